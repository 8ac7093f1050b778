"""What is wrapped: one module per file of Megatron, named after it, each with its own table of seams."""

from __future__ import annotations

from megatron_autoinstrument.patching import Seam
from megatron_autoinstrument.targets import (
    arguments,
    async_utils,
    checkpointing,
    distributed_data_parallel,
    global_vars,
    logging,
    one_logger_utils,
    optimizer,
    p2p_communication,
    param_and_grad_buffer,
    schedules,
    serialization,
    timers,
    training,
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
    *arguments.SEAMS,
    *global_vars.SEAMS,
    *logging.SEAMS,
    *timers.SEAMS,
    *one_logger_utils.SEAMS,
)
