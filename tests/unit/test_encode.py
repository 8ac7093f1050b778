"""What is encoded here is, message for message, what OpenTelemetry's own encoder makes of the same spans."""

import sys
import types

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags, TraceState

from megatron_autoinstrument.export import encode
from megatron_autoinstrument.megatron import patching

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
RESOURCE = Resource({"service.name": "megatron-lm", "dl.rank": 3}, "https://opentelemetry.io/schemas/1.37.0")
SCOPE = InstrumentationScope("megatron_autoinstrument", "1.0")
TRACE = 0x0102_0304_0506_0708_090A_0B0C_0D0E_0F10
CONTEXT, PARENT = SpanContext(TRACE, 1, False, SAMPLED), SpanContext(TRACE, 2**63 + 7, False, SAMPLED)
REMOTE = SpanContext(2**100, 9, True, SAMPLED)
STATEFUL = SpanContext(TRACE, 3, False, SAMPLED, TraceState([("a", "b")]))
install = encode.replace_encoders
MODULE = "opentelemetry.exporter.otlp.proto.grpc.trace_exporter"


def span(name="megatron.layer.forward", context=CONTEXT, parent=PARENT, resource=RESOURCE, scope=SCOPE, **more):
    times = {"start_time": 1_796_253_467_267_994_601, "end_time": 1_796_253_467_267_994_999}
    return ReadableSpan(name, context, parent, resource, **{**times, "instrumentation_scope": scope, **more})


USUAL = {
    "as most are": {},
    "a root": {"parent": None},
    "of a remote parent": {"parent": REMOTE},
    "with attributes": {"attributes": {"a": True, "b": 1, "c": 1.0, "d": "1", "e": False, "f": 0, "g": -0.0}},
    "with numbers": {"attributes": {str(n): n for n in (127, 128, 16_383, 16_384, 2**31, 2**63 - 1, -1, -(2**63))}},
    "with floats": {"attributes": {str(n): n for n in (1.5, -1e300, float("nan"), float("inf"))}},
    "with a link": {"links": [Link(PARENT)], "attributes": {"a": 1}},
    "with several": {"links": [Link(PARENT), Link(REMOTE)]},
    "with an error": {"status": Status(StatusCode.ERROR)},
    "with a long name": {"name": "é" * 20_000},
    "of about 128 bytes": {"name": "x" * 23},
}
UNUSUAL = {
    "with an event": {"events": [Event("exception", {"a": 1}, 5)]},
    "with a list": {"attributes": {"a": (1, 2)}},
    "with a number beyond 64 bits": {"attributes": {"a": 2**70}},
    "with text that is none": {"attributes": {"a": "\ud800", "b": 1}},
    "with a state": {"context": STATEFUL},
    "with attributes of a link": {"links": [Link(PARENT, {"a": 1})]},
    "with a description": {"status": Status(StatusCode.ERROR, "why")},
    "of another kind": {"kind": SpanKind.CLIENT},
    "with times before 1970": {"start_time": -1},
}


@pytest.fixture
def exporter_module(monkeypatch):
    """What stands for an exporter's module."""
    module = types.ModuleType(MODULE)
    module.encode_spans = encode_spans
    monkeypatch.setitem(sys.modules, MODULE, module)
    monkeypatch.setattr(encode, "_seen", set())
    monkeypatch.setattr(encode, "_encoding", set())
    monkeypatch.setattr(encode, "_encoders", {})
    monkeypatch.setattr(
        encode, "replace_encoders", lambda: None
    )  # the thread of an earlier test's recorder asks for it too
    return module


def encoded(spans):
    """By the exporter's own encoder, or the reason why it can't."""
    try:
        return encode_spans(spans)
    except Exception as error:  # noqa: BLE001
        return type(error)


