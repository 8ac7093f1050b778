"""Where OpenTelemetry's batch processors and OTLP exporters are all that there is, records go through them in place of
spans: what arrives is the same, whatever happens on the way."""

import functools
import threading

import pytest
import wrapt
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from megatron_autoinstrument.export import direct, encode, ids, providers, sdk_internals
from megatron_autoinstrument.recording import journal
from megatron_autoinstrument.recording import recorder as recording
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, SILENT
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.traces import Traces

TRACE = 77
INTERNAL, ERROR = 1, 2


class Sent:
    """In the place of gRPC's client."""

    def __init__(self):
        self.requests = []

    def Export(self, request, **more):
        # As gRPC does.
        self.requests.append(trace_service_pb2.ExportTraceServiceRequest.FromString(request.SerializeToString()))
        return trace_service_pb2.ExportTraceServiceResponse()

    @property
    def spans(self):
        return {
            span.name: span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        }


def exporting_to(sent):
    exporter = trace_exporter.OTLPSpanExporter(endpoint="127.0.0.1:1", insecure=True)
    exporter._client = sent
    return exporter


@pytest.fixture(autouse=True)
def _nothing_given_up(monkeypatch):
    monkeypatch.setattr(direct, "_given_up", False)
    monkeypatch.setattr(encode, "_seen", set())
    monkeypatch.setattr(encode, "_encoding", set())
    monkeypatch.setattr(encode, "_encoders", {})
    monkeypatch.setattr(trace_exporter, "encode_spans", encode_spans)


@pytest.fixture
def sent():
    return Sent()


@pytest.fixture
def provider(sent):
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporting_to(sent), schedule_delay_millis=3_600_000))
    yield provider
    provider.shutdown()


@pytest.fixture
def taken(monkeypatch):
    """The names of the records that an exporter was given in place of spans."""
    names, encode_record = [], encode.encode_record

    def spy(record):
        names.append(record.name)
        return encode_record(record)

    monkeypatch.setattr(encode, "encode_record", spy)
    return names


def connect(recorder, provider):
    recorder.connect_by(
        lambda: providers.connect({"traces": provider}, None, {}), lambda connection, run: Traces("key", 0, True, 5)
    )


def connected(provider):
    recorder = Recorder()
    connect(recorder, provider)
    return recorder


def record(provider, after=lambda name: None):
    """Records a step with each kind of record in it."""
    recorder = connected(provider)
    step = recorder.begin("megatron.train_step", LIVE, {"megatron.iteration": 1}, ((TRACE, 0, "step"), 0), TRACE)
    after("step")
    passed = recorder.begin("megatron.forward_backward", LIVE, {"megatron.num_microbatches": 2, "float": 0.5})
    one = recorder.begin("one", FREQUENT, {"megatron.microbatch_id": 0, "bool": True}, ((TRACE, 0, "forward"), 0))
    off = recorder.begin("off", SILENT)
    layer = recorder.begin("layer", FREQUENT, {"nan": float("nan")})
    recorder.link(layer, ((TRACE, 1, "forward"), 3))
    recorder.end(layer)
    recorder.end(off)
    after("layer")
    recorder.end(recorder.begin("with a list", FREQUENT, {"list": [1, 2]}))
    recorder.end(one, attributes={"late": "é"})
    recorder.end(recorder.begin("that failed", FREQUENT), ValueError("theirs"))
    both = recorder.begin_together(["sent", "received"], {"both": True})
    recorder.end_together(both, None)
    background = recorder.begin_background("megatron.save_checkpoint", None, {}, passed)
    thread = threading.Thread(target=lambda: recorder.end(recorder.begin("elsewhere", FREQUENT)))
    thread.start()
    thread.join()
    touched = recorder.begin("touched", LIVE)
    trace.get_current_span().set_attribute("theirs", 1)
    recorder.end(touched)
    recorder.end(passed)
    recorder.end_background(background)
    recorder.end(step)
    recorder.flush()
    recorder.reset_after_fork()


NAMES = {"megatron.train_step", "megatron.forward_backward", "one", "layer", "with a list", "that failed", "sent"}
NAMES |= {"received", "megatron.save_checkpoint", "elsewhere", "touched"}


def described(found):
    """Everything of the spans but random ids and times."""
    names = {span.span_id: name for name, span in found.items()}
    return {
        name: (
            span.trace_id if name != "megatron.save_checkpoint" else None,
            names.get(span.parent_span_id, span.parent_span_id),
            span.span_id if name in ("one", "megatron.train_step") else None,
            0 < span.start_time_unix_nano <= span.end_time_unix_nano,
            span.kind,
            span.flags,
            sorted((pair.key, pair.value.SerializeToString()) for pair in span.attributes),
            [(link.trace_id, names.get(link.span_id, link.span_id), link.flags) for link in span.links],
            [event.name for event in span.events],
            span.status.code,
            span.trace_state,
        )
        for name, span in found.items()
    }


