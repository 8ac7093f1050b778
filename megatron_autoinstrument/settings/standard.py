"""OpenTelemetry's own variables, before this package builds a provider from them.

Its standard has an empty value count as unset and a number that can't be used replaced by the default; its SDK
raises at some of them, and fails later and in silence at others.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from importlib.metadata import entry_points

from megatron_autoinstrument.common.redact import get_logger

_logger = get_logger(__name__)

_MOST = 2**31 - 1  # what a wait in milliseconds and a length can be everywhere

# Whose names match is a number from the first bound to _MOST.
_NUMBERS = (
    (re.compile(r"OTEL_.*_(SCHEDULE_DELAY|QUEUE_SIZE|BATCH_SIZE|EXPORT_INTERVAL|EXPORT_TIMEOUT)"), int, 1),
    (re.compile(r"OTEL_.*_LIMIT"), int, 0),
    (re.compile(r"OTEL_EXPORTER_OTLP_.*TIMEOUT"), float, 0.001),
)
_PROVIDER = re.compile(r"OTEL_PYTHON_((?:TRACER|METER|LOGGER)_PROVIDER)")


_named: set[tuple[str, str]] = set()


@contextlib.contextmanager
def tidied(empty_alone: bool = False) -> Iterator[None]:
    """Has the environment lack those that count as unset, and those that can't be used, which are named once.

    Args:
        empty_alone: Whether to leave those that can't be used: this process may have no use for them.
    """
    unusable = {}
    for name, value in list(os.environ.items()):
        if not name.startswith("OTEL_") or (empty_alone and value.strip()):
            continue
        allowed = _allowed(name, value.strip()) if value.strip() else ""
        if allowed and (name, value) not in _named:
            _named.add((name, value))
            _logger.warning("%s=%.200r is ignored. Allowed: %s.", name, value, allowed)
        if allowed is not None:
            unusable[name] = value
            os.environ.pop(name, None)
    try:
        yield
    finally:
        for name, value in unusable.items():
            os.environ.setdefault(name, value)  # other programs that this process starts read it in their own way


def _allowed(name: str, value: str) -> str | None:
    """What the variable `name` may hold; None where `value` will do."""
    for names, number, least in _NUMBERS:
        if names.fullmatch(name):
            try:
                if least <= number(value) <= _MOST:  # NaN isn't
                    return None
            except ValueError:
                pass
            return f"{'a whole number' if number is int else 'a number'} from {least} to {_MOST}"
    if provider := _PROVIDER.fullmatch(name):
        known = sorted(entry_points(group=f"opentelemetry_{provider[1].lower()}").names)
        return None if value in known else ", ".join(known)
    return None


class _Once(logging.Filter):
    """Lets each message through once: some come with every attribute, or once per signal."""

    building = False
    """Whether messages that differ in their arguments alone count as one."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[tuple[str, str]] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        try:
            key = record.name, str(record.msg) if self.building else record.getMessage()
        except Exception:  # noqa: BLE001
            return True  # its handlers will say what is wrong with it
        if key in self._seen:
            return False
        if len(self._seen) < 1000:
            self._seen.add(key)
        return True


_once = _Once()


@contextlib.contextmanager
def told_once() -> Iterator[None]:
    """Has those of OpenTelemetry's modules that are imported by now, and don't export, repeat no message ever after."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("opentelemetry.") and "export" not in name:
            logging.getLogger(name).addFilter(_once)
    _once.building = True
    try:
        yield
    finally:
        _once.building = False
