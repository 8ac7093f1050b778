"""Which trace a span belongs to, and ids that every rank works out alike, so that ranks can name each other's spans
without a byte between them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

Key = tuple[Any, ...]
"""(trace id, global rank, what, …): a span, or where it is one of several alike, their series."""

Identity = tuple[Key, int]
"""A span: its key, and its number in the series."""


def trace_id(*parts: Any) -> int:
    """The trace id that belongs to `parts`: ints, floats, strings and tuples of them."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=16).digest(), "big") or 1


# Odd, so that no two numbers of a series meet, and large, so that ids look like any others.
_STRIDE = 0x9E3779B97F4A7C15


@lru_cache(256)
def _first_id(key: Key) -> int:
    """Of a series: one for each kind of call in a pass, of this rank and of those that it links to."""
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=8).digest(), "big")


def span_id(identity: Identity) -> int:
    """The span id that belongs to `identity`."""
    key, number = identity
    return (_first_id(key) + number * _STRIDE) % (1 << 64) or 1


class Traces(NamedTuple):
    """The traces of one run of Megatron's `pretrain`, as this rank sees them."""

    key: str
    """Of the run, the same on every rank, and another one for each launch, restart and run in a process."""
    rank: int
    per_step: bool
    """Whether each step is a trace of its own."""
    run: int
    """The trace of what belongs to no step."""
    is_recorded: Callable[[int], bool] = lambda rank: False
    """Whether another rank of this run records, as far as its settings are this rank's."""

    def of_step(self, iteration: int, rewinds: int) -> int:
        """The trace of a step; `rewinds` tells apart the times that a run goes back to an earlier iteration."""
        return trace_id(self.key, iteration, rewinds) if self.per_step else self.run
