"""A span that is current may be asked for everything that one of the tracer's may be, at any time and by anybody."""

import copy
import signal
import sys
import threading
import time

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megatron_autoinstrument.export import direct, providers
from megatron_autoinstrument.recording import outbox
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.traces import Traces

TRACE = 77


@pytest.fixture
def made_directly(monkeypatch):
    """The names of the live spans that were made without the tracer."""
    names, make = [], direct.Direct.start

    def spy(self, parent, trace_id, what):
        made = make(self, parent, trace_id, what)
        if made is not None:
            names.append(what[0])
        return made

    monkeypatch.setattr(direct.Direct, "start", spy)
    return names


def connect(recorder, provider):
    recorder.connect_by(
        lambda: providers.connect({"traces": provider}, None, {}), lambda connection, run: Traces("key", 0, True, 5)
    )


def connected(provider):
    recorder = Recorder()
    connect(recorder, provider)
    return recorder


def begin_step(recorder):
    return recorder.begin("megatron.train_step", LIVE, {"megatron.iteration": 1}, ((TRACE, 0, "step"), 0), TRACE)


def passes(exporter):
    """What was exported of the passes inside the step."""
    return [span for span in exporter.get_finished_spans() if span.name == "megatron.forward_backward"]


@pytest.fixture
def while_made(monkeypatch):
    """Has something happen while the SDK's span is being made, once."""

    def happen(what):
        construct = direct.StartedSpan.__init__

        def interrupted(self, *args, **kwargs):
            monkeypatch.setattr(direct.StartedSpan, "__init__", construct)
            what()
            construct(self, *args, **kwargs)

        monkeypatch.setattr(direct.StartedSpan, "__init__", interrupted)

    return happen


@pytest.fixture
def fast_switching():
    """Threads take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


SET = {
    "an attribute": lambda span: span.set_attribute("theirs", [1, 2]),
    "attributes": lambda span: span.set_attributes({"a": 1}),
    "an event": lambda span: span.add_event("event", {"a": 1}),
    "a link": lambda span: span.add_link(trace.SpanContext(1, 2, True)),
    "an exception": lambda span: span.record_exception(ValueError("x")),
    "a status": lambda span: span.set_status(trace.StatusCode.ERROR, "theirs"),
    "a name": lambda span: span.update_name("theirs"),
    "nothing, and reads": lambda span: (span.name, span.attributes, span.resource, span.to_json(), repr(span)),
    "nothing, and looks for what there is none of": lambda span: hasattr(span, "no_such_attribute"),
}


@pytest.mark.parametrize("what", SET)
def test_a_live_span_takes_what_the_user_sets_on_it(what, provider, exporter, made_directly, monkeypatch):
    """As one of the tracer's does: before it ends, after it has ended, and after it was handed on."""

    def spans_set(when):
        recorder = connected(provider)
        step = begin_step(recorder)
        passed = recorder.begin("megatron.forward_backward", LIVE, {"megatron.num_microbatches": 2})
        span = trace.get_current_span()
        assert span.is_recording()
        for at in ("before", "after", "handed on"):
            if at == "after":
                recorder.end(passed, attributes={"late": True})
                assert not span.is_recording()
            if at == "handed on":
                recorder.drain()
            if at == when:
                SET[what](span)
        recorder.end(step)
        recorder.drain()
        recorder.reset_after_fork()
        found = {span.name: span for span in exporter.get_finished_spans()}
        exporter.clear()
        return {
            name: (
                dict(span.attributes),
                [(event.name, event.attributes.get("exception.type")) for event in span.events],
                [link.context for link in span.links],
                span.status.status_code,
                span.status.description,
                span.start_time <= span.end_time,
                (span.dropped_attributes, span.dropped_events, span.dropped_links),
            )
            for name, span in found.items()
        }

    found = {when: spans_set(when) for when in ("before", "after", "handed on")}
    assert made_directly[:2] == ["megatron.train_step", "megatron.forward_backward"]
    made_directly.clear()
    monkeypatch.setattr(direct.Direct, "look", lambda self: None)
    assert {when: spans_set(when) for when in found} == found
    assert made_directly == []


