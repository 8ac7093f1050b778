"""What is wrapped: one module per file of Megatron, named after it, each with its own table of seams."""

from __future__ import annotations

from megatron_autoinstrument.patching import Seam
from megatron_autoinstrument.targets import (
    async_utils,
    checkpointing,
    distributed_data_parallel,
    fine_grained_activation_offload,
    mamba_layer,
    optimizer,
    p2p_communication,
    param_and_grad_buffer,
    rerun_state_machine,
    schedules,
    serialization,
    training,
    transformer_layer,
)

SEAMS: tuple[Seam, ...] = (
    *training.SEAMS,
    *schedules.SEAMS,
    *p2p_communication.SEAMS,
    *distributed_data_parallel.SEAMS,
    *param_and_grad_buffer.SEAMS,
    *optimizer.SEAMS,
    *checkpointing.SEAMS,
    *serialization.SEAMS,
    *async_utils.SEAMS,
    *transformer_layer.SEAMS,
    *mamba_layer.SEAMS,
    *fine_grained_activation_offload.SEAMS,
    *rerun_state_machine.SEAMS,
)
