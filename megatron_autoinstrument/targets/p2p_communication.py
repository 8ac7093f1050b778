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
from typing import Any, NamedTuple

from megatron_autoinstrument.common.semconv import COMBINED, OVERLAPPED, SENDER_RECORDED
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.run import Pass
from megatron_autoinstrument.recording.traces import Identity
from megatron_autoinstrument.targets import schedules

_MODULE = "megatron.core.pipeline_parallel.p2p_communication"
_BRIDGE = "megatron.core.pipeline_parallel.bridge_communicator"
_PARALLEL_STATE = "megatron.core.parallel_state"
# What a receive gets has been sent after a microbatch's pass in this direction.
_SENT = {
    "megatron.p2p.recv_forward": ("recv_forward", "forward"),
    "megatron.p2p.recv_backward": ("recv_backward", "backward"),
}


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


def _operation(operation: str, original: Function, recorder: Recorder) -> Hook:
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
        sources: list[_Source | None] = []
        linked = None
        if (passing := recorder.run.passing) is not None and recorder.all_counted:
            sources = [_source(recorder, passing, name, args) if name in _SENT else None for name in names]
            if may_be_linked and sources[0] is not None:
                linked = _begin_linked(recorder, passing, sources[0], args)
        attributes = {}
        if len(names) > 1:
            attributes[COMBINED] = True
        if overlap(args, kwargs):
            attributes[OVERLAPPED] = True
        records = recorder.begin_together(names, attributes)
        if records is None:
            return None
        for record, source in zip(records, sources, strict=False):
            if source is not None:
                _link(recorder, record, source)
        return linked, records

    def end(token: tuple[Record | None, list[Record]], result: Any, error: BaseException | None) -> None:
        linked, records = token
        recorder.end_together(records, error)
        if linked is not None:
            recorder.end_call(linked, None, error)

    return Hook(begin, end)


def _bridge_operation(operation: str, original: Function, recorder: Recorder) -> Hook:
    """A leader's transfer to or from another module, with the broadcast among those that it leads."""
    names = [f"megatron.p2p.{direction}" for direction, *_ in _OPERATIONS[operation]]
    attributes = {COMBINED: True} if len(names) > 1 else {}

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> list[Record] | None:
        return recorder.begin_together(names, attributes)

    def end(records: list[Record], result: Any, error: BaseException | None) -> None:
        recorder.end_together(records, error)

    return Hook(begin, end)


def _reader(original: Function, parameter: str) -> Callable[[Arguments, Mapping[str, Any]], Any]:
    """Reads `parameter` from a call. Before core 0.13 the function found out itself whether its stage is at an end."""
    if parameter in ("is_first_stage", "is_last_stage") and parameter not in inspect.signature(original).parameters:
        at_an_end = getattr(sys.modules[_PARALLEL_STATE], parameter.replace("is_", "is_pipeline_"))
        return lambda args, kwargs: at_an_end()
    return argument(original, parameter)


class _Source(NamedTuple):
    """What a receive gets: the number of the tensor, of those that come this way in the pass, and who sent it."""

    number: int
    span: Identity | None = None
    recorded: bool = False


def _source(recorder: Recorder, passing: Pass, name: str, args: Arguments) -> _Source:
    """What `name` receives now."""
    direction, what = _SENT[name]
    number = passing.next(direction)
    sender = _neighbour(args, what) if passing.scope is not None and passing.single else None
    if passing.scope is None or not isinstance(sender, int):
        return _Source(number)  # several, before core 0.14, for an encoder of another size
    traces = recorder.run.traces
    recorded = traces is not None and traces.is_recorded(sender)
    if recorded and "microbatch" in recorder.groups:
        key = passing.key(sender, what)
        return _Source(number, key and (key, _of_sender(passing, what, number, args)), True)
    # Its step, or in an evaluation that one's step.
    (trace, _, scope, *rest), _ = passing.scope
    if scope == "megatron.evaluate":
        key = passing.key(sender, "megatron.evaluate.step")
        return _Source(number, key and (key, 0), recorded and "evaluate" in recorder.groups)
    return _Source(number, ((trace, sender, scope, *rest), 0), recorded and "step" in recorder.groups)


def _neighbour(args: Arguments, what: str) -> Any:
    """The rank that sends "forward" or "backward" to this one."""
    side = "prev" if what == "forward" else "next"
    rank = getattr(args[0], f"{side}_rank", None) if args else None
    return rank if rank is not None else _parallel_state(f"{side}_rank")


def _of_sender(passing: Pass, what: str, number: int, args: Arguments) -> int:
    """The number that the microbatch of the tensor `number` has among the sender's own. Microbatches go through the
    chunks in groups, and where the interleaved schedule goes round from one end of the pipeline to the other, the
    chunk at the end sends nothing."""
    if passing.chunks == 1:
        return number
    stage, stages = _stage(args)
    if stage != (0 if what == "forward" else stages - 1):
        return number
    group = passing.group_size or stages
    return number + number // (group * (passing.chunks - 1)) * group


def _stage(args: Arguments) -> tuple[int, int]:
    """The stage of this rank, and the number of stages."""
    group = getattr(args[0], "pp_group", None) if args else None
    if group is not None:
        return group.rank(), group.size()
    return _parallel_state("rank"), _parallel_state("world_size")


def _parallel_state(what: str) -> Any:
    return getattr(sys.modules[_PARALLEL_STATE], f"get_pipeline_model_parallel_{what}")()


def _link(recorder: Recorder, record: Record, source: _Source) -> None:
    if source.span is None:
        return
    recorder.link(record, source.span)
    if not source.recorded:
        record.attributes = {**(record.attributes or {}), SENDER_RECORDED: False}


def _begin_linked(recorder: Recorder, passing: Pass, source: _Source, args: Arguments) -> Record | None:
    """`megatron.pp.recv_forward.linked`: the warm-up receives of the non-interleaved schedule, and the one before
    its steady state. A pass with a backward makes no other plain receive; one without goes on making them."""
    if passing.interleaved:
        return None
    stage, stages = _stage(args)
    warmup = min(stages - stage - 1, passing.num_microbatches)
    if source.number > warmup:
        return None
    attributes = {"dl.pipeline_parallel.rank": stage}
    if source.number < warmup:
        attributes["dl.microbatch_id"] = source.number
    record = recorder.begin_frequent("megatron.pp.recv_forward.linked", attributes)
    if record is not None:
        _link(recorder, record, source)
    return record


SEAMS = tuple(
    seam
    for name in _OPERATIONS
    for seam in (
        Seam(
            _MODULE,
            f"P2PCommunicator.{name}",
            {"communication"},
            partial(_operation, name),
            unless=name,
            lost=schedules.lose_count,
        ),
        Seam(
            _MODULE,
            name,
            {"communication"},
            partial(_operation, name),
            unless="P2PCommunicator",
            lost=schedules.lose_count,
        ),
        Seam(_BRIDGE, f"BridgeCommunicator.{name}", {"communication"}, partial(_bridge_operation, name), optional=True),
    )
)
