"""megatron/training/training.py: the run, its training loop, its steps, model construction and evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from megatron_autoinstrument.common.groups import GROUPS, METRICS
from megatron_autoinstrument.common.semconv import GRAD_NORM_FINITE, LOSS_FINITE
from megatron_autoinstrument.export import metrics
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.record import LIVE, Record
from megatron_autoinstrument.recording.recorder import RECORDER, RUN_GROUPS, kind_of, span
from megatron_autoinstrument.recording.traces import Traces
from megatron_autoinstrument.targets import global_vars, schedules

_MODULE = "megatron.training.training"
_EVERY_GROUP = frozenset(GROUPS) | {METRICS}
_OF_A_STEP = frozenset(GROUPS) - RUN_GROUPS - {"inference"}


class Run:
    """What is known of a run of Megatron, in its targets. Nothing of it outlives the run."""

    __slots__ = ("evaluated", "key", "latest", "logging", "loss_name", "nonfinite", "ranks")

    def __init__(self) -> None:
        self.key: str | None = None  # of its traces
        self.latest = (0, 0)  # the step that came last, and how often the run has gone back to an earlier one
        self.evaluated = (-1, 0)  # after which iteration it was evaluated last, and how often then
        self.ranks: dict[str, int] = {}  # this rank's place in the parallelism, once it is known
        self.logging: Interval | None = None  # what Megatron logs now, if it does
        self.loss_name: str | None = None  # the first that the loss function has given
        self.nonfinite = False  # whether this log interval has an iteration that was counted as such


run = Run()


def _begin_run() -> None:
    """Forgets the run before: in `pretrain`, and where a loop of one's own builds its model."""
    global run
    run = Run()
    schedules.forget()
    metrics.forget()


def _follow(traces: Traces) -> None:
    """Forgets the run before where `traces` are of another, which may have begun unseen, while nothing was patched."""
    if run.key not in (None, traces.key):
        _begin_run()
    run.key = traces.key


