"""MEGATRON_OTEL_AB: what this package costs this very run. Blocks of steps with it and without it take turns, and at
the end of training the two are compared.

Every rank changes after the same steps, so that no communication is needed, and no result of training depends on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from statistics import fmean, median
from time import perf_counter_ns
from typing import Any, NamedTuple

from megatron_autoinstrument.patching import Arguments, Function, Hook, Ledger, Seam
from megatron_autoinstrument.semconv import AB_HIGH, AB_LOW, AB_OVERHEAD, AB_PAIRS
from megatron_autoinstrument.spans import RECORDER

_MODULE = "megatron.training.training"
_ON = frozenset({"ab"})
_WARM_UP = 2  # blocks
_FEWEST_PAIRS = 8
_RESAMPLES = 2000
_CATCH_UP_S = 1.0  # at most: what a block has recorded is to be exported before the next one is timed


class Overhead(NamedTuple):
    """By how much steps are longer, in percent, with the bounds of the 95 % confidence interval."""

    percent: float
    low: float
    high: float
    pairs: int


def overhead(pairs: list[tuple[float, float]]) -> Overhead | None:
    """Compares blocks that followed each other.

    Args:
        pairs: Of a block without and one with the instrumentation, the median time of a step each.

    Returns:
        The mean of the pairs' differences with a bootstrap interval; None where there are too few pairs to tell.
    """
    if len(pairs) < _FEWEST_PAIRS:
        return None
    differences = [(on - off) / off * 100 for off, on in pairs]
    draw = random.Random(0)  # never training's own
    means = sorted(fmean(draw.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    tail = int(_RESAMPLES * 0.025)
    return Overhead(fmean(differences), means[tail], means[-1 - tail], len(pairs))


def is_on(block: int) -> bool:
    """Whether a block is instrumented: after one of each to warm up, in pairs of alternating order."""
    if block < _WARM_UP:
        return block == 0
    pair, second = divmod(block - _WARM_UP, 2)
    return bool(second) == (pair % 2 == 0)


class Comparison:
    """The comparison that is going on."""

    def __init__(self, length: int, turn: Callable[[bool], None], says: bool) -> None:
        """
        Args:
            length: The number of steps of a block.
            turn: Puts the instrumentation in (True) or takes it out.
            says: Whether this rank prints the outcome.
        """
        self._length = length
        self._turn = turn
        self._says = says
        self._run, self._steps = Ledger(), Ledger()
        self._block = 0
        self._times: list[int] = []
        self._before: float | None = None  # the median of a pair's first block
        self.pairs: list[tuple[float, float]] = []

    def start(self) -> None:
        """Wraps the training loop inside the recording's own wrapper: call it before that is put in."""
        self._run.install([Seam(_MODULE, "train", _ON, self._train)], _ON)

    def watch(self) -> None:
        """Wraps the step around the recording's own wrapper: call it after that is put in."""
        self._steps.install([Seam(_MODULE, "train_step", _ON, self._train_step)], _ON)

    def stop(self) -> None:
        """Takes both out."""
        self._steps.uninstall()
        self._run.uninstall()

    def _train(self, original: Function, groups: frozenset[str]) -> Hook:
        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
            return True

        def end(token: bool, result: Any, error: BaseException | None) -> None:
            self._report()

        return Hook(begin, end)

    def _train_step(self, original: Function, groups: frozenset[str]) -> Hook:
        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> int:
            return perf_counter_ns()

        def end(started: int, result: Any, error: BaseException | None) -> None:
            self._times.append(perf_counter_ns() - started)
            if len(self._times) == self._length:
                self._end_block()

        return Hook(begin, end)

    def _end_block(self) -> None:
        # What the last block has left behind ends in the first quarter of this one.
        typical = median(self._times[max(1, self._length // 4) :])
        self._times.clear()
        on, following = is_on(self._block), is_on(self._block + 1)
        if self._block >= _WARM_UP:
            if self._before is None:
                self._before = typical
            else:
                self.pairs.append((self._before, typical) if on else (typical, self._before))
                self._before = None
        self._block += 1
        if following != on:
            self._steps.uninstall()
            if on:
                RECORDER.catch_up(_CATCH_UP_S)
            self._turn(following)
            self.watch()

    def _report(self) -> None:
        found = overhead(self.pairs)
        attributes: dict[str, Any] = {AB_PAIRS: len(self.pairs)}
        if found is None:
            told = (
                f"too few steps ran to tell: {len(self.pairs)} pairs of blocks of {self._length}, not {_FEWEST_PAIRS}"
            )
        else:
            attributes |= {AB_OVERHEAD: found.percent, AB_LOW: found.low, AB_HIGH: found.high}
            told = (
                f"{found.percent:+.2f} % of a step, 95 % confidence interval {found.low:+.2f} to {found.high:+.2f} % "
                f"({found.pairs} pairs of blocks of {self._length} steps)"
            )
        record = RECORDER.current
        if record is not None and record.name == "megatron.train":
            record.attributes = {**(record.attributes or {}), **attributes}
        if self._says:
            print(f"megatron-autoinstrument, overhead: {told}", flush=True)
