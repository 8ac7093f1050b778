"""From records, and spans of this package, to the bytes of OTLP's ExportTraceServiceRequest, by joins of what is known
beforehand.

The exporters of OpenTelemetry encode by a function `encode_spans`, which builds a message of protobuf for each part of
a span: two thirds of all that a span costs. Here most bytes of a span are those of the one before.
https://github.com/open-telemetry/opentelemetry-proto/blob/v1.5.0/opentelemetry/proto/trace/v1/trace.proto
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, wraps
from struct import Struct, error
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.export.losses import is_as_shipped, is_of_this_package
from megatron_autoinstrument.export.sdk_internals import EXPORT_METHODS, fields_of
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.traces import span_id
from megatron_autoinstrument.version import __version__

_logger = get_logger(__name__)

SCOPE = "megatron_autoinstrument"
"""The name of this package's instrumentation scope."""

# Tags of protobuf: the number of a field, shifted by three, and its wire type; of bytes of a known length, that too.
_TRACE_ID, _SPAN_ID, _PARENT_ID, _NAME, _INTERNAL = b"\x0a\x10", b"\x12\x08", b"\x22\x08", 0x2A, b"\x30\x01"
_START, _END, _ATTRIBUTE, _LINK = b"\x39", b"\x41", 0x4A, b"\x6a\x21"
_STATUS = {StatusCode.UNSET: b"\x7a\x00", StatusCode.OK: b"\x7a\x02\x18\x01", StatusCode.ERROR: b"\x7a\x02\x18\x02"}
# OTLP's flags say whether a parent, or what a link names, is remote.
_LOCAL, _REMOTE = b"\x85\x01\x00\x01\x00\x00", b"\x85\x01\x00\x03\x00\x00"
_LINK_LOCAL, _LINK_REMOTE = b"\x35\x00\x01\x00\x00", b"\x35\x00\x03\x00\x00"
_SPAN = b"\x12"  # in ScopeSpans

_Encoder = Callable[[Sequence[ReadableSpan]], Any]
"""From spans to a message ExportTraceServiceRequest."""

# Names, values and lengths come again: their bytes are made once, and kept so long as they are among the latest.
_known = lru_cache(4096, typed=True)

_child = Struct(">2s16s2sQ2sQ").pack
_child_size = len(_child(b"", b"", b"", 0, b"", 0))
_root = Struct(">2s16s2sQ").pack
_times = Struct("<sQsQ").pack


class Unusual(Exception):
    """A span has what only the exporter's own encoder knows."""


