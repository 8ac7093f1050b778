"""A long run of a fast loop with everything on, Python's garbage collector off as Megatron has it: what grows?

python benchmarks/soak.py [STEPS]; it ends with status 1 where anything has grown after the warm-up.
"""

import gc
import os
import sys
import threading
import time
import types

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from megatron_autoinstrument import MegatronInstrumentor, sdk
from megatron_autoinstrument.spans import RECORDER

TRAINING = """
_TRAIN_START_TIME = 1.0
def pretrain(steps, each):
    setup_model_and_optimizer()
    train(steps, each)
def setup_model_and_optimizer():
    pass
def train(steps, each):
    for iteration in range(steps):
        train_step(iteration=iteration)
        if iteration % 1000 == 0:
            evaluate()
        each(iteration)
def train_step(iteration):
    from megatron.core.pipeline_parallel import schedules
    schedules.forward_backward_no_pipelining(num_microbatches=2)
def evaluate(eval_iters=1):
    from megatron.core.pipeline_parallel import schedules
    schedules.forward_backward_no_pipelining(num_microbatches=1, forward_only=True)
"""
SCHEDULES = """
def forward_backward_no_pipelining(*, num_microbatches, forward_only=False):
    for number in range(num_microbatches):
        forward_step(current_microbatch=number)
        if not forward_only:
            backward_step()
def forward_step(current_microbatch):
    pass
def backward_step():
    pass
"""
exported = 0


class Spans(SpanExporter):
    def export(self, spans):
        global exported
        exported += len(spans)
        return SpanExportResult.SUCCESS


class Metrics(MetricExporter):
    def export(self, metrics_data, timeout_millis=0, **kwargs):
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self, timeout_millis=0, **kwargs):
        pass


def resident_mib():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def state():
    return {
        "MiB": round(resident_mib(), 1),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


def main(steps):
    os.environ.update(MEGATRON_OTEL_SPAN_GROUPS="all", MEGATRON_OTEL_METRICS_ENABLED="1")
    for name in ("", ".core", ".core.pipeline_parallel", ".training"):
        sys.modules[f"megatron{name}"] = types.ModuleType(f"megatron{name}")
    for name, source in (("core.pipeline_parallel.schedules", SCHEDULES), ("training.training", TRAINING)):
        module = sys.modules[f"megatron.{name}"] = types.ModuleType(f"megatron.{name}")
        exec(source, vars(module))
    sys.modules["megatron.core.pipeline_parallel"].schedules = sys.modules["megatron.core.pipeline_parallel.schedules"]
    sdk._component = lambda kind, name: {"traces_exporter": Spans, "metrics_exporter": Metrics}[kind]
    MegatronInstrumentor().instrument()
    seen = []

    def each(iteration):
        while len(RECORDER._waiting) > 10_000:  # a real step takes longer
            time.sleep(0.001)
        if (iteration + 1) % (steps // 10) == 0:
            seen.append(state())
            print(f"{iteration + 1:8d} steps", seen[-1], flush=True)

    gc.collect()
    gc.disable()
    start = time.perf_counter()
    sys.modules["megatron.training.training"].pretrain(steps, each)
    seconds = time.perf_counter() - start
    in_cycles = gc.collect()
    RECORDER.flush()
    print(f"{exported} spans in {seconds:.0f} s; {in_cycles} objects in reference cycles at the end")
    # The first fifth is warm-up.
    grown = {key: seen[-1][key] - seen[1][key] for key in seen[0]}
    print("grown since the warm-up:", grown)
    lost = 6 * steps - exported
    return int(grown["MiB"] > 8 or grown["threads"] > 0 or grown["files"] > 0 or in_cycles > 1000 or lost > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000))
