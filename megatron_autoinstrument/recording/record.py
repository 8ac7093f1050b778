"""One call that is, or was, running: what the training thread knows of it, and what its span is made from."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, TraceFlags

from megatron_autoinstrument.recording.traces import Identity, span_id

LIVE, FREQUENT, SILENT = "live", "frequent", "silent"
"""How a call reaches OpenTelemetry: as a span that is current while it runs, as a span that is made later, or not."""


class Record:
    """One call. Where nobody could tell the difference, it goes through OpenTelemetry's batch processors in place of a
    span, and is turned into bytes when the exporter asks for them."""

    __slots__ = (
        "attributes",
        "begun",
        "current_in",
        "ended",
        "error",
        "handed_by",
        "identity",
        "kind",
        "link",
        "name",
        "offset",
        "owned",
        "parent",
        "root",
        "slot",
        "span",
        "span_id",
        "token",
        "trace",
    )

    context = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))
    """All that a batch processor looks at: whether the span is sampled. Only those that are get there."""

    name: str
    kind: str
    parent: Record | None
    attributes: Mapping[str, Any] | None
    begun: int
    """When it began, in ns of the monotonic clock."""
    ended: int | None
    offset: int
    """From there to the wall clock."""
    owned: bool
    """Whether it is the training thread's, so that calls inside it are its children."""
    trace: bytes | None
    """The id of its trace, where that is known and kept by the sampler: else the tracer decides."""
    span_id: int
    """Of its span, where the trace is known; a SILENT record has what is around it in both."""
    root: int | None
    """The trace that it is the outermost record of."""
    identity: Identity | None
    """What its span id is worked out from, if others name it."""
    link: SpanContext | Identity | None
    error: dict[str, str] | None
    span: Span | None
    token: Any
    current_in: Context | None
    """The context that its span is current in, and that context's token."""
    handed_by: Any
    """The `Direct` that handed it on without a span."""
    slot: int
    """Its number in the journal; 0: it has none."""

    @property
    def start(self) -> int:
        """In ns since the epoch."""
        return self.begun + self.offset

    @property
    def end(self) -> int | None:
        """Likewise; None while it is running."""
        return None if self.ended is None else self.ended + self.offset

    def anchor(self) -> None:
        """Asks the wall clock anew, for what nothing but the run encloses: the clock may have been stepped since that
        began. Not where the span would start before its parent's."""
        offset = time_ns() - self.begun
        around = self.parent
        if around is not None and self.root is None and self.begun + offset < around.start:
            return
        self.offset = offset
        while around is not None:
            if (later := offset - around.offset) > 0:  # it is to end later then, and to start when it did
                around.begun -= later
                around.offset = offset
            around = around.parent

    @property
    def nearest_context(self) -> SpanContext | None:
        """Of this record's span, or the nearest enclosing one's; None if there is none, or not yet."""
        record: Record | None = self
        while record is not None:
            if record.span is not None:
                return record.span.get_span_context()
            if record.handed_by is not None and record.trace is not None:
                return _context(record.trace, record.span_id)
            record = record.parent
        return None


def open_record(
    name: str, kind: str, parent: Record | None, attributes: Mapping[str, Any] | None, owned: bool = True
) -> Record:
    """A record that begins now. (A constructor would take twice the time.)"""
    record = Record()
    record.name = name
    record.kind = kind
    record.parent = parent
    record.attributes = attributes
    record.owned = owned
    record.identity = record.link = record.root = record.span = record.token = record.current_in = record.error = None
    record.handed_by = record.ended = None
    record.slot = 0
    record.begun = begun = monotonic_ns()
    if parent is None:
        record.offset = time_ns() - begun
        record.trace = None
        record.span_id = 0
    else:
        record.offset = parent.offset
        record.trace = parent.trace
        record.span_id = parent.span_id
    return record


_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def linked(link: SpanContext | Identity) -> SpanContext:
    """What a link names."""
    if isinstance(link, SpanContext):
        return link
    return SpanContext(link[0][0], span_id(link), is_remote=True, trace_flags=_SAMPLED)


def _context(trace: bytes, span_id: int) -> SpanContext:
    return SpanContext(int.from_bytes(trace, "big"), span_id, False, _SAMPLED)
