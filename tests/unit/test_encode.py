import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, Status, StatusCode, TraceFlags

from megatron_autoinstrument.export import encode
from megatron_autoinstrument.recording.journal import ERROR, NO_LINK, NO_PARENT, NONE, Kind

SAMPLED = TraceFlags(TraceFlags.SAMPLED)
RESOURCE = Resource({"service.name": "megatron-lm", "dl.rank": 3}, "https://opentelemetry.io/schemas/1.37.0")
SCOPE = InstrumentationScope("megatron_autoinstrument", "1.0")
TRACE, SPAN, PARENT, LINK = bytes(range(1, 17)), b"\xffspan-id", b"parentid", bytes(range(30, 54))
NUMBER, OTHER = "dl.microbatch_id", "dl.pipeline_parallel.rank"
PLAIN = Kind("megatron.layer.forward")
NUMBERED = Kind("megatron.pp.recv_forward.linked", NUMBER, OTHER)
CONSTANT = Kind("megatron.p2p.recv_forward", constant=(("yes", True), ("no", False), ("text", "é" * 200), ("x", -1.5)))


def by_the_sdk(kind, start, end, parent=PARENT, link=NO_LINK, first=NONE, second=NONE, flags=0, more=()):
    def context(trace, span, remote=False):
        return SpanContext(int.from_bytes(trace, "big"), int.from_bytes(span, "big"), remote, SAMPLED)

    attributes = dict(kind.constant)
    attributes |= {key: value for key, value in ((kind.first, first), (kind.second, second)) if value != NONE}
    status = Status(StatusCode.ERROR if flags & ERROR else StatusCode.UNSET)
    return ReadableSpan(
        kind.name,
        context(TRACE, SPAN),
        context(TRACE, parent) if parent != NO_PARENT else None,
        RESOURCE,
        attributes | dict(more),
        links=[] if link == NO_LINK else [Link(context(link[:16], link[16:], remote=True))],
        status=status,
        start_time=start,
        end_time=end,
        instrumentation_scope=SCOPE,
    )


def by_us(kind, start, end, parent=PARENT, link=NO_LINK, first=NONE, second=NONE, flags=0, more=()):
    more = encode.attributes(dict(more))
    return encode.spans_of(kind)(flags, start, end, TRACE, SPAN, parent, link, first, second, more)


CASES = {
    "as most are": (PLAIN, {}),
    "a root": (PLAIN, {"parent": NO_PARENT}),
    "with constant attributes": (CONSTANT, {}),
    "with a number": (NUMBERED, {"first": 300}),
    "with two, one of them zero": (NUMBERED, {"first": 0, "second": 2**62}),
    "with a negative one": (NUMBERED, {"second": -7}),
    "with a link": (NUMBERED, {"link": LINK, "second": 1}),
    "with an error": (PLAIN, {"flags": ERROR}),
    "with everything": (NUMBERED, {"parent": NO_PARENT, "link": LINK, "first": 1, "more": (("a", 1.5), ("b", "c"))}),
}
TIMES = (1_796_253_467_267_994_601, 1_796_253_467_267_994_999)


@pytest.mark.parametrize("name", CASES)
def test_a_slot_becomes_what_the_sdks_encoder_makes_of_the_same_span(name):
    kind, more = CASES[name]
    (expected,) = encode_spans([by_the_sdk(kind, *TIMES, **more)]).resource_spans
    (scope,) = expected.scope_spans
    found = ExportTraceServiceRequest.FromString(
        encode.request(
            expected.resource.SerializeToString(),
            scope.scope.SerializeToString(),
            [by_us(kind, *TIMES, **more) for _ in range(3)],
            expected.schema_url,
        )
    )
    assert list(found.resource_spans[0].scope_spans[0].spans) == [scope.spans[0]] * 3
    del found.resource_spans[0].scope_spans[0].spans[1:]
    assert found.resource_spans[0] == expected


def test_every_number_is_written_as_protobuf_does():
    for number in [0, 1, 127, 128, 16_383, 16_384, 2**31, 2**62, 2**63 - 1, -1, -(2**62)]:
        kind = Kind("x", "n")
        (expected,) = encode_spans([by_the_sdk(kind, 1, 2, first=number)]).resource_spans[0].scope_spans[0].spans
        data = encode.request(b"", b"", [by_us(kind, 1, 2, first=number)])
        assert ExportTraceServiceRequest.FromString(data).resource_spans[0].scope_spans[0].spans[0] == expected


def test_what_is_no_value_of_an_attribute_is_refused():
    with pytest.raises(TypeError, match="x is a list"):
        encode.attribute("x", [1])
