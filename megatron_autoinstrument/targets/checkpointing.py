"""megatron/training/checkpointing.py: saving and loading a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.semconv import ASYNC, METADATA_ONLY
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.megatron.patching import Arguments, Seam
from megatron_autoinstrument.recording.hooks import span

_MODULE = "megatron.training.checkpointing"


def _asynchronous(args: Arguments, kwargs: Mapping[str, Any]) -> bool | None:
    return True if state.arg("async_save") else None


_SAVE, _LOAD = "megatron.save_checkpoint", "megatron.load_checkpoint"
_WRITE = span("megatron.save_checkpoint.io_write", live=True, within=_SAVE)

SEAMS = (
    Seam(
        _MODULE,
        "save_checkpoint",
        {"checkpoint"},
        span(_SAVE, live=True, given={"megatron.iteration": "iteration", ASYNC: _asynchronous}),
    ),
    # Loading calls it too.
    Seam(
        _MODULE,
        "generate_state_dict",
        {"checkpoint"},
        span("megatron.save_checkpoint.state_dict", live=True, within=_SAVE),
    ),
    # `torch` and `torch_dcp` checkpoints; those of `torch_dist` are written in serialization.py.
    Seam(_MODULE, "torch.save", {"checkpoint"}, _WRITE, home="torch.serialization"),
    Seam(
        _MODULE,
        "torch.distributed.checkpoint.save",
        {"checkpoint"},
        _WRITE,
        home="torch.distributed.checkpoint.state_dict_saver",
    ),
    Seam(_MODULE, "load_checkpoint", {"load_checkpoint"}, span(_LOAD, live=True)),
    # Called for the common state first, then for the tensors; outside of a load, for the arguments in a checkpoint.
    Seam(
        _MODULE,
        "_load_base_checkpoint",
        {"load_checkpoint"},
        span("megatron.load_checkpoint.io_read", live=True, within=_LOAD, given={METADATA_ONLY: "rank0"}),
    ),
)
