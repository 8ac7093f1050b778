"""Records on their way to an exporter without a tracer, where the SDK's own parts alone would see their spans: those
cost many times what the call's record does. Whoever brings a sampler, a processor or limits of another kind gets each
span by the tracer.

Where OpenTelemetry's batch processors and OTLP exporters are all that there is, no span is made at all: the record goes
through the processor's queue, and encode.py makes its bytes when the exporter asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import isfinite
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SynchronousMultiSpanProcessor, Tracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, TraceFlags, TraceState
from opentelemetry.trace import Span as ApiSpan

from megatron_autoinstrument.common.finite import finite
from megatron_autoinstrument.common.private_random import random_span_id
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.export import encode
from megatron_autoinstrument.export.ids import PrivateIdGenerator
from megatron_autoinstrument.export.losses import Tally, is_as_shipped, is_patched
from megatron_autoinstrument.export.sdk_internals import (
    CONTEXT,
    CONTEXTS_ARE_TUPLES,
    StartedSpan,
    counts_spans,
    exporter_of,
    inner_of,
    intake_of,
    is_enabled,
    keeps_roots,
    keeps_what_is_inside,
    limits_of,
    processors_behind,
    readable_of,
    scope_of,
    set_times,
    taking,
)
from megatron_autoinstrument.recording.connection import SpanStart
from megatron_autoinstrument.recording.record import Record, linked

_logger = get_logger(__name__)

_SAMPLED, _NO_STATE = TraceFlags(TraceFlags.SAMPLED), TraceState()
_PLAIN = frozenset({bool, int, float, str})  # attribute values that the SDK takes as they are
_NEVER_INFINITE = _PLAIN - {float}


_given_up = False


class HashedOnce(Resource):
    """A resource that knows its hash: encoders look it up for each span, and the SDK makes JSON of it each time."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class Direct:
    """Makes the spans of one tracer."""

    def __init__(self, tracer: Any, ours: type, is_closed: Callable[[], bool], ended: Tally) -> None:
        """
        Args:
            tracer: The tracer.
            ours: The class of this package's own processor.
            is_closed: Whether the tracer's provider was shut down.
            ended: Counts the spans that were handed on, as that processor does.
        """
        self._tracer = tracer
        self._ours = ours
        self._processors = {BatchSpanProcessor, SimpleSpanProcessor, ours}
        self._is_closed = is_closed
        self._ended = ended
        self._takers: tuple[Callable[[Any], None], ...] = ()  # the queues that take a record in place of a span
        self._seen: Any = None  # the processors that there were at the last look
        self.possible = False
        self.look()

    def look(self) -> None:
        """Finds out whether spans may be made here: processors may be added, and a resource completed, at any time."""
        possible, takers = False, self._takers[:0]
        if type(self._tracer) is Tracer and not _given_up:
            try:
                possible = self._may()
                takers = self._queues() if possible else ()
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
                return
        self._takers = takers
        self.possible = possible

    def _queues(self) -> tuple[Callable[[Any], None], ...]:
        """Where only batch processors that export by OTLP would see a span: what they take one by."""
        processors = [one for one in self._seen if type(one) is not self._ours]
        for one in processors:
            if type(one) is not BatchSpanProcessor or not all(map(is_as_shipped, intake_of(one))):
                return ()
            if is_patched(one) or is_patched(inner_of(one)) or not encode.encodes_for(exporter_of(one)):
                return ()
        return tuple(map(taking, processors))

    def _give_up(self, error: Exception) -> None:
        """This SDK is another than those that are known: every span is the tracer's from here on, in this process."""
        global _given_up
        self.possible, self._takers = False, ()
        if not _given_up:
            _given_up = True
            _logger.warning(
                "Spans are made by the SDK's tracer from here on, which costs more time: this release is not like "
                "those that are known. %s: %s",
                type(error).__name__,
                error,
            )

    def _may(self) -> bool:
        tracer = self._tracer
        is_sdks = type(tracer.span_processor) is SynchronousMultiSpanProcessor
        self._seen = processors_behind(tracer) if is_sdks else None  # first: more may come meanwhile
        if type(tracer.resource) is Resource:
            tracer.resource = HashedOnce(tracer.resource)
        self._scope, self._limits = scope_of(tracer), limits_of(tracer)
        self._keeps_root = keeps_roots(tracer.sampler)
        possible = (
            type(tracer.id_generator) is PrivateIdGenerator
            and is_sdks
            and all(map(self._knows, self._seen))
            and keeps_what_is_inside(tracer.sampler)
            and _has_room(self._limits)
            and is_enabled(tracer)
            and not counts_spans(tracer)  # it would not count these
        )
        if possible and not self.possible:
            # Now: to find out later that the SDK's constructor is another would be at a user's call.
            outer = _live((self, "sample", SpanContext(1, 1, False, _SAMPLED), None, 1, None, ()))
            _live((self, "sample", 1, outer, 1, None, ())).behind()
        return possible

    def _knows(self, processor: Any) -> bool:
        """Whether it does with a span what all of its class do, and nothing when one starts."""
        return type(processor) in self._processors and vars(processor).keys().isdisjoint(("on_start", "on_end"))

    def _is_possible(self) -> bool:
        """Also where a processor has come since the last look."""
        if self.possible and processors_behind(self._tracer) is not self._seen:
            self.look()
        return self.possible

    def start(self, parent: SpanContext | ApiSpan | None, trace_id: int | None, what: SpanStart) -> Live | None:
        """Starts a span that may be current. None where the tracer has to.

        Args:
            parent: A span that the sampler was asked about, or its context: the SDK's own keep what is inside one that
                they kept.
            trace_id: Of the trace whose root it is, where it has no parent.
            what: The span starts with that.
        """
        try:
            if not self._is_possible():
                return None
            name, start, attributes, links, span_id = what
            if type(parent) is Live:
                return _live((self, name, span_id or random_span_id(), parent, start, attributes, links))
            around = parent if parent is None or isinstance(parent, SpanContext) else parent.get_span_context()
            if around is not None:
                if not around.trace_flags.sampled:
                    return None
                context = _context(around, span_id)
            else:
                if trace_id is None or self._keeps_root is None or not self._keeps_root(trace_id):
                    return None
                context = _context_in(trace_id, _SAMPLED, _NO_STATE, span_id)
            return _live((self, name, context, around, start, attributes, links))
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return None

    def finish(self, span: Any, end: int, attributes: Mapping[str, Any] | None) -> bool:
        """Ends a span of `start`'s, with these attributes, if nobody has asked it for more than its context so far;
        `hand_on` does the rest."""
        ended = end, attributes
        return type(span) is Live and span.__dict__.setdefault("state", ended) is ended

    def hand_on(self, record: Record) -> bool:
        """Hands on what ended without error. False where the tracer has to. One thread at a time may call it.

        Raises:
            RuntimeError: the provider of a span that was finished was shut down.
        """
        span: Any = record.span
        if span is not None:
            return (
                type(span) is Live
                and span.ended is not None
                and (span.made_of[0]._hand_on_finished(record, span, self._ended))
            )
        try:
            if record.trace is None or not self.possible:
                return False
            if processors_behind(self._tracer) is not self._seen:  # one has come since the last look
                self.look()
                return self.hand_on(record)
            attributes = record.attributes
            if attributes:
                record.attributes = attributes = finite(attributes)
                if not _is_plain(attributes):
                    return False
            self._take(record, self._ended)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return False
        return True

    def hand_on_usual(self, waiting: deque[Record], most: int) -> tuple[int, Record | None]:
        """Hands on what `waiting` begins with, at most so many, as long as it was frequent calls that ended without an
        error, and one queue takes them.

        Returns:
            How many they were, and the first of another kind, if one was taken.
        """
        if len(self._takers) != 1 or processors_behind(self._tracer) is not self._seen:
            return 0, None
        (take,), handed, never_infinite = self._takers, 0, _NEVER_INFINITE
        try:
            while handed < most:
                try:
                    record = waiting.popleft()
                except IndexError:  # another thread may be here after the last flush
                    break
                if record.ended is None or record.error is not None or record.trace is None:
                    return handed, record
                attributes = record.attributes
                if (span := record.span) is not None:
                    state = span.__dict__.get("state") if type(span) is Live and span.made_of[0] is self else None
                    if type(state) is not tuple:
                        return handed, record
                    attributes = state[1]
                if attributes:
                    for value in attributes.values():
                        if (kind := type(value)) not in never_infinite and (kind is not float or not isfinite(value)):
                            return handed, record
                record.attributes = attributes
                record.handed_by = self
                try:
                    take(record)
                except Exception as error:  # noqa: BLE001
                    record.handed_by = None
                    self._give_up(error)
                    return handed, record
                handed += 1
        finally:
            self._ended.of_one += handed
        return handed, None

    def _hand_on_finished(self, record: Record, span: Live, count: Tally) -> bool:
        if self._is_closed():
            raise RuntimeError("The provider was shut down.")
        ended = span.ended
        assert ended is not None
        attributes = finite(ended[1]) if ended[1] else None
        if self._is_possible() and _is_plain(attributes):
            record.attributes = attributes
            try:
                self._take(record, count)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
            else:
                return True
        self._tracer.span_processor.on_end(readable_of(span.behind()))
        return True

    def _take(self, record: Record, count: Tally) -> None:
        takers = self._takers
        if takers and record.trace is not None:
            record.handed_by = self
            taken = 0
            for take in takers:
                try:
                    take(record)
                    taken += 1
                except Exception as error:
                    if not taken:
                        raise
                    self._give_up(error)  # the others have it: not once more
            count.of_one += 1
        else:
            self._tracer.span_processor.on_end(self.readable(record))
            record.handed_by = self

    @property
    def resource(self) -> Resource:
        """Of its spans."""
        resource: Resource = self._tracer.resource
        return resource

    @property
    def scope(self) -> Any:
        """The instrumentation scope of its spans."""
        return self._scope

    def readable(self, record: Record) -> ReadableSpan:
        """The span of a record that was handed on, or is about to be."""
        links: Sequence[Link]
        if type(record.span) is Live:
            _, _, _, parent, _, _, links = record.span.made_of
            context, parent = record.span.get_span_context(), _context_of(parent)
        else:
            assert record.trace is not None
            assert record.parent is not None
            flags = _SAMPLED
            trace_id = int.from_bytes(record.trace, "big")
            context, parent = (
                _context(SpanContext(trace_id, 1, False, flags), one.span_id) for one in (record, record.parent)
            )
            links = () if record.link is None else (Link(linked(record.link), {}),)
        return ReadableSpan(
            record.name,
            context,
            parent,
            self._tracer.resource,
            record.attributes or {},
            links=links,
            start_time=record.start,
            end_time=record.end,
            instrumentation_scope=self._scope,
        )

    def make(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Mapping[str, Any] | None,
        links: Sequence[Link],
    ) -> Span:
        """A span of the SDK's, which has not started."""
        tracer = self._tracer
        return StartedSpan(
            name,
            context,
            parent,
            tracer.sampler,
            resource=tracer.resource,
            attributes=attributes,
            links=links,
            span_processor=tracer.span_processor,
            limits=self._limits,
            instrumentation_scope=self._scope,
        )


