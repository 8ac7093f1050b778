"""What flags, `instrument()`, the file of OTEL_CONFIG_FILE and the environment ask for: the first of these that has a
setting decides it. A value that can't be used is named in one warning and the default stands."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import Any, TypeVar

from megatron_autoinstrument.common import groups
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.process import ranks, strategies
from megatron_autoinstrument.settings import declarative
from megatron_autoinstrument.settings import environment_variables as names

_logger = get_logger(__name__)
_T = TypeVar("_T")
_warned: set[tuple[str, str]] = set()

flags: dict[str, str | None] = {}
"""What Megatron's command line or configuration says of `--otel-span-groups` and `--otel-service-name`, once parsed."""

given: dict[str, Any] = {}
"""What `instrument()` was called with, by the settings' names."""

_PREFIX = "MEGATRON_OTEL_"


def _take_known(self: Any, **options: Any) -> None:
    for field in fields(self):
        setattr(self, field.name, options.get(field.name))


Configuration = make_dataclass(
    "Configuration",
    [(name.removeprefix(_PREFIX).lower(), Any, None) for name in vars(names) if name.startswith(_PREFIX)],
    init=False,
    namespace={"__init__": _take_known},  # what is unknown is named below: opentelemetry-configuration's is a traceback
)
"""The settings as `instrument()` takes them and as they stand in the file of OTEL_CONFIG_FILE, each named as its
variable is: `span_groups` for MEGATRON_OTEL_SPAN_GROUPS."""


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


def from_environment(place: ranks.Rank, warn: bool | None = None, settled: bool = True) -> Config:
    """Reads all settings, among them the `MEGATRON_OTEL_*` variables and their `NEMO_LENS_*` fallbacks.

    Args:
        place: This process's place: the first rank is the one that warns, and MEGATRON_OTEL_EXPORT_RANK must exist.
        warn: Whether it warns; None: if it is the first.
        settled: Whether `place` is this process's for good, so that it can be said which ranks there are.
    """
    last = place.world_size - 1
    warn = place.rank == 0 if warn is None else warn
    if warn and declarative.is_set():
        _name_unknown(declarative.settings(), "%s in OTEL_CONFIG_FILE")

    def read(
        name: str,
        parse: Callable[[str], _T],
        default: _T,
        allowed: str | Callable[[], str],
        alias: str | None = None,
        flag: str | None = None,
        warn: bool = warn,
    ) -> _T:
        return _read(name, parse, default, allowed, alias, flag, warn=warn)

    traces = read(names.MEGATRON_OTEL_TRACES_ENABLED, _boolean, True, _BOOLEANS)
    span_groups = read(
        names.MEGATRON_OTEL_SPAN_GROUPS,
        groups.parse,
        groups.PRESETS["default"],
        groups.KNOWN,
        flag="--otel-span-groups",
    )
    return Config(
        enabled=enabled(warn=warn),
        rank_strategy=read(
            names.MEGATRON_OTEL_RANK_STRATEGY,
            _one_of(strategies.RANK_STRATEGIES),
            "single_rank",
            strategies.RANK_STRATEGIES.names,
            alias=names.MEGATRON_OTEL_EXPORT_STRATEGY,
        ),
        export_rank=read(
            *(names.MEGATRON_OTEL_EXPORT_RANK, _between(int, -1, last), -1, f"-1 to {last}"), warn=warn and settled
        ),
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
            _one_of(strategies.SAMPLING_STRATEGIES),
            None,
            strategies.SAMPLING_STRATEGIES.names,
        ),
        ab=read(names.MEGATRON_OTEL_AB, _of_blocks, 0, "0, or a number of steps from 4 on"),
        service_name=flags.get("--otel-service-name"),
        exporter=read(names.MEGATRON_OTEL_EXPORTER, _one_of(("otlp", "console")), None, "otlp, console"),
    )


def enabled(*, warn: bool) -> bool | None:
    """Whether recording is asked for; None: nobody said. False in MEGATRON_OTEL_ENABLED beats all else, and the SDK's
    own switch, too, leaves nothing to record for."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    variables = map(os.environ.get, ("MEGATRON_OTEL_ENABLED", "NEMO_LENS_ENABLED"))
    if next((value.strip().lower() for value in variables if value and value.strip()), "") in _FALSE:
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
    settings = [variable.removeprefix(_PREFIX).lower() for variable in variables]
    variables += [variable.replace(_PREFIX, "NEMO_LENS_") for variable in variables]
    sources = [(flag, flags.get(flag) or "")] if flag else []
    sources += [(f"instrument({setting}=…)", _text(given.get(setting))) for setting in settings]
    if declarative.is_set():
        file = declarative.settings()
        sources += [(f"{setting} in OTEL_CONFIG_FILE", _text(file.get(setting))) for setting in settings]
    sources += [(variable, os.environ.get(variable, "").strip()) for variable in variables]
    for source, value in sources:
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


def _text(value: Any) -> str:
    """A setting as its variable would have it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return "" if value is None else str(value).strip()


def take(options: Mapping[str, Any]) -> None:
    """Keeps the settings that `instrument()` was given; what is none is named in one warning."""
    given.clear()
    given.update(options)
    _name_unknown(options, "instrument(%s=…)")


def _name_unknown(settings: Mapping[str, Any], where: str) -> None:
    known = sorted(field.name for field in fields(Configuration))
    for name in settings.keys() - set(known):
        source = where % name
        if (source, name) not in _warned:
            _warned.add((source, name))
            _logger.warning("%s is ignored: there is no such setting. Allowed: %s.", source, ", ".join(known))


_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_BOOLEANS = ", ".join(_TRUE + _FALSE)


def _boolean(value: str) -> bool:
    lowered = value.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
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
