"""megatron/core/rerun_state_machine.py: the wait for a batch. All of Megatron's data iterators are of this class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.recorder import span


def _next(original: Function, groups: frozenset[str]) -> Hook:
    hook = span("megatron.data_loading")(original, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        if args[0].replaying:
            return None  # a batch that it has kept, for an iteration that is run again
        return hook.begin(args, kwargs)

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        hook.end(record, result, None if isinstance(error, StopIteration) else error)  # the end of the data is no fault

    return Hook(begin, end)


SEAMS = (Seam("megatron.core.rerun_state_machine", "RerunDataIterator.__next__", {"data_loading"}, _next),)
