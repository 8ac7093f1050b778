"""MEGATRON_OTEL_AB: what this package costs this very run. Blocks of steps with it and without it take turns, and at
the end of training the two are compared.

Every rank changes after the same steps, so that no communication is needed, and no result of training depends on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import inf
from time import perf_counter_ns
from typing import Any, NamedTuple

from megatron_autoinstrument.common.semconv import AB_HIGH, AB_LOW, AB_OVERHEAD, AB_PAIRS
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Patcher, Seam
from megatron_autoinstrument.recording.recorder import Recorder

_MODULE = "megatron.training.training"
_ON = frozenset({"ab"})
_WARM_UP = 2  # blocks
_FEWEST_PAIRS = 8
_CONFIDENCE = 0.95
_CATCH_UP_S = 1.0  # at most: what a block has recorded is to be exported before the next one is timed
_LONG_S = 10.0  # of blocks as long, most of the exporting falls into their steps: a batch leaves after 5 s


class Overhead(NamedTuple):
    """By how much steps are longer, in percent, with the bounds of an interval that holds the truth so often."""

    percent: float
    low: float
    high: float
    confidence: float
    """In percent: 95 or more."""
    pairs: int


def overhead(pairs: Iterable[tuple[float, float]]) -> Overhead | None:
    """Compares blocks that followed each other.

    Args:
        pairs: Of a block without and one with the instrumentation, the mean time of a step each. A pair with a time
            that is none (zero, NaN, infinite) is left out.

    Returns:
        The median of the pairs' ratios, which neither a stall in a few of them nor noise in all pulls to one side,
        with the interval of the sign test, which assumes nothing of how the ratios are distributed. None where there
        are too few pairs to tell.
    """
    from statistics import median  # at the end of a run alone: it takes long to import

    percents = sorted((on / off - 1) * 100 for off, on in pairs if 0 < off < inf and 0 < on < inf)
    if len(percents) < _FEWEST_PAIRS:
        return None
    outside, coverage = _interval(len(percents))
    return Overhead(median(percents), percents[outside], percents[-1 - outside], coverage * 100, len(percents))


def _interval(count: int) -> tuple[int, float]:
    """How many of so many sorted figures may stay outside at each end, for what lies between to hold the median of
    what they are drawn from in _CONFIDENCE of cases or more; and in how many it does then.

    Each figure is above that median as often as below, so that the number of those below is that of a fair coin.
    """
    # Of the 2**count ways for the coin to fall: those with so many heads, and with so many or fewer.
    outside, ways, fewer = 0, 1, 1
    while True:
        ways = ways * (count - outside) // (outside + 1)
        if 1 - 2 * (fewer + ways) / 2**count < _CONFIDENCE:
            return outside, 1 - 2 * fewer / 2**count
        outside, fewer = outside + 1, fewer + ways


def is_on(block: int) -> bool:
    """Whether a block is instrumented: after one of each to warm up, in pairs of alternating order."""
    if block < _WARM_UP:
        return block == 0
    pair, second = divmod(block - _WARM_UP, 2)
    return bool(second) == (pair % 2 == 0)


class Comparison:
    """The comparison that is going on."""

    def __init__(self, recorder: Recorder, length: int, turn: Callable[[Comparison, bool], None], says: bool) -> None:
        """
        Args:
            recorder: Records the outcome.
            length: The number of steps of a block.
            turn: Puts the instrumentation in (True) or takes it out, below our own wrappers.
            says: Whether this rank prints the outcome.
        """
        self._recorder = recorder
        self._length = length
        self._turn = turn
        self._says = says
        self._run, self._steps = Patcher(), Patcher()
        self._of_run = [Seam(_MODULE, "train", _ON, self._train)]
        self._of_steps = [
            Seam(_MODULE, "train_step", _ON, self._train_step),
            Seam(_MODULE, "training_log", _ON, self._training_log),
        ]
        self._block = 0
        self._started: int | None = None
        self._times: list[int] = []
        self._before: float | None = None  # the mean of a pair's first block
        self._longest_s = 0.0  # of the blocks
        self.pairs: list[tuple[float, float]] = []

    def start(self) -> None:
        """Wraps the training loop inside the recording's own wrapper: call it before that is put in."""
        self._run.install(self._of_run, _ON)

    def watch(self) -> None:
        """Wraps the step and its log around the recording's own wrappers: call it after those are put in."""
        self._steps.install(self._of_steps, _ON)

    def unwatch(self) -> bool:
        """Takes that out, and says whether it was in. A step that is running then doesn't count."""
        was_in = bool(self._steps.groups)
        self._steps.uninstall()
        self._started = None
        return was_in

    def look_inside(self) -> None:
        """Wraps a training loop that was replaced: call it before the recording's own wrappers go around that."""
        self._run.look()

    def look_around(self) -> None:
        """Wraps steps that were replaced: call it after the recording's own wrappers are around those."""
        self._steps.look()

    def stop(self) -> None:
        """Takes out what `start` put in: call it after the recording's own wrappers are taken out."""
        self._run.uninstall()

    def silence(self) -> None:
        """Makes all of that pass through, and leaves it in place."""
        self._run.silence()
        self._steps.silence()

    def _train(self, original: Function, given: Any) -> Hook:
        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
            return True

        def end(token: bool, result: Any, error: BaseException | None) -> None:
            self._report()
            self._turn(self, True)  # what comes after the steps is recorded

        return Hook(begin, end)

    def _train_step(self, original: Function, given: Any) -> Hook:
        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> None:
            self._started = perf_counter_ns()

        return Hook(begin)

    def _training_log(self, original: Function, given: Any) -> Hook:
        """Runs after each step, of which it is a part: there its span ends and its metrics are recorded."""

        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
            return True

        def end(token: bool, result: Any, error: BaseException | None) -> None:
            started, self._started = self._started, None
            if started is None:
                return
            self._times.append(perf_counter_ns() - started)
            if len(self._times) == self._length:
                self._end_block()

        return Hook(begin, end)

    def _end_block(self) -> None:
        # What the last block has left behind ends in the first quarter of this one. The mean, not the median: what is
        # done beside training, such as exporting, slows a few steps down.
        counted = self._times[self._length // 4 :]
        typical = sum(counted) / len(counted)
        self._longest_s = max(self._longest_s, sum(self._times) / 1e9)
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
            if on:
                self._recorder.catch_up(_CATCH_UP_S)
            self._turn(self, following)

    def _report(self) -> None:
        found = overhead(self.pairs)
        attributes: dict[str, Any] = {AB_PAIRS: len(self.pairs) if found is None else found.pairs}
        if found is None:
            told = (
                f"too few steps ran to tell: {len(self.pairs)} pairs of blocks of {self._length}, not {_FEWEST_PAIRS}"
            )
        else:
            attributes |= {AB_OVERHEAD: found.percent, AB_LOW: found.low, AB_HIGH: found.high}
            told = (
                f"{found.percent:+.2f} % of a step, {found.confidence:.1f} % confidence interval "
                f"{found.low:+.2f} to {found.high:+.2f} % ({found.pairs} pairs of blocks of {self._length} steps)"
            )
            if self._longest_s < _LONG_S:
                told += (
                    f". Blocks took {self._longest_s:.1f} s at most: in less than {_LONG_S:g} s, "
                    "a part of the exporting falls between them and isn't counted."
                )
        record = self._recorder.current
        if record is not None and record.name == "megatron.train":
            record.attributes = {**(record.attributes or {}), **attributes}
        if self._says:
            print(f"megatron-autoinstrument, overhead: {told}", flush=True)
