"""Samplers by name, for providers of ours: MEGATRON_OTEL_SAMPLING_STRATEGY."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

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
