"""What flags, `instrument()`, the file of OTEL_CONFIG_FILE and the environment ask for: the first of these that has a
setting decides it. A value that can't be used is named in one warning and the default stands."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, make_dataclass
from typing import Any

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.process import ranks
from megatron_autoinstrument.settings import declarative
from megatron_autoinstrument.settings.table import BOOLEAN, FALSE, SETTINGS, Kind, Setting

_logger = get_logger(__name__)
_warned: set[tuple[str, str]] = set()

flags: dict[str, str | None] = {}
"""What Megatron's command line or configuration says of the flags that take a value, once parsed."""

given: dict[str, Any] = {}
"""What `instrument()` was called with, by the settings' names."""

_ENABLED = SETTINGS["MEGATRON_OTEL_ENABLED"]


def _take_known(self: Any, **options: Any) -> None:
    for field in fields(self):
        setattr(self, field.name, options.get(field.name))


Configuration = make_dataclass(
    "Configuration",
    [(keyword, Any, None) for setting in SETTINGS.values() for keyword in setting.keywords],
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
    traces_enabled: bool
    span_groups: frozenset[str]  # none where traces are off
    metrics_enabled: bool
    logs_enabled: bool
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
    warn = place.rank == 0 if warn is None else warn
    if warn and declarative.is_set():
        _name_unknown(declarative.settings(), "%s in OTEL_CONFIG_FILE")
    found: dict[str, Any] = {_ENABLED.field: enabled(warn=warn)}
    for setting in SETTINGS.values():
        if setting is _ENABLED or setting.kind is None:
            continue
        if isinstance(setting.kind, Kind):
            found[setting.field] = _read(setting, setting.kind, warn=warn)
        else:  # what it may be depends on the place
            found[setting.field] = _read(setting, setting.kind(place), warn=warn and settled)
    if not found["traces_enabled"]:
        found["span_groups"] = frozenset()
    return Config(**found)


def enabled(*, warn: bool) -> bool | None:
    """Whether recording is asked for; None: nobody said. False in MEGATRON_OTEL_ENABLED beats all else, and the SDK's
    own switch, too, leaves nothing to record for."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    variables = map(os.environ.get, _ENABLED.variables)
    if next((value.strip().lower() for value in variables if value and value.strip()), "") in FALSE:
        return False
    return _read(_ENABLED, BOOLEAN, warn=warn)


def _read(setting: Setting, kind: Kind, *, warn: bool) -> Any:
    sources = [(setting.flag, flags.get(setting.flag) or "")]
    sources += [(f"instrument({keyword}=…)", _text(given.get(keyword))) for keyword in setting.keywords]
    if declarative.is_set():
        file = declarative.settings()
        sources += [(f"{keyword} in OTEL_CONFIG_FILE", _text(file.get(keyword))) for keyword in setting.keywords]
    sources += [(variable, os.environ.get(variable, "").strip()) for variable in setting.variables]
    source, value = next(((source, value) for source, value in sources if value), ("", ""))
    try:
        if value:
            return kind.parse(value)
    except ValueError:
        if warn and (source, value) not in _warned:
            _warned.add((source, value))
            known = kind.allowed() if callable(kind.allowed) else kind.allowed
            _logger.warning("%s=%r is ignored. Allowed: %s.", source, value, known)
    return kind.parse(setting.default) if setting.default else None


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
