"""per_call.py's table in instructions in place of time, counted by valgrind's callgrind: the same on a busy machine,
to a part in a thousand. It wants valgrind, and takes half a minute.
"""

import contextlib
import gc
import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from opentelemetry import trace

from megatron_autoinstrument.spans import RECORDER

CALLS = 500  # fewer than a batch processor takes before it exports
ROUNDS = 4  # the first warms up
OUT = "BENCHMARK_CALLGRIND_OUT"
dumps = 0


def callgrind(command, out, *options):
    """The command to run `command` with its instructions counted."""
    return ["valgrind", "-q", "--tool=callgrind", f"--callgrind-out-file={out}", *options, *command]


def mark():
    """Has callgrind write down what was executed, by all threads, since the last mark; returns the file's name."""
    global dumps
    os.getpgrp()
    dumps += 1
    return f"{os.environ[OUT]}.{dumps}"


def instructions(dump):
    """What callgrind counted in a file that it wrote."""
    return next(int(line.split()[1]) for line in Path(dump).read_text().splitlines() if line.startswith("totals:"))


def measure(calls, rounds):
    """As per_call.measure, in thousands of instructions."""
    calling, total = dict.fromkeys(calls, 1e9), dict.fromkeys(calls, 1e9)
    gc.disable()
    for _ in range(rounds):
        for name, call in calls.items():
            mark()
            for _ in range(CALLS):
                call()
            called = mark()
            RECORDER.flush()
            trace.get_tracer_provider().force_flush()
            flushed = mark()
            used = instructions(called) / CALLS / 1000
            calling[name] = min(calling[name], used)
            total[name] = min(total[name], used + instructions(flushed) / CALLS / 1000)
        gc.collect()
    return calling, total


def main():
    if OUT in os.environ:
        import per_call

        per_call.measure, per_call.ROUNDS = measure, ROUNDS
        with contextlib.redirect_stdout(io.StringIO()) as table:
            per_call.main()
        print(table.getvalue().replace("µs per call", "thousand instructions per call"), end="")
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
