"""One call that is, or was, running: what the training thread knows of it, and what its span is made from."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic_ns, time_ns
from typing import Any

from opentelemetry.trace import Span, SpanContext, TraceFlags

from megatron_autoinstrument.traces import Identity, span_id

LIVE, FREQUENT, SILENT = "live", "frequent", "silent"
"""How a call reaches OpenTelemetry: as a span that is current while it runs, as a span that is made later, or not."""


class Record:
    """One call. Where nobody could tell the difference, it goes through OpenTelemetry's batch processors in place of a
    span, and is turned into bytes when the exporter asks for them."""

    __slots__ = (
        *("attributes", "begun", "ended", "error", "handed_by", "identity", "kind", "link", "name", "offset", "owned"),
        *("parent", "root", "slot", "span", "span_id", "token", "trace"),
    )

    context = SpanContext(1, 1, False, TraceFlags(TraceFlags.SAMPLED))
    """All that a batch processor looks at: whether the span is sampled. Only those that are get there."""

    def __init__(
        self, name: str, kind: str, parent: Record | None, attributes: Mapping[str, Any] | None, owned: bool = True
    ) -> None:
        self.name = name
        self.kind = kind
        self.parent = parent
        self.attributes = attributes
        self.owned = owned  # by the training thread, so that calls inside it are its children
        self.identity: Identity | None = None  # what its span id is worked out from, if others name it
        self.link: SpanContext | Identity | None = None
        self.root: int | None = None  # the trace that it is the outermost record of
        self.span: Span | None = None
        self.token: Any = None
        self.error: dict[str, str] | None = None
        self.handed_by: Any = None  # the `Direct` that handed it on without a span
        self.ended: int | None = None
        self.slot = 0  # its number in the journal
        # Where the trace is known, and kept by the sampler: its id and the span's. Else the tracer decides. Those of a
        # SILENT record are those of what is around.
        self.trace: bytes | None = None
        self.span_id = 0
        self.begun = monotonic_ns()
        if parent is None:
            self.offset = time_ns() - self.begun  # from there to the wall clock
        else:
            self.offset = parent.offset
            self.trace = parent.trace
            self.span_id = parent.span_id

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


_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def linked(link: SpanContext | Identity) -> SpanContext:
    """What a link names."""
    if isinstance(link, SpanContext):
        return link
    return SpanContext(link[0][0], span_id(link), is_remote=True, trace_flags=_SAMPLED)


def _context(trace: bytes, span_id: int) -> SpanContext:
    return SpanContext(int.from_bytes(trace, "big"), span_id, False, _SAMPLED)
