"""The way out: the application's providers, or ones of ours where it set none."""

from __future__ import annotations

import atexit
import logging
import os
import re
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from opentelemetry import _logs, metrics, trace
from opentelemetry.context import Context
from opentelemetry.environment_variables import OTEL_PYTHON_ID_GENERATOR
from opentelemetry.sdk import _logs as sdk_logs
from opentelemetry.sdk import metrics as sdk_metrics
from opentelemetry.sdk import trace as sdk_trace
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_RESOURCE_ATTRIBUTES,
    OTEL_TRACES_SAMPLER,
    OTEL_TRACES_SAMPLER_ARG,
)
from opentelemetry.sdk.metrics.export import MetricReader, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision, Sampler

from megatron_autoinstrument import exporting, ids
from megatron_autoinstrument.direct import Direct
from megatron_autoinstrument.metrics import SPANS_DROPPED
from megatron_autoinstrument.redact import get_logger
from megatron_autoinstrument.traces import Traces, trace_id
from megatron_autoinstrument.version import __version__

_logger = get_logger(__name__)

SCOPE = "megatron_autoinstrument"
TRACES, METRICS, LOGS = "traces", "metrics", "logs"

_RANDOM_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"  # the SDK's own instance id
_LOWER_HALF = (1 << 64) - 1
_OURS_EXIT_TIMEOUT_S = 5.0
_THEIRS_EXIT_TIMEOUT_S = 10.0


class Connection:
    """What to record with, and what can be asked of the providers behind it."""

    def __init__(self, providers: Mapping[str, Any]) -> None:
        self._providers = providers
        self.tracer: trace.Tracer = providers.get(TRACES, trace.NoOpTracerProvider()).get_tracer(SCOPE, __version__)
        self.meter: metrics.Meter = providers.get(METRICS, metrics.NoOpMeterProvider()).get_meter(SCOPE, __version__)
        self.log_handler = _log_handler(providers[LOGS]) if LOGS in providers else None
        self.closed = False  # somebody shut the tracer provider down
        theirs = [provider for provider in providers.values() if provider not in _ours.values()]
        self.exit_timeout_s = _THEIRS_EXIT_TIMEOUT_S if theirs else _OURS_EXIT_TIMEOUT_S
        self.has_others = set(providers) - {TRACES} != set()
        self._generator = ids.private_generator(self.tracer)
        ids.keep_random_state_in_retries()
        self.direct = Direct(self.tracer, _Watch)
        self._ended = exporting.Tally()
        self._exports = {
            name: exporting.watch(name, provider, self._ended, SCOPE) for name, provider in providers.items()
        }
        self._lost = self.meter.create_counter(SPANS_DROPPED, "{span}", "Spans that were recorded and not exported")

    def start_span(
        self,
        context: Context | None,
        trace_id: int | None,
        name: str,
        start: int,
        attributes: Mapping[str, Any] | None,
        links: Sequence[trace.Link],
        span_id: int | None,
    ) -> trace.Span:
        """Starts a span, with these ids where they are given and the provider lets us choose."""
        generator = self._generator
        if generator is None or trace_id is span_id is None:
            return self.tracer.start_span(name, context, start_time=start, attributes=attributes, links=links)
        generator.plan(trace_id, span_id)
        try:
            return self.tracer.start_span(name, context, start_time=start, attributes=attributes, links=links)
        finally:
            generator.plan(None, None)

    def plan(self, key: str, rank: int, per_step: bool) -> Traces | None:
        """The traces of the run `key`; None where the provider has ids of its own kind."""
        if self._generator is None:
            return None
        # A sampler by ratio must not lose what belongs to no step, and what the steps link to. It looks at the lower
        # half of a trace id, and keeps the low ones, or the high ones.
        run = trace_id(key, "run")
        candidates = (run, run & ~_LOWER_HALF | 1, run | _LOWER_HALF)
        kept = next((run for run in candidates if self.keeps(run, "megatron.pretrain")), run)
        return Traces(key, rank, per_step, kept)

    def keeps(self, trace_id: int, name: str) -> bool:
        """Whether the sampler keeps a root span `name` in the trace `trace_id`."""
        sampler = getattr(self.tracer, "sampler", None)
        if sampler is None:
            return True
        try:
            return sampler.should_sample(Context(), trace_id, name, attributes={}).decision is not Decision.DROP
        except Exception:  # noqa: BLE001
            return True  # it will say so itself when a span starts

    def watch(self, hand_on: Callable[[], None]) -> None:
        """Has `hand_on` called whenever somebody flushes the tracer provider, and notices when it is shut down."""
        provider = self._providers.get(TRACES)
        if isinstance(provider, sdk_trace.TracerProvider):
            if (watch := _watches.get(provider)) is None:
                watch = _watches[provider] = _Watch()
                provider.add_span_processor(watch)
            watch.serve(self, hand_on, self._ended)

    def flush_spans(self, final: bool = False) -> None:
        """Asks the tracer provider to export what it holds. The API's own providers have no such thing."""
        self._flush(TRACES, final)

    def flush_others(self, final: bool = False) -> None:
        """Asks the other providers to export what they hold."""
        for name in self._providers:
            if name != TRACES:
                self._flush(name, final)

    def _flush(self, name: str, final: bool) -> None:
        exports = self._exports.get(name)
        with exports[0].at_work() if exports else nullcontext():
            try:
                _ask(self._providers.get(name), "force_flush")
            finally:
                if final and name in _ours:  # somebody else's are theirs to shut down
                    _ask(_ours[name], "shutdown")

    def lost(self, final: bool) -> int:
        """How many of our spans the exporters lost, as far as they can be watched.

        Args:
            final: Whether what isn't exported by now is lost.
        """
        exports = self._exports.get(TRACES, ())
        return max((export.unexported if final else export.lost for export in exports), default=0)

    def count_lost(self, spans: int) -> None:
        """Adds to the metric of lost spans."""
        self._lost.add(spans)

    def give_up(self, late: bool) -> None:
        """Takes back the shutdowns at exit that would wait for a collector: they have no bound. What they would
        wait for has had its time.

        Args:
            late: Whether there is too little left for another time.
        """
        for name, provider in self._providers.items():
            if late or any(export.failing for export in self._exports[name]):
                atexit.unregister(getattr(provider, "shutdown", bool))

    def release(self) -> None:
        """Lets the exporters alone again."""
        for name in self._exports:
            for export in self._exports[name]:
                export.release()
            self._exports[name] = []