@_known
def _varint(number: int) -> bytes:
    """A number as protobuf writes one; a negative one takes ten bytes."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def _field(tag: int, value: bytes) -> bytes:
    return bytes((tag,)) + _varint(len(value)) + value


@_known
def _attribute(key: str, value: Any) -> bytes:
    """A KeyValue, in its field of Span."""
    if type(value) is bool:
        encoded = b"\x10" + bytes((value,))
    elif type(value) is int and -(1 << 63) <= value < 1 << 63:
        encoded = b"\x18" + _varint(value)
    elif type(value) is str:
        encoded = _field(0x0A, value.encode())
    else:
        raise Unusual
    return _key_value(key, encoded)


_double = Struct("<d").pack
_SMALL = [bytes((number,)) for number in range(128)]  # as varints


def _float(key: str, value: float) -> bytes:
    """The same for a float, which seldom comes again, and of which 0.0 and -0.0 are equal."""
    return _key_value(key, b"\x21" + _double(value))


# By the key: what comes before the eight bytes of a float, a number that takes one, and the byte of a truth.
_before: dict[str, tuple[bytes, bytes, bytes]] = {}


def _add_key(key: str) -> tuple[bytes, bytes, bytes]:
    found = _float(key, 0.0)[:-8], _attribute(key, 0)[:-1], _attribute(key, False)[:-1]
    if len(_before) < 1024:
        _before[key] = found
    return found


def _key_value(key: str, value: bytes) -> bytes:
    return _field(_ATTRIBUTE, _field(0x0A, key.encode()) + _field(0x12, value))


@_known
def _name(name: str) -> bytes:
    return _field(_NAME, name.encode()) + _INTERNAL


def _link(link: Link) -> bytes:
    context = link.context
    if link.attributes or context.trace_state:
        raise Unusual
    return _link_to(context.trace_id, context.span_id, context.is_remote)


def _link_to(trace_id: int, span_id: int, is_remote: bool) -> bytes:
    ids = _root(_TRACE_ID, trace_id.to_bytes(16, "big"), _SPAN_ID, span_id)
    return b"".join((_LINK, ids, _LINK_REMOTE if is_remote else _LINK_LOCAL))


def encode(span: ReadableSpan) -> bytes:
    """The span, in its field of ScopeSpans.

    Raises:
        Unusual: it has what is left to the exporter's own encoder: an event, attributes of links, lists.
        Exception: this SDK's spans are not like those that are known.
    """
    context, parent, events, links, status, attributes, kind, name, start, end = fields_of(span)
    if events or context.trace_state or status.description or kind is not SpanKind.INTERNAL:
        raise Unusual
    if type(attributes) is not dict or events != ():  # lists of the SDK, which may have dropped something
        for part in (attributes, events, links):
            if getattr(part, "dropped", 0):
                raise Unusual
    trace_id = context.trace_id.to_bytes(16, "big")
    if parent is None:
        ids, flags = _root(_TRACE_ID, trace_id, _SPAN_ID, context.span_id), _LOCAL
    else:
        ids = _child(_TRACE_ID, trace_id, _SPAN_ID, context.span_id, _PARENT_ID, parent.span_id)
        flags = _REMOTE if parent.is_remote else _LOCAL
    parts = [ids, _name(name), _times(_START, start, _END, end)]
    if attributes:
        parts.append(_attributes(attributes))
    if links:
        parts += map(_link, links)
    parts += (_STATUS[status.status_code], flags)
    return _framed(parts)


def _attributes(attributes: Mapping[str, Any]) -> bytes:
    found = b""
    for key, value in attributes.items():
        kind = type(value)
        if kind is float or kind is bool or (kind is int and 0 <= value < 128):
            try:
                before_float, before_int, before_bool = _before[key]
            except KeyError:
                before_float, before_int, before_bool = _add_key(key)
            if kind is float:
                found += before_float + _double(value)
            else:
                found += (before_int if kind is int else before_bool) + _SMALL[value]
        else:
            found += _attribute(key, value)
    return found


_LENGTHS = [_varint(length) for length in range(1024)]


def _framed(parts: list[bytes]) -> bytes:
    """A span of these fields, in its field of ScopeSpans."""
    length = sum(map(len, parts))
    return b"".join((_SPAN, _LENGTHS[length] if length < 1024 else _varint(length), *parts))


_ENDED_WELL, _ENDED_WELL_REMOTE = (_STATUS[StatusCode.UNSET] + flags for flags in (_LOCAL, _REMOTE))


# By the name of spans that have a parent, and neither attributes nor links: their length, what packs that with the ids,
# the length as bytes, what packs the rest, and the name as bytes. (A named tuple takes much longer to read.)
_named: dict[str, tuple[int, Callable[..., bytes], bytes, Callable[..., bytes], bytes]] = {}


def _add_name(name: str) -> tuple[int, Callable[..., bytes], bytes, Callable[..., bytes], bytes]:
    named = _name(name) + _START
    complete = Struct(f"<{len(named)}sQsQ{len(_ENDED_WELL)}s")
    length = _child_size + complete.size
    prefix = _SPAN + _varint(length)
    found = (length, Struct(f">{len(prefix)}s2s16s2sQ2sQ").pack, prefix, complete.pack, named)
    if len(_named) < 1024:
        _named[name] = found
    return found


def encode_record(record: Record) -> bytes:
    """The span of a record that was handed on, likewise.

    Raises:
        Unusual: it has what is left to the exporter's own encoder.
    """
    live: Any = record.span
    offset, attributes, link = record.offset, record.attributes, record.link
    try:
        length, begin, prefix, complete, name = _named[record.name]
    except KeyError:
        length, begin, prefix, complete, name = _add_name(record.name)
    # `ended` is known: it was handed on since.
    rest = complete(name, record.begun + offset, _END, record.ended + offset, _ENDED_WELL)  # type: ignore[operator]
    around: Any = None if live is None else live.made_of[3]
    if live is None or type(around) is type(live):  # in a trace of ours
        parent_id = record.parent.span_id  # type: ignore[union-attr]
        if link is None and not attributes:
            return begin(prefix, _TRACE_ID, record.trace, _SPAN_ID, record.span_id, _PARENT_ID, parent_id) + rest
        more = _attributes(attributes) if attributes else b""
        if link is not None:
            if isinstance(link, SpanContext):
                if link.trace_state:
                    raise Unusual
                more += _link_to(link.trace_id, link.span_id, link.is_remote)
            else:
                more += _link_to(link[0][0], span_id(link), True)
        length += len(more)
        size = _LENGTHS[length] if length < 1024 else _varint(length)
        ids = _child(_TRACE_ID, record.trace, _SPAN_ID, record.span_id, _PARENT_ID, parent_id)
        return b"".join((_SPAN, size, ids, rest, more))
    parent, links = around, live.made_of[6]
    if parent is None:
        parts = [_root(_TRACE_ID, record.trace, _SPAN_ID, record.span_id), rest]
    else:
        parts = [_child(_TRACE_ID, record.trace, _SPAN_ID, record.span_id, _PARENT_ID, parent.span_id), rest]
        if parent.is_remote:
            parts[1] = rest[: -len(_ENDED_WELL)] + _ENDED_WELL_REMOTE
    if links:
        parts += map(_link, links)
    if attributes:
        parts.append(_attributes(attributes))
    return _framed(parts)


def _request(of_sdk: _Encoder, kind: Any, spans: Sequence[Any]) -> Any:
    # Spans of one resource and one scope, which is nearly always all of them, are next to each other.
    groups: list[tuple[Any, Any, list[bytes]]] = []
    others: list[ReadableSpan] = []
    latest: Any = None
    add: Callable[[bytes], None] = list[bytes]().append  # replaced before it is called
    for span in spans:
        try:
            if type(span) is Record:
                encoded = encode_record(span)
                whose = span.handed_by
                if whose is not latest:
                    latest, add = whose, _group(groups, whose.resource, whose.scope)
            elif type(span) is ReadableSpan and getattr(span.instrumentation_scope, "name", None) == SCOPE:
                encoded = encode(span)
                latest, add = None, _group(groups, span.resource, span.instrumentation_scope)
            else:
                others.append(span)
                continue
        except (Unusual, ValueError, OverflowError, error):
            others.append(readable(span))
            continue
        add(encoded)
    request = of_sdk(others) if others else kind()
    for resource, scope, encoded_spans in groups:
        request.MergeFromString(_around(of_sdk, resource, scope, encoded_spans))
    return request


def _group(groups: list[tuple[Any, Any, list[bytes]]], resource: Any, scope: Any) -> Callable[[bytes], None]:
    if not groups or groups[-1][0] is not resource or groups[-1][1] is not scope:
        groups.append((resource, scope, []))
    return groups[-1][2].append


def readable(span: Any) -> ReadableSpan:
    """The span that a record stands for; a span itself."""
    made: ReadableSpan = span.handed_by.readable(span) if type(span) is Record else span
    return made


_heads: tuple[Any, Any, bytes, bytes] | None = None  # of the latest resource and scope


def _around(of_sdk: _Encoder, resource: Any, scope: Any, spans: Iterable[bytes]) -> bytes:
    """A request with these spans alone. What is around them, the exporter's own encoder makes, once."""
    global _heads
    heads = _heads
    if heads is None or heads[0] is not resource or heads[1] is not scope:
        (in_resource,) = of_sdk([_samples(resource, scope)[0]]).resource_spans
        (in_scope,) = in_resource.scope_spans
        del in_scope.spans[:]
        of_scope = in_scope.SerializeToString()
        del in_resource.scope_spans[:]
        heads = _heads = (resource, scope, in_resource.SerializeToString(), of_scope)
    _, _, of_resource, of_scope = heads
    # The fields of a message may come in any order.
    return _field(0x0A, of_resource + _field(0x12, b"".join((of_scope, *spans))))


