"""What is wrapped: one module per file of Megatron, named after it, each with its own table of seams."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron_autoinstrument.megatron.patching import Seam

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
    "training_log",
    "transformer_layer",
)

SEAMS: tuple[Seam, ...]
"""All of them. Only now are the modules imported, and OpenTelemetry with them: to teach flags takes neither."""


def __getattr__(name: str) -> Any:
    if name != "SEAMS":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    global SEAMS
    SEAMS = tuple(seam for target in _TARGETS for seam in import_module(f"{__name__}.{target}").SEAMS)
    return SEAMS
