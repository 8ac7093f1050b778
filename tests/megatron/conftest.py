import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# Their tests look at the same runs; those of each other file have their own.
SHARING_RUNS = {"contract", "cost", "flags_and_logs", "metrics", "resource", "spans_of_a_run", "traces", "ways_in"}


def pytest_collection_modifyitems(items):
    """Where tests run in several processes, each file's are in one, and so are those that share runs."""
    for item in items:
        name = item.path.stem.removeprefix("test_")
        item.add_marker(pytest.mark.xdist_group("sharing runs" if name in SHARING_RUNS else name))
