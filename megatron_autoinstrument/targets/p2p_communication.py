"""megatron/core/pipeline_parallel/p2p_communication.py: sends and receives between pipeline stages.

A call that does several of them at once (1F1B's steady state, and all of the interleaved schedule) gives one span per
direction, with the call's times. Before core 0.14 the methods of `P2PCommunicator` were functions of the module.
Between the modules of a multi-module model the transfers are those of bridge_communicator.py (core 0.15 on).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.semconv import COMBINED, OVERLAPPED
from megatron_autoinstrument.spans import FREQUENT, RECORDER, Record
from megatron_autoinstrument.targets import schedules

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_BRIDGE = "megatron.core.pipeline_parallel.bridge_communicator"
_PARALLEL_STATE = "megatron.core.parallel_state"


def _unless(value: Any) -> bool:
    return not value


def _is_given(value: Any) -> bool:
    return value is not None


# Method: its directions, each with the parameter that tells whether there is anything to send or receive: nothing
# goes beyond the first and the last stage.
_OPERATIONS: dict[str, tuple[tuple[str, str, Callable[[Any], bool]], ...]] = {
    "recv_forward": (("recv_forward", "is_first_stage", _unless),),
    "recv_backward": (("recv_backward", "is_last_stage", _unless),),
    "send_forward": (("send_forward", "is_last_stage", _unless),),
    "send_backward": (("send_backward", "is_first_stage", _unless),),
    "send_forward_recv_backward": (
        ("send_forward", "is_last_stage", _unless),
        ("recv_backward", "is_last_stage", _unless),
    ),
    "send_backward_recv_forward": (
        ("send_backward", "is_first_stage", _unless),
        ("recv_forward", "is_first_stage", _unless),
    ),
    "send_forward_recv_forward": (
        ("send_forward", "output_tensor", _is_given),
        ("recv_forward", "recv_prev", bool),
    ),
    "send_backward_recv_backward": (
        ("send_backward", "input_tensor_grad", _is_given),
        ("recv_backward", "recv_next", bool),
    ),
    "send_forward_backward_recv_forward_backward": (
        ("send_forward", "output_tensor", _is_given),
        ("send_backward", "input_tensor_grad", _is_given),
        ("recv_forward", "recv_prev", bool),
        ("recv_backward", "recv_next", bool),
    ),
}


def _operation(operation: str, original: Function, groups: frozenset[str]) -> Hook:
    directions = [
        (f"megatron.p2p.{direction}", _reader(original, parameter), test)
        for direction, parameter, test in _OPERATIONS[operation]
    ]
    overlap = argument(original, "overlap_p2p_comm")
    may_be_linked = operation == "recv_forward"

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record | None, list[Record]] | None:
        names = [name for name, read, test in directions if test(read(args, kwargs))]
        if not names:
            return None
        linked = _begin_linked(*_stage(args)) if may_be_linked else None
        attributes = {}
        if len(names) > 1:
            attributes[COMBINED] = True
        if overlap(args, kwargs):
            attributes[OVERLAPPED] = True
        records = RECORDER.begin_together(names, attributes)
        return None if records is None else (linked, records)

    def end(token: tuple[Record | None, list[Record]], result: Any, error: BaseException | None) -> None:
        linked, records = token
        RECORDER.end_together(records, error)
        if linked is not None:
            RECORDER.end(linked, error)

    return Hook(begin, end)


def _bridge_operation(operation: str, original: Function, groups: frozenset[str]) -> Hook:
    """A leader's transfer to or from another module, with the broadcast among those that it leads."""
    names = [f"megatron.p2p.{direction}" for direction, *_ in _OPERATIONS[operation]]
    attributes = {COMBINED: True} if len(names) > 1 else {}

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> list[Record] | None:
        return RECORDER.begin_together(names, attributes)

    def end(records: list[Record], result: Any, error: BaseException | None) -> None:
        RECORDER.end_together(records, error)

    return Hook(begin, end)


def _reader(original: Function, parameter: str) -> Callable[[Arguments, Mapping[str, Any]], Any]:
    """Reads `parameter` from a call. Before core 0.13 the function found out itself whether its stage is at an end."""
    if parameter in ("is_first_stage", "is_last_stage") and parameter not in inspect.signature(original).parameters:
        at_an_end = getattr(sys.modules[_PARALLEL_STATE], parameter.replace("is_", "is_pipeline_"))
        return lambda args, kwargs: at_an_end()
    return argument(original, parameter)


def _stage(args: Arguments) -> tuple[int, int]:
    """The stage of this rank, and the number of stages."""
    group = getattr(args[0], "pp_group", None)
    if group is not None:
        return group.rank(), group.size()
    state = sys.modules[_PARALLEL_STATE]
    return state.get_pipeline_model_parallel_rank(), state.get_pipeline_model_parallel_world_size()


def _begin_linked(stage: int, stages: int) -> Record | None:
    """`megatron.pp.recv_forward.linked`: the warm-up receives of the non-interleaved schedule, and the one before
    its steady state. A pass with a backward makes no other plain receive; one without goes on making them."""
    run = schedules.running
    if run is None or run.interleaved:
        return None
    microbatch = run.received
    run.received += 1
    warmup = min(stages - stage - 1, run.num_microbatches)
    if microbatch > warmup:
        return None
    attributes = {"dl.pipeline_parallel.rank": stage}
    if microbatch < warmup:
        attributes["dl.microbatch_id"] = microbatch
    return RECORDER.begin("megatron.pp.recv_forward.linked", FREQUENT, attributes)


SEAMS = tuple(
    seam
    for name in _OPERATIONS
    for seam in (
        Seam(_MODULE, f"P2PCommunicator.{name}", {"communication"}, partial(_operation, name), unless=name),
        Seam(_MODULE, name, {"communication"}, partial(_operation, name), unless="P2PCommunicator"),
        Seam(_BRIDGE, f"BridgeCommunicator.{name}", {"communication"}, partial(_bridge_operation, name), optional=True),
    )
)
