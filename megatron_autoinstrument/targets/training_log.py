"""megatron/training/training.py, training_log: what Megatron logs after a step. The hooks of timers.py and
one_logger_utils.py add what it is told meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

from megatron_autoinstrument.common.groups import METRICS
from megatron_autoinstrument.common.semconv import GRAD_NORM_FINITE, LOSS_FINITE
from megatron_autoinstrument.export import metrics
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam, argument
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.run import LogInterval, Run


def _training_log(original: Function, recorder: Recorder) -> Hook:
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

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> tuple[LogInterval | None, Arguments, Mapping[str, Any]]:
        run = recorder.run
        run.logging = None
        if iteration(args, kwargs) % state.arg("log_interval") == 0 or is_first_iteration(args, kwargs):
            run.logging = LogInterval(total_loss_dict(args, kwargs), bool(skipped_iter(args, kwargs)))
        return run.logging, args, kwargs

    def end(
        token: tuple[LogInterval | None, Arguments, Mapping[str, Any]], result: Any, error: BaseException | None
    ) -> None:
        run = recorder.run
        (interval, args, kwargs), run.logging = token, None
        if error is not None:
            recorder.end_held()
            return
        losses, skipped = loss_dict(args, kwargs), bool(skipped_iter(args, kwargs))
        loss = None if interval is None else _average_loss(run, interval, losses, skipped)
        norm = _number(grad_norm(args, kwargs))
        average_is_finite, norm_is_finite = loss is None or isfinite(loss), norm is None or isfinite(norm)
        # Of a skipped iteration Megatron has just read the losses, to count those that are NaN.
        loss_is_finite = not skipped or _all_finite(losses)
        on_step = {} if interval is None else {"megatron.loss": loss, "megatron.grad_norm": norm}
        if not (average_is_finite and loss_is_finite):
            on_step[LOSS_FINITE] = False
        if not norm_is_finite:
            on_step[GRAD_NORM_FINITE] = False
        recorder.end_held({key: value for key, value in on_step.items() if value is not None})
        if METRICS not in recorder.groups or recorder.meter is None:
            return
        # An average that isn't finite may be so by an iteration that was counted already.
        counts = not (loss_is_finite and norm_is_finite) or not (average_is_finite or run.nonfinite)
        run.nonfinite |= counts
        if interval is None:
            if skipped or counts:
                metrics.count(recorder, skipped, counts)
            return
        metrics.count(recorder, skipped, counts)
        metrics.record(recorder, _values(interval, loss, norm, _number(learning_rate(args, kwargs))))
        if not is_first_iteration(args, kwargs):  # Megatron's interval goes on after that
            run.nonfinite = False

    return Hook(begin, end)


def _values(
    interval: LogInterval, loss: float | None, grad_norm: float | None, learning_rate: float | None
) -> dict[str, float | None]:
    """What Megatron has logged, by the metric's name."""
    seconds = interval.elapsed_s / interval.iterations[1] if interval.elapsed_s else None
    tokens = state.tokens_per_iteration()
    return {
        "megatron.training.step_duration_ms": seconds and seconds * 1e3,
        "megatron.training.loss": loss,
        "megatron.training.throughput_tflops": interval.tflops,
        "megatron.training.tokens_per_sec": tokens / seconds if tokens and seconds else None,
        "megatron.training.grad_norm": grad_norm,
        "megatron.training.learning_rate": learning_rate,
        "megatron.training.memory_allocated_gb": state.peak_device_memory_gib(),
    }


def _average_loss(run: Run, interval: LogInterval, losses: Mapping[str, Any], skipped: bool) -> float | None:
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


SEAMS = (Seam("megatron.training.training", "training_log", {"step", METRICS}, _training_log, looks="first"),)
