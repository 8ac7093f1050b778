"""Where OpenTelemetry's batch processors and OTLP exporters are all that there is, records go through them in place of
spans: what arrives is the same, whatever happens on the way."""

import threading

import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext, TraceFlags, TraceState

from megatron_autoinstrument import direct, encode, sdk
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.spans import FREQUENT, LIVE, SILENT, Recorder
from megatron_autoinstrument.traces import Traces

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
    monkeypatch.setattr(trace_exporter, "encode_spans", trace_exporter.encode_spans)


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
    """The names of the records that batch processors took."""
    names, take = [], BatchSpanProcessor.on_end

    def spy(self, span):
        if type(span) is Record:
            names.append(span.name)
        take(self, span)

    spy.__module__ = take.__module__
    monkeypatch.setattr(BatchSpanProcessor, "on_end", spy)
    return names


def connected(provider):
    recorder = Recorder()
    recorder.connect_by(
        lambda: sdk.connect({"traces": provider}, None, {}), lambda connection, run: Traces("key", 0, True, 5)
    )
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
    recorder.abandon()


NAMES = {"megatron.train_step", "megatron.forward_backward", "one", "layer", "with a list", "that failed", "sent"}
NAMES |= {"received", "megatron.save_checkpoint", "elsewhere", "touched"}


def described(spans):
    """Everything of the spans but random ids and times."""
    names = {span.span_id: name for name, span in spans.items()}
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
        for name, span in spans.items()
    }


def test_what_arrives_of_records_is_what_arrives_of_spans(provider, sent, taken, monkeypatch):
    record(provider)
    assert set(taken) == NAMES - {"with a list", "that failed", "touched", "megatron.save_checkpoint"}
    spans = described(sent.spans)
    assert spans.keys() == NAMES
    layer, one = spans["layer"], sent.spans["one"]
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
        assert described(sent.spans) == spans


def theirs(provider, sent):
    """What somebody may add to a provider, or change of it, that wants spans to see."""
    (processor,) = provider._active_span_processor._span_processors
    exporter = processor.span_exporter if hasattr(processor, "span_exporter") else processor._batch_processor._exporter

    class Subclass(trace_exporter.OTLPSpanExporter):
        pass

    def wrap(name):
        before = getattr(exporter, name)
        setattr(exporter, name, lambda spans: [span.attributes for span in spans] and before(spans))

    def wrap_module():
        before = trace_exporter.encode_spans
        trace_exporter.encode_spans = lambda spans: [span.attributes for span in spans] and before(spans)

    return {
        "another exporter": lambda: provider.add_span_processor(SimpleSpanProcessor(InMemorySpanExporter())),
        "a batch of another": lambda: provider.add_span_processor(BatchSpanProcessor(InMemorySpanExporter())),
        "a subclass": lambda: provider.add_span_processor(BatchSpanProcessor(Subclass(insecure=True))),
        "an export of its own": lambda: wrap("export"),
        "a translation of its own": lambda: wrap("_translate_data"),
        "an encoder of its own": wrap_module,
        "an on_end of its own": lambda: setattr(
            processor, "on_end", lambda span: BatchSpanProcessor.on_end(processor, span)
        ),
    }


THEIRS = ["another exporter", "a batch of another", "a subclass", "an export of its own", "a translation of its own"]
THEIRS += ["an encoder of its own", "an on_end of its own"]


@pytest.mark.parametrize("when", ["before", "in mid-run"])
@pytest.mark.parametrize("what", THEIRS)
def test_whoever_looks_at_spans_gets_spans(what, when, provider, sent, taken):
    change = theirs(provider, sent)[what]
    if when == "before":
        change()
        record(provider)
        assert taken == []
    else:
        record(provider)
        taken.clear()
        sent.requests.clear()
        change()
        record(provider)
        assert taken == []
    assert sent.spans.keys() == NAMES


def test_what_can_not_be_encoded_goes_as_spans_and_is_named_once(provider, sent, monkeypatch, caplog):
    monkeypatch.setattr("megatron_autoinstrument.patching.reraise_internal_errors", False)

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
    recorder.abandon()
    spans = sent.spans
    assert spans["early"].parent_span_id == spans["late"].parent_span_id == spans["around"].span_id
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
        recorder.abandon()
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
    recorder.abandon()
    assert "1 spans were dropped" in caplog.text
