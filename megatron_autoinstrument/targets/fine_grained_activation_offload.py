"""megatron/core/pipeline_parallel/fine_grained_activation_offload.py: activations on their way to the host and back.

One span for each tensor that is copied, as in Megatron's own telemetry. Its `bulk_*` methods handle a group of
tensors, of which perhaps none is copied, and miss the tensor that backward needs before its group is reloaded. Copies
run on streams of their own: a span covers the launch.
"""

from __future__ import annotations

from megatron_autoinstrument.megatron import torch_state
from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.recording.hooks import span

SEAMS = tuple(
    Seam(
        "megatron.core.pipeline_parallel.fine_grained_activation_offload",
        f"ChunkOffloadHandler.{what}",
        {"activation_offload"},
        # Asked for anew: this is one span for each tensor that is copied, which takes far longer.
        span(f"megatron.activation.{what}", skip=lambda args, kwargs: torch_state.is_capturing()()),
    )
    for what in ("offload", "reload")
)
