"""What a wrapped call costs: on the thread that makes it, and in CPU time of all threads, its export included.

Run it alone on a quiet machine: python benchmarks/per_call.py [rounds]. Where nemo-lens is installed (it wants
Python 3.13), its trace_fn is measured in turn with ours, in the same process, with the same SDK and processors.
"""

import gc
import sys
import time
import types

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from megatron_autoinstrument import sdk
from megatron_autoinstrument.patching import Ledger, Seam
from megatron_autoinstrument.spans import LIVE, RECORDER, span

CALLS, ROUNDS = 2_000, 15
NAME = "megatron.microbatch.forward"
MODULE = "megatron.benchmark"


class Encoding(SpanExporter):
    """Makes of spans what is sent, and sends nothing."""

    def export(self, spans):
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


def measure(calls, rounds):
    """Of one call of each, in µs: the least time, and the least CPU time of all threads. In turn, so that what the
    machine does else falls on all of them alike."""
    wall, cpu = dict.fromkeys(calls, 1e9), dict.fromkeys(calls, 1e9)
    gc.disable()
    for _ in range(rounds):
        for name, call in calls.items():
            started, used = time.perf_counter(), time.process_time()
            for _ in range(CALLS):
                call()
            took = time.perf_counter() - started
            RECORDER.flush()
            trace.get_tracer_provider().force_flush()
            wall[name] = min(wall[name], took / CALLS * 1e6)
            cpu[name] = min(cpu[name], (time.process_time() - used) / CALLS * 1e6)
        gc.collect()
    return wall, cpu


def beyond_nothing(calls, rounds):
    """What `measure` finds, less a bare call."""
    bare = sys.modules[MODULE].bare
    calls = {"nothing": lambda: bare(1, current_microbatch=3), **calls}
    figures = measure(calls, rounds)
    return {name: [figure[name] - figure["nothing"] for figure in figures] for name in list(calls)[1:]}


def costs(rounds):
    """Of a call of each kind: on the thread that calls, and of all threads."""
    module = sys.modules[MODULE] = types.ModuleType(MODULE)
    source = "def {}(x, current_microbatch=None): return x\n"
    exec("".join(map(source.format, ("bare", "frequent", "coarse", "off"))), vars(module))
    # As many attributes as a run's resource has.
    resource = Resource.create({f"dl.attribute.{number}": number for number in range(24)})
    provider = TracerProvider(shutdown_on_exit=False, resource=resource)
    provider.add_span_processor(BatchSpanProcessor(Encoding(), max_queue_size=100_000))
    trace.set_tracer_provider(provider)
    RECORDER.connect_by(lambda: sdk.connect({"traces": provider}, None, {}))
    ledger = Ledger()
    attributes = {"megatron.microbatch_id": "current_microbatch"}
    seams = [
        Seam(MODULE, "frequent", {"microbatch"}, span(NAME, given=attributes)),
        Seam(MODULE, "coarse", {"step"}, span("megatron.forward_backward", live=True)),
        Seam(MODULE, "off", {"step"}, span("megatron.optimizer_step", live=True)),
    ]
    ledger.install(seams, frozenset({"microbatch", "forward_backward", "step", "optimizer"}))
    off = module.off

    def by_opentelemetry():
        with trace.get_tracer("reference").start_as_current_span(NAME):
            module.bare(1, current_microbatch=3)

    calls = {
        "a frequent span": lambda: module.frequent(1, current_microbatch=3),
        "a coarse span": lambda: module.coarse(1, current_microbatch=3),
        "`get_tracer` and `start_as_current_span`": by_opentelemetry,
    }
    try:
        from nemo.lens import helpers, state
    except ImportError:
        print("nemo-lens is not installed; its trace_fn calls get_tracer and start_as_current_span.\n")
    else:
        state.set_enabled_span_groups(frozenset({"microbatch"}))
        theirs = helpers.trace_fn("microbatch", NAME)(module.bare)
        calls["nemo-lens's `trace_fn`"] = lambda: theirs(1, current_microbatch=3)
    inside = RECORDER.begin("megatron.train", LIVE)  # as all of them are in a run
    found = beyond_nothing(calls, rounds)
    RECORDER.end(inside)
    ledger.uninstall()
    calls = {"a wrapper that somebody kept after `uninstrument()`": lambda: off(1, current_microbatch=3)}
    return found | beyond_nothing(calls, rounds)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    print("| µs per call | the thread that calls | all threads, encoding included |\n|---|---|---|")
    for name, (wall, cpu) in costs(rounds).items():
        print(f"| {name} | {wall:.2f} | {cpu:.2f} |")


if __name__ == "__main__":
    main()
