"""What is known of one run of training: made when it begins, and gone when the next one does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.recording.traces import Identity, Key, Traces


class Run:
    """One `pretrain`, or what a loop of one's own trains."""

    __slots__ = (
        "evaluated",
        "key",
        "last_pass",
        "last_step",
        "logged",
        "logging",
        "loss_name",
        "nonfinite",
        "number",
        "passing",
        "ranks",
        "traces",
    )

    def __init__(self, number: int = 0) -> None:
        self.number = number
        """Of this run in the process."""
        self.traces: Traces | None = None
        """Once connected; None where ids can't be worked out."""
        self.key: str | None = None
        """Of the latest traces that it had."""
        self.ranks: dict[str, int] = {}
        """This rank's place in each kind of parallelism, as attributes, once it is known."""
        self.last_step = (0, 0)
        """Its iteration, and how often the run has gone back to an earlier one."""
        self.evaluated = (-1, 0)
        """After which iteration it was evaluated last, and how often before that then."""
        self.passing: Pass | None = None
        """The schedule that is running."""
        self.last_pass: tuple[Identity | None, int] = (None, 0)
        """The step or evaluation of the latest pass, and its number there."""
        self.logging: LogInterval | None = None
        """What Megatron logs now, if it does."""
        self.logged: dict[str, float] = {}
        """The finite ones of the values that it has logged last, by the metric's name."""
        self.loss_name: str | None = None
        """The first that the loss function has given."""
        self.nonfinite = False
        """Whether this log interval has an iteration that was counted as such."""

    def step(self, iteration: int) -> tuple[int, int]:
        """Notes that a step begins, and says which it is: its iteration, and how often the run has gone back."""
        latest, rewinds = self.last_step
        self.last_step = (iteration, rewinds + (iteration <= latest))
        return self.last_step

    def evaluation(self, after: int) -> tuple[int, int]:
        """Notes that an evaluation begins, and says which it is: after which iteration, and the how manieth there."""
        self.evaluated = (after, self.evaluated[1] + 1 if self.evaluated[0] == after else 0)
        return self.evaluated

    def number_of_pass(self, scope: Identity | None) -> int:
        """Notes that a pass begins in the step or evaluation `scope`, and gives its number there."""
        self.last_pass = (scope, self.last_pass[1] + 1 if self.last_pass[0] == scope else 0)
        return self.last_pass[1]


class Pass:
    """A schedule's run: which of its microbatches each call inside it belongs to. A stage sends in the order in which
    it computes, so that the number of a receive tells what is received."""

    __slots__ = ("chunks", "group_size", "interleaved", "num_microbatches", "number", "numbers", "scope", "single")

    def __init__(
        self,
        scope: Identity | None,
        number: int,
        num_microbatches: int,
        interleaved: bool = False,
        chunks: int = 1,
        group_size: int | None = None,
        single: bool = True,
    ) -> None:
        """
        Args:
            scope: The step or evaluation that it is in.
            number: Its number there.
            num_microbatches: Of it.
            interleaved: Whether the schedule is.
            chunks: Of the model, on this rank.
            group_size: Of the microbatches that a chunk takes in turn; None: as many as there are stages.
            single: Whether each microbatch has one tensor per direction, sent and received by a call of its own.
        """
        self.scope, self.number, self.num_microbatches = scope, number, num_microbatches
        self.interleaved, self.chunks, self.group_size, self.single = interleaved, chunks, group_size, single
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


class LogInterval:
    """What Megatron says of the interval that it logs now."""

    __slots__ = ("before", "elapsed_s", "iterations", "tflops")

    def __init__(self, before: Mapping[str, Any], skipped: bool) -> None:
        """
        Args:
            before: Megatron's sums over the interval's earlier iterations.
            skipped: Whether this iteration's update was.
        """
        self.before = dict(before)
        advanced = before.get("advanced iterations", 0) + (not skipped)
        self.iterations = (advanced, advanced + before.get("skipped iterations", 0) + skipped)
        """Those that were not skipped, and all."""
        self.elapsed_s: float | None = None
        self.tflops: float | None = None
