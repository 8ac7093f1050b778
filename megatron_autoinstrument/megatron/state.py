"""What Megatron's own modules know of the run: its arguments, its parallel groups, its batch. Nothing is imported."""

from __future__ import annotations

import math
import sys
from typing import Any

_ALWAYS = ("pipeline_model_parallel", "tensor_model_parallel", "data_parallel")
_PARALLEL = {
    **{kind: kind.replace("_model", "") for kind in _ALWAYS},
    "context_parallel": "context_parallel",
    "expert_model_parallel": "expert_parallel",
}


def args() -> Any | None:
    """Megatron's arguments, or None before they are parsed and where there is no `megatron.training`."""
    module = sys.modules.get("megatron.training.global_vars")
    return getattr(module, "_GLOBAL_ARGS", None)


def arg(name: str) -> Any | None:
    """The argument `name`, or None."""
    return getattr(args(), name, None)


def tokens_per_iteration() -> int | None:
    """The tokens of one iteration on all ranks, counted as Megatron counts its batch."""
    calculator = sys.modules.get("megatron.core.num_microbatches_calculator")
    factors: list[Any] = [arg("micro_batch_size"), arg("data_parallel_size"), arg("seq_length")]
    if calculator is None or None in factors:
        return None
    return math.prod(factors) * calculator.get_num_microbatches() * (arg("gtp_weight_remat_size") or 1)


def parallel_state() -> Any | None:
    """Megatron core's module of that name, once it knows the parallel groups."""
    state = sys.modules.get("megatron.core.parallel_state")
    return state if getattr(state, "model_parallel_is_initialized", bool)() else None


def parallel_ranks() -> dict[str, int]:
    """This rank's place in each kind of parallelism, and in context and expert parallelism where they are used."""
    state = parallel_state()
    if state is None:
        return {}
    found = {}
    for kind, attribute in _PARALLEL.items():
        rank, size = (getattr(state, f"get_{kind}_{what}", None) for what in ("rank", "world_size"))
        if rank is not None and size is not None and (kind in _ALWAYS or size() > 1):
            found[f"dl.{attribute}.rank"] = rank()
    return found


def peak_device_memory_gib() -> float | None:
    """The most device memory that was allocated at once so far, in GiB; None without a device."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda.max_memory_allocated() / 2**30 if cuda is not None and cuda.is_available() else None
