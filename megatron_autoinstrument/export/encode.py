"""From slots of the journal to the bytes of OTLP's ExportTraceServiceRequest, with no object for a span in between.

Most of a span's bytes are those of every other of its kind: they are worked out once, and the rest is put between them.
https://github.com/open-telemetry/opentelemetry-proto/blob/v1.5.0/opentelemetry/proto/trace/v1/trace.proto
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from struct import Struct
from typing import Any

from megatron_autoinstrument.recording.journal import ERROR, NO_LINK, NO_PARENT, NONE, Kind

# Tags: the number of a field, shifted by three, and its wire type.
_TRACE_ID, _SPAN_ID, _PARENT_ID, _NAME, _INTERNAL = b"\x0a\x10", b"\x12\x08", b"\x22\x08", 0x2A, b"\x30\x01"
_START, _END, _ATTRIBUTE = b"\x39", b"\x41", 0x4A
_OK_STATUS, _ERROR_STATUS = b"\x7a\x00", b"\x7a\x02\x18\x02"
_FLAGS = b"\x85\x01\x00\x01\x00\x00"  # it is known whether the parent is remote, and it isn't
_LINK = b"\x6a\x21" + _TRACE_ID
_LINK_FLAGS = b"\x35\x00\x03\x00\x00"  # that of a link is
_SPAN = 0x12  # in ScopeSpans

_MOST_CACHED = 4096


def varint(number: int) -> bytes:
    """A number as protobuf writes one; a negative one takes ten bytes."""
    number &= (1 << 64) - 1
    found = bytearray()
    while number > 0x7F:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    return bytes(found)


def field(tag: int, value: bytes) -> bytes:
    """A field with its length before it."""
    return bytes((tag,)) + varint(len(value)) + value


def attribute(key: str, value: Any) -> bytes:
    """An attribute of a span: a KeyValue in its field.

    Raises:
        TypeError: the value is no bool, int, float or str.
    """
    if isinstance(value, bool):
        encoded = b"\x10" + bytes((value,))
    elif isinstance(value, int):
        encoded = b"\x18" + varint(value)
    elif isinstance(value, float):
        encoded = b"\x21" + Struct("<d").pack(value)
    elif isinstance(value, str):
        encoded = field(0x0A, value.encode())
    else:
        raise TypeError(f"{key} is a {type(value).__name__}")
    return field(_ATTRIBUTE, field(0x0A, key.encode()) + field(0x12, encoded))


def spans_of(kind: Kind) -> Callable[..., bytes]:
    """What makes a span of a call of `kind`, in its field of ScopeSpans.

    The function's parameters are those of the slot, and two more: the flags, the start and the end in ns since the
    epoch, trace, span and parent id, link, first and second number, and bytes to add, of attributes and events.
    """
    constant = b"".join(attribute(key, value) for key, value in kind.constant)
    after_ids = field(_NAME, kind.name.encode()) + _INTERNAL + _FLAGS + constant
    with_parent = Struct(f"<2s16s2s8s2s8s{len(after_ids)}scqcq").pack
    without = Struct(f"<2s16s2s8s{len(after_ids)}scqcq").pack
    prefixes: dict[int, bytes] = {}
    numbers: tuple[dict[int, bytes], ...] = ({NONE: b""}, {NONE: b""})

    def number(which: int, value: int) -> bytes:
        key = (kind.first, kind.second)[which]
        found = b"" if key is None else attribute(key, value)
        if len(numbers[which]) < _MOST_CACHED:
            numbers[which][value] = found
        return found

    firsts, seconds = numbers

    def encode(
        flags: int,
        start: int,
        end: int,
        trace_id: bytes,
        span_id: bytes,
        parent_id: bytes,
        link: bytes = NO_LINK,
        first: int = NONE,
        second: int = NONE,
        more: bytes = b"",
    ) -> bytes:
        if parent_id == NO_PARENT:
            body = without(_TRACE_ID, trace_id, _SPAN_ID, span_id, after_ids, _START, start, _END, end)
        else:
            body = with_parent(
                _TRACE_ID, trace_id, _SPAN_ID, span_id, _PARENT_ID, parent_id, after_ids, _START, start, _END, end
            )
        if first != NONE:
            body += firsts.get(first) or number(0, first)
        if second != NONE:
            body += seconds.get(second) or number(1, second)
        if link != NO_LINK:
            body += b"".join((_LINK, link[:16], _SPAN_ID, link[16:], _LINK_FLAGS))
        body += more + (_ERROR_STATUS if flags & ERROR else _OK_STATUS)
        size = len(body)
        prefix = prefixes.get(size)
        if prefix is None:
            prefix = prefixes[size] = bytes((_SPAN,)) + varint(size)
        return prefix + body

    return encode


def request(resource: bytes, scope: bytes, spans: Iterable[bytes], schema_url: str = "") -> bytes:
    """The whole request.

    Args:
        resource: The message Resource.
        scope: The message InstrumentationScope.
        spans: What `spans_of` has made.
        schema_url: Of the resource.
    """
    of_scope = field(0x0A, scope) + b"".join(spans)
    of_resource = field(0x0A, resource) + field(0x12, of_scope)
    if schema_url:
        of_resource += field(0x1A, schema_url.encode())
    return field(0x0A, of_resource)


def attributes(values: Mapping[str, Any]) -> bytes:
    """Several of a span's."""
    return b"".join(attribute(key, value) for key, value in values.items())
