"""A long run with everything on and Python's garbage collector off, as Megatron has it: what grows?

It is the run of fixtures/standin_run.py, with a call of every kind that is wrapped. Spans, metrics and logs are sent
over OTLP/gRPC to a receiver in another process.

python benchmarks/soak.py [STEPS]; it ends with status 1 where anything grows after the warm-up, or a span is lost.
"""

import ctypes
import gc
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from megatron_autoinstrument import MegatronInstrumentor
from megatron_autoinstrument.instrumentor import RECORDER

sys.path.insert(0, str(Path(__file__).parents[1] / "fixtures"))
import standin_run

EVERY = 100  # steps between evaluations, and between saves
# The most that may be added from the warm-up to the end. One object in a hundred steps is more than that.
BOUNDS = {"resident MiB": 8, "allocated MiB": 1, "blocks": 1000, "objects": 100, "threads": 0, "files": 0}
MOST_IN_CYCLES = 1000  # of those that are made once

# Counts what comes in, and says so when its standard input is closed.
RECEIVER = """
import sys
from concurrent.futures import ThreadPoolExecutor
import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
spans = 0
def traces(request, context):
    global spans
    found = ExportTraceServiceRequest.FromString(request).resource_spans
    spans += sum(len(scope.spans) for resource in found for scope in resource.scope_spans)
    return b""
server = grpc.server(ThreadPoolExecutor(max_workers=4))
for signal, answer in (("trace", traces), ("metrics", lambda *_: b""), ("logs", lambda *_: b"")):
    method = grpc.unary_unary_rpc_method_handler(answer)
    service = f"opentelemetry.proto.collector.{signal}.v1.{signal.capitalize()}Service"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": method}),))
port = server.add_insecure_port("127.0.0.1:0")
server.start()
print(port, flush=True)
sys.stdin.read()
server.stop(None)
print(spans, flush=True)
"""


class Mallinfo2(ctypes.Structure):
    """Of malloc.h."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", Mallinfo2)  # not every C library has it
mallinfo2.restype = Mallinfo2


def allocated():
    """MiB that malloc has given out, in C and C++ too; 0 where the C library doesn't tell."""
    found = mallinfo2()
    return (found.uordblks + found.hblkhd) / 2**20


def state():
    """Of this process, while nothing waits to be exported."""
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    return {
        "resident MiB": round(resident, 1),
        "allocated MiB": round(allocated(), 2),
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main(steps):
    receiver = subprocess.Popen(
        [sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    os.environ.update(
        OTEL_EXPORTER_OTLP_ENDPOINT=f"http://127.0.0.1:{receiver.stdout.readline().strip()}",
        OTEL_METRIC_EXPORT_INTERVAL="1000",
        MEGATRON_OTEL_SPAN_GROUPS="all",
        MEGATRON_OTEL_LOGS_ENABLED="1",
        no_proxy="127.0.0.1",
    )
    standin_run.install()
    MegatronInstrumentor().instrument()
    seen = []

    def each(iteration):
        while len(RECORDER._waiting) > 10_000:  # a real step takes longer
            time.sleep(0.001)
        if iteration % (steps // 10) == 0:
            run.losses.clear()
            RECORDER.flush()
            seen.append(state())
            print(f"{iteration:8d} steps", seen[-1], flush=True)

    gc.collect()
    gc.disable()
    start = time.perf_counter()
    run = standin_run.Run(steps + 1, each, every=EVERY)
    run.pretrain()
    RECORDER.flush(final=True)
    seconds = time.perf_counter() - start
    in_cycles = gc.collect()
    received = int(receiver.communicate()[0])
    print(f"{received} spans in {seconds:.0f} s; {in_cycles} objects in reference cycles at the end")
    grown = {key: seen[-1][key] - seen[3][key] for key in seen[0]}  # three tenths are warm-up: caches fill
    print("grown since the warm-up:", grown)
    too_much = any(grown[key] > bound for key, bound in BOUNDS.items()) or in_cycles > MOST_IN_CYCLES
    return int(too_much or received != spans_of(steps + 1))


def spans_of(steps):
    """How many spans so many steps give, with their evaluations and saves and those after them."""
    forward = 11  # a receive, the link around it, the microbatch, its batch, two layers of three spans, a send
    step = 3 + 2 * (forward + 3) + 2  # backward: a receive, the microbatch, a send; a gradient sync's start and finish
    others = (steps - 1) // EVERY + 1
    return steps * step + others * (2 + 2 * forward + 4) + 6


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
