"""What is known of somebody's sampler: whether it must be asked about each span."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def keeps_what_is_inside(sampler: Any) -> bool:
    """Whether it is known to keep everything inside a span that it kept: else it is asked about each span."""
    return _decides_alike(sampler, True)


def drops_what_is_inside(sampler: Any) -> bool:
    """Whether it is known to drop everything inside a span that it dropped."""
    return _decides_alike(sampler, False)


def keeps_roots(sampler: Any) -> Callable[[int], bool] | None:
    """What says whether a span without a parent is kept, by its trace's id; None where a sampler of somebody's own
    decides on that."""
    from opentelemetry.sdk.trace import sampling as sdk

    if type(sampler).__module__ == sdk.__name__ and isinstance(sampler, sdk.ParentBased):
        sampler = getattr(sampler, "_root", None)
    if type(sampler).__module__ != sdk.__name__:
        return None
    if isinstance(sampler, sdk.StaticSampler):
        kept = sampler.should_sample(None, 1, "").decision is sdk.Decision.RECORD_AND_SAMPLE
        return lambda trace_id: kept
    if isinstance(sampler, sdk.TraceIdRatioBased):
        return lambda trace_id: sampler.should_sample(None, trace_id, "").decision is sdk.Decision.RECORD_AND_SAMPLE
    return None


def _decides_alike(sampler: Any, kept: bool) -> bool:
    from opentelemetry.sdk.trace import sampling as sdk

    if type(sampler).__module__ != sdk.__name__:
        return False
    if isinstance(sampler, sdk.ParentBased):
        # It asks this part of it about what is inside a span of this process.
        part = getattr(sampler, "_local_parent_sampled" if kept else "_local_parent_not_sampled", None)
        wanted = sdk.Decision.RECORD_AND_SAMPLE if kept else sdk.Decision.DROP
        if type(part).__module__ != sdk.__name__ or not isinstance(part, sdk.StaticSampler):
            return False
        return part.should_sample(None, 1, "").decision is wanted
    return isinstance(sampler, (sdk.StaticSampler, sdk.TraceIdRatioBased))  # these look at the trace alone