def _pretrain(original: Function, groups: frozenset[str]) -> Hook:
    """The run. Its span starts at the call, but is opened once the run's identity is settled."""
    model_type, restarts = argument(original, "model_type"), argument(original, "inprocess_call_wrapper")
    kind = kind_of("megatron.pretrain", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Record, Any] | None:
        record = RECORDER.begin_deferred("megatron.pretrain", kind, getattr(restarts(args, kwargs), "iteration", None))
        if record is None:
            return None  # inside of another
        _begin_run()
        return record, model_type(args, kwargs)

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
    """Model and optimizer construction: the first seam after torch.distributed is initialised, which settles the run's
    identity. In a loop of one's own a run begins here."""
    hook = span("megatron.model_init", live=True)(original, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        RECORDER.settle(begins=True)
        if RECORDER.traces is not None:
            _follow(RECORDER.traces)
        elif RECORDER.current is None:
            _begin_run()
        return hook.begin(args, kwargs)

    return Hook(begin, hook.end)


def _train_step(original: Function, groups: frozenset[str]) -> Hook:
    """A step: the trace of all that happens in it, also where its own group is off."""
    iteration = argument(original, "iteration")
    kind = kind_of("megatron.train_step", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        # Megatron counts finished ones, prints one more, and before core 0.16 didn't pass it on.
        finished = iteration(args, kwargs)
        if finished is None:
            finished = global_vars.arg("curr_iteration")
        RECORDER.settle()
        traces = RECORDER.traces
        if finished is None or traces is None or not (traces.per_step or RECORDER.is_in_the_runs_trace()):
            attributes = {} if finished is None else {"megatron.iteration": finished + 1}
            return RECORDER.begin("megatron.train_step", kind, attributes | _ranks())
        _follow(traces)
        latest, rewinds = run.latest
        number = finished + 1
        if RECORDER.journal is not None:
            RECORDER.journal.step(number)
        run.latest = (number, rewinds + (number <= latest))
        trace = traces.of_step(*run.latest)
        return RECORDER.begin(
            "megatron.train_step",
            kind,
            {"megatron.iteration": number, **_ranks()},
            ((trace, traces.rank, "megatron.train_step", *run.latest), 0),
            trace if traces.per_step else None,
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        RECORDER.end(record, error, hold=True)

    return Hook(begin, end)


def _ranks() -> dict[str, int]:
    if not run.ranks:
        run.ranks = global_vars.parallel_ranks()
    return run.ranks


def _evaluate(original: Function, groups: frozenset[str]) -> Hook:
    eval_iters = argument(original, "eval_iters")
    kind = kind_of("megatron.evaluate", LIVE, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
        number = eval_iters(args, kwargs)
        if number is None:
            number = global_vars.arg("eval_iters")
        after = global_vars.arg("curr_iteration") or 0
        RECORDER.settle()
        if RECORDER.traces is not None:
            _follow(RECORDER.traces)
        run.evaluated = (after, run.evaluated[1] + 1 if run.evaluated[0] == after else 0)
        traces = RECORDER.traces if RECORDER.is_in_the_runs_trace() else None
        return RECORDER.begin(
            "megatron.evaluate",
            kind,
            None if number is None else {"megatron.eval_iters": number},
            None if traces is None else ((traces.run, traces.rank, "megatron.evaluate", *run.evaluated), 0),
        )

    def end(record: Record, result: Any, error: BaseException | None) -> None:
        RECORDER.end(record, error)

    return Hook(begin, end)


class Interval:
    """What Megatron says of the interval that it logs now. The hooks of timers.py and one_logger_utils.py add to it."""

    __slots__ = ("before", "elapsed_s", "iterations", "tflops")

    def __init__(self, before: Mapping[str, Any], skipped: bool) -> None:
        self.before = dict(before)
        advanced = before.get("advanced iterations", 0) + (not skipped)
        self.iterations = (advanced, advanced + before.get("skipped iterations", 0) + skipped)
        self.elapsed_s: float | None = None
        self.tflops: float | None = None


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

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[Interval | None, Arguments, Mapping[str, Any]]:
        run.logging = None
        if iteration(args, kwargs) % global_vars.arg("log_interval") == 0 or is_first_iteration(args, kwargs):
            run.logging = Interval(total_loss_dict(args, kwargs), bool(skipped_iter(args, kwargs)))
        return run.logging, args, kwargs

    def end(
        token: tuple[Interval | None, Arguments, Mapping[str, Any]], result: Any, error: BaseException | None
    ) -> None:
        (interval, args, kwargs), run.logging = token, None
        if error is not None:
            RECORDER.release()
            return
        losses, skipped = loss_dict(args, kwargs), bool(skipped_iter(args, kwargs))
        loss = None if interval is None else _average_loss(interval, losses, skipped)
        norm = _number(grad_norm(args, kwargs))
        average_is_finite, norm_is_finite = loss is None or isfinite(loss), norm is None or isfinite(norm)
        # Of a skipped iteration Megatron has just read the losses, to count those that are NaN.
        loss_is_finite = not skipped or _all_finite(losses)
        on_step = {} if interval is None else {"megatron.loss": loss, "megatron.grad_norm": norm}
        if not (average_is_finite and loss_is_finite):
            on_step[LOSS_FINITE] = False
        if not norm_is_finite:
            on_step[GRAD_NORM_FINITE] = False
        RECORDER.release({key: value for key, value in on_step.items() if value is not None})
        if METRICS not in groups or (meter := RECORDER.meter) is None:
            return
        # An average that isn't finite may be so by an iteration that was counted already.
        counts = not (loss_is_finite and norm_is_finite) or not (average_is_finite or run.nonfinite)
        run.nonfinite |= counts
        if interval is None:
            if skipped or counts:
                metrics.count(meter, skipped, counts)
            return
        metrics.count(meter, skipped, counts)
        metrics.record(meter, _values(interval, loss, norm, _number(learning_rate(args, kwargs))))
        if not is_first_iteration(args, kwargs):  # Megatron's interval goes on after that
            run.nonfinite = False

    return Hook(begin, end)


def _values(
    interval: Interval, loss: float | None, grad_norm: float | None, learning_rate: float | None
) -> dict[str, float | None]:
    """What Megatron has logged, by the metric's name."""
    seconds = interval.elapsed_s / interval.iterations[1] if interval.elapsed_s else None
    tokens = global_vars.tokens_per_iteration()
    return {
        "megatron.training.step_duration_ms": seconds and seconds * 1e3,
        "megatron.training.loss": loss,
        "megatron.training.throughput_tflops": interval.tflops,
        "megatron.training.tokens_per_sec": tokens / seconds if tokens and seconds else None,
        "megatron.training.grad_norm": grad_norm,
        "megatron.training.learning_rate": learning_rate,
        "megatron.training.memory_allocated_gb": global_vars.peak_device_memory_gib(),
    }


def _average_loss(interval: Interval, losses: Mapping[str, Any], skipped: bool) -> float | None:
    """The loss that Megatron has just printed, worked out as it does: its own sum is gone by now. Reading the tensor
    waits for no more of the device than Megatron just did."""
    if run.loss_name is None:
        run.loss_name = next(iter(losses), None)
    if run.loss_name is None:
        return None  # not the last pipeline stage
    total, latest = interval.before.get(run.loss_name), None if skipped else losses.get(run.loss_name)
    if latest is not None:
        total = latest if total is None else total + latest
    return None if total is None else float(total.item()) / max(1, interval.iterations[0])


def _all_finite(losses: Mapping[str, Any]) -> bool:
    return all(isfinite(loss.float().sum().item()) for loss in losses.values())


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
