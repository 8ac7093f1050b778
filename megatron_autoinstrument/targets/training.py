"""megatron/training/training.py: the run, its training loop, its steps, model construction and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument import metrics
from megatron_autoinstrument.groups import GROUPS, METRICS
from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.spans import LIVE, RECORDER, RUN_GROUPS, Record, kind_of, span
from megatron_autoinstrument.targets import global_vars, schedules

_MODULE = "megatron.training.training"
_EVERY_GROUP = frozenset(GROUPS) | {METRICS}
_OF_A_STEP = frozenset(GROUPS) - RUN_GROUPS - {"inference"}


def _pretrain(original: Function, groups: frozenset[str]) -> Hook:
    """The run. Its span starts at the call, but is opened once the run's identity is settled."""
    model_type, restarts = argument(original, "model_type"), argument(original, "inprocess_call_wrapper")
    kind = kind_of("megatron.pretrain", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record, Any] | None:
        schedules.running = None  # an in-process restart may have left anything behind
        record = RECORDER.begin_deferred("megatron.pretrain", kind, getattr(restarts(args, kwargs), "iteration", None))
        return (record, model_type(args, kwargs)) if record is not None else None

    def end(token: tuple[Record, Any], result: Any, error: BaseException | None) -> None:
        record, model = token
        attributes = {
            "megatron.model_type": getattr(model, "name", None),
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
        global _latest
        _latest = (0, 0)
        _parallel_ranks.clear()
        RECORDER.settle()
        return hook.begin(args, kwargs)

    return Hook(begin, hook.end)


_latest = (0, 0)  # the step that came last, and how often the run has gone back to an earlier one


def _train_step(original: Function, groups: frozenset[str]) -> Hook:
    """A step: the trace of all that happens in it, also where its own group is off."""
    iteration = argument(original, "iteration")
    kind = kind_of("megatron.train_step", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        global _latest
        # Megatron counts finished ones, prints one more, and before core 0.16 didn't pass it on.
        finished = iteration(args, kwargs)
        if finished is None:
            finished = global_vars.arg("curr_iteration")
        RECORDER.settle()
        traces = RECORDER.traces
        if finished is None or traces is None or not (traces.per_step or RECORDER.is_in_the_runs_trace()):
            attributes = {} if finished is None else {"megatron.iteration": finished + 1}
            return RECORDER.begin("megatron.train_step", kind, attributes | _ranks())
        latest, rewinds = _latest
        number = finished + 1
        _latest = (number, rewinds + (number <= latest))
        trace = traces.of_step(*_latest)
        return RECORDER.begin(
            "megatron.train_step",
            kind,
            {"megatron.iteration": number, **_ranks()},
            ((trace, traces.rank, "megatron.train_step", *_latest), 0),
            trace if traces.per_step else None,
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        RECORDER.end(record, error, hold=True)

    return Hook(begin, end)


_parallel_ranks: dict[str, int] = {}


def _ranks() -> dict[str, int]:
    """The same as long as the process lives, but for a restart in it."""
    if not _parallel_ranks:
        _parallel_ranks.update(global_vars.parallel_ranks())
    return _parallel_ranks


_evaluated = (-1, 0)  # after which iteration it was evaluated last, and how often then


def _evaluate(original: Function, groups: frozenset[str]) -> Hook:
    eval_iters = argument(original, "eval_iters")
    kind = kind_of("megatron.evaluate", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        global _evaluated
        number = eval_iters(args, kwargs)
        if number is None:
            number = global_vars.arg("eval_iters")
        after = global_vars.arg("curr_iteration") or 0
        _evaluated = (after, _evaluated[1] + 1 if _evaluated[0] == after else 0)
        RECORDER.settle()
        traces = RECORDER.traces if RECORDER.is_in_the_runs_trace() else None
        return RECORDER.begin(
            "megatron.evaluate",
            kind,
            None if number is None else {"megatron.eval_iters": number},
            None if traces is None else ((traces.run, traces.rank, "megatron.evaluate", *_evaluated), 0),
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        RECORDER.end(record, error)

    return Hook(begin, end)


class _Interval:
    """What Megatron says of the interval that it logs now. The hooks of timers.py and one_logger_utils.py add to it."""

    __slots__ = ("before", "elapsed_s", "iterations", "tflops")

    def __init__(self, before: Mapping[str, Any], skipped: bool) -> None:
        self.before = dict(before)
        advanced = before.get("advanced iterations", 0) + (not skipped)
        self.iterations = (advanced, advanced + before.get("skipped iterations", 0) + skipped)
        self.elapsed_s: float | None = None
        self.tflops: float | None = None


logging_now: _Interval | None = None
"""Set while `training_log` logs."""

_skipped_iterations = 0  # since they were last recorded
_loss_name: str | None = None  # the first that the loss function has given


def _training_log(original: Function, groups: frozenset[str]) -> Hook:
    """Runs after each step: lets its span end, and in the iterations that Megatron logs (each `--log-interval`, and
    from core 0.16 on the first of the process) adds the loss and the gradient norm to it and records the metrics."""
    loss_dict, total_loss_dict, learning_rate, iteration, skipped_iter, grad_norm, is_first_iteration = (
        argument(original, name)
        for name in (
            "loss_dict",
            "total_loss_dict",
            "learning_rate",
            "iteration",
            "skipped_iter",
            "grad_norm",
            "is_first_iteration",
        )
    )

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[_Interval | None, Arguments, Mapping[str, Any]]:
        global logging_now, _skipped_iterations
        skipped = bool(skipped_iter(args, kwargs))
        _skipped_iterations += skipped
        if iteration(args, kwargs) % global_vars.arg("log_interval") == 0 or is_first_iteration(args, kwargs):
            logging_now = _Interval(total_loss_dict(args, kwargs), skipped)
        return logging_now, args, kwargs

    def end(
        token: tuple[_Interval | None, Arguments, Mapping[str, Any]], result: Any, error: BaseException | None
    ) -> None:
        global logging_now, _skipped_iterations
        (interval, args, kwargs), logging_now = token, None
        if interval is None or error is not None:
            RECORDER.release()
            return
        loss = _average_loss(interval, loss_dict(args, kwargs), bool(skipped_iter(args, kwargs)))
        norm = _number(grad_norm(args, kwargs))
        on_step = {"megatron.loss": loss, "megatron.grad_norm": norm}
        RECORDER.release({key: value for key, value in on_step.items() if value is not None})
        if METRICS in groups and (meter := RECORDER.meter) is not None:
            seconds = interval.elapsed_s / interval.iterations[1] if interval.elapsed_s else None
            tokens = global_vars.tokens_per_iteration()
            metrics.record(
                meter,
                {
                    "megatron.training.step_duration_ms": seconds and seconds * 1e3,
                    "megatron.training.loss": loss,
                    "megatron.training.throughput_tflops": interval.tflops,
                    "megatron.training.tokens_per_sec": tokens / seconds if tokens and seconds else None,
                    "megatron.training.grad_norm": norm,
                    "megatron.training.skipped_iters": _skipped_iterations,
                    "megatron.training.learning_rate": _number(learning_rate(args, kwargs)),
                    "megatron.training.memory_allocated_gb": global_vars.peak_device_memory_gib(),
                },
            )
            _skipped_iterations = 0

    return Hook(begin, end)


def _average_loss(interval: _Interval, losses: Mapping[str, Any], skipped: bool) -> float | None:
    """The loss that Megatron has just printed, worked out as it does: its own sum is gone by now. Reading the tensor
    waits for no more of the device than Megatron just did."""
    global _loss_name
    if _loss_name is None:
        _loss_name = next(iter(losses), None)
    if _loss_name is None:
        return None  # not the last pipeline stage
    total, latest = interval.before.get(_loss_name), None if skipped else losses.get(_loss_name)
    if latest is not None:
        total = latest if total is None else total + latest
    return None if total is None else float(total.item()) / max(1, interval.iterations[0])


def _number(value: Any) -> float | None:
    """`value`, unless it is a tensor: to read that might wait for the device."""
    return float(value) if isinstance(value, (int, float)) else None


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
            given={"megatron.train_iters": lambda args, kwargs: global_vars.arg("train_iters")},
        ),
        looks="always",
    ),
    Seam(_MODULE, "train_step", _OF_A_STEP, _train_step, looks="first"),
    Seam(_MODULE, "training_log", {"step", METRICS}, _training_log, looks="first"),
    # A schedule that runs inside an evaluation is no forward-backward pass of an iteration, nor are its receives.
    Seam(_MODULE, "evaluate", {"evaluate", "forward_backward", "communication"}, _evaluate),
)
