"""Providers, processors and exporters of any make: they are used as they are, and what can't be done with one costs
neither it nor anything else.
"""

import asyncio
import logging
import random
import sys
import types
from collections import Counter

import pytest
from opentelemetry import _logs, metrics, trace
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import SimpleLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter, PeriodicExportingMetricReader
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter, SpanExportResult

from megatron_autoinstrument.export import providers
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
from megatron_autoinstrument.recording.recorder import Recorder


@pytest.fixture(autouse=True)
def _nothing_told(monkeypatch):
    monkeypatch.setattr(providers, "_told", set())


@pytest.fixture
def recorder():
    recorder = Recorder()
    yield recorder
    recorder.disconnect()
    recorder.reset_after_fork()


def record(recorder, **given):
    recorder.connect_by(lambda: providers.connect(given, None, {"dl.rank": 3}))
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.end(step)
    recorder.drain(final=True)


def refuse(*args, **kwargs):
    raise RuntimeError("not with me")


class ProxyProvider(trace.TracerProvider):
    """What stands around another one, under any name."""

    def __init__(self, provider):
        self.provider = provider

    def get_tracer(self, *args, **kwargs):
        return self.provider.get_tracer(*args, **kwargs)


class Bare(trace.TracerProvider):
    """One without attributes of its own."""

    __slots__ = ("inside",)

    def __init__(self, provider):
        object.__setattr__(self, "inside", provider)

    def get_tracer(self, *args, **kwargs):
        return self.inside.get_tracer(*args, **kwargs)

    def __getattr__(self, name):
        raise RuntimeError("nothing else here")


class Unhashable(TracerProvider):
    def __eq__(self, other):
        raise RuntimeError("compare nothing with me")

    __hash__ = None


class Closed(TracerProvider):
    add_span_processor = _update_resource = force_flush = refuse


class Fixed(TracerProvider):
    """Nothing can be set on it, or on its tracers."""

    def get_tracer(self, *args, **kwargs):
        tracer = super().get_tracer(*args, **kwargs)

        class FixedTracer(type(tracer)):
            def __setattr__(self, name, value):
                raise AttributeError(name)

        tracer.__class__ = FixedTracer
        return tracer

    def __setattr__(self, name, value):
        if name != "done" and "done" in vars(self):
            raise AttributeError(name)
        super().__setattr__(name, value)


def wrapped(kind):
    def make(exporter):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        return kind(provider)

    return make


def subclassed(kind, **options):
    def make(exporter):
        provider = kind(**options)
        provider.done = True
        TracerProvider.add_span_processor(provider, SimpleSpanProcessor(exporter))
        return provider

    return make


PROVIDERS = {
    "a wrapper called a proxy": wrapped(ProxyProvider),
    "a wrapper without attributes": wrapped(Bare),
    "unhashable": subclassed(Unhashable),
    "its functions raise": subclassed(Closed),
    "nothing can be set": subclassed(Fixed, shutdown_on_exit=False),
    "several threads for processors": subclassed(
        TracerProvider, active_span_processor=ConcurrentMultiSpanProcessor(2), shutdown_on_exit=False
    ),
}


@pytest.mark.parametrize("make", PROVIDERS.values(), ids=PROVIDERS)
def test_spans_arrive_by_a_provider_of_any_make(make, recorder, exporter, caplog):
    provider = make(exporter)
    record(recorder, traces=provider)
    recorder.flush()
    assert [span.name for span in exporter.get_finished_spans()] == [
        "megatron.train_step",
        "megatron.microbatch.forward",
    ]
    assert recorder.dropped == 0
    for log in caplog.records:  # what can't be done is named, and is all that is
        if log.levelno >= logging.WARNING:
            assert "Which rank this is" in log.getMessage() or "_flush" in log.exc_text


def test_a_wrappers_resource_is_completed_too(recorder, exporter):
    record(recorder, traces=wrapped(ProxyProvider)(exporter))
    assert {span.resource.attributes["dl.rank"] for span in exporter.get_finished_spans()} == {3}


def test_a_provider_is_watched_once_however_often_it_is_connected(exporter):
    provider = subclassed(Unhashable)(exporter)
    for _ in range(3):
        recorder = Recorder()
        record(recorder, traces=provider)
        recorder.reset_after_fork()
    assert (
        sum(isinstance(one, providers._WatchingProcessor) for one in provider._active_span_processor._span_processors)
        == 1
    )


def test_a_signal_whose_provider_cannot_be_used_costs_that_signal_alone(recorder, exporter, caplog):
    reader = InMemoryMetricReader()

    class Meters(MeterProvider):
        get_meter = refuse

    record(recorder, metrics=Meters([reader], shutdown_on_exit=False), traces=wrapped(ProxyProvider)(exporter))
    assert len(exporter.get_finished_spans()) == 2
    (message,) = [log.getMessage() for log in caplog.records if log.levelno >= logging.WARNING]
    assert message == "No metrics are recorded: OpenTelemetry could not be set up for them. not with me"


