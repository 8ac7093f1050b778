"""megatron/core/dist_checkpointing/serialization.py: the writing of a distributed checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.semconv import ASYNC
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.hooks import span
from megatron_autoinstrument.recording.recorder import Recorder


def _save(original: Function, recorder: Recorder) -> Hook:
    asynchronous = argument(original, "async_sharded_save")

    def launched(args: Arguments, kwargs: Mapping[str, Any]) -> bool | None:
        """True where the call plans and stages, and leaves the writing to another process."""
        return True if asynchronous(args, kwargs) else None

    return span(
        "megatron.save_checkpoint.io_write", live=True, within="megatron.save_checkpoint", given={ASYNC: launched}
    )(original, recorder)


SEAMS = (Seam("megatron.core.dist_checkpointing.serialization", "save", {"checkpoint"}, _save),)
