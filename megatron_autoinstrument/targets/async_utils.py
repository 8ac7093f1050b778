"""megatron/training/async_utils.py: the part of an asynchronous save that goes on after `save_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.common.semconv import ASYNC
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.recorder import Recorder

_logger = get_logger(__name__)


def _finished(recorder: Recorder, writes: list[Record]) -> None:
    # Megatron calls this right before a collective: an exception here would leave the other ranks in that.
    try:
        for write in writes:
            recorder.end_background(write)
    except Exception:
        _logger.warning("The end of an asynchronous save could not be recorded.", exc_info=True)


def _schedule_async_save(original: Function, recorder: Recorder) -> Hook:
    """From the hand-over to the moment when Megatron has found the write done, which it looks for once an iteration:
    Megatron then calls the request's finalize functions, and ours with them."""
    request_of = argument(original, "async_request")

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        save = recorder.current
        if save is None or save.name != "megatron.save_checkpoint":
            return
        attributes = {**(save.attributes or {}), ASYNC: True}
        writes: list[Record] = []
        request_of(args, kwargs).add_finalize_fn(partial(_finished, recorder, writes))
        writes.append(recorder.begin_background("megatron.save_checkpoint.async_write", save.parent, attributes, save))

    return Hook(begin)


SEAMS = (Seam("megatron.training.async_utils", "schedule_async_save", {"checkpoint"}, _schedule_async_save),)
