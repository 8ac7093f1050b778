"""megatron/training/one_logger_utils.py: the throughput that `training_log` works out by its version's formula."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.groups import METRICS
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.recorder import Recorder


def _track_e2e_metrics(original: Function, recorder: Recorder) -> Hook:
    throughput = argument(original, "throughput")

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        if recorder.run.logging is not None:
            recorder.run.logging.tflops = throughput(args, kwargs)

    return Hook(begin)


SEAMS = (Seam("megatron.training.one_logger_utils", "track_e2e_metrics", {METRICS}, _track_e2e_metrics),)