class _Watch(sdk_trace.SpanProcessor):
    """What sees a tracer provider flushed, shut down, and handed spans; one for each, as it can't be taken back."""

    def serve(self, connection: Connection, hand_on: Callable[[], None], ended: exporting.Tally) -> None:
        """Works for `connection` from now on."""
        self._connection = weakref.ref(connection)
        self._hand_on = hand_on
        self._ended = ended

    def on_end(self, span: sdk_trace.ReadableSpan) -> None:
        connection = self._connection()
        if connection is None or connection.closed or not (span.context and span.context.trace_flags.sampled):
            return
        if span.instrumentation_scope is not None and span.instrumentation_scope.name == SCOPE:
            self._ended.add(1)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        if self._connection() is not None:
            self._hand_on()
        return True

    def shutdown(self) -> None:
        if (connection := self._connection()) is not None:
            connection.closed = True


_watches: weakref.WeakKeyDictionary[Any, _Watch] = weakref.WeakKeyDictionary()


def connect(
    wanted: Mapping[str, Any],
    exporter: str | None,
    attributes: Mapping[str, str | int | float | bool],
    build: bool = True,
    service_name: str | None = None,
    sampler: Sampler | None = None,
) -> Connection:
    """Connects each signal to the provider given for it, else to the application's global one, else to one of ours.

    Args:
        wanted: The signals to connect (TRACES, METRICS, LOGS), each with a provider or None.
        exporter: "otlp", "console", or None to follow the OTEL_*_EXPORTER variables (default: otlp).
        attributes: Resource attributes of this process.
        build: Whether to make providers where there are none.
        service_name: What a flag calls the service; it wins over everything else.
        sampler: The sampler of a tracer provider of ours, in place of OTEL_TRACES_SAMPLER's.
    """
    new = _New(exporter, attributes, service_name, sampler)
    providers = {}
    for name, given in wanted.items():
        try:
            providers[name] = _provider(_SIGNALS[name], given, new, build)
        except Exception as error:  # noqa: BLE001
            _logger.warning("No %s are recorded: OpenTelemetry could not be set up for them. %s", name, error)
    return Connection(providers)


class _New(NamedTuple):
    """How a provider is to be made, or completed."""

    exporter: str | None
    attributes: Mapping[str, str | int | float | bool]
    service_name: str | None
    sampler: Sampler | None


def _provider(signal: _Signal, given: Any, new: _New, build: bool) -> Any:
    provider = given or signal.get()
    # What the API gives until a provider is set; its class has no public name for metrics.
    if "Proxy" in type(provider).__name__:
        if not build:
            return provider
        provider = _ours[signal.name] = _build(signal, new)
    elif provider not in _ours.values():
        _complete(provider, new)
        # In a forked child their readers start again and repeat what this rank has recorded, as this rank.
        for reader in exporting.holders(provider) if signal.name == METRICS else ():
            _silent_in_children(getattr(reader, "_exporter", None))
        for variable in ("EXPORTER" if new.exporter else "", "SAMPLING_STRATEGY" if new.sampler else ""):
            if variable:
                _logger.info("MEGATRON_OTEL_%s is not used for %s: a provider is set already.", variable, signal.name)
    return provider


def _build(signal: _Signal, new: _New) -> Any:
    """A provider from the standard `OTEL_*` variables, set globally so that what the user records is exported too.

    The SDK's own configurator sets its provider before it has made the exporters, and one without any stays where
    that fails, and it makes all three at once; here all of one signal is made first.

    Raises:
        RuntimeError: an exporter, sampler or id generator that was asked for is not installed.
    """
    exporter = new.exporter
    if exporter is None:
        exporter = os.environ.get(f"OTEL_{signal.name.upper()}_EXPORTER", "").strip() or "otlp"
    exporters = [
        _silent_in_children(_component(f"{signal.name}_exporter", _entry_point(name.strip(), signal.name))())
        for name in exporter.split(",")
        if name.strip() != "none"
    ]
    provider = signal.build(exporters, _described(Resource.create(), new), new)
    signal.set(provider)
    return provider


