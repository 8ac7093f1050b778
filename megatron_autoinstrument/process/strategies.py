"""Which ranks record and export, and which sampler a rank's provider gets: by name, the user's own among them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from megatron_autoinstrument.common.registry import Registry
from megatron_autoinstrument.process import store
from megatron_autoinstrument.process.ranks import Known, Rank, current, look, place_on_node

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.sampling import Sampler


class Settings(Protocol):
    """The settings that decide."""

    @property
    def rank_strategy(self) -> str:
        """The name of a rank strategy."""

    @property
    def export_rank(self) -> int:
        """The rank of `single_rank`; -1 is the last."""

    @property
    def export_sample_rate(self) -> float:
        """The share of ranks of `sampled`, from 0 to 1."""


def _single_rank(place: Rank, settings: Settings) -> bool:
    last = place.world_size - 1
    return place.rank == (settings.export_rank if 0 <= settings.export_rank <= last else last)


def sampled(place: Rank, settings: Settings) -> bool:
    """Whether `place` is among the share of ranks that MEGATRON_OTEL_EXPORT_SAMPLE_RATE names."""
    # Multiples of the golden ratio: any rate is met evenly, and never by the same local rank of every node.
    return place.rank * 0.6180339887498949 % 1.0 < settings.export_sample_rate


RANK_STRATEGIES: Registry[Callable[[Rank, Settings], bool]] = Registry(
    "megatron_autoinstrument_rank_strategy",
    {
        "single_rank": _single_rank,
        "all_ranks": lambda place, settings: True,
        "sampled": sampled,
        "first_rank_per_node": lambda place, settings: place.local_rank == 0,
    },
)


def register_rank_strategy(name: str, strategy: Callable[[Rank, Settings], bool]) -> None:
    """Makes `strategy` available under `name` to MEGATRON_OTEL_RANK_STRATEGY. An installed package does the same by an
    entry point `name` in the group `megatron_autoinstrument_rank_strategy`.

    Args:
        name: What the variable will say.
        strategy: Tells whether a rank records and exports; it must answer alike wherever it is asked about a rank.

    Raises:
        ValueError: the name is taken.
    """
    RANK_STRATEGIES.register(name, strategy)


def records(rank: int, settings: Settings) -> bool:
    """Whether the rank of that number is known to record and export under `settings`'s rank strategy, were its settings
    this process's. Where its number on its node can't be known, it doesn't count for a strategy that asks for that."""
    place = current()
    return exports(_other(rank, place, _per_node(place)), settings)


def is_first(place: Rank, settings: Settings) -> bool:
    """Whether `place` is the one that speaks for all that record: the first of them, as far as they are known."""
    per_node = _per_node(place)
    return not any(exports(_other(rank, place, per_node), settings) for rank in range(place.rank))


def _per_node(place: Rank) -> int | None:
    found = place_on_node(place)
    return found[1] if found is not None else None


def _other(rank: int, place: Rank, per_node: int | None) -> Rank:
    return Rank(rank, place.world_size, rank % per_node if per_node else None)


def exports(place: Rank, settings: Settings) -> bool:
    """Whether `place` records and exports under `settings`'s rank strategy."""
    return bool(RANK_STRATEGIES.get(settings.rank_strategy)(place, settings))


_BY_RANK = ("single_rank", "all_ranks", "sampled")  # the strategies that don't ask for the local rank


def chosen(settings: Settings, last: bool = False) -> bool:
    """Whether this process records and exports, as far as that can be known now. Where nobody tells its number on its
    node, and `settings`'s strategy asks for that, the processes of a node draw numbers once torch.distributed is
    initialised; before that, each may be the first.

    Args:
        last: Whether it won't be asked again.
    """
    place, known = look()
    if known is Known.GUESSED:
        return True
    if settings.rank_strategy not in _BY_RANK and place.world_size > 1:
        found = place_on_node(place)
        number = found[0] if found is not None else store.number_on_node()
        if number is None:
            number = place.rank if last or store.is_up() else 0
        place = place._replace(local_rank=number)
    return exports(place, settings)


def _rank_aware(place: Rank, settings: Settings) -> Sampler:
    """Everything of a rank, or nothing, the same ranks as the rank strategy `sampled` has."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

    return ALWAYS_ON if sampled(place, settings) else ALWAYS_OFF


SAMPLING_STRATEGIES: Registry[Callable[[Rank, Settings], Sampler]] = Registry(
    "megatron_autoinstrument_sampling_strategy", {"rank_aware": _rank_aware}
)


def register_sampling_strategy(name: str, strategy: Callable[[Rank, Settings], Sampler]) -> None:
    """Makes `strategy` available under `name` to MEGATRON_OTEL_SAMPLING_STRATEGY. An installed package does the same by
    an entry point `name` in the group `megatron_autoinstrument_sampling_strategy`.

    Args:
        name: What the variable will say.
        strategy: Makes a rank's sampler.

    Raises:
        ValueError: the name is taken.
    """
    SAMPLING_STRATEGIES.register(name, strategy)
