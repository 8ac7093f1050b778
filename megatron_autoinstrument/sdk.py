"""The way out: the application's tracer provider, or one of ours where it set none."""

from __future__ import annotations

import atexit
import logging
import os
import re
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.environment_variables import OTEL_TRACES_EXPORTER
from opentelemetry.sdk.environment_variables import OTEL_RESOURCE_ATTRIBUTES
from opentelemetry.sdk.resources import Resource
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
    return Connection(provider, tracer, provider is _ours)


def _build(exporter: str | None, attributes: Mapping[str, str | int]) -> TracerProvider:
    """A provider from the standard `OTEL_*` variables, set globally so that the user's own spans are exported too."""
    described = _described(Resource.create(), attributes)
    try:
        _build_as_configured(exporter, described)
    except (ImportError, AttributeError, TypeError):
        _logger.debug("This SDK's configurator is not the one we know", exc_info=True)
        _build_plain(described)
    provider = trace.get_tracer_provider()
    atexit.unregister(provider.shutdown)  # type: ignore[attr-defined]  # it has no bound; ours has
    return provider


def _build_as_configured(exporter: str | None, described: Resource) -> None:
    # Private to the SDK, but the one place that knows every OTEL_TRACES_* variable; see _build_plain for a fallback.
    from opentelemetry.sdk import _configuration as sdk

    if exporter is None and os.environ.get(OTEL_TRACES_EXPORTER):
        names = sdk._get_exporter_names("traces")
    else:
        names = [sdk._get_exporter_entry_point(exporter or "otlp", "traces")]
    exporters, _, _ = sdk._import_exporters(names, [], [])
    chosen = sdk._get_id_generator()
    sdk._init_tracing(
        exporters=exporters,
        id_generator=ids.PrivateIdGenerator() if chosen == "random" else sdk._import_id_generator(chosen),
        sampler=sdk._import_sampler(sdk._get_sampler()),
        resource=described,
    )


def _build_plain(described: Resource) -> None:
    """The defaults, by public means alone: OTLP over gRPC, and the samplers that the SDK itself reads."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = SdkTracerProvider(resource=described, id_generator=ids.PrivateIdGenerator())
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def _complete(provider: TracerProvider, attributes: Mapping[str, str | int]) -> None:
    """Adds our resource attributes to a provider that was made before the rank was known."""
    from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider

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
