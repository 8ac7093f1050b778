"""Trains the Megatron in fake/, which has no tensors, as its own pretrain script would.

`pretrain_fake.py --cases FILE` does so once for each line of FILE, a JSON object of environment variables, each time in
a process forked off one that has imported OpenTelemetry: that is what takes long. It prints a JSON object for each.
Variables that OpenTelemetry reads when it is imported have those cases run in fresh processes.
"""

import contextlib
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time

AT_ONCE = 6
TIMEOUT_S = 60
IMPORTED = (
    "opentelemetry.sdk.trace.export",
    "opentelemetry.sdk.metrics.export",
    "opentelemetry.sdk._logs.export",
    "opentelemetry.instrumentation.instrumentor",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "opentelemetry.exporter.otlp.proto.grpc.metric_exporter",
    "opentelemetry.exporter.otlp.proto.grpc._log_exporter",
)


class _Running:
    """A case, its output and when it began."""

    def __init__(self, case):
        self.case, self.begun = case, time.monotonic()
        self.output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115

    def report(self, status):
        self.output.seek(0)
        seconds = time.monotonic() - self.begun
        print(json.dumps({**self.case, "status": status, "seconds": seconds, "output": self.output.read()}), flush=True)


def read_at_import():
    """The variables that OpenTelemetry looks at when it is imported."""
    read, get = set(), os._Environ.__getitem__
    os._Environ.__getitem__ = lambda self, name: (read.add(name), get(self, name))[1]
    for name in IMPORTED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    os._Environ.__getitem__ = get
    return read


def each(cases):
    """Returns in a child, once for each case, with its environment set; in the parent never."""
    running, fresh = {}, read_at_import()
    while cases or running:
        while cases and len(running) < AT_ONCE:
            case = _Running(cases.pop(0))
            if fresh & case.case["set"].keys():
                process = subprocess.Popen(
                    [sys.executable, __file__, *sys.argv[3:]],
                    env={**os.environ, **case.case["set"]},
                    stdout=case.output,
                    stderr=case.output,
                )
                running[process.pid] = case
                continue
            pid = os.fork()
            if pid == 0:
                os.environ.update(case.case["set"])
                for descriptor in (1, 2):
                    os.dup2(case.output.fileno(), descriptor)
                sys.argv[1:3] = []
                return
            running[pid] = case
        pid, status = os.waitpid(-1, 0)
        running.pop(pid).report(os.waitstatus_to_exitcode(status))
    os._exit(0)


if sys.argv[1:2] == ["--cases"]:
    with open(sys.argv[2]) as file:
        each([json.loads(line) for line in file])

logging.basicConfig(format="LOG %(levelname)s %(name)s: %(message)s")
from megatron_autoinstrument import autoload  # noqa: E402

autoload.from_pth()
from megatron.training import arguments, global_vars, training  # noqa: E402

global_vars.set_args(arguments.parse_args())
training.pretrain()
with contextlib.suppress(ImportError):
    from opentelemetry import metrics

    metrics.get_meter("user").create_counter("of.the.user").add(1)