def _samples(resource: Any, scope: Any) -> list[ReadableSpan]:
    """Spans with all that `encode` knows."""
    sampled = TraceFlags(TraceFlags.SAMPLED)
    local, remote = (SpanContext((1 << 127) + 1, 1 << 63, is_remote, sampled) for is_remote in (False, True))
    attributes: Any = {"bool": True, "int": -1, "large": 1 << 40, "float": 0.5, "str": "é"}
    return [
        ReadableSpan(
            f"sample {number}",
            local,
            parent,
            resource,
            attributes if number else None,
            links=[Link(local), Link(remote)] if number else (),
            status=status,
            start_time=1,
            end_time=1 << 60,
            instrumentation_scope=scope,
        )
        for number, (parent, status) in enumerate(
            ((None, Status()), (local, Status(StatusCode.ERROR)), (remote, Status(StatusCode.OK)))
        )
    ]


_EXPORTERS = tuple(f"opentelemetry.exporter.otlp.proto.{protocol}.trace_exporter" for protocol in ("grpc", "http"))
_seen: set[str] = set()
_encoders: dict[str, Callable[..., Any]] = {}  # put into their modules
_encoding: set[str] = set()  # those whose exporters have spans encoded here


def replace_encoders() -> None:
    """Has the exporters that are loaded by now encode this package's spans by `encode`. All other spans, and those with
    something unusual, stay with their own encoder, and so do all spans where that makes something else of a sample."""
    for name in _EXPORTERS:
        if name not in _seen and (module := sys.modules.get(name)) is not None:
            _seen.add(name)
            try:
                _replace(module)
                _encoding.add(name)
            except Exception as reason:  # noqa: BLE001
                _give_up(module, reason)