@pytest.mark.parametrize("name", USUAL | UNUSUAL)
def test_a_request_is_what_the_sdks_encoder_makes(name, exporter_module, monkeypatch):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)
    install()
    assert exporter_module.encode_spans is not encode_spans
    one = span(**(USUAL | UNUSUAL)[name])
    expected = encoded([one])
    for _ in range(2):  # and once more when all of it is known already
        try:
            found = exporter_module.encode_spans([one])
        except Exception as error:  # noqa: BLE001
            found = type(error)
        if "floats" in name:
            assert str(found) == str(expected)  # NaN is no number that equals itself
        else:
            assert found == expected


@pytest.mark.parametrize("name", USUAL)
def test_what_is_usual_is_encoded_here(name):
    assert len(encode.encode(span(**USUAL[name]))) > 60


@pytest.mark.parametrize("name", UNUSUAL)
def test_what_is_unusual_is_not(name):
    with pytest.raises((encode.Unusual, ValueError, encode.error)):
        encode.encode(span(**UNUSUAL[name]))


def test_a_batch_of_many_kinds_loses_and_doubles_nothing(exporter_module):
    other = InstrumentationScope("of.the.user")
    elsewhere = Resource({"service.name": "other"})
    spans = [
        *(span(f"plain {number}") for number in range(600)),
        span("of another scope", scope=other),
        span("of no scope", scope=None),
        *(span(name, **more) for name, more in UNUSUAL.items() if "none" not in name and "beyond" not in name),
        span("of another resource", resource=elsewhere),
        span("plain again"),
    ]
    spans = [one for one in spans if one.name != "with times before 1970"]
    install()
    request = exporter_module.encode_spans(spans)

    def flat(message):
        return sorted(
            (
                resource.resource.SerializeToString(deterministic=True) + resource.schema_url.encode(),
                scope.scope.SerializeToString(deterministic=True),
                one.SerializeToString(deterministic=True),
            )
            for resource in message.resource_spans
            for scope in resource.scope_spans
            for one in scope.spans
        )

    assert flat(request) == flat(encode_spans(spans))
    assert len(flat(request)) == len(spans)


def test_live_spans_of_the_sdk_are_encoded_too_and_what_their_limits_dropped_is_told(exporter_module):
    install()
    for limits in (None, SpanLimits(max_span_attributes=2)):
        exporter = InMemorySpanExporter()
        provider = TracerProvider(span_limits=limits)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        with provider.get_tracer("megatron_autoinstrument").start_as_current_span("megatron.train_step") as live:
            live.set_attributes({"a": 1, "b": "x", "c": (1.5, 2.5) if limits else 1.5})
        (ended,) = exporter.get_finished_spans()
        assert exporter_module.encode_spans([ended]) == encode_spans([ended])
        if limits is None:
            assert encode.encode(ended)


@pytest.mark.parametrize("fault", ["other bytes", "another signature", "nothing"])
def test_a_release_with_an_encoder_of_another_kind_keeps_it_and_is_named_once(
    fault, exporter_module, monkeypatch, caplog
):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)

    def other_bytes(spans):
        request = encode_spans(spans)
        request.resource_spans[0].scope_spans[0].spans[0].flags = 1
        return request

    if fault == "nothing":
        del exporter_module.encode_spans
    else:
        exporter_module.encode_spans = {"other bytes": other_bytes, "another signature": lambda a, b: a}[fault]
    before = dict(vars(exporter_module))
    install()
    install()
    assert vars(exporter_module) == before
    assert caplog.text.count("Spans are encoded by opentelemetry.exporter.otlp.proto.grpc") == 1


def test_a_failure_goes_back_to_the_exporters_encoder_for_good_and_loses_nothing(exporter_module, monkeypatch, caplog):
    monkeypatch.setattr(patching, "reraise_internal_errors", False)
    install()

    calls = []

    def fail(one):
        calls.append(1)
        raise AttributeError("_kind")

    monkeypatch.setattr(encode, "encode", fail)
    for _ in range(2):
        assert exporter_module.encode_spans([span()]) == encode_spans([span()])
    assert calls == [1]
    assert caplog.text.count("AttributeError: _kind") == 1