def test_a_live_span_of_which_nothing_is_asked_is_never_made(recorder, exporter, made_directly):
    step = recorder.begin("megatron.train_step", LIVE)
    passed = recorder.begin("megatron.forward_backward", LIVE)
    assert made_directly == ["megatron.forward_backward"]
    span = trace.get_current_span()
    assert span.get_span_context().is_valid
    assert span.is_recording()
    recorder.end(passed)
    recorder.end(step)
    recorder.drain()
    assert "state" in vars(span)
    assert "late" not in vars(span)
    (got,) = passes(exporter)
    assert (got.events, got.links, got.end_time) == ((), (), passed.end)


def test_a_live_span_may_be_asked_by_many_threads_at_once(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    for number in range(200):
        passed = recorder.begin("megatron.forward_backward", LIVE)
        span, together = trace.get_current_span(), threading.Barrier(4)

        def ask(key, span=span, together=together):
            together.wait()
            span.set_attribute(key, 1)

        threads = [threading.Thread(target=ask, args=(key,)) for key in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.end(passed)
        recorder.drain()
        (got,) = exporter.get_finished_spans()
        assert set(got.attributes) == set("abcd"), number
        exporter.clear()
    recorder.end(step)


def test_a_live_span_can_be_ended_by_its_user(recorder, exporter, caplog):
    step = recorder.begin("megatron.train_step", LIVE)
    passed = recorder.begin("megatron.forward_backward", LIVE)
    trace.get_current_span().end()
    recorder.end(passed)
    recorder.end(step)
    recorder.drain()
    assert len(passes(exporter)) == 1


def test_a_live_span_whose_provider_gets_another_processor_before_it_is_handed_on_is_seen_by_that(
    recorder, provider, exporter
):
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(recorder.begin("megatron.forward_backward", LIVE, {"a": 1}), attributes={"b": 2})
    own = InMemorySpanExporter()
    provider.add_span_processor(type("Own", (SimpleSpanProcessor,), {})(own))
    recorder.drain()
    for exported in (own, exporter):
        (got,) = exported.get_finished_spans()
        assert dict(got.attributes) == {"a": 1, "b": 2}
        assert got.end_time is not None
    recorder.end(step)


def test_where_too_many_wait_a_live_span_is_not_one_that_is_lost(recorder, exporter, monkeypatch):
    step = recorder.begin("megatron.train_step", LIVE)
    monkeypatch.setattr(outbox, "MAX_WAITING", 0)
    recorder.end(recorder.begin("megatron.forward_backward", LIVE))
    recorder.end(step)
    assert len(exporter.get_finished_spans()) == 2


ASKED = {
    "an attribute and an event": [lambda span: span.set_attribute("a", 1), lambda span: span.add_event("b")],
    "its name and its end": [lambda span: span.name, lambda span: span.end_time],
    "its attributes and a status": [
        lambda span: dict(span.attributes),
        lambda span: span.set_status(trace.StatusCode.OK),
    ],
}


@pytest.mark.parametrize("what", ASKED)
def test_whoever_asks_first_no_thread_sees_half_a_span_and_it_is_exported_once(
    what, recorder, provider, exporter, fast_switching
):
    """Two threads ask, while its call ends and this package's thread hands it on."""
    step, failures, number = recorder.begin("megatron.train_step", LIVE), [], 400
    for _ in range(number):
        passed = recorder.begin("megatron.forward_backward", LIVE)
        span, together = trace.get_current_span(), threading.Barrier(3)

        def ask(question, span=span, together=together):
            together.wait()
            try:
                for _ in range(3):
                    question(span)
            except Exception as error:  # noqa: BLE001
                failures.append(repr(error))

        threads = [threading.Thread(target=ask, args=(question,)) for question in ASKED[what]]
        for thread in threads:
            thread.start()
        together.wait()
        recorder.end(passed)
        recorder.drain()
        for thread in threads:
            thread.join()
    recorder.end(step)
    recorder.drain()
    assert not failures
    ids = [span.context.span_id for span in passes(exporter)]
    assert len(set(ids)) == len(ids) == number
    assert recorder.dropped == 0


def test_a_signal_handler_may_ask_while_the_span_is_being_made(recorder, exporter, while_made):
    step = recorder.begin("megatron.train_step", LIVE)
    passed = recorder.begin("megatron.forward_backward", LIVE)
    span = trace.get_current_span()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: span.set_attribute("handler", 1))
    try:
        while_made(lambda: signal.raise_signal(signal.SIGUSR1))
        span.set_attribute("thread", 1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    recorder.end(passed)
    recorder.end(step)
    recorder.drain()
    (got,) = passes(exporter)
    assert dict(got.attributes) == {"handler": 1, "thread": 1}


def interrupt():
    raise KeyboardInterrupt


def test_an_interrupt_while_the_span_is_being_made_loses_nothing_that_is_set_later(recorder, exporter, while_made):
    step = recorder.begin("megatron.train_step", LIVE)
    passed = recorder.begin("megatron.forward_backward", LIVE)
    span = trace.get_current_span()
    while_made(interrupt)
    with pytest.raises(KeyboardInterrupt):
        span.set_attribute("a", 1)
    span.set_attribute("b", 2)
    recorder.end(passed)
    recorder.end(step)
    recorder.drain()
    (got,) = passes(exporter)
    assert dict(got.attributes) == {"b": 2}
    assert got.start_time == passed.start


class Slow(InMemorySpanExporter):
    """Tells when it is at work, and works until it is told to stop."""

    def __init__(self):
        super().__init__()
        self.at_work, self.go_on = threading.Event(), threading.Event()

    def export(self, batch):
        self.at_work.set()
        assert self.go_on.wait(10)
        return super().export(batch)


def test_while_it_is_being_exported_it_has_ended():
    exporter, provider = Slow(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder = connected(provider)
    step = begin_step(recorder)
    span = trace.get_current_span()
    recorder.end(step)
    draining = threading.Thread(target=recorder.drain)
    draining.start()
    assert exporter.at_work.wait(10)
    assert not span.is_recording()
    span.set_attribute("late", 1)
    span.end()
    exporter.go_on.set()
    draining.join()
    recorder.drain()
    (got,) = exporter.get_finished_spans()
    assert "late" not in got.attributes
    recorder.reset_after_fork()


def test_after_its_end_it_shows_what_was_exported_of_it(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    passed = recorder.begin("megatron.forward_backward", LIVE, {"a": 1})
    span = trace.get_current_span()
    recorder.end(passed, attributes={"b": 2})
    assert dict(span.attributes) == {"a": 1, "b": 2}
    assert span.end_time == passed.end
    recorder.drain()
    assert dict(span.attributes) == {"a": 1, "b": 2}
    recorder.end(step)


def test_what_is_written_into_it_past_its_methods_counts_too(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    passed = recorder.begin("megatron.forward_backward", LIVE)
    span = trace.get_current_span()
    span._name = "mine"
    span.own = 5
    assert (span.name, span.own, copy.copy(span).name) == ("mine", 5, "mine")
    recorder.end(passed)
    recorder.end(step)
    recorder.drain()
    assert "mine" in [span.name for span in exporter.get_finished_spans()]


class Own(SpanProcessor):
    """Somebody's own."""

    def __init__(self):
        self.started, self.ended = [], []

    def on_start(self, span, parent_context=None):
        self.started.append(span.name)

    def on_end(self, span):
        self.ended.append(span.name)


def test_a_processor_that_comes_between_two_spans_sees_the_second_one_start(provider):
    recorder, own = connected(provider), Own()
    recorder.end(begin_step(recorder))
    recorder.drain()
    provider.add_span_processor(own)
    step = begin_step(recorder)
    recorder.end(recorder.begin("megatron.forward_backward", LIVE))
    recorder.end(step)
    recorder.drain()
    assert sorted(own.started) == sorted(own.ended) == ["megatron.forward_backward", "megatron.train_step"]
    recorder.reset_after_fork()


class Failing(SpanProcessor):
    """Somebody's own, without a flush."""

    def force_flush(self, timeout_millis=30_000):
        raise NotImplementedError


def test_a_processor_that_cannot_be_flushed_does_not_keep_the_others_from_their_shutdown(monkeypatch):
    monkeypatch.setattr(outbox, "_FLUSH_EVERY", 2)
    provider, exporter = TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    provider.add_span_processor(Failing())
    recorder = connected(provider)
    step = begin_step(recorder)
    for _ in range(9):
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.end(step)
    provider.shutdown()
    assert len(exporter.get_finished_spans()) == 10
    recorder.reset_after_fork()


@pytest.mark.parametrize("ask", ["force_flush", "shutdown"])
@pytest.mark.parametrize("several", [None, 1, 2], ids=["one after the other", "one thread", "two threads"])
def test_whoever_flushes_or_shuts_down_finds_what_has_ended(ask, several):
    processors = ConcurrentMultiSpanProcessor(several) if several else None
    provider = TracerProvider(shutdown_on_exit=False, active_span_processor=processors)
    exporter = InMemorySpanExporter()
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    recorder = connected(provider)
    step = begin_step(recorder)
    for _ in range(9):
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    recorder.end(step)
    assert getattr(provider, ask)() in (None, True)
    assert len(exporter.get_finished_spans()) == 10
    assert recorder.dropped == 0
    recorder.reset_after_fork()


def test_a_flush_waits_for_what_another_thread_is_handing_on_and_says_so_if_that_takes_too_long(monkeypatch):
    exporter, provider = Slow(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder = connected(provider)
    step = begin_step(recorder)
    for _ in range(3):
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
    draining = threading.Thread(target=recorder.drain)
    draining.start()
    assert exporter.at_work.wait(10)
    with monkeypatch.context() as shorter:
        shorter.setattr(outbox, "_FOR_A_FLUSH_S", 0.01)
        assert provider.force_flush() is False
    threading.Timer(0.1, exporter.go_on.set).start()
    assert provider.force_flush() is True
    assert len(exporter.get_finished_spans()) == 3
    draining.join()
    recorder.end(step)
    recorder.reset_after_fork()


def test_after_the_last_flush_a_shutdown_waits_for_nothing(monkeypatch):
    """Our thread may be stuck in an export, and has had its time."""
    provider = TracerProvider(shutdown_on_exit=False)
    recorder = connected(provider)
    recorder.end(begin_step(recorder))
    recorder.flush(final=True)
    with recorder._draining:
        started = time.monotonic()
        provider.shutdown()
        assert time.monotonic() - started < outbox._FOR_A_FLUSH_S
    recorder.reset_after_fork()


def test_the_last_flush_does_not_wait_for_a_thread_that_never_goes_on(recorder, exporter, monkeypatch):
    """A signal has interrupted it."""
    monkeypatch.setattr(outbox, "_FOR_OTHERS_S", 0.01)
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(recorder.begin("megatron.forward_backward", LIVE))
    recorder.end(step)
    with recorder._draining:
        started = time.monotonic()
        recorder.drain(final=True)
        assert time.monotonic() - started < 5
    assert len(exporter.get_finished_spans()) == 2


def test_a_span_belongs_to_the_provider_that_it_was_started_with():
    """Another one is connected in mid-step."""
    (first, of_first), (second, of_second) = (
        (TracerProvider(shutdown_on_exit=False), InMemorySpanExporter()) for _ in range(2)
    )
    for provider, exporter in ((first, of_first), (second, of_second)):
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=3_600_000))
    recorder = connected(first)
    step = begin_step(recorder)
    connect(recorder, second)
    recorder.end(recorder.begin("megatron.forward_backward", LIVE))
    recorder.end(step)
    first.shutdown()
    second.force_flush()
    assert [span.name for span in of_first.get_finished_spans()] == ["megatron.train_step"]
    assert [span.name for span in of_second.get_finished_spans()] == ["megatron.forward_backward"]
    assert recorder.dropped == 0
    recorder.reset_after_fork()


def test_a_span_whose_provider_was_shut_down_before_it_ended_is_counted():
    """And another one is connected by then."""
    first, second = (TracerProvider(shutdown_on_exit=False) for _ in range(2))
    recorder = connected(first)
    step = begin_step(recorder)
    connection = recorder._connection  # else nothing keeps it
    first.shutdown()
    connect(recorder, second)
    recorder.end(recorder.begin("megatron.forward_backward", LIVE))
    recorder.end(step)
    recorder.drain()
    assert connection.closed
    assert recorder.dropped == 1
    recorder.reset_after_fork()


def test_each_link_has_attributes_to_look_at(provider, exporter):
    recorder = connected(provider)
    with provider.get_tracer("application").start_as_current_span("theirs"):
        run = recorder.begin("megatron.train", LIVE)
        step = begin_step(recorder)
        recorder.end(step)
        recorder.end(run)
    recorder.drain()
    (step,) = [span for span in exporter.get_finished_spans() if span.name == "megatron.train_step"]
    assert [dict(link.attributes.items()) for link in step.links] == [{}]
    recorder.reset_after_fork()
