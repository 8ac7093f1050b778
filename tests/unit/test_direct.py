"""Spans made without a tracer are those that it would have made, and whoever looks at each span still does."""

import json

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ConcurrentMultiSpanProcessor, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    DEFAULT_OFF,
    DEFAULT_ON,
    Decision,
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    TraceIdRatioBased,
)

from megatron_autoinstrument.export import direct, providers
from megatron_autoinstrument.recording.record import FREQUENT, LIVE
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.traces import Traces

TRACE = 77


@pytest.fixture(autouse=True)
def _not_given_up(monkeypatch):
    monkeypatch.setattr(direct, "_given_up", False)


@pytest.fixture
def made_directly(monkeypatch):
    """The names of the spans that were made without the tracer."""
    names = []

    hand_on = direct.Direct.hand_on

    def spy(self, record):
        made = hand_on(self, record)
        if made:
            names.append(record.name)
        return made

    monkeypatch.setattr(direct.Direct, "hand_on", spy)
    return names


def recorded(provider, exporter, link=None):
    """Records a step of each kind of record, and returns its spans."""
    recorder = Recorder()
    recorder.connect_by(
        lambda: providers.connect({"traces": provider}, None, {}), lambda connection, run: Traces("key", 0, True, 5)
    )
    step = recorder.begin("megatron.train_step", LIVE, {"megatron.iteration": 1}, ((TRACE, 0, "step"), 0), TRACE)
    passed = recorder.begin("megatron.forward_backward", LIVE, {"megatron.num_microbatches": 2})
    microbatch = recorder.begin(
        "megatron.microbatch.forward", FREQUENT, {"megatron.microbatch_id": 0}, ((TRACE, 0, "forward"), 0)
    )
    layer = recorder.begin("megatron.layer.forward", FREQUENT)
    layer.link = ((TRACE, 1, "forward"), 0)
    recorder.end(layer)
    recorder.end(microbatch, attributes={"late": True})
    recorder.end(passed, ValueError("theirs") if link else None)
    recorder.end(step)
    recorder.drain()
    recorder.reset_after_fork()
    return {span.name: span for span in exporter.get_finished_spans()}


def described(spans):
    """Everything of the spans but random ids and times."""
    names = {span.context.span_id: name for name, span in spans.items()}
    return {
        name: (
            span.context.trace_id,
            span.context.trace_flags,
            span.context.trace_state,
            span.context.is_remote,
            span.context.span_id if name in ("megatron.train_step", "megatron.microbatch.forward") else None,
            names[span.parent.span_id] if span.parent else None,
            span.start_time <= span.end_time,
            dict(span.attributes),
            [(link.context, dict(link.attributes)) for link in span.links],
            [json.loads(span.to_json())[part] for part in ("attributes", "events", "links")],  # as a console shows them
            span.events,
            span.kind,
            span.status.status_code,
            span.resource,
            span.instrumentation_scope,
            (span.dropped_attributes, span.dropped_events, span.dropped_links),
        )
        for name, span in spans.items()
    }


def test_what_is_made_directly_is_what_the_tracer_makes(provider, exporter, made_directly, monkeypatch):
    spans = described(recorded(provider, exporter))
    assert sorted(made_directly) == [
        *("megatron.forward_backward", "megatron.layer.forward", "megatron.microbatch.forward", "megatron.train_step")
    ]
    exporter.clear()
    made_directly.clear()
    monkeypatch.setattr(direct.Direct, "look", lambda self: None)
    assert described(recorded(provider, exporter)) == spans
    assert made_directly == []


class Everything(Sampler):
    """Somebody's own."""

    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None):
        return SamplingResult(Decision.RECORD_AND_SAMPLE, {**(attributes or {}), "sampled": name})

    def get_description(self):
        return "everything"


class Bare:
    """Somebody's own, that is no subclass and has no `__dict__`."""

    __slots__ = ()
    should_sample, get_description = Everything.should_sample, Everything.get_description


class Own(SpanProcessor):
    """Somebody's own."""

    def __init__(self):
        self.started = []

    def on_start(self, span, parent_context=None):
        self.started.append(span.name)


class Counting(IdGenerator):
    """Somebody's own."""

    number = 0

    def generate_span_id(self):
        self.number += 1
        return self.number

    generate_trace_id = generate_span_id


@pytest.mark.parametrize(
    "sampler",
    [ALWAYS_ON, DEFAULT_ON, TraceIdRatioBased(0.999), ParentBasedTraceIdRatio(0.999)],
    ids=lambda sampler: sampler.get_description()[:40],
)
def test_the_sdks_own_samplers_need_not_be_asked_for_each_span(sampler, exporter, made_directly):
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    assert len(recorded(provider, exporter)) == 4
    assert len(made_directly) == 4


