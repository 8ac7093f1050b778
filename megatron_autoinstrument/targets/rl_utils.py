"""megatron/rl/rl_utils.py: the end of a run of reinforcement learning."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NoReturn

from megatron_autoinstrument.common.groups import GROUPS, LOGS, METRICS
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.recorder import Recorder


def _rl_inference_interface_shutdown(original: Function, recorder: Recorder) -> Hook:
    """From core 0.17 on it leaves by `os._exit`, which runs nobody's exit: ours goes right before, when no rank waits
    for another any more."""

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        leave = os._exit

        def leave_after_ours(status: int) -> NoReturn:
            try:
                recorder.exit()
            finally:
                leave(status)

        os._exit = leave_after_ours
        return leave

    def end(leave: Any, result: Any, error: BaseException | None) -> None:
        os._exit = leave

    return Hook(begin, end)


SEAMS = (
    Seam(
        "megatron.rl.rl_utils",
        "rl_inference_interface_shutdown",
        frozenset(GROUPS) | {METRICS, LOGS},
        _rl_inference_interface_shutdown,
        optional=True,
    ),
)
