"""What is wrapped: one module per file of Megatron, named after it, each with its own table of seams."""

from __future__ import annotations

from importlib import import_module

from megatron_autoinstrument.patching import Seam

_TARGETS = (
    "arguments",
    "async_utils",
    "checkpointing",
    "combined_1f1b",
    "distributed_data_parallel",
    "fine_grained_activation_offload",
    "global_vars",
    "logging",
    "mamba_layer",
    "one_logger_utils",
    "optimizer",
    "p2p_communication",
    "parallel_state",
    "param_and_grad_buffer",
    "rerun_state_machine",
    "rl_utils",
    "schedules",
    "serialization",
    "timers",
    "training",
    "transformer_layer",
)

SEAMS: tuple[Seam, ...] = tuple(seam for name in _TARGETS for seam in import_module(f"{__name__}.{name}").SEAMS)
