"""per_call.py's table in instructions in place of time, counted by valgrind's callgrind: the same on a busy machine,
to a part in a thousand. It wants valgrind, and takes a minute.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CALLS = 500  # fewer spans than a batch processor takes before it exports
ROUNDS = 3  # the first warms up
OUT = "BENCHMARK_CALLGRIND_OUT"
dumps = 0


def callgrind(command, out, *options):
    """The command to run `command` with its instructions counted."""
    return ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}", *options, *command]


def instructions(dump):
    """What callgrind counted in a file that it wrote."""
    return next(int(line.split()[1]) for line in Path(dump).read_text().splitlines() if line.startswith("totals:"))


class Mark(int):
    """A moment: the number of the file into which callgrind then wrote what all threads had executed since the last."""

    def __sub__(self, earlier):
        """In thousands of instructions. Files are read only now, so that reading is part of no measurement."""
        return sum(instructions(f"{os.environ[OUT]}.{dump}") for dump in range(earlier + 1, self + 1)) / 1000


def reading():
    """As per_call.reading."""
    global dumps
    os.getpgrp()
    dumps += 1
    return Mark(dumps), Mark(dumps)


def main():
    if OUT in os.environ:
        import per_call

        per_call.reading, per_call.CALLS, per_call.ROUNDS = reading, CALLS, ROUNDS
        per_call.UNIT = "thousand instructions"
        per_call.main()
        return 0
    if shutil.which("valgrind") is None:
        print("valgrind is not installed: no instructions are counted.")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/out"
        command = callgrind([sys.executable, __file__], out, "--dump-before=getpgrp")
        return subprocess.run(command, env={**os.environ, OUT: out, "PYTHONHASHSEED": "0"}).returncode


if __name__ == "__main__":
    sys.exit(main())
