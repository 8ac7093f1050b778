"""megatron/core/timers.py: the time of the log interval, as Megatron reads it. Asking for it would reset it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.groups import METRICS
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.recorder import Recorder


def _elapsed(original: Function, recorder: Recorder) -> Hook:
    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        interval = recorder.run.logging
        return interval if interval is not None and args[0].name == "interval-time" else None

    def end(interval: Any, result: Any, error: BaseException | None) -> None:
        interval.elapsed_s = result

    return Hook(begin, end)


SEAMS = (Seam("megatron.core.timers", "Timer.elapsed", {METRICS}, _elapsed),)
