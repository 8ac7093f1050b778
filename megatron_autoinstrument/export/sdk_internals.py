"""What this package reads of OpenTelemetry's SDK and exporters that they don't offer in public, each with the releases
that have it: "all" are 1.33 to 1.45. No other module reads any.

Where a release has it otherwise, the answer is None or False if whoever asks can do without. The rest raises
AttributeError: whoever asks tells of that, and goes the longer way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, Span, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanContext, TraceFlags

# Modules.

LOGS_API, LOGS_SDK = "opentelemetry._logs", "opentelemetry.sdk._logs"
"""Where the logs are, in all: they have no public place yet."""

# Providers.


def holders_of(provider: Any) -> list[Any] | None:
    """Its processors or readers. None where it has them in another way than those known."""
    for owner, name in (
        (multi_processor_of(provider), "_span_processors"),  # in all
        (getattr(provider, "_multi_log_record_processor", None), "_log_record_processors"),  # in all
        (getattr(provider, "_sdk_config", None), "metric_readers"),  # to 1.42
        (provider, "_metric_readers"),  # from 1.43
    ):
        if (found := getattr(owner, name, None)) is not None:
            return list(found)
    return None


def multi_processor_of(provider: Any) -> Any | None:
    """What a tracer provider flushes and shuts its processors down by: `_active_span_processor`, in all."""
    return getattr(provider, "_active_span_processor", None)


def resource_of(provider: Any) -> Any:
    """What describes where its data come from: `_resource`, and the one of `_sdk_config` for metrics, in all."""
    return getattr(*_resource_place(provider))


def set_resource(provider: Any, resource: Resource) -> None:
    """Gives it another that was made of its own: by `_update_resource` from 1.44 on, which also reaches what the
    provider has made before."""
    if hasattr(provider, "_update_resource"):
        provider._update_resource(resource)
    else:
        setattr(*_resource_place(provider), resource)


def _resource_place(provider: Any) -> tuple[Any, str]:
    return (provider._sdk_config, "resource") if hasattr(provider, "_sdk_config") else (provider, "_resource")


# Processors and readers, and what they export by.


def inner_of(holder: Any) -> Any:
    """The part that has queue and exporter: the `_batch_processor` of batch processors, from 1.34 on; else itself."""
    return getattr(holder, "_batch_processor", holder)


def exporter_of(holder: Any) -> Any | None:
    """What it exports by: `_exporter`, in all; `span_exporter` of simple span processors, and in 1.33 of batch ones."""
    inner = inner_of(holder)
    return getattr(inner, "_exporter", None) or getattr(inner, "span_exporter", None)


def queue_of(holder: Any) -> Any | None:
    """What waits in a batch processor: `_queue`, in all; in 1.33, `queue` of the one for spans."""
    inner = inner_of(holder)
    return getattr(inner, "_queue", getattr(inner, "queue", None))


def intake_of(processor: Any) -> list[Any]:
    """The functions through which a batch processor takes a span: `on_end`, and the `emit` of its inner part."""
    inner = inner_of(processor)
    return [type(processor).on_end] + ([type(inner).emit] if inner is not processor else [])


def taking(processor: BatchSpanProcessor) -> Callable[[Any], None]:
    """What takes a span that is sampled into its queue: the `emit` of its inner part, from 1.34 on, where its `on_end`
    asks for nothing but that."""
    on_end: Any = BatchSpanProcessor.on_end
    if on_end.__code__.co_names == ("context", "trace_flags", "sampled", "_batch_processor", "emit"):
        emit: Callable[[Any], None] = inner_of(processor).emit
        return emit
    return processor.on_end


QUEUE_IS_FULL = "Queue "
"""What the warning of a full queue begins with: in 1.33, and from 1.40 on; those between drop silently."""

EXPORT_METHODS = ("export", "_export", "_translate_data")
"""What an OTLP exporter may have between its call and the encoder's: all three over gRPC, in all; over HTTP no
`_translate_data`, and no `_export` in 1.45."""

# Tracers. What is read at each call is read in C.

processors_behind: Callable[[Any], tuple[Any, ...]] = attrgetter("span_processor._span_processors")
"""The processors of a tracer's provider, in all: another tuple where one has come."""


def scope_of(tracer: Any) -> Any:
    """The instrumentation scope of its spans: `_instrumentation_scope`, in all."""
    return tracer._instrumentation_scope


def limits_of(tracer: Any) -> Any:
    """What its spans are cut to: `_span_limits`, in all."""
    return tracer._span_limits