def encodes_for(exporter: Any) -> bool:
    """Whether an exporter is OpenTelemetry's own, as it is, and asks this module for the bytes of its spans: it takes
    records then."""
    kind = type(exporter)
    if kind.__module__ not in _encoding or kind.__name__ != "OTLPSpanExporter":
        return False
    own = vars(exporter)
    return (
        getattr(sys.modules[kind.__module__], "encode_spans", None) is _encoders.get(kind.__module__)
        and all(is_as_shipped(getattr(kind, name)) for name in EXPORT_METHODS if hasattr(kind, name))
        and own.keys().isdisjoint(EXPORT_METHODS[1:])
        and ("export" not in own or is_of_this_package(own["export"]))
    )


def _replace(module: Any) -> None:
    of_sdk = module.encode_spans
    if not is_as_shipped(of_sdk):
        raise Unusual("its encoder is somebody's own")
    samples = _samples(Resource({"sample": True}, "https://example.com"), InstrumentationScope(SCOPE, __version__))
    expected = of_sdk(samples)
    kind = type(expected)
    if _request(of_sdk, kind, samples) != expected:
        raise Unusual("its encoder makes something else")

    @wraps(of_sdk)
    def encode_spans(sdk_spans: Sequence[ReadableSpan]) -> Any:
        if module.__name__ in _encoding:
            try:
                return _request(of_sdk, kind, sdk_spans)
            except Exception as reason:  # noqa: BLE001
                _encoding.discard(module.__name__)
                _give_up(module, reason)
        return of_sdk(list(map(readable, sdk_spans)))  # records may be waiting in a queue

    module.encode_spans = _encoders[module.__name__] = encode_spans


def _give_up(module: Any, reason: Exception) -> None:
    if patching.reraise_internal_errors:
        raise
    _logger.warning(
        "Spans are encoded by %s alone, which costs more time: this release is not like those that are known. %s: %s",
        module.__name__,
        type(reason).__name__,
        reason,
    )