def _tracer_provider(exporters: Sequence[Any], resource: Resource, new: _New) -> Any:
    processors = [BatchSpanProcessor(exporter) for exporter in exporters]
    generator = os.environ.get(OTEL_PYTHON_ID_GENERATOR, "random").strip()
    provider = sdk_trace.TracerProvider(
        sampler=new.sampler or _sampler(),
        resource=resource,
        id_generator=ids.PrivateIdGenerator() if generator == "random" else _component("id_generator", generator)(),
        shutdown_on_exit=False,  # that has no bound; our own exit has
    )
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def _meter_provider(exporters: Sequence[Any], resource: Resource, new: _New) -> Any:
    readers = [
        exporter if isinstance(exporter, MetricReader) else PeriodicExportingMetricReader(exporter)
        for exporter in exporters
    ]
    return sdk_metrics.MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)


def _logger_provider(exporters: Sequence[Any], resource: Resource, new: _New) -> Any:
    processors = [BatchLogRecordProcessor(exporter) for exporter in exporters]
    provider = sdk_logs.LoggerProvider(resource=resource, shutdown_on_exit=False)
    for processor in processors:
        provider.add_log_record_processor(processor)
    return provider


class _Signal(NamedTuple):
    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    build: Callable[[Sequence[Any], Resource, _New], Any]


_SIGNALS = {
    TRACES: _Signal(TRACES, trace.get_tracer_provider, trace.set_tracer_provider, _tracer_provider),
    METRICS: _Signal(METRICS, metrics.get_meter_provider, metrics.set_meter_provider, _meter_provider),
    LOGS: _Signal(LOGS, _logs.get_logger_provider, _logs.set_logger_provider, _logger_provider),
}

_ours: dict[str, Any] = {}  # global providers that we made: OpenTelemetry lets each be set once


def _entry_point(exporter: str, signal: str) -> str:
    if exporter != "otlp":
        return exporter
    protocol = os.environ.get(f"OTEL_EXPORTER_OTLP_{signal.upper()}_PROTOCOL")
    protocol = (protocol or os.environ.get(OTEL_EXPORTER_OTLP_PROTOCOL) or "grpc").strip()
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


def _silent_in_children(exporter: Any) -> Any:
    """Has `exporter` export in this process alone: in forked children the SDK starts its threads again."""
    export = getattr(exporter, "export", None)
    if export is not None and not hasattr(export, "silent_in_children_of"):
        process = os.getpid()

        def export_in_this_process(*args: Any, **kwargs: Any) -> Any:
            # None is no result of any signal's exporter, and none of their callers looks at it.
            return export(*args, **kwargs) if os.getpid() == process else None

        export_in_this_process.silent_in_children_of = process  # type: ignore[attr-defined]
        exporter.export = export_in_this_process
    return exporter


def _complete(provider: Any, new: _New) -> None:
    """Adds our resource attributes to a provider that was made before the rank was known."""
    if not isinstance(provider, (sdk_trace.TracerProvider, sdk_metrics.MeterProvider, sdk_logs.LoggerProvider)):
        return
    # A meter provider keeps its resource in its configuration.
    holder, name = (provider._sdk_config, "resource") if hasattr(provider, "_sdk_config") else (provider, "_resource")
    described = _described(getattr(holder, name), new)
    if hasattr(provider, "_update_resource"):  # from SDK 1.44; also reaches tracers made before
        provider._update_resource(described)
    else:
        setattr(holder, name, described)


def _described(has: Resource, new: _New) -> Resource:
    """The resource `has` with those attributes that nobody chose."""
    made_up = {
        key
        for key, default in (("service.name", r"unknown_service.*"), ("service.instance.id", _RANDOM_UUID))
        if re.fullmatch(default, str(has.attributes.get(key, "")))
    }
    chosen = set(has.attributes) - made_up
    chosen |= {pair.partition("=")[0].strip() for pair in os.environ.get(OTEL_RESOURCE_ATTRIBUTES, "").split(",")}
    added = {key: value for key, value in new.attributes.items() if key not in chosen}
    if new.service_name:
        added["service.name"] = new.service_name
    return has.merge(Resource(added))


def _log_handler(provider: Any) -> logging.Handler | None:
    """What turns a record of Python's logging into OpenTelemetry's. None where the application has one at work."""
    if any(type(handler).__name__ == "LoggingHandler" for handler in logging.getLogger().handlers):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # it moves to a package of instrumentations
        handler = sdk_logs.LoggingHandler(logger_provider=provider)
    # Python flushes every handler at exit, and this one would start a thread for it, which Python refuses by then.
    handler.flush = lambda: None  # type: ignore[method-assign]
    return handler


def _ask(provider: Any, what: str) -> None:
    if (method := getattr(provider, what, None)) is not None:
        method()
