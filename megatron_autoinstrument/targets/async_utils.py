"""megatron/training/async_utils.py: the part of an asynchronous save that goes on after `save_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.semconv import ASYNC
from megatron_autoinstrument.spans import RECORDER


def _schedule_async_save(original: Function, groups: frozenset[str]) -> Hook:
    """From the hand-over to the moment when Megatron has found the write done, which it looks for once an iteration:
    Megatron then calls the request's finalize functions, and ours with them."""
    request_of = argument(original, "async_request")

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        save = RECORDER.current
        if save is None or save.name != "megatron.save_checkpoint":
            return
        request = request_of(args, kwargs)
        record = RECORDER.begin_background(
            "megatron.save_checkpoint.async_write", save.parent, {**(save.attributes or {}), ASYNC: True}, save
        )
        request.add_finalize_fn(lambda: RECORDER.end_background(record))

    return Hook(begin, lambda token, result, error: None)


SEAMS = (Seam("megatron.training.async_utils", "schedule_async_save", {"checkpoint"}, _schedule_async_save),)
