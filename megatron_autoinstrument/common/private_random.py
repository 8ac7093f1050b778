"""Random numbers apart from Python's global generator: Megatron seeds that alike on all ranks, so that ranks would draw
the same ids, and each span would move the state that training draws from.
"""

from __future__ import annotations

import os
import random
from typing import Any


class _Random(random.Random):
    """A generator that can stand in for the module `random` as well."""

    def __getattr__(self, name: str) -> Any:
        return getattr(random, name)


GENERATOR = _Random(os.urandom(32))
os.register_at_fork(after_in_child=lambda: GENERATOR.seed(os.urandom(32)))


random_bits = GENERATOR.getrandbits
"""So many random bits. (To look it up takes longer than to draw.)"""


def random_span_id() -> int:
    """A span id: 64 bits, never 0."""
    return random_bits(64) or 1
