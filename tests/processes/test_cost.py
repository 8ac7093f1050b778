"""What a call costs, beside OpenTelemetry's own way: ratios within one process, never times."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What nemo-lens's trace_fn calls; beside it, where it is installed, benchmarks/per_call.py shows both.
REFERENCE = "`get_tracer` and `start_as_current_span`"
CALLING, ALL_THREADS = 0, 1


@cache
def costs():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, ROOT / "benchmarks/per_call.py", "5"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    return {name: (float(wall), float(cpu)) for name, wall, cpu in rows[1:]}


@pytest.mark.parametrize(
    ("call", "where", "most"),
    [
        ("a frequent span", CALLING, 0.1),
        ("a frequent span", ALL_THREADS, 0.5),
        ("a coarse span", CALLING, 1.0),
        ("a coarse span", ALL_THREADS, 0.6),  # about a half, and what a busy machine adds
        ("a wrapper that somebody kept after `uninstrument()`", CALLING, 0.02),
    ],
)
def test_a_call_costs_at_most_so_much_of_opentelemetrys_own_way(call, where, most):
    assert costs()[call][where] <= most * costs()[REFERENCE][where], costs()