@pytest.mark.parametrize(
    "chosen",
    [
        {"sampler": Everything()},
        {"sampler": Bare()},
        {"sampler": ParentBased(ALWAYS_ON, local_parent_sampled=Everything())},
        {"sampler": ParentBased(ALWAYS_ON, local_parent_sampled=TraceIdRatioBased(1.0))},
        {"span_limits": SpanLimits(max_span_attributes=1)},
        {"span_limits": SpanLimits(max_attribute_length=1)},
        {"id_generator": Counting()},
        {"active_span_processor": ConcurrentMultiSpanProcessor(2)},
    ],
    ids=lambda chosen: "+".join(chosen),
)
def test_someones_own_sampler_limits_or_ids_get_every_span(chosen, exporter, made_directly):
    provider = TracerProvider(shutdown_on_exit=False, **chosen)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = recorded(provider, exporter)
    assert len(spans) == 4
    assert not made_directly
    if isinstance(chosen.get("sampler"), (Everything, Bare)):
        assert [span.attributes["sampled"] for span in spans.values()] == list(spans)
    if "span_limits" in chosen:
        assert all(
            len(span.attributes) <= 1 or max(map(len, map(str, span.attributes.values()))) < 5
            for span in spans.values()
        )


class ByName(Sampler):
    """Somebody's own, that looks at more than the trace."""

    def should_sample(self, parent_context, trace_id, name, kind=None, attributes=None, links=None, trace_state=None):
        return SamplingResult(Decision.DROP if name == "megatron.train_step" else Decision.RECORD_AND_SAMPLE)

    def get_description(self):
        return "by name"


INSIDE = ["megatron.forward_backward", "megatron.layer.forward", "megatron.microbatch.forward"]


@pytest.mark.parametrize(
    ("sampler", "kept"),
    [
        (ParentBased(ALWAYS_ON, local_parent_sampled=ALWAYS_OFF), ["megatron.train_step"]),
        (ParentBased(ALWAYS_ON, local_parent_sampled=ByName()), [*INSIDE, "megatron.train_step"]),
        (ParentBased(ALWAYS_OFF, local_parent_not_sampled=ALWAYS_ON), INSIDE),
        (ParentBased(ALWAYS_OFF, local_parent_sampled=ALWAYS_OFF, local_parent_not_sampled=ALWAYS_ON), INSIDE[:2]),
        (ParentBased(ByName()), []),
        (ByName(), INSIDE),
        (ALWAYS_OFF, []),
        (DEFAULT_OFF, []),
        (ParentBased(Everything()), [*INSIDE, "megatron.train_step"]),
    ],
    ids=lambda value: value.get_description()[:40] if hasattr(value, "get_description") else None,
)
def test_every_sampler_is_obeyed(sampler, kept, exporter):
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    names = ("megatron.train_step", *INSIDE[:1], "megatron.microbatch.forward", "megatron.layer.forward")
    # What the tracer alone makes of the same calls.
    context = otel_context.Context()
    spans = []
    for name in names:
        spans.append(provider.get_tracer("alone").start_span(name, context))
        context = trace.set_span_in_context(spans[-1], context)
    for span in reversed(spans):
        span.end()
    assert sorted(span.name for span in exporter.get_finished_spans()) == kept
    exporter.clear()
    recorder = Recorder()
    recorder.connect_by(
        lambda: providers.connect({"traces": provider}, None, {}), lambda connection, run: Traces("key", 0, True, 5)
    )
    step = recorder.begin(names[0], LIVE, None, ((TRACE, 0, "step"), 0), TRACE)
    inside = [recorder.begin(name, LIVE if name == names[1] else FREQUENT) for name in names[1:]]
    for record in reversed([record for record in inside if record is not None]):
        recorder.end(record)
    recorder.end(step)
    recorder.drain()
    recorder.reset_after_fork()
    assert sorted(span.name for span in exporter.get_finished_spans()) == kept


def test_someones_own_processor_sees_each_span_start_also_one_that_comes_later(provider, exporter, made_directly):
    recorded(provider, exporter)
    assert len(made_directly) == 4
    own = Own()
    provider.add_span_processor(own)
    assert sorted(own.started) == []
    recorded(provider, exporter)
    assert len(made_directly) == 4
    assert len(own.started) == 4


