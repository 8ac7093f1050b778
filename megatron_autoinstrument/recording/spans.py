"""Records that become spans of the tracer, or spans that are current while their calls run."""

from __future__ import annotations

import logging
from typing import NamedTuple

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode

from megatron_autoinstrument.common.finite import finite
from megatron_autoinstrument.common.private_random import random_span_id
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.common.semconv import SPAN_GROUPS
from megatron_autoinstrument.recording import outbox
from megatron_autoinstrument.recording.connection import SpanStart
from megatron_autoinstrument.recording.record import FREQUENT, SILENT, Record, linked
from megatron_autoinstrument.recording.run import Run
from megatron_autoinstrument.recording.traces import span_id

_logger = get_logger(__name__)

RUN_GROUPS = {"job", "model_init", "load_checkpoint", "checkpoint", "evaluate"}
"""What belongs to no step."""


class SpanPlacement(NamedTuple):
    """Where a span belongs."""

    parent: SpanContext | None
    trace: int | None = None  # the one that it is a root of; None: any
    opens_step: bool = False  # as an outermost span of a step, whatever is current
    around: SpanContext | None = None  # what is around that step: a link


class Spans(outbox.Outbox):
    """Where a record's span belongs, and how it starts and ends."""

    def __init__(self) -> None:
        super().__init__()
        self.run = Run()
        self._told_of_loss = False

    def _open(self, record: Record) -> None:
        """Starts the span of a live record, and makes it current."""
        connection, around, root, context = self._connection, record.parent, record.root, context_api.get_current()
        assert connection is not None
        inside: trace.Span | None = None
        links: tuple[Link, ...] = ()
        if root is not None:
            outside = None if around is None else around.nearest_context
            links = () if outside is None else _links_around(outside)
        else:
            while around is not None and around.kind is SILENT and around.root is None:
                around = around.parent
            # Else something of the application's is between, or the tracer must be asked.
            if around is not None and around.current_in is context and record.trace is not None:
                inside = around.span
        if root is not None or inside is not None:
            own_id = random_span_id() if record.identity is None else span_id(record.identity)
            start = record.begun + record.offset
            span = connection.direct.start(inside, root, (record.name, start, record.attributes, links, own_id))
            if span is not None:
                record.span = span
                parent_id, record.span_id = record.span_id, own_id
                if root is not None:
                    record.trace = root.to_bytes(16, "big")
                if (journal := self.journal) is not None:
                    record.slot = journal.keep(record, parent_id)
                record.current_in = context = _context_with(span, context)
                record.token = context_api.attach(context)
                return
        self._open_anywhere(record)

    def _open_anywhere(self, record: Record) -> None:
        assert self._connection is not None
        place = self._placement(record)
        described = _described(record, place)
        context: context_api.Context | None = None
        span: trace.Span | None = None
        direct = False
        if place.opens_step:
            context = trace.set_span_in_context(trace.INVALID_SPAN)
        elif (current := trace.get_current_span().get_span_context()) is place.parent:
            span = self._connection.direct.start(current, None, described)
            direct = span is not None
        elif not current.is_valid:
            context = _context_of(place.parent)
        if span is None:
            try:
                span = self._connection.start_span(context, place.trace, described)
            except Exception as error:  # noqa: BLE001
                record.kind = SILENT  # what is inside belongs to what is around
                if record.root is not None:
                    record.trace, record.span_id = None, 0
                self._lose(error)
                return
        record.span = span
        parent_id, made = record.span_id, span.get_span_context()
        record.span_id = made.span_id
        if not direct or record.trace is None:  # else it is in the trace of what is around
            known = made.trace_flags.sampled and not made.trace_state
            record.trace = made.trace_id.to_bytes(16, "big") if known else None
        if (journal := self.journal) is not None:
            record.slot = journal.keep(record, parent_id)
        if not self._connection.chooses_ids:
            record.trace = None
        record.current_in = trace.set_span_in_context(span)
        record.token = context_api.attach(record.current_in)

    def _placement(self, record: Record) -> SpanPlacement:
        at: Record | None = record
        while at is not None:
            if at.span is not None:
                return SpanPlacement(at.span.get_span_context())
            if at.handed_by is not None:
                return SpanPlacement(at.nearest_context)
            if at.root is not None:
                return SpanPlacement(None, at.root, True, at.parent.nearest_context if at.parent is not None else None)
            at = at.parent
        traces = self.run.traces  # another thread may instrument anew
        if traces is not None and (not traces.per_step or SPAN_GROUPS[record.name] in RUN_GROUPS):
            return SpanPlacement(None, traces.run)
        return SpanPlacement(None)

    def _end(self, record: Record, span: trace.Span) -> None:
        """Ends the span of a live record: in our thread, where nobody has asked the span for anything."""
        if (
            self._connection is not None
            and len(self._waiting) < outbox.MAX_WAITING
            and record.ended is not None
            and self._connection.direct.finish(span, record.ended + record.offset, record.attributes)
        ):
            self._waiting.append(record)
            return
        try:
            if record.attributes:
                span.set_attributes(finite(record.attributes))
            span.end(record.end)
        except Exception as error:  # noqa: BLE001
            self._lose(error)
        if self._connection is not None and self._connection.closed:
            self.dropped += 1

    def _lose(self, error: Exception) -> None:
        """A sampler or a processor of the application's has failed, which costs one span and not its recording."""
        self.dropped += 1
        level = logging.DEBUG if self._told_of_loss else logging.WARNING
        self._told_of_loss = True
        _logger.log(
            level,
            "A span was lost, since a sampler or processor of spans raised %s. (Told once: training goes on, and spans "
            "that are lost are counted and reported at the end.)",
            type(error).__name__,
        )

    def _emit(self, record: Record, end: int) -> None:
        """By the tracer."""
        span = record.span or self._start(record)
        if record.attributes:
            span.set_attributes(finite(record.attributes))
        mark(span, record, end)
        span.end(end)

    def _start(self, record: Record) -> trace.Span:
        """Starts the span of a frequent record, in our thread."""
        assert self._connection is not None
        self._start_around(record)
        place = self._placement(record)
        context = _context_of(place.parent)
        record.span = self._connection.start_span(context, place.trace, _described(record, place))
        return record.span

    def _start_around(self, record: Record) -> None:
        """Starts the span of the frequent record around this one, which is still running: nobody waits for its end."""
        around = record.parent
        while around is not None and around.span is None and around.kind is not FREQUENT:
            around = around.parent
        if around is not None and around.span is None and around.handed_by is None:
            self._start(around)


