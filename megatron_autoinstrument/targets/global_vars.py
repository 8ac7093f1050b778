"""megatron/training/global_vars.py and what else Megatron knows of the run. Read, not patched."""

from __future__ import annotations

import sys
from typing import Any


def args() -> Any | None:
    """Megatron's arguments, or None before they are parsed and where there is no `megatron.training`."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def arg(name: str) -> Any | None:
    """The argument `name`, or None."""
    return getattr(args(), name, None)


def start_time() -> float | None:
    """The run's start, in seconds since the epoch, which Megatron has made the same on every rank by the time it
    builds the model; None where there is no `megatron.training`.

    Where `_LEGACY_TRAIN_START_TIME` exists, that is the reduced one and `_TRAIN_START_TIME` differs per rank.
    """
    module = sys.modules.get("megatron.training.training")
    return getattr(module, "_LEGACY_TRAIN_START_TIME", getattr(module, "_TRAIN_START_TIME", None))
