"""OTEL_CONFIG_FILE, OpenTelemetry's declarative configuration: where it is set, it decides alone what is exported.

The package opentelemetry-configuration reads it; SDK 1.43 could by itself, and older ones know nothing of it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

from megatron_autoinstrument.common.redact import get_logger

_logger = get_logger(__name__)

_READERS = ("opentelemetry.configuration.file", "opentelemetry.sdk._configuration.file")
_SECTIONS = {"traces": "tracer_provider", "metrics": "meter_provider", "logs": "logger_provider"}
_NONE_INSTALLED = "The package opentelemetry-configuration, which reads it, isn't installed."


class _File(NamedTuple):
    reader: Any = None  # the module that has load_config_file and create_*
    model: Any = None  # what the file says
    problem: str = ""  # why there is neither


def is_set() -> bool:
    """Whether OTEL_CONFIG_FILE has a value."""
    return bool(_path())


def settings() -> Mapping[str, Any]:
    """This package's settings in the file, as they stand there: `instrumentation/development: python: megatron:`."""
    instrumentation = getattr(_read(_path()).model, "instrumentation_development", None)
    node = (getattr(instrumentation, "python", None) or {}).get("megatron")
    return node if isinstance(node, Mapping) else {}


class LeftOut(Exception):
    """The file doesn't configure a signal, or can't be read, which has been said."""


def provider(signal: str, described: Callable[[Any], Any]) -> Any:
    """The provider that the file describes for `signal` (traces, metrics or logs).

    Args:
        signal: The signal.
        described: Completes the file's resource.

    Raises:
        LeftOut: it describes none.
    """
    reader, model, problem = _read(_path())
    if problem:
        _complain(_path(), problem)
    section = getattr(model, _SECTIONS[signal], None)
    if section is None or getattr(model, "disabled", None):
        raise LeftOut(signal)
    create = getattr(reader, f"create_{_SECTIONS[signal]}")
    resource = described(reader.create_resource(model.resource))
    if "global_attribute_limits" in inspect.signature(create).parameters:  # of spans and logs, from 1.44 on
        return create(section, resource, model.attribute_limits)
    return create(section, resource)


def _path() -> str:
    return os.environ.get("OTEL_CONFIG_FILE", "").strip()


@functools.cache
def _read(path: str) -> _File:
    if not path:
        return _File()
    if not os.path.isfile(path):  # its reader would say so, too
        return _File(problem="There is no such file.")
    try:
        from opentelemetry.sdk import environment_variables

        known = hasattr(environment_variables, "OTEL_CONFIG_FILE")
        reader = next((found for name in _READERS if known and (found := _imported(name)) is not None), None)
        if reader is None:
            return _File(problem=_NONE_INSTALLED if known else "This release of OpenTelemetry doesn't read it.")
        return _File(reader, reader.load_config_file(path))
    except Exception as error:  # noqa: BLE001
        return _File(problem=f"{type(error).__name__}: {error}")


def _imported(name: str) -> Any | None:
    try:
        return import_module(name)
    except ImportError:
        return None


@functools.cache
def _complain(path: str, problem: str) -> None:
    _logger.warning("OTEL_CONFIG_FILE=%.200r can't be followed, and nothing is exported by it. %s", path, problem)
