"""What a call costs beside OpenTelemetry's own way, in calls of Python's and C's functions: as many on a busy machine.
Times and instructions are those of `make benchmark`."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(sys, "monitoring"), reason="Calls are counted by sys.monitoring, new in 3.12"
)

ROOT = Path(__file__).parents[2]

# What nemo-lens's trace_fn calls; beside it, where it is installed, benchmarks/per_call.py shows both.
REFERENCE = "`get_tracer` and `start_as_current_span`"
COUNTED = """
import sys, threading
from collections import Counter
sys.path.insert(0, "benchmarks")
import per_call

calls = Counter()  # by the thread

def called(code, offset, function, argument):
    calls[threading.get_ident()] += 1

tool, event = sys.monitoring.PROFILER_ID, sys.monitoring.events.CALL
sys.monitoring.use_tool_id(tool, "calls")
sys.monitoring.register_callback(tool, event, called)
sys.monitoring.set_events(tool, event)
per_call.reading = lambda: (calls[threading.get_ident()], sum(calls.copy().values()))
per_call.CALLS, per_call.ROUNDS, per_call.UNIT = 200, 2, "calls"
per_call.main()
"""


@cache
def costs():
    """Of each row: its spans, the calls on its own thread, and those on all threads."""
    done = subprocess.run(
        [sys.executable, "-c", COUNTED],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return {name: (int(spans), float(calling), float(everywhere)) for name, spans, calling, everywhere in rows[1:]}


# Of OpenTelemetry's own way, which gives one span: at most so much on the thread that calls, and on all threads.
MOST = {
    "`train_step` and its `training_log`": (1.3, 1.4),
    "the same, logged, with metrics": (3.0, 3.0),
    "the schedule": (0.8, 0.9),
    "`optimizer.step`": (0.7, 0.9),
    "`forward_step`": (0.2, 0.4),
    "`backward_step`": (0.2, 0.35),
    "`recv_forward` in the warm-up: two spans, two links": (0.7, 1.0),
    "`recv_forward`, linked": (0.45, 0.6),
    "`send_forward`": (0.25, 0.35),
    "`send_forward_recv_backward`: two spans, a link": (0.55, 0.9),
    "`TransformerLayer.forward`, without its halves": (0.2, 0.35),
    "the wait for a batch": (0.2, 0.35),
    "`finish_grad_sync`": (0.2, 0.35),
    "`start_grad_sync`": (0.2, 0.35),
    "the same, on autograd's thread": (0.25, 0.35),
    "`backward_step` in a step that the sampler drops": (0.1, 0.1),
    "the schedule with the default groups, without a span": (0.2, 0.2),
    "a wrapper that somebody kept after `uninstrument()`": (0.02, 0.05),
}


@pytest.mark.parametrize("call", MOST)
def test_a_call_costs_at_most_so_much_of_opentelemetrys_own_way(call):
    _, calling, everywhere = costs()[call]
    most_calling, most_everywhere = MOST[call]
    _, reference_calling, reference_everywhere = costs()[REFERENCE]
    assert calling <= most_calling * reference_calling, costs()
    assert everywhere <= most_everywhere * reference_everywhere, costs()


def test_each_row_of_the_benchmark_makes_the_spans_that_it_names_and_has_a_bound():
    spans = {name: spans for name, (spans, *_) in costs().items()}
    assert MOST.keys() | {REFERENCE} == spans.keys() - {"nemo-lens's `trace_fn`"}
    none = {
        "`backward_step` in a step that the sampler drops",
        "the schedule with the default groups, without a span",
        "a wrapper that somebody kept after `uninstrument()`",
    }
    assert spans == {name: 0 if name in none else 2 if "two spans" in name else 1 for name in spans}
