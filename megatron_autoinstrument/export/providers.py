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
from dataclasses import replace
from functools import partial, wraps
from importlib import import_module
from importlib.metadata import entry_points
from time import monotonic
from types import SimpleNamespace
from typing import Any, NamedTuple

from opentelemetry import metrics, trace
from opentelemetry.context import Context
from opentelemetry.environment_variables import OTEL_PYTHON_ID_GENERATOR
from opentelemetry.sdk import metrics as sdk_metrics
from opentelemetry.sdk import trace as sdk_trace
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

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.export import encode, ids, losses
from megatron_autoinstrument.export.metrics import SPANS_DROPPED
from megatron_autoinstrument.export.sdk_internals import (
    LOGS_API,
    LOGS_SDK,
    drops_what_is_inside,
    exporter_of,
    holders_of,
    multi_processor_of,
    resource_of,
    set_resource,
)
from megatron_autoinstrument.recording.connection import SpanStart
from megatron_autoinstrument.recording.traces import Traces, trace_id
from megatron_autoinstrument.settings import declarative, standard
from megatron_autoinstrument.version import __version__

_logger = get_logger(__name__)

SCOPE = encode.SCOPE
TRACES, METRICS, LOGS = "traces", "metrics", "logs"

_RANDOM_UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"  # the SDK's own instance id
_LOWER_HALF = (1 << 64) - 1
_BUILT_EXIT_TIMEOUT_S = 5.0
_APPLICATIONS_EXIT_TIMEOUT_S = 10.0
_PROCESSORS_WITHIN_S = 10.0  # the time that an application has to add a processor to its provider