@pytest.mark.parametrize("batch", [True, False])
def test_an_exporter_that_takes_no_attributes_exports(batch, recorder, caplog):
    got = []

    class Slots(SpanExporter):
        __slots__ = ()

        def __setattr__(self, name, value):
            raise TypeError(name)

        def export(self, spans):
            got.extend(span.name for span in spans)
            logging.getLogger(__name__).warning("told each time")
            return SpanExportResult.FAILURE

    provider = TracerProvider(shutdown_on_exit=False)
    for _ in range(2):
        provider.add_span_processor((BatchSpanProcessor if batch else SimpleSpanProcessor)(Slots()))
    record(recorder, traces=provider)
    provider.force_flush()
    assert got.count("megatron.train_step") == 2
    assert caplog.messages.count("told each time") == (2 if batch else 4)  # not filtered: it isn't watched


def test_a_metric_exporter_that_takes_no_attributes_exports(recorder):
    got = []

    class Slots(MetricExporter):
        def __setattr__(self, name, value):
            if "_preferred_aggregation" in vars(self):
                raise AttributeError(name)
            super().__setattr__(name, value)

        def export(self, data, **kwargs):
            got.append(data)

        def force_flush(self, timeout_millis=0):
            return True

        def shutdown(self, **kwargs):
            pass

    provider = MeterProvider([PeriodicExportingMetricReader(Slots())], shutdown_on_exit=False)
    record(recorder, metrics=provider)
    recorder.meter.create_counter("steps").add(1)
    provider.force_flush()
    assert got
    provider.shutdown()


# ------------------------------------------------------------------------------------------- nothing behind them


class Disabled(TracerProvider):
    """What the SDK's own gives with OTEL_SDK_DISABLED."""

    def get_tracer(self, *args, **kwargs):
        return trace.NoOpTracer()


NOWHERE = {
    "no span processor": ({"traces": TracerProvider}, "has no span processor"),
    "no reader": ({"metrics": MeterProvider}, "has no metric reader"),
    "no log record processor": ({"logs": LoggerProvider}, "has no log record processor"),
    "no-op traces": ({"traces": trace.NoOpTracerProvider}, "is a no-op"),
    "no-op metrics": ({"metrics": metrics.NoOpMeterProvider}, "is a no-op"),
    "no-op logs": ({"logs": _logs.NoOpLoggerProvider}, "is a no-op"),
    "disabled": ({"traces": Disabled}, "is a no-op"),
    "wrapped": ({"traces": lambda: ProxyProvider(TracerProvider())}, "has no span processor"),
}


def warnings_of(caplog):
    return [log.getMessage() for log in caplog.records if log.levelno >= logging.WARNING]


@pytest.mark.parametrize(("kinds", "why"), NOWHERE.values(), ids=NOWHERE)
def test_a_provider_with_nothing_behind_it_is_named_once(kinds, why, caplog):
    for _ in range(2):
        recorder = Recorder()
        record(recorder, **{name: kind() for name, kind in kinds.items()})
        recorder.reset_after_fork()
    (message,) = warnings_of(caplog)
    assert why in message
    assert message.endswith(": this package records, and nothing will leave.")
    assert next(iter(kinds)) in message


def test_it_is_named_during_a_run_that_goes_on_not_only_at_its_end(recorder, caplog, monkeypatch):
    monkeypatch.setattr(providers, "_PROCESSORS_WITHIN_S", 0.0)
    recorder.connect_by(lambda: providers.connect({"traces": TracerProvider()}, None, {}))
    recorder.end(recorder.begin("megatron.train_step", LIVE))
    recorder.drain()
    assert len(warnings_of(caplog)) == 1


def test_a_processor_may_be_added_later(recorder, exporter, caplog):
    provider = TracerProvider()
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    recorder.end(recorder.begin("megatron.train_step", LIVE))
    recorder.drain()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder.end(recorder.begin("megatron.train_step", LIVE))
    recorder.drain(final=True)
    assert len(exporter.get_finished_spans()) == 1
    assert not warnings_of(caplog)


class Opaque(trace.TracerProvider):
    def get_tracer(self, *args, **kwargs):
        return TracerProvider().get_tracer(*args)


