"""The metrics of Megatron's guide, recorded from what Megatron logs, when it logs it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from megatron_autoinstrument.recording.recorder import Recorder

STEP_DURATION = "megatron.training.step_duration_ms"
SKIPPED = "megatron.training.skipped_iters"
NONFINITE = "megatron.training.nonfinite_iters"
"""Beyond the guide, and absent while there are none."""

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
    SKIPPED: _Instrument("counter", "", "Iterations whose update was skipped"),
    NONFINITE: _Instrument("counter", "", "Iterations whose loss or gradient norm was no finite number"),
    "megatron.training.learning_rate": _Instrument("gauge", "", "Learning rate"),
    "megatron.training.memory_allocated_gb": _Instrument("gauge", "", "Peak device memory in GiB"),
}

SPANS_DROPPED = "megatron.otel.spans_dropped"
"""Beyond the guide."""

_instruments: tuple[Meter, dict[str, Any]] | None = None


def record(recorder: Recorder, values: Mapping[str, float | None]) -> None:
    """Records what Megatron logs now, one value per instrument. None, and what is no finite number, is left out: a NaN
    would stay in a histogram's sum for ever. The gauges of a new run say nothing until something is recorded."""
    instruments = _of(recorder)
    logged = {name: value for name, value in values.items() if value is not None and math.isfinite(value)}
    recorder.run.logged = logged
    for name, value in logged.items():
        if INSTRUMENTS[name].kind == "counter":
            instruments[name].add(value)
        elif INSTRUMENTS[name].kind == "histogram":
            instruments[name].record(value)


def count(recorder: Recorder, skipped: bool, nonfinite: bool) -> None:
    """Counts an iteration as what it was."""
    instruments = _of(recorder)
    instruments[SKIPPED].add(int(skipped))
    if nonfinite:
        instruments[NONFINITE].add(1)


def _of(recorder: Recorder) -> dict[str, Any]:
    global _instruments
    meter = recorder.meter
    assert meter is not None
    if _instruments is None or _instruments[0] is not meter:
        _instruments = (meter, {name: _create(meter, name, recorder) for name in INSTRUMENTS})
    return _instruments[1]


def _create(meter: Meter, name: str, recorder: Recorder) -> Any:
    kind, unit, description = INSTRUMENTS[name]
    if kind == "histogram":
        return meter.create_histogram(name, unit, description, explicit_bucket_boundaries_advisory=_BOUNDARIES)
    if kind == "counter":
        return meter.create_counter(name, unit, description)

    # The SDK would go on exporting the last value that was set, also when there is none any more.
    def observe(options: CallbackOptions) -> list[Observation]:
        value = recorder.run.logged.get(name) if _instruments is not None and _instruments[0] is meter else None
        return [] if value is None else [Observation(value)]

    return meter.create_observable_gauge(name, [observe], unit, description)
