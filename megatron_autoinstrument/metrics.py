"""The metrics of Megatron's guide, recorded from what Megatron logs, when it logs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from opentelemetry.metrics import Meter

STEP_DURATION = "megatron.training.step_duration_ms"

# Of a step's duration in milliseconds: 10 ms to 10 minutes, five to a decade.
_BOUNDARIES = [10, 16, 25, 40, 63, 100, 160, 250, 400, 630, 1_000, 1_600, 2_500, 4_000, 6_300]
_BOUNDARIES += [10_000, 16_000, 25_000, 40_000, 63_000, 100_000, 160_000, 250_000, 400_000, 600_000]


class _Instrument(NamedTuple):
    kind: str
    unit: str
    description: str


INSTRUMENTS = {
    STEP_DURATION: _Instrument("histogram", "ms", "Time of an iteration, averaged over the log interval"),
    "megatron.training.loss": _Instrument("gauge", "", "Loss, averaged over the log interval"),
    "megatron.training.throughput_tflops": _Instrument("gauge", "", "TFLOP/s per GPU, as Megatron counts them"),
    "megatron.training.tokens_per_sec": _Instrument("gauge", "", "Tokens per second, all ranks together"),
    "megatron.training.grad_norm": _Instrument("gauge", "", "Gradient norm"),
    "megatron.training.skipped_iters": _Instrument("counter", "", "Iterations whose update was skipped"),
    "megatron.training.learning_rate": _Instrument("gauge", "", "Learning rate"),
    "megatron.training.memory_allocated_gb": _Instrument("gauge", "", "Peak device memory in GiB"),
}

SPANS_DROPPED = "megatron.otel.spans_dropped"
"""Beyond the guide."""

_instruments: tuple[Meter, dict[str, Any]] | None = None


def record(meter: Meter, values: Mapping[str, float | None]) -> None:
    """Records one value per instrument. None, and what is no finite number, is left out: a NaN would stay in a
    histogram's sum for ever."""
    global _instruments
    if _instruments is None or _instruments[0] is not meter:
        _instruments = (meter, {name: _create(meter, name) for name in INSTRUMENTS})
    for name, value in values.items():
        if value is None or not math.isfinite(value):
            continue
        instrument = _instruments[1][name]
        if INSTRUMENTS[name].kind == "counter":
            instrument.add(value)
        elif INSTRUMENTS[name].kind == "gauge":
            instrument.set(value)
        else:
            instrument.record(value)


def _create(meter: Meter, name: str) -> Any:
    kind, unit, description = INSTRUMENTS[name]
    if kind == "histogram":
        return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=_BOUNDARIES)
    return getattr(meter, f"create_{kind}")(name, unit, description)
