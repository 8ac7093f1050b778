"""The way out: the application's tracer provider, or one of ours where it set none."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import trace
from opentelemetry.environment_variables import OTEL_PYTHON_ID_GENERATOR, OTEL_TRACES_EXPORTER
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL,
    OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER,
    OTEL_TRACES_SAMPLER_ARG,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Sampler
from opentelemetry.trace import ProxyTracerProvider, Tracer, TracerProvider

from megatron_autoinstrument import ids
from megatron_autoinstrument.version import __version__

_logger = logging.getLogger(__name__)

_RANDOM_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"  # the SDK's own instance id
_OURS_EXIT_TIMEOUT_S = 5.0
_THEIRS_EXIT_TIMEOUT_S = 10.0

_ours: TracerProvider | None = None  # the global provider, once we made it: OpenTelemetry lets it be set once


class Connection:
    """A tracer, and what can be asked of the provider behind it."""

    def __init__(self, provider: TracerProvider, tracer: Tracer, ours: bool) -> None:
        self.tracer = tracer
        self.exit_timeout_s = _OURS_EXIT_TIMEOUT_S if ours else _THEIRS_EXIT_TIMEOUT_S
        self._provider = provider
        self._ours = ours

    def flush(self) -> None:
        """Asks the provider to export what it holds. The API's own providers have no such thing."""
        if (flush := getattr(self._provider, "force_flush", None)) is not None:
            flush()

    def shutdown(self) -> None:
        """Shuts the provider down if it is ours; somebody else's is theirs to shut down."""
        if self._ours:
            self._provider.shutdown()  # type: ignore[attr-defined]


def connect(provider: TracerProvider | None, exporter: str | None, attributes: Mapping[str, str | int]) -> Connection:
    """Connects to `provider`, else to the application's global one, else to a new one of ours.

    Args:
        provider: What `instrument(tracer_provider=...)` was given.
        exporter: "otlp", "console", or None to follow OTEL_TRACES_EXPORTER (default: otlp).
        attributes: Resource attributes of this process.
    """
    global _ours
    if provider is None:
        provider = trace.get_tracer_provider()
        if isinstance(provider, ProxyTracerProvider):
            provider = _ours = _build(exporter, attributes)
        elif exporter is not None and provider is not _ours:
            _logger.info("MEGATRON_OTEL_EXPORTER is not used: the application set a tracer provider of its own.")
    if provider is not _ours:
        _complete(provider, attributes)
    tracer = provider.get_tracer("megatron_autoinstrument", __version__)
    ids.keep_random_state(tracer)
    ids.keep_random_state_in_retries()
    return Connection(provider, tracer, provider is _ours)


def _build(exporter: str | None, attributes: Mapping[str, str | int]) -> TracerProvider:
    """A provider from the standard `OTEL_*` variables, set globally so that the user's own spans are exported too.

    The SDK's own configurator sets its provider before it has made the exporters, and one without any stays where
    that fails; here all is made first.

    Raises:
        RuntimeError: an exporter, sampler or id generator that was asked for is not installed.
    """
    if exporter is None:
        exporter = os.environ.get(OTEL_TRACES_EXPORTER, "").strip() or "otlp"
    names = [name.strip() for name in exporter.split(",") if name.strip() != "none"]
    processors = [BatchSpanProcessor(_component("traces_exporter", _entry_point(name))()) for name in names]
    generator = os.environ.get(OTEL_PYTHON_ID_GENERATOR, "random").strip()
    provider = SdkTracerProvider(
        sampler=_sampler(),
        resource=_described(Resource.create(), attributes),
        id_generator=ids.PrivateIdGenerator() if generator == "random" else _component("id_generator", generator)(),
        shutdown_on_exit=False,  # that has no bound; our own exit has
    )
    for processor in processors:
        provider.add_span_processor(processor)
    trace.set_tracer_provider(provider)
    return provider


def _entry_point(exporter: str) -> str:
    if exporter != "otlp":
        return exporter
    protocol = os.environ.get(OTEL_EXPORTER_OTLP_TRACES_PROTOCOL) or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL)
    protocol = (protocol or "grpc").strip()
    return {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}.get(protocol, f"otlp over {protocol}")


def _sampler() -> Sampler | None:
    """The sampler of OTEL_TRACES_SAMPLER where a package brings it; None for those that the SDK reads itself."""
    name = os.environ.get(OTEL_TRACES_SAMPLER, "").strip()
    for entry_point in entry_points(group="opentelemetry_traces_sampler", name=name):
        if not entry_point.value.startswith("opentelemetry.sdk."):
            return entry_point.load()(os.environ.get(OTEL_TRACES_SAMPLER_ARG))
    return None


def _component(kind: str, name: str) -> Any:
    """What an installed package offers under the entry point `opentelemetry_KIND`."""
    offered = entry_points(group=f"opentelemetry_{kind}")
    for entry_point in offered:
        if entry_point.name == name:
            return entry_point.load()
    raise RuntimeError(f"There is no {kind} {name!r} among those installed: {', '.join(sorted(offered.names))}.")


def _complete(provider: TracerProvider, attributes: Mapping[str, str | int]) -> None:
    """Adds our resource attributes to a provider that was made before the rank was known."""
    if not isinstance(provider, SdkTracerProvider):
        return
    described = _described(provider.resource, attributes)
    if hasattr(provider, "_update_resource"):  # from SDK 1.44; also reaches tracers made before
        provider._update_resource(described)
    else:
        provider._resource = described


def _described(has: Resource, attributes: Mapping[str, str | int]) -> Resource:
    """The resource `has` with those of `attributes` that nobody chose."""
    made_up = {
        key
        for key, default in (("service.name", r"unknown_service.*"), ("service.instance.id", _RANDOM_UUID))
        if re.fullmatch(default, str(has.attributes.get(key, "")))
    }
    chosen = set(has.attributes) - made_up
    chosen |= {pair.partition("=")[0].strip() for pair in os.environ.get(OTEL_RESOURCE_ATTRIBUTES, "").split(",")}
    return has.merge(Resource({key: value for key, value in attributes.items() if key not in chosen}))
