"""megatron/core/optimizer/optimizer.py: the optimizer's step. `ChainedOptimizer` holds others; its step is the one."""

from __future__ import annotations

from typing import Any

from megatron_autoinstrument.patching import Seam
from megatron_autoinstrument.spans import span


def _outcome(result: Any) -> dict[str, Any]:
    """From (update_successful, grad_norm, num_zeros_in_grad). A tensor is left alone: reading it would wait for the
    device."""
    attributes: dict[str, Any] = {}
    if isinstance(result, tuple) and len(result) >= 2:
        successful, grad_norm = result[:2]
        if isinstance(successful, bool):
            attributes["megatron.update_successful"] = successful
        if isinstance(grad_norm, (int, float)):
            attributes["megatron.grad_norm"] = float(grad_norm)
    return attributes


_STEP = span("megatron.optimizer_step", live=True, returned=_outcome)

SEAMS = tuple(
    Seam("megatron.core.optimizer.optimizer", f"{name}.step", {"optimizer"}, _STEP)
    for name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
)