@pytest.mark.parametrize(
    ("kind", "exporter"), [(Opaque, "otlp"), (TracerProvider, "none"), (TracerProvider, "a, none")]
)
def test_nothing_is_said_where_it_is_not_known_or_was_asked_for(kind, exporter, recorder, caplog, monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", exporter)
    record(recorder, traces=kind())
    assert not warnings_of(caplog)


# ------------------------------------------------------------------------------------------- random numbers


def test_an_exporter_that_is_loaded_later_draws_from_the_private_generator(recorder, exporter, provider):
    record(recorder, traces=provider)
    module = types.ModuleType("opentelemetry.exporter.late.http")
    exec("import random as dice; from random import uniform, random; from random import Random", vars(module))
    sys.modules[module.__name__] = module
    try:
        recorder.drain()
        before = random.getstate()
        assert 0 <= module.random() < 1
        assert 1 <= module.uniform(1, 2) <= 2
        assert 1 <= module.dice.uniform(1, 2) <= 2
        assert module.dice.choice([7]) == 7
        assert random.getstate() == before
        assert module.dice.SystemRandom is random.SystemRandom  # all of the module is there
        assert module.Random is random.Random
    finally:
        del sys.modules[module.__name__]


# ------------------------------------------------------------------------------------------- log records


class Exporting:
    """An exporter of log records that logs, under this name."""

    def __init__(self, name):
        self.got = []
        self.logger = logging.getLogger(name)
        self.logger.setLevel(logging.INFO)

    def export(self, batch):
        self.got += [str(record.log_record.body) for record in batch]
        self.logger.warning("exported")

    def force_flush(self, timeout_millis=0):
        return True

    def shutdown(self):
        pass


class Logging(SpanProcessor):
    def on_end(self, span):
        logging.getLogger("mycompany.processor").warning("a span ended")


@pytest.fixture
def logged(recorder, monkeypatch):
    """Has `recorder` export log records, as the seam in Python's logging does."""
    from megatron_autoinstrument.targets import logging as target

    hook = target._call_handlers(logging.Logger.callHandlers, recorder)
    call_handlers = logging.Logger.callHandlers

    def wrapper(*args):
        hook.begin(args, {})
        return call_handlers(*args)

    monkeypatch.setattr(logging.Logger, "callHandlers", wrapper)
    return recorder


@pytest.mark.parametrize("name", ["mycompany.exporter", "root", "megatron.core.x", __name__])
@pytest.mark.parametrize("processor", ["simple", "batch"])
def test_what_an_exporter_logs_under_any_name_is_not_exported(name, processor, logged):
    from opentelemetry.sdk._logs.export import BatchLogRecordProcessor

    exporter = Exporting(name)
    provider = LoggerProvider(shutdown_on_exit=False)
    kind = SimpleLogRecordProcessor if processor == "simple" else BatchLogRecordProcessor
    provider.add_log_record_processor(kind(exporter))
    record(logged, logs=provider)
    for number in range(3):
        logging.getLogger(name).warning("theirs %d", number)
        provider.force_flush()
    provider.force_flush()
    assert exporter.got == ["theirs 0", "theirs 1", "theirs 2"]


def test_what_this_packages_threads_log_is_not_exported(logged, provider):
    """They hand spans on to processors of anybody's."""
    exporter, logs = Exporting("mycompany"), LoggerProvider(shutdown_on_exit=False)
    logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    provider.add_span_processor(Logging())
    logged.connect_by(lambda: providers.connect({"traces": provider, "logs": logs}, None, {}))
    logged.end(logged.begin("megatron.microbatch.forward", FREQUENT))
    assert logged.flush()
    assert exporter.got == []
    provider.get_tracer("theirs").start_span("theirs").end()  # on a thread of theirs
    assert exporter.got == ["a span ended"]


def test_a_processor_that_logs_does_not_log_for_ever(logged):
    got = []

    class Own:
        def on_emit(self, record):
            got.append(str(record.log_record.body))
            logging.getLogger("mycompany.processor").warning("got one")

        emit = on_emit  # before SDK 1.38

        def shutdown(self):
            pass

        def force_flush(self, timeout_millis=0):
            return True

    provider = LoggerProvider(shutdown_on_exit=False)
    provider.add_log_record_processor(Own())
    record(logged, logs=provider)
    logging.getLogger("theirs").warning("theirs")
    assert got == ["theirs"]


def test_a_record_that_cannot_be_formatted_costs_no_other(logged, caplog, monkeypatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    exporter, logs = Exporting("mycompany"), LoggerProvider(shutdown_on_exit=False)
    logs.add_log_record_processor(SimpleLogRecordProcessor(exporter))
    record(logged, logs=logs)
    logger = logging.getLogger("theirs")
    logger.propagate = False
    try:
        for _ in range(2):
            logger.warning("%d", "not a number")
        logger.warning("theirs")
    finally:
        logger.propagate = True
    assert exporter.got == ["theirs"]
    (message,) = [text for text in caplog.messages if text.startswith("A log record")]
    assert message == "A log record could not be exported (TypeError). (Told once.)"


HANDLER = """
import logging
class LoggingHandler(logging.Handler):
    def __init__(self, level=0, logger_provider=None, log_code_attributes=False):
        super().__init__(level)
        self.provider, self.code = logger_provider, log_code_attributes
"""


def test_the_handler_of_the_instrumentation_of_logging_is_used_where_it_is_installed(fake_module):
    module = fake_module("opentelemetry.instrumentation.logging.handler", HANDLER)
    fake_module("opentelemetry.instrumentation.logging")
    provider = LoggerProvider(shutdown_on_exit=False)
    handler = providers.connect({"logs": provider}, None, {}).log_handler
    assert type(handler) is module.LoggingHandler
    assert handler.provider is provider
    assert handler.code


def test_without_any_handler_logs_are_not_recorded_and_spans_are(recorder, provider, exporter, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.instrumentation.logging.handler", None)
    monkeypatch.delattr("opentelemetry.sdk._logs.LoggingHandler")
    record(recorder, traces=provider, logs=LoggerProvider(shutdown_on_exit=False))
    assert len(exporter.get_finished_spans()) == 2
    (message,) = warnings_of(caplog)
    assert message.startswith("No logs are recorded")
    assert "opentelemetry-instrumentation-logging is not installed" in message


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("theirs", [True, False])
def test_records_are_not_exported_twice_where_opentelemetrys_handler_is_at_work(theirs, monkeypatch):
    class LoggingHandler(logging.Handler):
        """Somebody's, which has nothing to do with OpenTelemetry."""

    class Sub(providers._handler_class().func):
        """The application's own kind of it."""

    provider = LoggerProvider(shutdown_on_exit=False)
    handler = Sub(logger_provider=provider) if theirs else LoggingHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    assert (providers.connect({"logs": provider}, None, {}).log_handler is None) == theirs


class Failing(SpanProcessor):
    """It raises once, where it is told to."""

    def __init__(self, where):
        self.where = where

    def _fail(self, where, span):
        if self.where == where and span.name == "megatron.train_step":
            self.where = None
            raise ConnectionError("the network")

    def on_start(self, span, parent_context=None):
        self._fail("on_start", span)

    def on_end(self, span):
        self._fail("on_end", span)


@pytest.mark.parametrize("where", ["on_start", "on_end"])
@pytest.mark.parametrize("hold", [True, False])
def test_a_processor_that_fails_once_costs_one_span_and_no_more(recorder, provider, exporter, caplog, where, hold):
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    processors = provider._active_span_processor
    processors._span_processors = (Failing(where), *processors._span_processors)
    for _ in range(3):
        step = recorder.begin("megatron.train_step", LIVE)
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
        recorder.end(step, hold=hold)
        recorder.end_held({"megatron.loss": 1.5})
    recorder.drain()
    names = Counter(span.name for span in exporter.get_finished_spans())
    assert names == {"megatron.train_step": 2, "megatron.microbatch.forward": 3}
    assert recorder.dropped == 1
    assert caplog.text.count("A span was lost, since a sampler or processor of spans raised ConnectionError") == 1
    assert recorder.current is None
    assert not trace.get_current_span().get_span_context().is_valid


def test_what_a_processor_raises_that_is_no_ordinary_exception_ends_no_thread(recorder, provider, exporter):
    class Cancelling(SpanProcessor):
        def force_flush(self, timeout_millis=30_000):
            raise asyncio.CancelledError

    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    provider.add_span_processor(Cancelling())
    assert not recorder.flush()
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.flush()
    assert len(exporter.get_finished_spans()) == 2


def test_a_method_that_is_replaced_on_one_processor_sees_every_span_start(provider, exporter, recorder):
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    (processor,) = provider._active_span_processor._span_processors
    started = []
    processor.on_start = lambda span, parent_context=None: started.append(span.name)
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.end(step)
    recorder.drain()
    assert sorted(started) == ["megatron.microbatch.forward", "megatron.train_step"]


def test_what_cannot_be_looked_at_costs_nothing_but_its_own(provider, exporter):
    class Delegating(SpanProcessor):
        __module__ = "opentelemetry.sdk.somebodys"

        def __getattr__(self, name):
            raise KeyError(name)

    class Refusing(MeterProvider):
        def get_meter(self, *args, **kwargs):
            meter = super().get_meter(*args, **kwargs)
            meter.create_counter = None
            return meter

    provider.add_span_processor(Delegating())
    recorder = Recorder()
    meters = Refusing(shutdown_on_exit=False)
    recorder.connect_by(lambda: providers.connect({"traces": provider, "metrics": meters}, None, {}))
    recorder.end(recorder.begin("megatron.train_step", LIVE))
    recorder.dropped = 1
    recorder.flush()
    recorder.reset_after_fork()
    assert len(exporter.get_finished_spans()) == 1
