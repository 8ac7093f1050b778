"""megatron/training/training.py: the run, its training loop, its steps, model construction and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.groups import GROUPS, METRICS
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.hooks import kind_of, span
from megatron_autoinstrument.recording.record import LIVE, Record
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.run import Run
from megatron_autoinstrument.recording.spans import RUN_GROUPS

_MODULE = "megatron.training.training"
_EVERY_GROUP = frozenset(GROUPS) | {METRICS}
_OF_A_STEP = frozenset(GROUPS) - RUN_GROUPS - {"inference"}


def _pretrain(original: Function, recorder: Recorder) -> Hook:
    """The run. Its span starts at the call, but is opened once the run's identity is settled."""
    model_type, restarts = argument(original, "model_type"), argument(original, "inprocess_call_wrapper")
    kind = kind_of("megatron.pretrain", LIVE, recorder.groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record, Any] | None:
        record = recorder.begin_deferred("megatron.pretrain", kind, getattr(restarts(args, kwargs), "iteration", None))
        if record is None:
            return None  # inside of another
        return record, model_type(args, kwargs)

    def end(token: tuple[Record, Any], result: Any, error: BaseException | None) -> None:
        record, model = token
        attributes = {
            "megatron.model_type": getattr(model, "name", None),
            "megatron.train_iters": state.arg("train_iters"),  # known by now, whatever the version
            "megatron.global_batch_size": state.arg("global_batch_size"),
        }
        recorder.end(record, error, {key: value for key, value in attributes.items() if value is not None})

    return Hook(begin, end)


def _setup_model_and_optimizer(original: Function, recorder: Recorder) -> Hook:
    """Model and optimizer construction: the first seam after torch.distributed is initialised, which settles the run's
    identity. In a loop of one's own a run begins here."""
    hook = span("megatron.model_init", live=True)(original, recorder)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        recorder.connect(begins=True)
        return hook.begin(args, kwargs)

    return Hook(begin, hook.end)


def _train_step(original: Function, recorder: Recorder) -> Hook:
    """A step: the trace of all that happens in it, also where its own group is off."""
    iteration = argument(original, "iteration")
    kind = kind_of("megatron.train_step", LIVE, recorder.groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        # Megatron counts finished ones, prints one more, and before core 0.16 didn't pass it on.
        finished = iteration(args, kwargs)
        if finished is None:
            finished = state.arg("curr_iteration")
        recorder.connect()
        run, journal = recorder.run, recorder.journal
        traces = run.traces
        if finished is None or traces is None or not (traces.per_step or recorder.is_in_the_runs_trace()):
            attributes = {} if finished is None else {"megatron.iteration": finished + 1}
            return recorder.begin("megatron.train_step", kind, attributes | _ranks(run))
        if journal is not None:
            journal.step(finished + 1)
        step = run.step(finished + 1)
        trace = traces.of_step(*step)
        return recorder.begin(
            "megatron.train_step",
            kind,
            {"megatron.iteration": finished + 1, **_ranks(run)},
            ((trace, traces.rank, "megatron.train_step", *step), 0),
            trace if traces.per_step else None,
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        recorder.end(record, error, hold=True)

    return Hook(begin, end)


def _ranks(run: Run) -> dict[str, int]:
    if not run.ranks:
        run.ranks = state.parallel_ranks()
    return run.ranks


def _evaluate(original: Function, recorder: Recorder) -> Hook:
    eval_iters = argument(original, "eval_iters")
    kind = kind_of("megatron.evaluate", LIVE, recorder.groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        number = eval_iters(args, kwargs)
        if number is None:
            number = state.arg("eval_iters")
        after = state.arg("curr_iteration") or 0
        recorder.connect()
        evaluation = recorder.run.evaluation(after)
        traces = recorder.run.traces if recorder.is_in_the_runs_trace() else None
        return recorder.begin(
            "megatron.evaluate",
            kind,
            None if number is None else {"megatron.eval_iters": number},
            None if traces is None else ((traces.run, traces.rank, "megatron.evaluate", *evaluation), 0),
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        recorder.end(record, error)

    return Hook(begin, end)


SEAMS = (
    Seam(_MODULE, "pretrain", _EVERY_GROUP, _pretrain, looks="always"),
    Seam(_MODULE, "setup_model_and_optimizer", _EVERY_GROUP, _setup_model_and_optimizer, looks="always"),
    Seam(
        _MODULE,
        "train",
        {"job"},
        span(
            "megatron.train",
            live=True,
            given={"megatron.train_iters": lambda args, kwargs: state.arg("train_iters")},
        ),
        looks="always",
    ),
    Seam(_MODULE, "train_step", _OF_A_STEP, _train_step, looks="first"),
    # A schedule that runs inside an evaluation is no forward-backward pass of an iteration, nor are its receives.
    Seam(_MODULE, "evaluate", {"evaluate", "forward_backward", "communication"}, _evaluate),
)