def test_an_sdk_that_counts_spans_itself_counts_all_of_them(exporter, made_directly, monkeypatch):
    monkeypatch.setenv("OTEL_PYTHON_SDK_INTERNAL_METRICS_ENABLED", "true")
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("x")
    if type(getattr(tracer, "_tracer_metrics", None)).__name__ in ("NoneType", "NoOpTracerMetrics"):
        pytest.skip("this SDK doesn't")
    recorded(provider, exporter)
    assert not made_directly


@pytest.mark.parametrize("private", ["_instrumentation_scope", "_span_limits", "span_processor._span_processors"])
def test_an_sdk_without_what_is_read_of_it_gets_every_span(
    private, provider, exporter, made_directly, monkeypatch, caplog
):
    class Blind:
        """What the SDK's object is, without that."""

        def __init__(self, of):
            self.of = of

        def __getattr__(self, name):
            if name in private:
                raise AttributeError(name)
            return getattr(self.of, name)

    look = direct.Direct.look

    def look_blindly(self):
        tracer, self._tracer = self._tracer, Blind(self._tracer)
        monkeypatch.setattr(direct, "Tracer", Blind)
        if "." in private:
            monkeypatch.setattr(direct, "SynchronousMultiSpanProcessor", Blind)
            self._tracer.span_processor = Blind(tracer.span_processor)
        look(self)
        self._tracer = tracer

    monkeypatch.setattr(direct.Direct, "look", look_blindly)
    assert len(recorded(provider, exporter)) == 4
    assert made_directly == []
    (message,) = caplog.messages  # once, however often it is looked at
    assert message.startswith("Spans are made by the SDK's tracer from here on")


class Changed:
    """What a later release may make of a constructor."""

    def __init__(self, **wanted):
        raise TypeError("unexpected keyword argument")


@pytest.mark.parametrize("changed", ["ReadableSpan", "Live", "HashedOnce", "_context", "on_end", "StartedSpan"])
def test_an_sdk_that_has_changed_loses_no_span(changed, provider, exporter, made_directly, monkeypatch, caplog):
    if changed == "on_end":
        takes = SimpleSpanProcessor.on_end

        def on_end(self, span):
            takes(self, span.needs_something_new if isinstance(span._attributes, dict) else span)

        monkeypatch.setattr(SimpleSpanProcessor, "on_end", on_end)
    else:
        monkeypatch.setattr(direct, changed, Changed)
    assert len(recorded(provider, exporter)) == 4
    made_directly.clear()
    exporter.clear()
    assert len(recorded(provider, exporter)) == 4
    assert not made_directly
    (message,) = caplog.messages
    assert "Error: " in message


def test_an_attribute_that_the_sdk_would_change_is_left_to_it(recorder, exporter, made_directly):
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT, {"shape": [1, 2]}))
    recorder.end(step)
    recorder.drain()
    assert exporter.get_finished_spans()[-1].attributes["shape"] == (1, 2)
    assert made_directly == []


def test_an_error_is_told_as_the_tracer_tells_it(recorder, exporter):
    step = recorder.begin("megatron.train_step", LIVE)
    recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT), ValueError("theirs"))
    passed = recorder.begin("megatron.forward_backward", LIVE)
    recorder.end(passed, ValueError("theirs too"))
    recorder.end(step)
    recorder.drain()
    for span in exporter.get_finished_spans():
        if span.name != "megatron.train_step":
            assert span.status.status_code is trace.StatusCode.ERROR
            assert [event.attributes["exception.type"] for event in span.events] == ["ValueError"]


def test_a_resource_that_knows_its_hash_is_the_same_to_an_encoder():
    resource = Resource({"a": 1, "b": "c"}, "https://schema")
    known = direct.HashedOnce(resource)
    assert known == resource
    assert resource == known
    assert hash(known) == hash(resource)
    assert {resource: 1}[known] == 1
    assert known.merge(Resource({"d": 2})).attributes == {"a": 1, "b": "c", "d": 2}
    assert known.schema_url == resource.schema_url


def test_a_resource_that_is_completed_later_is_on_the_spans_that_follow(provider, exporter):
    if not hasattr(provider, "_update_resource"):
        pytest.skip("this SDK's tracers keep theirs")
    recorder = Recorder()
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    step = recorder.begin("megatron.train_step", LIVE)
    provider._update_resource(Resource({"later": True}))
    for _ in range(2):
        recorder.end(recorder.begin("megatron.microbatch.forward", FREQUENT))
        recorder.drain()
    recorder.end(step)
    recorder.reset_after_fork()
    assert all(span.resource.attributes["later"] for span in exporter.get_finished_spans()[:2])
    assert type(exporter.get_finished_spans()[1].resource) is direct.HashedOnce
