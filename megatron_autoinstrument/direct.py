"""Spans without a tracer, where the SDK's own parts alone would see them: `start_span` and `end` cost several times
what the span itself does. Whoever brings a sampler, a processor or limits of another kind gets each span by the tracer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, SynchronousMultiSpanProcessor, Tracer
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, TraceFlags

from megatron_autoinstrument.ids import PrivateIdGenerator, random_span_id
from megatron_autoinstrument.redact import get_logger
from megatron_autoinstrument.sampling import keeps_what_is_inside

_logger = get_logger(__name__)

_PLAIN = frozenset({bool, int, float, str})  # attribute values that the SDK takes as they are


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

    def __init__(self, tracer: Any, ours: type) -> None:
        """
        Args:
            tracer: The tracer.
            ours: The class of this package's own processor.
        """
        self._tracer = tracer
        self._processors = {BatchSpanProcessor, SimpleSpanProcessor, ours}
        self.possible = False
        self.look()

    def look(self) -> None:
        """Finds out whether spans may be made here: processors may be added, and a resource completed, at any time."""
        possible = False
        if type(self._tracer) is Tracer and not _given_up:
            try:
                possible = self._may()
            except Exception as error:  # noqa: BLE001
                self._give_up(error)
        self.possible = possible

    def _give_up(self, error: Exception) -> None:
        """This SDK is another than those that are known: every span is the tracer's from here on, in this process."""
        global _given_up
        self.possible = False
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
        if type(tracer.resource) is Resource:
            tracer.resource = HashedOnce(tracer.resource)
        self._scope, self._limits = tracer._instrumentation_scope, tracer._span_limits
        return (
            type(tracer.id_generator) is PrivateIdGenerator
            and type(tracer.span_processor) is SynchronousMultiSpanProcessor
            and all(map(self._knows, tracer.span_processor._span_processors))
            and keeps_what_is_inside(tracer.sampler)
            and _has_room(self._limits)
            and getattr(tracer, "_is_enabled", lambda: True)()
            # What counts spans by itself would not count these.
            and type(getattr(tracer, "_tracer_metrics", None)).__name__ in ("NoneType", "NoOpTracerMetrics")
        )

    def _knows(self, processor: Any) -> bool:
        """Whether it does with a span what all of its class do, and nothing when one starts."""
        return type(processor) in self._processors and vars(processor).keys().isdisjoint(("on_start", "on_end"))

    def start(
        self,
        parent: SpanContext,
        name: str,
        start: int,
        attributes: Mapping[str, Any] | None,
        links: Sequence[Link],
        span_id: int | None,
    ) -> Span | None:
        """Starts a span. None where the tracer has to.

        Args:
            parent: A span that the sampler was asked about: the SDK's own keep what is inside one that they kept.
            name: Of the span.
            start: In ns since the epoch.
            attributes: Of it.
            links: Of it.
            span_id: Its id; None for a random one.
        """
        if not self.possible or not parent.trace_flags.sampled:
            return None
        tracer = self._tracer
        try:
            span = _Started(
                name,
                _context(parent, span_id),
                parent,
                tracer.sampler,
                resource=tracer.resource,
                attributes=attributes,
                links=links,
                span_processor=tracer.span_processor,
                limits=self._limits,
                instrumentation_scope=self._scope,
            )
            span.start(start)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return None
        return span

    def end(
        self,
        parent: SpanContext,
        end: int,
        name: str,
        start: int,
        attributes: Mapping[str, Any] | None,
        links: Sequence[Link],
        span_id: int | None,
    ) -> SpanContext | None:
        """Hands on a span that ended without error, at `end`, and returns its context; all else is as for `start`."""
        if not self.possible or not parent.trace_flags.sampled:
            return None
        if attributes and not _PLAIN.issuperset(map(type, attributes.values())):
            return None
        tracer = self._tracer
        try:
            context = _context(parent, span_id)
            span = ReadableSpan(
                name,
                context,
                parent,
                tracer.resource,
                attributes,
                links=links,
                start_time=start,
                end_time=end,
                instrumentation_scope=self._scope,
            )
            tracer.span_processor.on_end(span)
        except Exception as error:  # noqa: BLE001
            self._give_up(error)
            return None
        return context


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


def _context(parent: SpanContext, span_id: int | None) -> SpanContext:
    span_id = span_id or random_span_id()
    if _IS_A_TUPLE:
        # Its constructor, in Python, takes most of the time that a span does.
        fields = (parent[0], span_id, False, parent[3], parent[4], True)
        return tuple.__new__(SpanContext, fields)
    return SpanContext(parent.trace_id, span_id, False, parent.trace_flags, parent.trace_state)


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