def test_what_arrives_of_records_is_what_arrives_of_spans(provider, sent, taken, monkeypatch):
    record(provider)
    assert set(taken) == NAMES - {"with a list", "that failed", "touched", "megatron.save_checkpoint"}
    found = described(sent.spans)
    assert found.keys() == NAMES
    layer, one = found["layer"], sent.spans["one"]
    assert layer[1] == "one"
    assert [(pair.key, pair.value.bool_value) for pair in sent.spans["layer"].attributes] == [("nan.finite", False)]
    assert one.kind == INTERNAL
    assert sent.spans["that failed"].status.code == ERROR
    for without in ("records", "direct"):
        sent.requests.clear()
        taken.clear()
        if without == "records":
            monkeypatch.setattr(encode, "encodes_for", lambda exporter: False)
        else:
            monkeypatch.setattr(direct.Direct, "look", lambda self: None)
        record(provider)
        assert taken == []
        assert described(sent.spans) == found


def plainly(original):
    """A function of somebody's in the place of `original`, that looks at spans."""

    def look(*arguments):
        for span in arguments[-1] if isinstance(arguments[-1], (list, tuple)) else arguments[-1:]:
            assert span.status
            assert span.resource
        return original(*arguments)

    return look


def with_its_name(original):
    return functools.wraps(original)(plainly(original))


def by_wrapt(original):
    return wrapt.FunctionWrapper(
        original, lambda wrapped, instance, arguments, options: plainly(wrapped)(*arguments, **options)
    )


def theirs(provider, monkeypatch):
    """What somebody may add to a provider, or change of it, that wants spans to see."""
    (processor,) = (one for one in provider._active_span_processor._span_processors if type(one) is BatchSpanProcessor)
    exporter, inner = sdk_internals.exporter_of(processor), sdk_internals.inner_of(processor)

    class Subclass(trace_exporter.OTLPSpanExporter):
        pass

    def replaced(holder, name, wrap):
        return lambda: monkeypatch.setattr(holder, name, wrap(getattr(holder, name)))

    places = {
        "a processor's on_end": (processor, "on_end"),
        "every processor's on_end": (BatchSpanProcessor, "on_end"),
        "an exporter's export": (exporter, "export"),
        "every exporter's export": (trace_exporter.OTLPSpanExporter, "export"),
        "an exporter's translation": (exporter, "_translate_data"),
        "the encoder": (trace_exporter, "encode_spans"),
    }
    if inner is not processor:
        places["a queue's emit"] = (inner, "emit")
    return {
        "another exporter": lambda: provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter())),
        "a batch of another": lambda: provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter())),
        "a subclass": lambda: provider.add_span_processor(BatchSpanProcessor(Subclass(insecure=True))),
    } | {
        f"{what} {how.__name__}": replaced(*place, how)
        for what, place in places.items()
        for how in (plainly, with_its_name, by_wrapt)
    }


THEIRS = ["another exporter", "a batch of another", "a subclass"] + [
    f"{what} {how}"
    for what in (
        *("a processor's on_end", "every processor's on_end", "a queue's emit", "an exporter's export"),
        *("every exporter's export", "an exporter's translation", "the encoder"),
    )
    for how in ("plainly", "with_its_name", "by_wrapt")
]


@pytest.mark.parametrize("when", ["before", "in mid-run"])
@pytest.mark.parametrize("what", THEIRS)
def test_whoever_looks_at_spans_gets_spans(what, when, provider, sent, taken, monkeypatch):
    if when == "in mid-run":
        record(provider)
        assert taken
        taken.clear()
        sent.requests.clear()
    change = theirs(provider, monkeypatch).get(what)
    if change is None:
        pytest.skip("not in this SDK")
    change()
    record(provider)
    assert taken == []
    assert sent.spans.keys() == NAMES


def test_what_can_not_be_encoded_goes_as_spans_and_is_named_once(provider, sent, monkeypatch, caplog):
    monkeypatch.setattr("megatron_autoinstrument.megatron.patching.reraise_internal_errors", False)

    def fail(record):
        raise AttributeError("changed")

    monkeypatch.setattr(encode, "encode_record", fail)
    record(provider)
    assert sent.spans.keys() == NAMES
    sent.requests.clear()
    record(provider)
    assert sent.spans.keys() == NAMES
    assert caplog.text.count("Spans are encoded by opentelemetry.exporter.otlp.proto.grpc") == 1


def test_what_is_inside_a_call_that_left_as_a_record_stays_inside_it(provider, sent, exporter):
    """Also where somebody comes to look at spans meanwhile."""
    recorder = connected(provider)
    step = recorder.begin("megatron.train_step", LIVE, {}, ((TRACE, 0, "step"), 0), TRACE)
    around = recorder.begin("around", FREQUENT)
    early = recorder.begin("early", FREQUENT)
    recorder.end(early)
    recorder.drain()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    recorder.end(recorder.begin("late", FREQUENT))
    recorder.end(around)
    recorder.end(step)
    recorder.flush()
    recorder.reset_after_fork()
    left = sent.spans
    assert left["early"].parent_span_id == left["late"].parent_span_id == left["around"].span_id
    assert {span.name for span in exporter.get_finished_spans()} == {"late", "around", "megatron.train_step"}