class Providers:
    """What to record with, and what can be asked of the providers behind it."""

    def __init__(self, providers: Mapping[str, Any], instruments: Mapping[str, Any], new: ProviderOptions) -> None:
        """
        Args:
            providers: By signal.
            instruments: What each of them gives to record with: a tracer, a meter, a handler of log records or None.
            new: How their resources are to be completed.
        """
        self._providers = providers
        self._instruments = instruments
        self._new = new
        self._behind = {name: _behind(provider, _SIGNALS[name]) for name, provider in providers.items()}
        self.tracer: trace.Tracer = instruments.get(TRACES) or trace.NoOpTracerProvider().get_tracer(SCOPE)
        self.meter: metrics.Meter = instruments.get(METRICS) or metrics.NoOpMeterProvider().get_meter(SCOPE)
        self.log_handler: logging.Handler | None = instruments.get(LOGS)
        self.closed = False  # somebody shut the tracer provider down
        self.drops_whole_traces = False
        """Whether the sampler drops all that is inside a span that it drops, and need not be asked."""
        self.exit_timeout_s = (
            _BUILT_EXIT_TIMEOUT_S if all(map(_is_built, providers.values())) else _APPLICATIONS_EXIT_TIMEOUT_S
        )
        self.others = " and ".join(name for name in providers if name != TRACES)
        self._generator = ids.private_generator(self.tracer)
        self.chooses_ids = self._generator is not None
        """Whether a span can be given the id that it is to have."""
        self._hand_on: Callable[[], bool] = lambda: True
        self._watch: _WatchingProcessor | None = None
        self._ended = losses.Tally()
        self.direct = _direct(self.tracer, lambda: self.closed, self._ended)
        self._exports = {
            name: losses.watch_exporters(name, behind, self._ended, SCOPE) for name, behind in self._behind.items()
        }
        counter = (SPANS_DROPPED, "{span}", "Spans that were recorded and not exported")
        try:
            self._lost = self.meter.create_counter(*counter)
        except Exception:
            _logger.debug("A meter of somebody's has no place for a counter", exc_info=True)
            self._lost = metrics.NoOpMeter(SCOPE).create_counter(*counter)
        self._tell_from = monotonic() + _PROCESSORS_WITHIN_S
        self.look()

    def start_span(self, context: Context | None, trace_id: int | None, what: SpanStart) -> trace.Span:
        """Starts a span, with these ids where they are given and the provider lets us choose."""
        name, start, attributes, links, span_id = what
        generator = self._generator
        if generator is None or trace_id is span_id is None:
            return self.tracer.start_span(name, context, start_time=start, attributes=attributes, links=links)
        generator.use_ids(trace_id, span_id)
        try:
            return self.tracer.start_span(name, context, start_time=start, attributes=attributes, links=links)
        finally:
            generator.use_ids(None, None)

    def traces_of(
        self, key: str | None, rank: int, per_step: bool, is_recorded: Callable[[int], bool] = lambda rank: False
    ) -> Traces | None:
        """The traces of the run `key`; None where it has none, or the provider ids of its own kind."""
        if key is None or self._generator is None:
            return None
        # A sampler by ratio must not lose what belongs to no step, and what the steps link to. It looks at the lower
        # half of a trace id, and keeps the low ones, or the high ones.
        run = trace_id(key, "run")
        candidates = (run, run & ~_LOWER_HALF | 1, run | _LOWER_HALF)
        kept = next((run for run in candidates if self.keeps(run, "megatron.pretrain")), run)
        return Traces(key, rank, per_step, kept, is_recorded)

    def keeps(self, trace_id: int, name: str) -> bool:
        """Whether the sampler keeps a root span `name` in the trace `trace_id`."""
        sampler = self._sampler
        if sampler is None:
            return True
        try:
            return sampler.should_sample(Context(), trace_id, name, attributes={}).decision is not Decision.DROP
        except Exception:  # noqa: BLE001
            return True  # it will say so itself when a span starts

    @property
    def _sampler(self) -> Any:
        for part in (self.tracer, self._behind.get(TRACES)):
            if (sampler := getattr(part, "sampler", None)) is not None:
                return sampler
        return None

    def watch(self, hand_on: Callable[[], bool]) -> None:
        """Has `hand_on` called before somebody flushes the tracer provider or shuts it down, and notices that."""
        self._hand_on = hand_on
        provider = self._behind.get(TRACES)
        if provider is None:
            return
        try:
            watches = [holder for holder in holders_of(provider) or () if isinstance(holder, _WatchingProcessor)]
            self._watch = watches[0] if watches else _WatchingProcessor()
            self._watch.serve(self, hand_on, self._ended)
            if not watches:
                # A class of somebody's may do more when a processor is added: Phoenix's drops the one it has.
                sdk_trace.TracerProvider.add_span_processor(provider, self._watch)
                _drain_before(multi_processor_of(provider), self._watch)
        except Exception:
            _logger.debug("A tracer provider can't be watched", exc_info=True)

    def look(self, final: bool = False) -> None:
        """Sees what the application has done since the last look: to processors, providers and modules.

        Args:
            final: Whether this is the last one.
        """
        try:
            ids.keep_random_state_in_retries()
            encode.replace_encoders()
            self.direct.look()
            self._look_behind()
            self.drops_whole_traces = drops_what_is_inside(self._sampler)
            if final or monotonic() > self._tell_from:
                self._tell_from = float("inf")
                self._tell()
        except Exception:
            if "look" not in _told:
                _told.add("look")
                _logger.warning("What the application does to its providers can't be followed.", exc_info=True)

    def _look_behind(self) -> None:
        provider, signal = self._providers.get(TRACES), _SIGNALS[TRACES]
        before = self._behind.get(TRACES)
        if provider is before or (behind := _behind(provider, signal)) is before:
            return
        self._behind[TRACES] = behind  # another one, in the same wrapper
        _complete(behind, self._new, signal)
        self.closed = False
        self.watch(self._hand_on)

    def _tell(self) -> None:
        for name, provider in self._providers.items():
            signal = _SIGNALS[name]
            instrument = provider.get_logger(SCOPE) if name == LOGS else self._instruments[name]
            if _is_the_apis(instrument, signal) and not _is_unset(instrument, signal):
                _say_once(name, provider, "is a no-op")
            elif not _is_built(provider) and _is_empty(self._behind[name]):
                _say_once(name, provider, f"has no {signal.holder}")

    def flush_spans(self, final: bool = False) -> None:
        """Asks the tracer provider to export what it holds. The API's own providers have no such thing."""
        self._flush(TRACES, final)

    def flush_others(self, final: bool = False) -> None:
        """Asks the other providers to export what they hold."""
        failure: Exception | None = None
        for name in self._providers:
            if name != TRACES:
                try:
                    self._flush(name, final)
                except Exception as error:  # noqa: BLE001
                    failure = error  # of metrics, after the logs have left too
        if failure is not None:
            raise failure

    def _flush(self, name: str, final: bool) -> None:
        exports = self._exports.get(name)
        with exports[0].at_work() if exports else nullcontext():
            try:
                _ask(self._providers.get(name), "force_flush")
            finally:
                if final and name in _built:  # somebody else's are theirs to shut down
                    _ask(_built[name], "shutdown")

    def lost(self, final: bool) -> int:
        """How many of our spans the exporters lost, as far as they can be watched.

        Args:
            final: Whether what isn't exported by now is lost.
        """
        exports = self._exports.get(TRACES, ())
        return max((export.unexported if final else export.lost for export in exports), default=0)

    def stop_failing(self) -> bool:
        """Has no more spans exported where the last attempt has failed, and says whether it has anywhere: what is
        counted as lost must not arrive afterwards."""
        exports = self._exports.get(TRACES, ())
        for export in exports:
            export.given_up |= export.failing
        return any(export.given_up for export in exports)

    @property
    def sent(self) -> int:
        """How many of our spans an exporter has now: they may have arrived."""
        return max((export.sent for export in self._exports.get(TRACES, ())), default=0)

    def count_lost(self, spans: int) -> None:
        """Adds to the metric of lost spans."""
        self._lost.add(spans)

    def give_up(self, late: bool) -> None:
        """Leaves out of the shutdowns at exit what would wait for a collector: they have no bound. What they would
        wait for has had its time. What else a provider shuts down it does.

        Args:
            late: Whether there is too little left for another time.
        """
        for name, provider in self._providers.items():
            exports = self._exports[name]
            left_out = [export.leave_out_of_shutdown() for export in exports if late or export.failing]
            if not all(left_out) or (late and not exports):
                for one in (provider, self._behind[name]):
                    atexit.unregister(getattr(one, "shutdown", bool))

    def unhook(self) -> None:
        """Lets the exporters alone again."""
        for name in self._exports:
            for export in self._exports[name]:
                export.unhook()
            self._exports[name] = []


