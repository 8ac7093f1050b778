"""megatron/core/optimizer: the optimizer's step, however the optimizers nest; the outermost is the one.

Replaying a CUDA graph of it (`--optimizer-cuda-graph`, core 0.17 on) takes its place.
"""

from __future__ import annotations

from typing import Any

from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.recording.hooks import span


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
    Seam(f"megatron.core.optimizer.{module}", path, {"optimizer"}, _STEP, looks="first")
    for module, path in (
        ("optimizer", "MixedPrecisionOptimizer.step"),
        ("optimizer", "FP32Optimizer.step"),
        ("optimizer", "ChainedOptimizer.step"),
        ("layer_wise_optimizer", "LayerWiseDistributedOptimizer.step"),  # its own in core 0.16 and 0.17
        ("optimizer_cuda_graph", "OptimizerCudaGraphWrapper.__call__"),
    )
)
