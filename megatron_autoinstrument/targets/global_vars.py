"""megatron/training/global_vars.py: the moment when Megatron's arguments are known."""

from __future__ import annotations

from typing import Any

from megatron_autoinstrument.common.groups import FLAGS
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.megatron.patching import Function, Hook, Seam
from megatron_autoinstrument.recording.recorder import Recorder


def tells(original: Function, recorder: Recorder) -> Hook:
    """Tells the recorder that this process's place is known, after a function that each rank runs once."""

    def end(token: Any, result: Any, error: BaseException | None) -> None:
        if error is None:
            recorder.when_arguments_known(state.args())

    return Hook(lambda args, kwargs: True, end)


SEAMS = (Seam("megatron.training.global_vars", "set_args", {FLAGS}, tells),)
