"""The names that users rely on: spans, each with its group."""

from __future__ import annotations

SPAN_GROUPS: dict[str, str] = {
    "megatron.pretrain": "job",
    "megatron.train": "job",
    "megatron.model_init": "model_init",
    "megatron.load_checkpoint": "load_checkpoint",
    "megatron.load_checkpoint.io_read": "load_checkpoint",
    "megatron.train_step": "step",
    "megatron.forward_backward": "forward_backward",
    "megatron.microbatch.forward": "microbatch",
    "megatron.microbatch.backward": "microbatch",
    "megatron.layer.forward": "layer",
    "megatron.layer.self_attention": "layer",
    "megatron.layer.mlp": "layer",
    # Beyond Megatron's guide, which reserves the group: the wait for a batch.
    "megatron.data_loading": "data_loading",
    "megatron.pp.recv_forward.linked": "communication",
    "megatron.p2p.recv_forward": "communication",
    "megatron.p2p.send_forward": "communication",
    "megatron.p2p.recv_backward": "communication",
    "megatron.p2p.send_backward": "communication",
    "megatron.activation.offload": "activation_offload",
    "megatron.activation.reload": "activation_offload",
    "megatron.grad_sync.start": "communication",
    "megatron.grad_sync.finish": "communication",
    "megatron.optimizer_step": "optimizer",
    "megatron.save_checkpoint": "checkpoint",
    "megatron.save_checkpoint.state_dict": "checkpoint",
    "megatron.save_checkpoint.io_write": "checkpoint",
    # Beyond Megatron's guide: what an asynchronous save does after megatron.save_checkpoint has returned.
    "megatron.save_checkpoint.async_write": "checkpoint",
    "megatron.evaluate": "evaluate",
    "megatron.evaluate.step": "evaluate",
}

# Attributes beyond Megatron's guide.
COMBINED = "megatron.p2p.combined"
"""True on the spans of one call that both sends and receives: they share its time, which counts once."""
COMBINED_MICROBATCHES = "megatron.microbatch.combined"
"""True on the two spans of one call that runs a microbatch forward and another backward: its time counts once."""
OVERLAPPED = "megatron.p2p.overlapped"
"""True where the call returned before the transfer was done: the span covers its launch."""
SENDER_RECORDED = "megatron.p2p.sender_recorded"
"""False where the rank that sent records nothing that the link could name: it then names the step's trace alone."""
RECOMPUTED = "megatron.recomputed"
"""True on the spans of a layer's forward pass that the backward pass runs again, its activations not being kept."""
FORWARD_ONLY = "megatron.forward_only"
"""True on a forward-backward pass without a backward pass."""
ASYNC = "megatron.checkpoint.async"
"""True on an asynchronous save: its spans cover the launch, `megatron.save_checkpoint.async_write` the writing."""
FINALIZED = "megatron.checkpoint.finalized"
"""False on an asynchronous write that had not been finalized when the process ended."""
AB_OVERHEAD = "megatron.ab.overhead_percent"
"""By how much steps are longer with this package than without it; with MEGATRON_OTEL_AB, on `megatron.train`."""
AB_LOW, AB_HIGH = "megatron.ab.overhead_percent.low", "megatron.ab.overhead_percent.high"
"""The bounds of its confidence interval, which holds the truth in 95 % of cases or more."""
AB_PAIRS = "megatron.ab.pairs"
"""The pairs of blocks that were compared."""
LOSS_FINITE = "megatron.loss.finite"
"""False on a step whose loss, or the average that Megatron logs with it, is NaN or infinite: that is sent nowhere."""
GRAD_NORM_FINITE = "megatron.grad_norm.finite"
"""False where the gradient norm is, on the step and on `megatron.optimizer_step`."""
METADATA_ONLY = "megatron.checkpoint.metadata_only"
"""True on the read of a checkpoint's common state, which precedes that of its tensors."""