# By which a context has its current span; None where that can't be told.
_keys = list(trace.set_span_in_context(trace.INVALID_SPAN, context_api.Context()))
_CURRENT = _keys[0] if len(_keys) == 1 else None


def _context_with(span: trace.Span, context: context_api.Context) -> context_api.Context:
    """What `set_span_in_context` gives, in half its time."""
    if _CURRENT is None:
        return trace.set_span_in_context(span, context)
    values = context.copy()
    values[_CURRENT] = span
    return context_api.Context(values)


def _context_of(parent: SpanContext | None) -> context_api.Context:
    # Never the caller's context: in our thread it says nothing of where the call was made.
    return (
        trace.set_span_in_context(NonRecordingSpan(parent), context_api.Context()) if parent else context_api.Context()
    )


def _described(record: Record, place: SpanPlacement) -> SpanStart:
    """What is known of its span when it starts."""
    links = () if place.around is None else _links_around(place.around)
    if record.link is not None:
        links += (Link(linked(record.link), {}),)
    attributes = finite(record.attributes) if record.attributes else None
    return record.name, record.start, attributes, links, _wanted_id(record)


_latest_around: tuple[SpanContext | None, tuple[Link, ...]] = (None, ())


def _links_around(context: SpanContext) -> tuple[Link, ...]:
    """A link to it: all steps of a run have the same one, which takes long to make."""
    global _latest_around
    latest, links = _latest_around
    if latest is not context:
        # An exporter may take each link's attributes for a mapping, as the SDK's are.
        links = (Link(context, {}),)
        _latest_around = context, links
    return links


def _wanted_id(record: Record) -> int | None:
    """The id that others may know its span by already."""
    if record.kind is FREQUENT and record.trace is not None:
        return record.span_id
    return span_id(record.identity) if record.identity is not None else None


def mark(span: trace.Span, record: Record, now: int) -> None:
    """Says on a span what its call has raised, if anything."""
    if record.error is not None and span.is_recording():
        name = record.error["exception.type"]
        span.set_attribute("error.type", name)
        span.set_status(Status(StatusCode.ERROR, name))
        if "exception.stacktrace" in record.error:
            span.add_event("exception", record.error, timestamp=now)
