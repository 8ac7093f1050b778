"""megatron/core/pipeline_parallel/schedules.py: the forward-backward pass, an evaluation's step, and microbatches.

Where the whole pass is a CUDA graph (full_cuda_graph.py, core 0.14 and later), a replay takes its place and nothing
inside it is seen; its capture, which computes nothing, is not shown as a pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_autoinstrument.common.semconv import FORWARD_ONLY
from megatron_autoinstrument.megatron import torch_state
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.hooks import kind_of
from megatron_autoinstrument.recording.record import LIVE, Record
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.run import Pass, Run
from megatron_autoinstrument.recording.traces import Identity

_MODULE = "megatron.core.pipeline_parallel.schedules"
_CAPTURE = (None, None)
_PASSES = ("megatron.forward_backward", "megatron.evaluate.step")


def lose_count(recorder: Recorder) -> None:
    """Some calls are not seen from here on: what a receive gets can't be told by its number."""
    recorder.all_counted = False


def _pass(recorder: Recorder, interleaved: bool, kwargs: Mapping[str, Any], number: int | None) -> Pass:
    """The run of a schedule that is called with `kwargs`, which every version takes by keyword alone."""
    model: Any = kwargs.get("model")
    chunks = len(model) if interleaved and isinstance(model, list) else 1
    config = getattr(model[0], "config", None) if chunks > 1 else None
    scope = recorder.scope()
    return Pass(
        scope,
        recorder.run.number_of_pass(scope) if number is None else number,
        kwargs["num_microbatches"],
        interleaved,
        chunks,
        getattr(config, "microbatch_group_size_per_vp_stage", None),
        # An encoder-decoder model has two tensors per microbatch and direction, a multi-module one any number.
        single=kwargs.get("decoder_seq_length") is None
        # Another class of communicator may send and receive by calls of its own.
        and type(kwargs.get("p2p_communicator")).__name__ in ("P2PCommunicator", "NoneType"),
    )


def _microbatch(what: str, original: Function, recorder: Recorder) -> Hook:
    name = f"megatron.microbatch.{what}"
    microbatch = argument(original, "current_microbatch")

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        number = microbatch(args, kwargs)
        attributes = None if number is None else {"megatron.microbatch_id": number}
        return recorder.begin_frequent(name, attributes, identity_of_next(recorder.run, what))

    return Hook(begin, recorder.end_call)


def identity_of_next(run: Run, what: str) -> Identity | None:
    """Of the microbatch that goes "forward" or "backward" now."""
    passing, traces = run.passing, run.traces
    if passing is None:
        return None
    number = passing.next(what)
    key = None if traces is None else passing.key(traces.rank, what)
    return None if key is None else (key, number)


def _schedule(schedule: str, original: Function, recorder: Recorder) -> Hook:
    """The pass of an iteration; inside `megatron.evaluate`, that evaluation's step."""
    interleaved = schedule.endswith("_with_interleaving")
    is_capturing = torch_state.is_capturing()
    iteration_kind = kind_of("megatron.forward_backward", LIVE, recorder.groups)
    evaluation_kind = kind_of("megatron.evaluate.step", LIVE, recorder.groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record | None, Pass | None] | None:
        if recorder.muted:
            return None
        if is_capturing():
            recorder.mute(True)
            return _CAPTURE
        record: Record | None = None
        current, run = recorder.current, recorder.run
        evaluating = current is not None and current.name == "megatron.evaluate"
        if evaluating and kwargs.get("collect_non_loss_data"):
            return None  # one more pass after the last step, on the last rank alone
        # FullCudaGraphWrapper's own run of a schedule is the same pass.
        around = run.passing if current is not None and current.name in _PASSES else None
        this = _pass(recorder, interleaved, kwargs, None if around is None else around.number)
        if evaluating:
            traces = run.traces
            key = None if traces is None else this.key(traces.rank, "megatron.evaluate.step")
            record = recorder.begin("megatron.evaluate.step", evaluation_kind, None, None if key is None else (key, 0))
        elif around is None:
            attributes = {"megatron.num_microbatches": this.num_microbatches}
            if kwargs.get("forward_only"):
                attributes[FORWARD_ONLY] = True
            record = recorder.begin("megatron.forward_backward", iteration_kind, attributes)
        outer, run.passing = run.passing, this
        return record, outer

    def end(token: tuple[Record | None, Pass | None], result: Any, error: BaseException | None) -> None:
        if token is _CAPTURE:
            recorder.mute(False)
            return
        record, recorder.run.passing = token
        if record is not None:
            recorder.end(record, error)

    return Hook(begin, end)


_SCHEDULES = (
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)

SEAMS = (
    *(
        Seam(
            module,
            path,
            {"forward_backward", "evaluate", "communication"},
            partial(_schedule, path),
            looks="first",
        )
        for module, path in (
            *((_MODULE, path) for path in _SCHEDULES),
            ("megatron.core.full_cuda_graph", "FullCudaGraphWrapper.__call__"),
        )
    ),
    *(
        Seam(_MODULE, path, {"microbatch"}, partial(_microbatch, what), optional="multimodule" in path, lost=lose_count)
        for path, what in (
            ("forward_step", "forward"),
            ("backward_step", "backward"),
            ("backward_step_multimodule", "backward"),  # from core 0.17 on
        )
    ),
)
