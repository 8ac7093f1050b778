"""What the environment asks for. A value that can't be used is named in one warning and the default stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TypeVar

from megatron_autoinstrument import environment_variables as names
from megatron_autoinstrument import groups, ranks, sampling
from megatron_autoinstrument.redact import get_logger

_logger = get_logger(__name__)
_T = TypeVar("_T")
_warned: set[tuple[str, str]] = set()

flags: dict[str, str | None] = {}
"""What Megatron's command line or configuration says of `--otel-span-groups` and `--otel-service-name`, once parsed."""


@dataclass(frozen=True)
class Config:
    """The settings of one installation."""

    enabled: bool | None  # None: nobody said
    rank_strategy: str
    export_rank: int
    export_sample_rate: float
    span_groups: frozenset[str]
    metrics: bool
    logs: bool
    exception_text: bool
    trace_scope: str  # step or run
    sampling_strategy: str | None  # None: the SDK's own
    ab: int  # steps of a block; 0: none
    service_name: str | None  # None: nobody said by flag
    exporter: str | None  # None: nobody said


def from_environment(place: ranks.Rank) -> Config:
    """Reads the `MEGATRON_OTEL_*` variables and their `NEMO_LENS_*` fallbacks.

    Args:
        place: This process's place: the first rank is the one that warns, and MEGATRON_OTEL_EXPORT_RANK must exist.
    """
    last = place.world_size - 1

    def read(
        name: str,
        parse: Callable[[str], _T],
        default: _T,
        allowed: str | Callable[[], str],
        alias: str | None = None,
        flag: str | None = None,
    ) -> _T:
        return _read(name, parse, default, allowed, alias, flag, warn=place.rank == 0)

    traces = read(names.MEGATRON_OTEL_TRACES_ENABLED, _boolean, True, _BOOLEANS)
    span_groups = read(
        names.MEGATRON_OTEL_SPAN_GROUPS,
        groups.parse,
        groups.PRESETS["default"],
        groups.KNOWN,
        flag="--otel-span-groups",
    )
    return Config(
        enabled=enabled(warn=place.rank == 0),
        rank_strategy=read(
            names.MEGATRON_OTEL_RANK_STRATEGY,
            _one_of(ranks.STRATEGIES),
            "single_rank",
            ranks.STRATEGIES.names,
            alias=names.MEGATRON_OTEL_EXPORT_STRATEGY,
        ),
        export_rank=read(names.MEGATRON_OTEL_EXPORT_RANK, _between(int, -1, last), -1, f"-1 to {last}"),
        export_sample_rate=read(
            names.MEGATRON_OTEL_EXPORT_SAMPLE_RATE, _between(float, 0.0, 1.0), 1.0, "a number from 0 to 1"
        ),
        span_groups=span_groups if traces else frozenset(),
        metrics=read(names.MEGATRON_OTEL_METRICS_ENABLED, _boolean, True, _BOOLEANS),
        logs=read(names.MEGATRON_OTEL_LOGS_ENABLED, _boolean, False, _BOOLEANS),
        exception_text=read(names.MEGATRON_OTEL_EXCEPTION_TEXT, _boolean, False, _BOOLEANS),
        trace_scope=read(names.MEGATRON_OTEL_TRACE_SCOPE, _one_of(("step", "run")), "step", "step, run"),
        sampling_strategy=read(
            names.MEGATRON_OTEL_SAMPLING_STRATEGY,
            _one_of(sampling.STRATEGIES),
            None,
            sampling.STRATEGIES.names,
        ),
        ab=read(names.MEGATRON_OTEL_AB, _of_blocks, 0, "0, or a number of steps from 4 on"),
        service_name=flags.get("--otel-service-name"),
        exporter=read(names.MEGATRON_OTEL_EXPORTER, _one_of(("otlp", "console")), None, "otlp, console"),
    )


def enabled(*, warn: bool) -> bool | None:
    """What MEGATRON_OTEL_ENABLED says, or None. The SDK's own switch, too, leaves nothing to record for."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    return _read(names.MEGATRON_OTEL_ENABLED, _boolean, None, _BOOLEANS, None, None, warn=warn)


def _read(
    name: str,
    parse: Callable[[str], _T],
    default: _T,
    allowed: str | Callable[[], str],
    alias: str | None,
    flag: str | None,
    *,
    warn: bool,
) -> _T:
    variables = [name, *([alias] if alias else [])]
    variables += [variable.replace("MEGATRON_OTEL_", "NEMO_LENS_") for variable in variables]
    given = [(flag, flags.get(flag) or "")] if flag else []
    given += [(variable, os.environ.get(variable, "").strip()) for variable in variables]
    for source, value in given:
        if not value:
            continue
        try:
            return parse(value)
        except ValueError:
            if warn and (source, value) not in _warned:
                _warned.add((source, value))
                known = allowed() if callable(allowed) else allowed
                _logger.warning("%s=%r is ignored. Allowed: %s.", source, value, known)
            return default
    return default


_BOOLEANS = "1, true, yes, on, 0, false, no, off"


def _boolean(value: str) -> bool:
    lowered = value.lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(value)


def _one_of(known: Container[str]) -> Callable[[str], str]:
    def parse(value: str) -> str:
        for name in (value, value.lower()):
            if name in known:
                return name
        raise ValueError(value)

    return parse


def _of_blocks(value: str) -> int:
    steps = int(value)
    if steps != 0 and steps < 4:
        raise ValueError(value)
    return steps


_N = TypeVar("_N", int, float)


def _between(number: Callable[[str], _N], low: _N, high: _N) -> Callable[[str], _N]:
    def parse(value: str) -> _N:
        parsed = number(value)
        if not low <= parsed <= high:  # also refuses NaN
            raise ValueError(value)
        return parsed

    return parse