def test_a_trace_with_a_state_keeps_it(provider, sent, taken):
    state = TraceState([("a", "b")])
    parent = SpanContext(TRACE, 5, True, TraceFlags(1), state)
    with trace.use_span(trace.NonRecordingSpan(parent)):
        recorder = connected(provider)
        step = recorder.begin("megatron.train_step", LIVE)
        recorder.end(recorder.begin("inside", FREQUENT))
        recorder.end(step)
        recorder.flush()
        recorder.reset_after_fork()
    assert taken == []
    assert [span.trace_state for span in sent.spans.values()] == ["a=b"] * 2
    assert sent.spans["inside"].parent_span_id == sent.spans["megatron.train_step"].span_id


def test_records_are_counted_as_spans_are(provider, sent, caplog):
    recorder = connected(provider)
    recorder.begin("megatron.train_step", LIVE, {}, ((TRACE, 0, "step"), 0), TRACE)
    for _ in range(10):
        recorder.end(recorder.begin("inside", FREQUENT))
    recorder.drain()
    assert recorder._connection.lost(final=True) == 10
    assert recorder._connection.lost(final=False) == 0
    recorder.flush()
    assert recorder._connection.lost(final=True) == 0
    recorder.end(recorder.begin("late", FREQUENT))
    provider.shutdown()
    assert "late" in sent.spans
    recorder.end(recorder.begin("too late", FREQUENT))
    recorder.flush()
    recorder.reset_after_fork()
    assert "1 spans were dropped" in caplog.text


def test_records_of_an_earlier_connection_are_counted_by_the_one_that_hands_them_on(provider, sent):
    recorder = connected(provider)
    step = recorder.begin("megatron.train_step", LIVE, {}, ((TRACE, 0, "step"), 0), TRACE)
    connect(recorder, provider)
    recorder.end(recorder.begin("inside", FREQUENT))
    recorder.end(step)
    recorder.flush()
    ended = recorder._connection._ended.total
    recorder.reset_after_fork()
    assert ended == len(sent.spans) == 2


def test_what_is_inside_a_span_that_was_lost_is_inside_of_what_is_around(provider, sent, monkeypatch):
    recorder = connected(provider)
    step = recorder.begin("megatron.train_step", LIVE, {}, ((TRACE, 0, "step"), 0), TRACE)
    lost = recorder.begin("lost", FREQUENT)
    inside = recorder.begin("inside", FREQUENT)
    hand_on = direct.Direct.hand_on

    def fail(self, record):
        if record is lost:
            raise RuntimeError
        return hand_on(self, record)

    monkeypatch.setattr(direct.Direct, "hand_on", fail)
    monkeypatch.setattr(direct.Direct, "hand_on_usual", lambda self, waiting, most: (0, None))
    for one in (inside, lost, step):
        recorder.end(one)
    recorder.flush()
    recorder.reset_after_fork()
    assert sent.spans["inside"].parent_span_id == sent.spans["megatron.train_step"].span_id


@pytest.mark.parametrize("ids_of", ["this package", "somebody"])
def test_the_journal_has_the_ids_that_leave_or_none(ids_of, sent):
    class Counting(ids.RandomIdGenerator):
        """Somebody's own."""

    provider = TracerProvider(shutdown_on_exit=False, id_generator=Counting() if ids_of == "somebody" else None)
    provider.add_span_processor(BatchSpanProcessor(exporting_to(sent), schedule_delay_millis=3_600_000))
    recorder = connected(provider)
    run = recorder.begin("megatron.train", LIVE)
    step = recorder.begin("megatron.train_step", SILENT, {}, ((TRACE, 0, "step"), 0), TRACE)
    passed = recorder.begin("megatron.forward_backward", LIVE)
    one = recorder.begin("one", FREQUENT)
    for opened in (one, passed, step, run):
        recorder.end(opened)
    _, kinds, slots = journal.read(bytes(recorder.journal.memory))
    recorder.flush()
    recorder.reset_after_fork()
    provider.shutdown()
    written = {kinds[slot.kind].name: slot for slot in slots}
    assert written.keys() == {"megatron.train", "megatron.forward_backward", "one"}
    for name, slot in written.items():
        assert slot.span_id in (0, int.from_bytes(sent.spans[name].span_id, "big"))
        assert slot.trace_id in (bytes(16), sent.spans[name].trace_id)
        assert slot.parent_id in (0, int.from_bytes(sent.spans[name].parent_span_id, "big"))
        assert slot.span_id or (ids_of == "somebody" and name == "one")


def test_without_a_journal_everything_else_is_recorded(provider, sent, monkeypatch):
    def fail():
        raise RuntimeError

    monkeypatch.setattr(recording, "create_journal", fail)
    record(provider)
    assert sent.spans.keys() == NAMES