_Ended = tuple[int, Mapping[str, Any] | None]
"""How a call ended whose span had been asked for nothing but its context: when, and with which attributes."""


_MadeOf = tuple["Direct", str, SpanContext | int, "SpanContext | Live | None", int, Any, Sequence[Link]]
"""Who has made a `Live`, its name, its context or no more than its id, the context of the span around it or, where that
is a `Live` too, itself, start, attributes and links."""


class Live(StartedSpan):
    """A span that is current while its call runs. Most are asked for nothing but their context. Where somebody asks for
    more, a span of the SDK's is made, and has the state of this one from then on.

    Whether that or the end comes first is decided by one `setdefault`: threads and signal handlers need no lock.
    """

    made_of: _MadeOf

    def get_span_context(self) -> SpanContext:
        own = vars(self)
        context: SpanContext | None = own.get(CONTEXT)
        if context is None:
            _, _, made, parent, _, _, _ = own["made_of"]
            made = made if isinstance(made, SpanContext) else _context(parent.get_span_context(), made)
            context = own.setdefault(CONTEXT, made)
        return context

    @property
    def ended(self) -> _Ended | None:
        """How it was finished, if it was."""
        state = vars(self).get("state")
        return state if type(state) is tuple else None

    def behind(self) -> Span:
        """The SDK's span. Of one that was finished, there is one to be read: it has ended."""
        own = vars(self)
        state = own.get("state") or own.setdefault("state", self._make(None))
        if type(state) is not tuple:
            return state
        return own.get("late") or own.setdefault("late", self._make(state))

    def _make(self, ended: _Ended | None) -> Span:
        of, name, _, parent, start, attributes, links = self.made_of
        if ended is not None:
            attributes = ended[1]
        attributes = finite(attributes) if attributes else None
        span = of.make(name, self.get_span_context(), _context_of(parent), attributes, links)
        set_times(span, start, None if ended is None else ended[0])
        return span

    def __getattr__(self, name: str) -> Any:
        if "made_of" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        if name == CONTEXT:
            return self.get_span_context()
        return getattr(self.behind(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.behind(), name, value)

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        state = vars(self).get("state")
        return state is None or (type(state) is not tuple and state.is_recording())


def _is_plain(attributes: Mapping[str, Any] | None) -> bool:
    """Whether the SDK takes these values as they are."""
    return not attributes or _PLAIN.issuperset(map(type, attributes.values()))


def _live(made_of: _MadeOf) -> Live:
    """A span that is made of these, past the SDK's constructors: they take most of the time."""
    live = object.__new__(Live)
    live.__dict__["made_of"] = made_of
    return live


def _context_of(parent: SpanContext | Live | None) -> SpanContext | None:
    return parent.get_span_context() if isinstance(parent, Live) else parent


def _context(parent: SpanContext, span_id: int | None) -> SpanContext:
    return _context_in(parent.trace_id, parent.trace_flags, parent.trace_state, span_id)


def _context_in(trace_id: int, flags: TraceFlags, state: TraceState, span_id: int | None) -> SpanContext:
    span_id = span_id or random_span_id()
    if CONTEXTS_ARE_TUPLES:
        # Its constructor, in Python, takes most of the time that a span does.
        return tuple.__new__(SpanContext, (trace_id, span_id, False, flags, state, True))
    return SpanContext(trace_id, span_id, False, flags, state)


def _has_room(limits: Any) -> bool:
    """Whether they cut nothing off that we record."""
    return limits.max_span_attribute_length is None and all(
        number is None or number >= 16 for number in (limits.max_span_attributes, limits.max_links)
    )
