"""megatron/training/global_vars.py and what else Megatron knows of the run. Read, not patched."""

from __future__ import annotations

import math
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


def tokens_per_iteration() -> int | None:
    """The tokens of one iteration on all ranks, counted as Megatron counts its batch."""
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    factors: list[Any] = [arg("micro_batch_size"), arg("data_parallel_size"), arg("seq_length")]
    if calculator is None or None in factors:
        return None
    return math.prod(factors) * calculator.get_num_microbatches() * (arg("gtp_weight_remat_size") or 1)


def peak_device_memory_gib() -> float | None:
    """The most device memory that was allocated at once so far, in GiB; None without a device."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda.max_memory_allocated() / 2**30 if cuda is not None and cuda.is_available() else None
