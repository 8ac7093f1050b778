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
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, Record
from megatron_autoinstrument.recording.recorder import RECORDER, kind_of
from megatron_autoinstrument.recording.traces import Identity, Key

_MODULE = "megatron.core.pipeline_parallel.schedules"
_CAPTURE = (None, None)
_PASSES = ("megatron.forward_backward", "megatron.evaluate.step")


class Pass:
    """A schedule's run: which of its microbatches each call inside it belongs to. A stage sends in the order in which
    it computes, so that the number of a receive tells what is received."""

    __slots__ = ("chunks", "group_size", "interleaved", "num_microbatches", "number", "numbers", "scope", "single")

    def __init__(self, interleaved: bool, kwargs: Mapping[str, Any], number: int | None = None) -> None:
        self.interleaved = interleaved
        self.num_microbatches: int = kwargs["num_microbatches"]
        model: Any = kwargs.get("model")
        self.chunks = len(model) if interleaved and isinstance(model, list) else 1
        # Of the microbatches that a chunk takes in turn; None: as many as there are stages.
        self.group_size: int | None = (
            getattr(getattr(model[0], "config", None), "microbatch_group_size_per_vp_stage", None)
            if self.chunks > 1
            else None
        )
        # Tensors per microbatch and direction: an encoder-decoder model has two, a multi-module one any number.
        self.single = (
            kwargs.get("decoder_seq_length") is None
            # Another class of communicator may send and receive by calls of its own.
            and type(kwargs.get("p2p_communicator")).__name__ in ("P2PCommunicator", "NoneType")
        )
        self.scope = RECORDER.scope()
        self.number = _number_in(self.scope) if number is None else number
        self.numbers = {"forward": 0, "backward": 0, "recv_forward": 0, "recv_backward": 0}

    def next(self, what: str) -> int:
        """The number of this call, of those of its kind."""
        number = self.numbers[what]
        self.numbers[what] = number + 1
        return number

    def key(self, rank: int, what: str) -> Key | None:
        """Of `rank`'s calls `what` ("forward" or "backward") in this pass; None outside steps and evaluations."""
        if self.scope is None:
            return None
        (trace, _, *scope), _ = self.scope
        return (trace, rank, what, *scope, self.number)


running: Pass | None = None
"""The run of a schedule that is going on."""

all_counted = True
"""Whether every call that the numbers in a `Pass` count is seen, as far as this rank can know."""


def lose_count() -> None:
    """Some are not seen from here on: what a receive gets can't be told by its number."""
    global all_counted
    all_counted = False


_passes: tuple[Identity | None, int] = (None, 0)  # the step or evaluation of the latest pass, and its number there


def forget() -> None:
    """A run begins: an in-process restart may have left anything of the last one behind."""
    global running, _passes
    running, _passes = None, (None, 0)


def _number_in(scope: Identity | None) -> int:
    global _passes
    _passes = (scope, _passes[1] + 1 if _passes[0] == scope else 0)
    return _passes[1]


def _microbatch(what: str, original: Function, groups: frozenset[str]) -> Hook:
    name = f"megatron.microbatch.{what}"
    microbatch = argument(original, "current_microbatch")

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        number = microbatch(args, kwargs)
        return RECORDER.begin(
            name, FREQUENT, None if number is None else {"megatron.microbatch_id": number}, identity_of_next(what)
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        RECORDER.end(record, error)

    return Hook(begin, end)


def identity_of_next(what: str) -> Identity | None:
    """Of the microbatch that goes "forward" or "backward" now."""
    run = running  # another thread may instrument anew
    if run is None:
        return None
    number, traces = run.next(what), RECORDER.traces
    key = None if traces is None else run.key(traces.rank, what)
    return None if key is None else (key, number)


def _schedule(schedule: str, original: Function, groups: frozenset[str]) -> Hook:
    """The pass of an iteration; inside `megatron.evaluate`, that evaluation's step."""
    interleaved = schedule.endswith("_with_interleaving")
    is_capturing = torch_state.is_capturing()
    iteration_kind = kind_of("megatron.forward_backward", LIVE, groups)
    evaluation_kind = kind_of("megatron.evaluate.step", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record | None, Pass | None] | None:
        global running
        if RECORDER.muted:
            return None
        if is_capturing():
            RECORDER.mute(True)
            return _CAPTURE
        # Every version takes these by keyword alone.
        record: Record | None = None
        current = RECORDER.current
        evaluating = current is not None and current.name == "megatron.evaluate"
        if evaluating and kwargs.get("collect_non_loss_data"):
            return None  # one more pass after the last step, on the last rank alone
        # FullCudaGraphWrapper's own run of a schedule is the same pass.
        around = running if current is not None and current.name in _PASSES else None
        this = Pass(interleaved, kwargs, None if around is None else around.number)
        if evaluating:
            traces = RECORDER.traces
            key = None if traces is None else this.key(traces.rank, "megatron.evaluate.step")
            record = RECORDER.begin("megatron.evaluate.step", evaluation_kind, None, None if key is None else (key, 0))
        elif around is None:
            attributes = {"megatron.num_microbatches": this.num_microbatches}
            if kwargs.get("forward_only"):
                attributes[FORWARD_ONLY] = True
            record = RECORDER.begin("megatron.forward_backward", iteration_kind, attributes)
        outer, running = running, this
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
