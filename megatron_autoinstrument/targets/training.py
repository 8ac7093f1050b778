"""megatron/training/training.py: the run, its training loop, its steps, model construction and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.groups import GROUPS
from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.spans import RECORDER, Record, span
from megatron_autoinstrument.targets import global_vars

_MODULE = "megatron.training.training"
_EVERY_GROUP = frozenset(GROUPS)


def _pretrain(original: Function, groups: frozenset[str]) -> Hook:
    """The run. Its span starts at the call, but is opened once the run's identity is settled."""
    model_type = argument(original, "model_type")

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record, Any] | None:
        record = RECORDER.begin_deferred("megatron.pretrain")
        return (record, model_type(args, kwargs)) if record is not None else None

    def end(token: tuple[Record, Any], result: Any, error: BaseException | None) -> None:
        record, kind = token
        attributes = {
            "megatron.model_type": getattr(kind, "name", None),
            "megatron.train_iters": global_vars.arg("train_iters"),  # known by now, whatever the version
            "megatron.global_batch_size": global_vars.arg("global_batch_size"),
        }
        RECORDER.end(record, error, {key: value for key, value in attributes.items() if value is not None})

    return Hook(begin, end)


def _setup_model_and_optimizer(original: Function, groups: frozenset[str]) -> Hook:
    """Model and optimizer construction: the first seam after Megatron has all-reduced its start time, which settles
    the run's identity."""
    hook = span("megatron.model_init", live=True)(original, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        RECORDER.settle()
        return hook.begin(args, kwargs)

    return Hook(begin, hook.end)


def _train_step(original: Function, groups: frozenset[str]) -> Hook:
    iteration = argument(original, "iteration")

    def number(args: Arguments, kwargs: Mapping[str, Any]) -> int | None:
        """The iteration as Megatron prints it: it counts finished ones, and before core 0.16 didn't pass that on."""
        finished = iteration(args, kwargs)
        if finished is None:
            finished = global_vars.arg("curr_iteration")
        return None if finished is None else finished + 1

    return span("megatron.train_step", live=True, given={"megatron.iteration": number})(original, groups)


def _evaluate(original: Function, groups: frozenset[str]) -> Hook:
    eval_iters = argument(original, "eval_iters")

    def number(args: Arguments, kwargs: Mapping[str, Any]) -> int | None:
        given = eval_iters(args, kwargs)
        return global_vars.arg("eval_iters") if given is None else given

    return span("megatron.evaluate", live=True, given={"megatron.eval_iters": number})(original, groups)


SEAMS = (
    Seam(_MODULE, "pretrain", {"job"}, _pretrain),
    Seam(_MODULE, "setup_model_and_optimizer", _EVERY_GROUP, _setup_model_and_optimizer),
    Seam(
        _MODULE,
        "train",
        {"job"},
        span(
            "megatron.train",
            live=True,
            given={"megatron.train_iters": lambda args, kwargs: global_vars.arg("train_iters")},
        ),
    ),
    Seam(_MODULE, "train_step", {"step"}, _train_step),
    # A schedule that runs inside an evaluation is no forward-backward pass of an iteration.
    Seam(_MODULE, "evaluate", {"evaluate", "forward_backward"}, _evaluate),
)
