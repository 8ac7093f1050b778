"""Records on their way to an exporter without a tracer, where the SDK's own parts alone would see their spans: those
cost many times what the call's record does. Whoever brings a sampler, a processor or limits of another kind gets each
span by the tracer.

Where OpenTelemetry's batch processors and OTLP exporters are all that there is, no span is made at all: the record goes
through the processor's queue, and encode.py makes its bytes when the exporter asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SynchronousMultiSpanProcessor, Tracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, TraceFlags, TraceState

from megatron_autoinstrument.common.finite import finite
from megatron_autoinstrument.common.private_random import random_span_id
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.export import encode
from megatron_autoinstrument.export.ids import PrivateIdGenerator
from megatron_autoinstrument.export.losses import Tally, exporter_of, inner_of, is_as_shipped, is_patched
from megatron_autoinstrument.export.sampling import keeps_roots, keeps_what_is_inside
from megatron_autoinstrument.recording.record import Record, linked

_logger = get_logger(__name__)

_SAMPLED, _NO_STATE = TraceFlags(TraceFlags.SAMPLED), TraceState()
_PLAIN = frozenset({bool, int, float, str})  # attribute values that the SDK takes as they are
_SURE = _PLAIN - {float}  # those of them that are finite


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
        self._taker: Callable[[Any], None] | None = None  # the only one
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
        self._takers, self._taker = takers, takers[0] if len(takers) == 1 else None
        self.possible = possible

    def _queues(self) -> tuple[Callable[[Any], None], ...]:
        """Where only batch processors that export by OTLP would see a span: what they take one by."""
        processors = [one for one in self._seen if type(one) is not self._ours]
        for one in processors:
            inner = inner_of(one)
            takes = [BatchSpanProcessor.on_end] + ([type(inner).emit] if inner is not one else [])
            if type(one) is not BatchSpanProcessor or not all(map(is_as_shipped, takes)):
                return ()
            if is_patched(one) or is_patched(inner) or not encode.encodes_for(exporter_of(one)):
                return ()
        return tuple(_taker(one) for one in processors)

    def _give_up(self, error: Exception) -> None:
        """This SDK is another than those that are known: every span is the tracer's from here on, in this process."""
        global _given_up
        self.possible, self._takers, self._taker = False, (), None
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
        self._seen = getattr(tracer.span_processor, "_span_processors", None)  # first: more may come meanwhile
        if type(tracer.resource) is Resource:
            tracer.resource = HashedOnce(tracer.resource)
        self._scope, self._limits = tracer._instrumentation_scope, tracer._span_limits
        self._keeps_root = keeps_roots(tracer.sampler)
        possible = (
            type(tracer.id_generator) is PrivateIdGenerator
            and type(tracer.span_processor) is SynchronousMultiSpanProcessor
            and all(map(self._knows, tracer.span_processor._span_processors))
            and keeps_what_is_inside(tracer.sampler)
            and _has_room(self._limits)
            and getattr(tracer, "_is_enabled", lambda: True)()
            # What counts spans by itself would not count these.
            and type(getattr(tracer, "_tracer_metrics", None)).__name__ in ("NoneType", "NoOpTracerMetrics")
        )
        if possible and not self.possible:
            # Now: to find out later that the SDK's constructor is another would be at a user's call.
            outer = _live(self, SpanContext(1, 1, False, _SAMPLED), None, "sample", 1, None, ())
            _live(self, 1, outer, "sample", 1, None, ()).behind()
        return possible

    def _knows(self, processor: Any) -> bool:
        """Whether it does with a span what all of its class do, and nothing when one starts."""
        return type(processor) in self._processors and vars(processor).keys().isdisjoint(("on_start", "on_end"))

    def _is_possible(self) -> bool:
        """Also where a processor has come since the last look."""
        if self.possible and self._tracer.span_processor._span_processors is not self._seen:
            self.look()
        return self.possible

    def start(
        self,
        parent: SpanContext | trace.Span | None,
        trace_id: int | None,
        name: str,
        start: int,
        attributes: Mapping[str, Any] | None,
        links: Sequence[Link],
        span_id: int | None,
    ) -> Live | None:
        """Starts a span that may be current. None where the tracer has to.

        Args:
            parent: A span that the sampler was asked about, or its context: the SDK's own keep what is inside one that
                they kept.
            trace_id: Of the trace whose root it is, where it has no parent.
            name: Of the span.
            start: In ns since the epoch.
            attributes: Of it.
            links: Of it.
            span_id: Its id; None for a random one.
        """
        try:
            if not self.possible or (
                self._tracer.span_processor._span_processors is not self._seen and not self._is_possible()
            ):
                return None
            if type(parent) is Live:  # what `_live` does
                span = object.__new__(Live)
                vars(span)["made_of"] = (self, name, span_id or random_span_id(), parent, start, attributes, links)
                return span
            if parent is not None and not isinstance(parent, SpanContext):
                parent = parent.get_span_context()
            if parent is None:
                if trace_id is None or self._keeps_root is None or not self._keeps_root(trace_id):
                    return None
                context = _context_in(trace_id, _SAMPLED, _NO_STATE, span_id)
            elif parent.trace_flags.sampled:
                context = _context(parent, span_id)
            else:
                return None
            return _live(self, context, parent, name, start, attributes, links)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return None

    def finish(self, span: Any, end: int, attributes: Mapping[str, Any] | None) -> bool:
        """Ends a span of `start`'s, with these attributes, if nobody has asked it for more than its context so far;
        `hand_on` does the rest."""
        if type(span) is not Live:
            return False
        ended = (end, attributes)
        return vars(span).setdefault("state", ended) is ended

    def hand_on(self, record: Record) -> bool:
        """Hands on what ended without error. False where the tracer has to. One thread at a time may call it.

        Raises:
            RuntimeError: the provider of a span that was finished was shut down.
        """
        span: Any = record.span
        if span is not None:
            if type(span) is not Live:
                return False
            own = vars(span)
            ended = own.get("state")
            if type(ended) is not tuple:
                return False
            made_by: Direct = own["made_of"][0]
            return made_by._hand_on_finished(record, ended[1], self._ended)
        try:
            if record.trace is None or not self.possible:
                return False
            if self._tracer.span_processor._span_processors is not self._seen:  # one has come since the last look
                self.look()
                return self.hand_on(record)
            attributes = record.attributes
            if attributes and not _is_as_sent(attributes):
                record.attributes = attributes = finite(attributes)
                if not _is_plain(attributes):
                    return False
            if (take := self._taker) is not None:  # what `_take` does
                record.handed_by = self
                take(record)
                self._ended.of_one += 1
            else:
                self._take(record, self._ended)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return False
        return True

    def _hand_on_finished(self, record: Record, attributes: Mapping[str, Any] | None, count: Tally) -> bool:
        if self._is_closed():
            raise RuntimeError("The provider was shut down.")
        is_plain = True
        if attributes and not _is_as_sent(attributes):
            attributes = finite(attributes)
            is_plain = _is_plain(attributes)
        if is_plain and self._is_possible():
            record.attributes = attributes
            try:
                self._take(record, count)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
            else:
                return True
        span: Any = record.span
        self._tracer.span_processor.on_end(span.behind()._readable_span())
        return True

    def _take(self, record: Record, count: Tally) -> None:
        takers = self._takers
        if not takers or record.trace is None:
            self._tracer.span_processor.on_end(self.readable(record))
            record.handed_by = self
            return
        record.handed_by = self
        takers[0](record)
        for take in takers[1:]:
            try:
                take(record)
            except Exception as error:  # noqa: BLE001
                self._give_up(error)  # the others have it: not once more
        count.of_one += 1

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
        return _Started(
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


class _Started(Span):
    """The SDK wants a class of one's own to make a span without a tracer."""

    def _readable_span(self) -> ReadableSpan:
        """What is exported of it. An SDK without this method only makes it dearer."""
        span = super()._readable_span()
        # Of the SDK's bounded lists an encoder makes copies, under a lock: half of its work where they are empty.
        for name in ("_events", "_links"):
            if not getattr(span, name, True):
                with suppress(AttributeError):  # of another make
                    setattr(span, name, ())
        return span


class Live(_Started):
    """A span that is current while its call runs. Most are asked for nothing but their context. Where somebody asks for
    more, a span of the SDK's is made, and has the state of this one from then on.

    Whether that or the end comes first is decided by one `setdefault`: threads and signal handlers need no lock.
    """

    made_of: tuple[Direct, str, SpanContext | int, SpanContext | Live | None, int, Any, Sequence[Link]]
    """What made it, name, context or id, the span around it or that one's context, start, attributes and links."""

    def get_span_context(self) -> SpanContext:
        own = vars(self)
        context: SpanContext | None = own.get("_context")
        if context is None:
            context = own["made_of"][2]
            if not isinstance(context, SpanContext):
                context = _context(own["made_of"][3].get_span_context(), context)
            context = own.setdefault("_context", context)
        return context

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
        span._start_time = start
        if ended is not None:
            span._end_time = ended[0]
        return span

    def __getattr__(self, name: str) -> Any:
        if "made_of" not in vars(self):  # a copy that is being made
            raise AttributeError(name)
        if name == "_context":
            return self.get_span_context()
        return getattr(self.behind(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.behind(), name, value)

    def is_recording(self) -> bool:
        """Whether it has not ended."""
        state = vars(self).get("state")
        return state is None or (type(state) is not tuple and state.is_recording())


def _taker(processor: Any) -> Callable[[Any], None]:
    """What a batch processor takes a span by that is sampled."""
    inner = inner_of(processor)
    # Where that is all that it does with one, as it has been so far.
    is_all = set(BatchSpanProcessor.on_end.__code__.co_names) == _NAMED_BY_ON_END
    take: Callable[[Any], None] = inner.emit if is_all and inner is not processor else processor.on_end
    return take


_NAMED_BY_ON_END = {"context", "trace_flags", "sampled", "_batch_processor", "emit"}


_Ended = tuple[int, "Mapping[str, Any] | None"]
"""How a call ended whose span had been asked for nothing but its context: when, and its attributes."""


def _live(
    of: Direct,
    context: SpanContext | int,
    parent: SpanContext | Live | None,
    name: str,
    start: int,
    attributes: Mapping[str, Any] | None,
    links: Sequence[Link],
) -> Live:
    """A span that is made of these: past the SDK's constructors, which take most of the time."""
    span = object.__new__(Live)
    vars(span)["made_of"] = (of, name, context, parent, start, attributes, links)
    return span


def _context_of(parent: SpanContext | Live | None) -> SpanContext | None:
    return parent.get_span_context() if isinstance(parent, Live) else parent


def _is_as_sent(attributes: Mapping[str, Any]) -> bool:
    """Whether these are plain and finite, as nearly all are."""
    for value in attributes.values():
        kind = type(value)
        if not (isfinite(value) if kind is float else kind in _SURE):
            return False
    return True


def _is_plain(attributes: Mapping[str, Any] | None) -> bool:
    """Whether the SDK takes these values as they are."""
    return not attributes or _PLAIN.issuperset(map(type, attributes.values()))


def _context(parent: SpanContext, span_id: int | None) -> SpanContext:
    return _context_in(parent.trace_id, parent.trace_flags, parent.trace_state, span_id)


def _context_in(trace_id: int, flags: TraceFlags, state: TraceState, span_id: int | None) -> SpanContext:
    span_id = span_id or random_span_id()
    if _IS_A_TUPLE:
        # Its constructor, in Python, takes most of the time that a span does.
        return tuple.__new__(SpanContext, (trace_id, span_id, False, flags, state, True))
    return SpanContext(trace_id, span_id, False, flags, state)


def _is_a_tuple() -> bool:
    """Whether a context is nothing but a tuple of its ids, flags and state, and of whether it is valid."""
    made = SpanContext(7, 5, False, TraceFlags(1))
    try:
        fields = (7, 5, False, made.trace_flags, made.trace_state, True)
        return type(made).__mro__[1:] == (tuple, object) and tuple(made) == fields and made.is_valid
    except Exception:  # noqa: BLE001
        return False


_IS_A_TUPLE = _is_a_tuple()


def _has_room(limits: Any) -> bool:
    """Whether they cut nothing off that we record."""
    return limits.max_span_attribute_length is None and all(
        number is None or number >= 16 for number in (limits.max_span_attributes, limits.max_links)
    )
