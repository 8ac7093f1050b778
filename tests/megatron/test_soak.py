"""Twenty thousand steps of a fast loop with every kind of call, a real exporter, and the garbage collector off."""

import subprocess
import sys

from harness import ROOT


def test_memory_objects_threads_and_files_are_flat_after_the_warm_up():
    process = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "soak.py", "20000"], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    assert "20000 steps" in process.stdout
