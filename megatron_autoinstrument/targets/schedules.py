"""megatron/core/pipeline_parallel/schedules.py: the forward-backward pass, an evaluation's step, and microbatches.

Where the whole pass is a CUDA graph (full_cuda_graph.py, core 0.14 and later), a replay takes its place and nothing
inside it is seen; its capture, which computes nothing, is not shown as a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_autoinstrument import torch_state
from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.semconv import FORWARD_ONLY
from megatron_autoinstrument.spans import LIVE, RECORDER, Record, kind_of, span

_MODULE = "megatron.core.pipeline_parallel.schedules"
_CAPTURE = (None, None)
_PASSES = ("megatron.forward_backward", "megatron.evaluate.step")


class Pass:
    """A schedule's run, as far as the receives inside it need to know it."""

    __slots__ = ("interleaved", "num_microbatches", "received")

    def __init__(self, interleaved: bool, num_microbatches: int) -> None:
        self.interleaved = interleaved
        self.num_microbatches = num_microbatches
        self.received = 0  # calls of recv_forward so far


running: Pass | None = None
"""The run of a schedule that is going on."""


def _schedule(schedule: str, original: Function, groups: frozenset[str]) -> Hook:
    """The pass of an iteration; inside `megatron.evaluate`, that evaluation's step."""
    interleaved = schedule.endswith("_with_interleaving")
    is_capturing = torch_state.is_capturing()
    iteration_kind = kind_of("megatron.forward_backward", LIVE, groups)
    evaluation_kind = kind_of("megatron.evaluate.step", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record | None, Pass | None] | None:
        global running
        if is_capturing():
            RECORDER.mute(True)
            return _CAPTURE
        # Every version takes these by keyword alone.
        num_microbatches = kwargs["num_microbatches"]
        record: Record | None = None
        if (current := RECORDER.current) is not None and current.name == "megatron.evaluate":
            if kwargs.get("collect_non_loss_data"):
                return None  # one more pass after the last step, on the last rank alone
            record = RECORDER.begin("megatron.evaluate.step", evaluation_kind)
        elif current is None or current.name not in _PASSES:  # else this is the wrapper's own run of it
            attributes = {"megatron.num_microbatches": num_microbatches}
            if kwargs.get("forward_only"):
                attributes[FORWARD_ONLY] = True
            record = RECORDER.begin("megatron.forward_backward", iteration_kind, attributes)
        outer, running = running, Pass(interleaved, num_microbatches)
        return record, outer

    def end(token: tuple[Record | None, Pass | None], result: Any, error: BaseException | None) -> None:
        global running
        if token is _CAPTURE:
            RECORDER.mute(False)
            return
        record, running = token
        if record is not None:
            RECORDER.end(record, error)

    return Hook(begin, end)


_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)

SEAMS = (
    *(
        Seam(module, path, {"forward_backward", "evaluate", "communication"}, partial(_schedule, path))
        for module, path in (
            *((_MODULE, path) for path in _SCHEDULES),
            ("megatron.core.full_cuda_graph", "FullCudaGraphWrapper.__call__"),
        )
    ),
    Seam(
        _MODULE,
        "forward_step",
        {"microbatch"},
        span("megatron.microbatch.forward", given={"megatron.microbatch_id": "current_microbatch"}),
    ),
    *(
        Seam(_MODULE, path, {"microbatch"}, span("megatron.microbatch.backward"), optional=path != "backward_step")
        for path in ("backward_step", "backward_step_multimodule")  # the latter from core 0.17 on
    ),
)
