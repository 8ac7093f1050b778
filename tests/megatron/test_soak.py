"""A hundred thousand steps of a fast loop with everything on and the garbage collector off."""

import subprocess
import sys

from harness import ROOT


def test_memory_threads_and_files_are_flat_after_the_warm_up():
    process = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "soak.py", "100000"], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr[-2000:]
    assert "100000 steps" in process.stdout