class _WatchingProcessor(sdk_trace.SpanProcessor):
    """What sees a tracer provider flushed, shut down, and handed spans; one for each, as it can't be taken back."""

    def serve(self, connection: Providers, hand_on: Callable[[], bool], ended: losses.Tally) -> None:
        """Works for `connection` from now on."""
        self._connection = weakref.ref(connection)
        self._hand_on = hand_on
        self._ended = ended

    def on_end(self, span: sdk_trace.ReadableSpan) -> None:
        scope = getattr(span, "instrumentation_scope", None)  # spans of somebody else's make come here as well
        if scope is None or scope.name != SCOPE:
            return
        connection = self._connection()
        if connection is None or connection.closed or not (span.context and span.context.trace_flags.sampled):
            return
        self._ended.add(1)

    def drain(self) -> bool:
        """Has what has ended handed on. False where another thread that does so takes too long."""
        try:
            return self._hand_on()
        except Exception:
            _logger.debug("What has ended could not be handed on", exc_info=True)
            return False

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self.drain()

    def shutdown(self) -> None:
        connection = self._connection()
        if connection is not None and connection._watch is self:
            connection.closed = True


def _drain_before(several: Any, watch: _WatchingProcessor) -> None:
    """Has what has ended by then handed on before the processors of a provider are flushed or shut down, in the thread
    that asks for it: OpenTelemetry asks `watch` after the others. For the life of the provider, as `watch` is there."""

    def before(ask: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(ask)
        def drained(*args: Any, **kwargs: Any) -> Any:
            done = watch.drain()
            return ask(*args, **kwargs) and done

        return drained

    for name in ("force_flush", "shutdown"):
        setattr(several, name, before(getattr(several, name)))


def connect(
    wanted: Mapping[str, Any],
    exporter: str | None,
    attributes: Mapping[str, str | int | float | bool],
    build: bool = True,
    service_name: str | None = None,
    sampler: Sampler | None = None,
) -> Providers:
    """Connects each signal to the provider given for it, else to the application's global one, else to one of ours.

    Args:
        wanted: The signals to connect (TRACES, METRICS, LOGS), each with a provider or None.
        exporter: "otlp", "console", or None to follow the OTEL_*_EXPORTER variables (default: otlp).
        attributes: Resource attributes of this process.
        build: Whether to make providers where there are none.
        service_name: What a flag calls the service; it wins over everything else.
        sampler: The sampler of a tracer provider of ours, in place of OTEL_TRACES_SAMPLER's.
    """
    new = ProviderOptions(exporter, attributes, service_name, sampler)
    providers: dict[str, Any] = {}
    instruments: dict[str, Any] = {}
    with standard.tidied() if build else nullcontext():
        for name, given in wanted.items():
            try:
                provider = _provider(_SIGNALS[name], given, new, build)
                instruments[name] = _SIGNALS[name].instrument(provider)
                providers[name] = provider
            except declarative.LeftOut:
                pass
            except Exception as error:  # noqa: BLE001
                _logger.warning("No %s are recorded: OpenTelemetry could not be set up for them. %s", name, error)
    return Providers(providers, instruments, new)


class ProviderOptions(NamedTuple):
    """How a provider is to be made, or completed."""

    exporter: str | None
    attributes: Mapping[str, str | int | float | bool]
    service_name: str | None
    sampler: Sampler | None


def _provider(signal: _Signal, given: Any, new: ProviderOptions, build: bool) -> Any:
    provider = signal.get() if given is None else given
    if _is_unset(provider, signal):
        if not build:
            return provider
        provider = _built[signal.name] = _build(signal, new)
    elif not _is_built(provider):
        behind = _behind(provider, signal)
        _complete(behind, new, signal)
        # In a forked child their readers start again and repeat what this rank has recorded, as this rank.
        for reader in (holders_of(behind) or ()) if signal.name == METRICS else ():
            _silent_in_children(exporter_of(reader), _without_ours)
        for variable in ("EXPORTER" if new.exporter else "", "SAMPLING_STRATEGY" if new.sampler else ""):
            if variable:
                _logger.info("MEGATRON_OTEL_%s is not used for %s: a provider is set already.", variable, signal.name)
    return provider


def _is_built(provider: Any) -> bool:
    return any(provider is one for one in _built.values())


def _is_the_apis(thing: Any, signal: _Signal) -> bool:
    """Whether its class is one of OpenTelemetry's API, which has classes that stand for nothing. Names of classes say
    nothing: logfire has a ProxyTracerProvider too."""
    return f"{type(thing).__module__}.".startswith(f"{signal.api}.")


def _is_unset(thing: Any, signal: _Signal) -> bool:
    """Whether it is what the API gives until a provider is set; the class has no public name for metrics."""
    return _is_the_apis(thing, signal) and "Proxy" in type(thing).__name__


def _is_empty(provider: Any) -> bool:
    """Whether it is known to have nothing that it could hand anything to."""
    holders = holders_of(provider)
    return holders is not None and all(isinstance(holder, _WatchingProcessor) for holder in holders)


_told: set[str] = set()


def _say_once(name: str, provider: Any, what: str) -> None:
    asked_for = os.environ.get(f"OTEL_{name.upper()}_EXPORTER", "")
    if name not in _told and "none" not in [exporter.strip() for exporter in asked_for.split(",")]:
        _told.add(name)
        kind = type(provider)
        _logger.warning(
            "The provider of %s that is set, a %s.%s, %s: this package records, and nothing will leave.",
            *(name, kind.__module__, kind.__qualname__, what),
        )


def _behind(provider: Any, signal: _Signal) -> Any:
    """The SDK's provider: this one, or one inside it, as in logfire's; None if there is none that can be found. Only
    plain attributes are looked at: a property might take a lock that is held."""
    try:
        sdk = getattr(import_module(signal.sdk), f"{signal.kind.capitalize()}Provider")
        if isinstance(provider, sdk):
            return provider
        inside = [value for value in vars(provider).values() if isinstance(value, sdk)]
    except Exception:  # noqa: BLE001
        return None
    return inside[0] if len(inside) == 1 else None


def _build(signal: _Signal, new: ProviderOptions) -> Any:
    """A provider from the standard `OTEL_*` variables, set globally so that what the user records is exported too.

    The SDK's own configurator sets its provider before it has made the exporters, and one without any stays where
    that fails, and it makes all three at once; here all of one signal is made first.

    Raises:
        declarative.LeftOut: OTEL_CONFIG_FILE is set and leaves the signal out.
        RuntimeError: an exporter, sampler or id generator that was asked for is not installed.
    """
    if declarative.is_set():
        provider = declarative.provider(signal.name, lambda resource: _described(resource, new))
        for holder in holders_of(provider) or ():
            _silent_in_children(exporter_of(holder))
        atexit.unregister(provider.shutdown)  # it has no bound; our own exit has
    else:
        with standard.told_once():  # to import the SDK's logs makes a resource
            kinds = [
                _component(f"{signal.name}_exporter", _entry_point(name, signal.name))
                for name in _exporters(signal.name, new.exporter)
            ]
        with standard.told_once():
            exporters = [_silent_in_children(kind()) for kind in kinds]
            ids.keep_random_state_in_retries()  # before a reader's thread may export
            provider = signal.build(exporters, _described(Resource.create(), new), new)
    signal.set(provider)
    return provider


def _exporters(signal: str, chosen: str | None) -> list[str]:
    """The exporters to make: `none` in the standard variable is none, whatever else is chosen."""
    standard = os.environ.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
    if standard.lower() == "none":
        return []
    names = [name.strip() for name in (chosen or standard or "otlp").split(",")]
    return [name for name in names if name and name.lower() != "none"]


def _tracer_provider(exporters: Sequence[Any], resource: Resource, new: ProviderOptions) -> Any:
    processors = [BatchSpanProcessor(exporter) for exporter in exporters]
    generator = os.environ.get(OTEL_PYTHON_ID_GENERATOR, "random").strip()
    provider = sdk_trace.TracerProvider(
        sampler=new.sampler or _sampler(),
        resource=resource,
        id_generator=ids.PrivateIdGenerator() if generator == "random" else _component("id_generator", generator)(),
        shutdown_on_exit=False,  # that has no bound; our own exit has
    )
    provider.get_tracer(SCOPE).start_span("megatron.pretrain").end()  # raises where the limits can't be
    for processor in processors:
        provider.add_span_processor(processor)
    return provider


def _meter_provider(exporters: Sequence[Any], resource: Resource, new: ProviderOptions) -> Any:
    readers = [
        exporter if isinstance(exporter, MetricReader) else PeriodicExportingMetricReader(exporter)
        for exporter in exporters
    ]
    return sdk_metrics.MeterProvider(metric_readers=readers, resource=resource, shutdown_on_exit=False)


def _logger_provider(exporters: Sequence[Any], resource: Resource, new: ProviderOptions) -> Any:
    # Imported here: a release that moves them costs the logs alone.
    sdk_logs, export = import_module(LOGS_SDK), import_module(f"{LOGS_SDK}.export")
    processors = [export.BatchLogRecordProcessor(exporter) for exporter in exporters]
    provider = sdk_logs.LoggerProvider(resource=resource, shutdown_on_exit=False)
    for processor in processors:
        provider.add_log_record_processor(processor)
    return provider


class _Signal(NamedTuple):
    """What a signal is called in OpenTelemetry."""

    name: str
    kind: str
    api: str
    sdk: str
    holder: str
    build: Callable[[Sequence[Any], Resource, ProviderOptions], Any]
    instrument: Callable[[Any], Any]
    """What a provider gives to record with."""

    def get(self) -> Any:
        """The global provider."""
        return getattr(import_module(self.api), f"get_{self.kind}_provider")()

    def set(self, provider: Any) -> None:
        """Makes it the global one."""
        getattr(import_module(self.api), f"set_{self.kind}_provider")(provider)


_built: dict[str, Any] = {}  # global providers that we made: OpenTelemetry lets each be set once


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


def _silent_in_children(exporter: Any, without_ours: Callable[[Any], Any] = lambda batch: None) -> Any:
    """Has `exporter` export in this process alone: in forked children the SDK starts its threads again.

    Args:
        exporter: The exporter.
        without_ours: What is left of a batch for it to export in a child; None if nothing is.
    """
    export = getattr(exporter, "export", None)
    if export is not None and not hasattr(export, "silent_in_children_of"):
        process = os.getpid()

        def export_in_this_process(*args: Any, **kwargs: Any) -> Any:
            if os.getpid() != process:
                if not args or (left := without_ours(args[0])) is None:
                    return None  # no result of any signal's exporter, and none of their callers looks at it
                args = (left, *args[1:])
            return export(*args, **kwargs)

        export_in_this_process.silent_in_children_of = process  # type: ignore[attr-defined]
        export_in_this_process.of_this_package = True  # type: ignore[attr-defined]
        try:
            exporter.export = export_in_this_process
        except Exception:
            _logger.debug("An exporter can't be replaced", exc_info=True)
    return exporter


def _without_ours(data: Any) -> Any:
    """Metrics without those that this package records."""
    try:
        resources = [
            replace(resource, scope_metrics=scopes)
            for resource in data.resource_metrics
            if (scopes := [scope for scope in resource.scope_metrics if scope.scope.name != SCOPE])
        ]
        return replace(data, resource_metrics=resources) if resources else None
    except Exception:  # noqa: BLE001
        return None


def _complete(provider: Any, new: ProviderOptions, signal: _Signal) -> None:
    """Adds our resource attributes to a provider that was made before the rank was known."""
    if provider is None:
        _logger.info("The provider of %s can't be told which rank this is: it is not the SDK's.", signal.name)
        return
    try:
        set_resource(provider, _described(resource_of(provider), new))
    except Exception:  # noqa: BLE001
        if f"resource of {signal.name}" not in _told:
            _told.add(f"resource of {signal.name}")
            _logger.warning("Which rank this is can't be added to the resource of the provider of %s.", signal.name)


def _described(has: Resource, new: ProviderOptions) -> Resource:
    """The resource `has` with those attributes that nobody chose."""
    made_up = {
        key
        for key, default in (("service.name", r"unknown_service.*"), ("service.instance.id", _RANDOM_UUID))
        if re.fullmatch(default, str(has.attributes.get(key, "")))
    }
    chosen = set(has.attributes) - made_up
    if not declarative.is_set():  # or the variable counts for nothing
        chosen |= {pair.partition("=")[0].strip() for pair in os.environ.get(OTEL_RESOURCE_ATTRIBUTES, "").split(",")}
    added = {key: value for key, value in new.attributes.items() if key not in chosen}
    if new.service_name:
        added["service.name"] = new.service_name
    return has.merge(Resource(added))


def _tracer(provider: Any) -> Any:
    return provider.get_tracer(SCOPE, __version__)


def _meter(provider: Any) -> Any:
    return provider.get_meter(SCOPE, __version__)


def _log_handler(provider: Any) -> logging.Handler | None:
    """What turns a record of Python's logging into OpenTelemetry's. None where the application has one at work.

    Raises:
        RuntimeError: there is none.
    """
    for handler in logging.getLogger().handlers:
        for kind in type(handler).__mro__:
            if kind.__name__ == "LoggingHandler" and kind.__module__.startswith("opentelemetry."):
                return None
    make = _handler_class()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the SDK's moves to the package of instrumentations
        handler = make(logger_provider=provider)
    # Python flushes every handler at exit, and this one would start a thread for it, which Python refuses by then.
    handler.flush = lambda: None  # type: ignore[method-assign]
    return handler


def _handler_class() -> Callable[..., logging.Handler]:
    for module, options in (
        ("opentelemetry.instrumentation.logging.handler", {"log_code_attributes": True}),  # as the SDK's does
        (LOGS_SDK, {}),
    ):
        try:
            found = import_module(module).LoggingHandler
        except Exception:  # noqa: BLE001
            continue  # not installed, or its dependencies are not
        return partial(found, **options)
    raise RuntimeError("opentelemetry-instrumentation-logging is not installed, and this SDK has no LoggingHandler.")


_SIGNALS = {
    signal.name: signal
    for signal in (
        _Signal(
            *(TRACES, "tracer", "opentelemetry.trace", "opentelemetry.sdk.trace", "span processor"),
            *(_tracer_provider, _tracer),
        ),
        _Signal(
            *(METRICS, "meter", "opentelemetry.metrics", "opentelemetry.sdk.metrics", "metric reader"),
            *(_meter_provider, _meter),
        ),
        _Signal(
            *(LOGS, "logger", LOGS_API, LOGS_SDK, "log record processor"),
            *(_logger_provider, _log_handler),
        ),
    )
}


def _direct(tracer: Any, is_closed: Callable[[], bool], ended: losses.Tally) -> Any:
    """The shorter way for its spans, where this SDK has what that is made of."""
    try:
        from megatron_autoinstrument.export.direct import Direct
    except ImportError as error:
        if "direct" not in _told:
            _told.add("direct")
            _logger.warning("Spans are made by the SDK's tracer, which costs more time. %s", error)

        def never(*args: Any) -> None:
            pass

        return SimpleNamespace(possible=False, look=never, start=never, finish=never, hand_on=never)
    return Direct(tracer, _WatchingProcessor, is_closed, ended)


def _ask(provider: Any, what: str) -> None:
    if (method := getattr(provider, what, None)) is not None:
        method()