def is_enabled(tracer: Any) -> bool:
    """Whether its provider's configuration lets it make spans: `_is_enabled`, from 1.40 on."""
    return bool(getattr(tracer, "_is_enabled", lambda: True)())


def counts_spans(tracer: Any) -> bool:
    """Whether it counts the spans that it makes: by `_tracer_metrics`, in 1.40 and 1.41; from 1.42 on if asked to."""
    return type(getattr(tracer, "_tracer_metrics", None)).__name__ not in ("NoneType", "NoOpTracerMetrics")


# Spans.

CONTEXT = "_context"
"""Where a span has its context, in all."""

fields_of: Callable[[ReadableSpan], tuple[Any, ...]] = attrgetter(
    *("_context", "_parent", "_events", "_links", "_status"),
    *("_attributes", "_kind", "_name", "_start_time", "_end_time"),
)
"""What a span that ended holds, in all; its public properties make copies."""


class StartedSpan(Span):
    """A span made without a tracer, and without a start. The SDK wants a class of one's own for that."""

    def _readable_span(self) -> ReadableSpan:
        """What is exported of it, in all. An SDK without this method only makes it dearer."""
        span = super()._readable_span()
        # Of the SDK's bounded lists an encoder makes copies, under a lock: half of its work where they are empty.
        for name in ("_events", "_links"):
            if not getattr(span, name, True):
                with suppress(AttributeError):  # of another make
                    setattr(span, name, ())
        return span


def readable_of(span: Span) -> ReadableSpan:
    """What is exported of a span of the SDK's: `_readable_span`, in all."""
    return span._readable_span()


def set_times(span: Span, start: int, end: int | None) -> None:
    """Has a span start, and end if `end` is given, and tells no processor: `_start_time` and `_end_time`, in all."""
    span._start_time = start
    if end is not None:
        span._end_time = end


def _contexts_are_tuples() -> bool:
    made = SpanContext(7, 5, False, TraceFlags(1))
    try:
        fields = (7, 5, False, made.trace_flags, made.trace_state, True)
        return type(made).__mro__[1:] == (tuple, object) and tuple(made) == fields and made.is_valid
    except Exception:  # noqa: BLE001
        return False


CONTEXTS_ARE_TUPLES = _contexts_are_tuples()
"""Whether a context is nothing but a tuple of its ids, flags and state, and of whether it is valid: in all."""

# Samplers: whether they must be asked about each span.


def keeps_what_is_inside(sampler: Any) -> bool:
    """Whether it is known to keep everything inside a span that it kept: else it is asked about each span."""
    return _decides_alike(sampler, True)


def drops_what_is_inside(sampler: Any) -> bool:
    """Whether it is known to drop everything inside a span that it dropped."""
    return _decides_alike(sampler, False)


def keeps_roots(sampler: Any) -> Callable[[int], bool] | None:
    """What says whether a span without a parent is kept, by its trace's id; None where a sampler of somebody's own
    decides on that. A sampler by parent asks its `_root`, in all."""
    if _is_the_sdks(sampler) and isinstance(sampler, sampling.ParentBased):
        sampler = getattr(sampler, "_root", None)
    if not _is_the_sdks(sampler):
        return None
    if isinstance(sampler, sampling.StaticSampler):
        kept = _decision(sampler, 1) is sampling.Decision.RECORD_AND_SAMPLE
        return lambda trace_id: kept
    if isinstance(sampler, sampling.TraceIdRatioBased):
        return lambda trace_id: _decision(sampler, trace_id) is sampling.Decision.RECORD_AND_SAMPLE
    return None


def _decides_alike(sampler: Any, kept: bool) -> bool:
    """Whether it is known to decide on what is inside a span as it did on that. A sampler by parent asks its
    `_local_parent_sampled` or `_local_parent_not_sampled` about that in this process, in all."""
    if not _is_the_sdks(sampler):
        return False
    if isinstance(sampler, sampling.ParentBased):
        part = getattr(sampler, "_local_parent_sampled" if kept else "_local_parent_not_sampled", None)
        wanted = sampling.Decision.RECORD_AND_SAMPLE if kept else sampling.Decision.DROP
        return _is_the_sdks(part) and isinstance(part, sampling.StaticSampler) and _decision(part, 1) is wanted
    # These look at the trace alone.
    return isinstance(sampler, (sampling.StaticSampler, sampling.TraceIdRatioBased))


def _is_the_sdks(sampler: Any) -> bool:
    return type(sampler).__module__ == sampling.__name__


def _decision(sampler: sampling.Sampler, trace_id: int) -> sampling.Decision:
    return sampler.should_sample(None, trace_id, "").decision
