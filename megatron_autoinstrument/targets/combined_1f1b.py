"""megatron/core/pipeline_parallel/combined_1f1b.py: `--overlap-moe-expert-parallel-comm`, in core 0.14 and later.

One call runs a microbatch forward and another one backward, each while the other communicates: one span for each, with
the call's times. What runs inside is shown in the forward one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.semconv import COMBINED_MICROBATCHES
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.targets import schedules


def _combined(original: Function, recorder: Recorder) -> Hook:
    forward_model, backward_model, microbatch = (
        argument(original, name) for name in ("f_model", "b_model", "current_microbatch")
    )

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> list[Record] | None:
        models = {"forward": forward_model(args, kwargs), "backward": backward_model(args, kwargs)}
        directions = [what for what, model in models.items() if model is not None]
        identities = [schedules.identity_of_next(recorder.run, what) for what in directions]
        attributes = {COMBINED_MICROBATCHES: True} if len(directions) > 1 else {}
        names = [f"megatron.microbatch.{what}" for what in directions]
        records = recorder.begin_together(names, attributes, identities) if names else None
        if records is not None and (number := microbatch(args, kwargs)) is not None:
            records[0].attributes = {**attributes, "megatron.microbatch_id": number}
        return records

    def end(records: list[Record], result: Any, error: BaseException | None) -> None:
        recorder.end_together(records, error)

    return Hook(begin, end)


SEAMS = (
    Seam(
        "megatron.core.pipeline_parallel.combined_1f1b",
        "combined_forward_backward_step",
        {"microbatch"},
        _combined,
        lost=schedules.lose_count,
    ),
)
