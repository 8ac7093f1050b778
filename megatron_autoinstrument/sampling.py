"""Samplers: by name, for providers of ours (MEGATRON_OTEL_SAMPLING_STRATEGY), and what is known of somebody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_autoinstrument import ranks
from megatron_autoinstrument.registry import Registry

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler

    from megatron_autoinstrument.config import Config


def _rank_aware(place: ranks.Rank, config: Config) -> Sampler:
    """Everything of a rank, or nothing, the same ranks as the rank strategy `sampled` has."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    return ALWAYS_ON if ranks.sampled(place, config) else ALWAYS_OFF


STRATEGIES: Registry[Callable[[ranks.Rank, Config], Sampler]] = Registry(
    "megatron_autoinstrument_sampling_strategy", {"rank_aware": _rank_aware}
)


def register_sampling_strategy(name: str, strategy: Callable[[ranks.Rank, Config], Sampler]) -> None:
    """Makes `strategy` available under `name` to MEGATRON_OTEL_SAMPLING_STRATEGY. An installed package does the same by
    an entry point `name` in the group `megatron_autoinstrument_sampling_strategy`.

    Args:
        name: What the variable will say.
        strategy: Makes a rank's sampler.

    Raises:
        ValueError: the name is taken.
    """
    STRATEGIES.register(name, strategy)


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
