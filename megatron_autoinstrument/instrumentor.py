"""The life cycle: when and on which ranks Megatron is instrumented. What is done then is elsewhere."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import wrapt

from megatron_autoinstrument import ab, autoload
from megatron_autoinstrument.base import BaseInstrumentor
from megatron_autoinstrument.common import groups, redact
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.megatron import nemo_lens, patching, state
from megatron_autoinstrument.process import ranks, signals, strategies
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.settings import config, declarative, flags
from megatron_autoinstrument.targets import arguments

if TYPE_CHECKING:
    from megatron_autoinstrument.recording.connection import Connection
    from megatron_autoinstrument.recording.traces import Traces

_logger = get_logger(__name__)

RECORDER = Recorder()
"""The process's."""
PATCHER = patching.Patcher(lambda look: _in_turn(lambda: _look(look)), beside=arguments.PATCHER)

_PROVIDERS = {"traces": "tracer", "metrics": "meter", "logs": "logger"}
_ASIDE = (
    "Megatron's own telemetry (nemo-lens) is on: it records this run, and megatron-autoinstrument stands aside. "
    "To have the spans of Megatron's guide instead, uninstall nemo-lens."
)
_SHUT_DOWN = (
    "nemo-lens is installed and off: at the end of training it shuts OpenTelemetry's providers down all the same, "
    "before megatron.pretrain has ended. Uninstall it, or set MEGATRON_OTEL_ENABLED=1 for Megatron's own spans."
)
_NO_CORE = "Nothing is recorded: this Megatron has no megatron.core, and megatron-autoinstrument knows none without."
_CORE_ALONE = (
    "megatron/training.py is no training loop that megatron-autoinstrument knows: it records no run, step, evaluation "
    "or checkpoint of it, and of megatron.core what it knows."
)


class MegatronInstrumentor(BaseInstrumentor):  # type: ignore[misc]  # its package has no types
    """Records NVIDIA Megatron-LM training with OpenTelemetry.

    `instrument()` may come before or after Megatron is imported, and again after `uninstrument()`, also while
    training runs. What to record, and on which ranks, is told by variables (see
    `settings.table`) and by flags. On ranks that don't export, nothing is patched but
    Megatron's argument parser and what it hands its result to. Any thread may call these, and a signal handler may:
    what is asked for while something else is being done comes after it, and nobody waits for that for ever.
    """

    configuration = config.Configuration  # opentelemetry-configuration asks for it by this name
    _waiting: Any = None  # for Megatron's import
    _given: dict[str, Any] = {}  # providers

    def instrumentation_dependencies(self) -> Collection[str]:
        # A git checkout of Megatron has no package metadata, and a requirement on it would then, without a word,
        # turn us off.
        return ()

    def instrument(self, **kwargs: Any) -> None:
        if self.is_instrumented_by_opentelemetry and declarative.is_set():
            return  # opentelemetry-instrument calls it once for the file, and once as always
        _in_turn(functools.partial(super().instrument, **kwargs))

    def uninstrument(self, **kwargs: Any) -> None:
        """In mid-run nobody waits for what was recorded to be exported; else that takes 10 s at most."""
        _in_turn(functools.partial(super().uninstrument, **kwargs))
        if not self.is_instrumented_by_opentelemetry:
            _guarded(signals.TERMINATION.uninstall)  # once more: the turn may have been another thread's

    def _instrument(self, **kwargs: Any) -> None:
        """
        Args:
            tracer_provider: The provider to use in place of the global one. Given any, none is built by us.
            meter_provider: Likewise.
            logger_provider: Likewise.
            kwargs: Settings by the names of `config.Configuration`, such as `span_groups="all"`. They beat variables.
        """
        try:
            self._given = {signal: kwargs.pop(f"{name}_provider", None) for signal, name in _PROVIDERS.items()}
            config.take(kwargs)
            if any(name == "megatron" or name.startswith("megatron.") for name in list(sys.modules)):
                _begin(self._given)
            else:
                self._waiting = autoload.before_megatron(lambda: _in_turn(lambda: _begin(self._given)))
        except Exception:
            if patching.reraise_internal_errors:
                raise
            _logger.warning("Could not instrument Megatron; nothing is recorded.", exc_info=True)

    def _uninstrument(self, **kwargs: Any) -> None:
        try:
            if self._waiting is not None:
                autoload.forget(self._waiting)
                self._waiting = None
            _take_out()
            _stop_comparing()
            if RECORDER.current is not None:
                RECORDER.request_flush(end_held=True)
            else:
                RECORDER.flush(end_held=True)
                RECORDER.disconnect()
            signals.TERMINATION.uninstall()
        except Exception:
            if patching.reraise_internal_errors:
                raise
            PATCHER.silence()
            _logger.warning("Could not take the instrumentation back; it is silent from here on.", exc_info=True)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Takes every wrapper out of Megatron for the length of a `with`, and puts them back: nothing of this package
        runs inside it. The step it begins in is recorded up to there. Any thread may use it."""
        _in_turn(_pause)
        try:
            yield
        finally:
            _in_turn(_resume)


_TURN_S = 10.0  # the longest that one waits for another: an uninstrument() whose flush takes all its time
_asked: deque[Callable[[], None]] = deque()
_switching = threading.RLock()
_busy = False


def _in_turn(switch: Callable[[], None]) -> None:
    """Has `switch` run when no other does: now, after those of other threads, or after the one that a signal handler
    has interrupted. Whoever runs one runs all that are asked for meanwhile, so that to give up waiting loses none."""
    global _busy
    _asked.append(switch)
    if not _switching.acquire(timeout=_TURN_S):
        return
    try:
        while _asked and not _busy:
            _busy = True
            try:
                while _asked:  # a signal handler may have run them since the last look
                    _guarded(_asked.popleft())
            finally:
                _busy = False
    finally:
        _switching.release()


def _guarded(switch: Callable[[], None]) -> None:
    try:
        switch()
    except Exception:
        if patching.reraise_internal_errors:
            raise
        PATCHER.silence()
        _logger.warning("Switching the instrumentation failed; it is silent from here on.", exc_info=True)


_pauses = 0
_paused: tuple[frozenset[str], bool] = (frozenset(), False)  # what the first of them took out


def _pause() -> None:
    global _pauses, _paused
    if _pauses == 0:
        _paused = PATCHER.groups, _take_out()
    _pauses += 1


def _resume() -> None:
    global _pauses
    _pauses -= 1
    patched, watched = _paused
    # Inside the last of them, it may have been uninstrumented, or that and instrumented again.
    if _pauses or PATCHER.groups or not MegatronInstrumentor().is_instrumented_by_opentelemetry:
        return
    if patched:
        _patch(patched)
    if watched and _comparison is not None:
        _comparison.watch()


def accept_flags() -> None:
    """Lets Megatron's parser know our flags, and waits for what they say. Nothing else is patched."""
    _in_turn(lambda: _patch(frozenset()))


class _Decision(NamedTuple):
    """What this process is to do, as far as its place and Megatron's arguments are known."""

    place: ranks.Rank
    settings: config.Config
    records: bool


_decision: _Decision | None = None


def _decide(last: bool = False) -> _Decision:
    """Decides. What there is to say, one process says once, and none that doesn't know its place.

    Args:
        last: Whether what is known now is all that will be.
    """
    place, known = ranks.look()
    knows = last or known > ranks.Known.GUESSED
    settings = config.from_environment(
        place, warn=knows and place.rank == 0, settled=last or known is ranks.Known.SETTLED
    )
    off = settings.enabled is False or not (settings.span_groups or settings.metrics_enabled or settings.logs_enabled)
    records = not off and not ranks.is_helper_process() and strategies.chosen(settings, last)
    if records and nemo_lens.is_here():
        aside = nemo_lens.is_asked_for()
        if knows and strategies.is_first(place, settings):
            _say_once(_ASIDE if aside else _SHUT_DOWN)
        records = not aside
    return _Decision(place, settings, records)


def _look_again(last: bool = False) -> None:
    """More is known than at the last decision: takes it again, and does what follows if it is another one."""
    decision = _decide(last)
    if MegatronInstrumentor().is_instrumented_by_opentelemetry and decision != _decision:
        _take_out()
        _install(MegatronInstrumentor()._given, decision)


@functools.cache  # wrapt's hooks can't be taken back
def _watch_for_training() -> None:
    wrapt.register_post_import_hook(_look_for_core, "megatron.training")


def _look_for_core(training: ModuleType) -> None:
    """`megatron.training` has been imported: tells where it isn't the one that is known. EleutherAI's gpt-neox and
    early Megatrons have a file of that name, whose loop nothing is known of."""
    try:
        is_file = getattr(training, "__file__", None) is not None and not hasattr(training, "__path__")
        if not is_file or _decision is None or not _decision.records:
            return
        place, settings = ranks.current(), _decision.settings
        if strategies.exports(place, settings) and strategies.is_first(place, settings):
            core = "megatron.core" in sys.modules or importlib.util.find_spec("megatron.core") is not None
            _say_once(_CORE_ALONE if core else _NO_CORE)
    except Exception:
        if patching.reraise_internal_errors:
            raise
        _logger.debug("It could not be told which Megatron this is", exc_info=True)


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _logger.warning(message)


def _begin(given: Mapping[str, Any]) -> None:
    arguments.teach()  # before anything that could fail
    _install(given)


def _install(given: Mapping[str, Any], decision: _Decision | None = None) -> None:
    global _decision
    place, settings, records = _decision = decision or _decide()
    if not records:
        RECORDER.connect_by(None)
        _stop_comparing()
        _patch(frozenset())
        return
    redact.with_text = settings.exception_text
    _watch_for_training()
    wanted = {
        **({"traces": given["traces"]} if settings.span_groups else {}),
        **({"metrics": given["metrics"]} if settings.metrics_enabled else {}),
        **({"logs": given["logs"]} if settings.logs_enabled else {}),
    }

    def connect() -> Connection:
        # Only now: the SDK takes long to import, and the run's id is known no earlier.
        from megatron_autoinstrument.export import ids, providers, resource

        # With the first span: Megatron has set its own handlers by then, and knows of no other. So has PyTorch
        # Lightning, which sets one for SIGUSR1 only where there is none.
        _in_turn(_handle_signals)
        strategy = settings.sampling_strategy
        return providers.connect(
            wanted,
            settings.exporter,
            resource.attributes(place, ids.run_id(RECORDER.run.number)),
            build=not any(given.values()),
            service_name=settings.service_name,
            sampler=strategies.SAMPLING_STRATEGIES.get(strategy)(place, settings) if strategy else None,
        )

    def plan(connection: Connection, run: int) -> Traces | None:
        from megatron_autoinstrument.export import ids

        if RECORDER.journal is not None:
            now = ranks.current()
            RECORDER.journal.describe(now.rank, now.world_size, run, ids.run_id(run))
        # A restart in the process may have given it another rank.
        is_recorded = functools.cache(functools.partial(strategies.records, settings=settings))
        return connection.traces_of(ids.run_key(run), ranks.current().rank, settings.trace_scope == "step", is_recorded)

    # A program that tells its ranks their places in another way than Megatron's has told it by the first record.
    RECORDER.connect_by(connect, plan, lambda: _in_turn(lambda: _look_again(last=True)))
    other = {groups.METRICS: settings.metrics_enabled, groups.LOGS: settings.logs_enabled}
    everything = settings.span_groups | {name for name, on in other.items() if on}
    if settings.ab:
        _compare(settings, place, everything)
    _patch(everything)
    if _comparison is not None:
        _comparison.watch()


def _handle_signals() -> None:
    if MegatronInstrumentor().is_instrumented_by_opentelemetry:  # still
        signals.install(RECORDER.terminate, RECORDER.request_flush)


_comparison: ab.Comparison | None = None


def _compare(settings: config.Config, place: ranks.Rank, everything: frozenset[str]) -> None:
    global _comparison

    def turn(comparison: ab.Comparison, on: bool) -> None:
        def switch() -> None:
            # Another thread may have taken it out since its step ended.
            if comparison is not _comparison or not _take_out():
                return
            if on:
                _patch(everything)
            comparison.watch()

        _in_turn(switch)

    _stop_comparing()
    _comparison = ab.Comparison(RECORDER, settings.ab, turn, says=strategies.is_first(place, settings))
    _comparison.start()


def _stop_comparing() -> None:
    global _comparison
    if _comparison is not None:
        _comparison.stop()
        _comparison = None


def _look(look: Callable[[], None]) -> None:
    """Others may have replaced functions since: `look` finds which, and a comparison goes where it was around them."""
    comparison = _comparison
    if comparison is not None:
        comparison.look_inside()
    look()
    if comparison is not None:
        comparison.look_around()


def _take_out() -> bool:
    """Takes out what runs per step, from the outside in, and says whether a comparison was watching."""
    watched = _comparison is not None and _comparison.unwatch()
    # Megatron exits on flags that its parser doesn't know, and may be yet to parse these.
    if not flags.are_given() or state.args() is not None:
        arguments.PATCHER.uninstall(rebind=False)  # the other one does that as well
    PATCHER.uninstall()
    return watched


def _patch(wanted: frozenset[str]) -> None:
    if _in_child_of_a_rank:
        return
    from megatron_autoinstrument.targets import SEAMS

    RECORDER.when_arguments_known = lambda args: _in_turn(lambda: _apply_flags(args))
    RECORDER.set_groups(wanted)
    arguments.teach(rebind=False)  # the other ledger does that as well
    PATCHER.install([seam for seam in SEAMS if seam not in arguments.SEAMS], wanted | {groups.FLAGS}, RECORDER)


def _apply_flags(args: Any) -> None:
    """Megatron's arguments are known: what they say of us overrides the variables, the kill switch excepted."""
    said = {flag: getattr(args, flag[2:].replace("-", "_"), None) for flag in flags.WITH_VALUE}
    changed = {flag: value for flag, value in said.items() if value and config.flags.get(flag) != value}
    config.flags.update(changed)
    instrumentor = MegatronInstrumentor()
    if instrumentor.is_instrumented_by_opentelemetry:
        _look_again()
        _look(PATCHER.look)
        return
    on = config.enabled(warn=ranks.current().rank == 0)
    if getattr(args, "otel_enabled", None) and on is not False:
        PATCHER.uninstall()  # what accept_flags() patched
        instrumentor.instrument()


_in_child_of_a_rank = False


def _silence() -> None:
    global _switching, _busy, _comparison, _in_child_of_a_rank
    _in_child_of_a_rank = _in_child_of_a_rank or _decision is not None  # Megatron was there, or about to be
    _switching, _busy = threading.RLock(), False  # another thread may have held it
    _asked.clear()
    PATCHER.silence()
    if _comparison is not None:
        _comparison.silence()
        _comparison = None
    RECORDER.reset_after_fork()


# Forked children (data workers, checkpoint writers) record nothing, whatever was running when they were forked.
os.register_at_fork(after_in_child=_silence)
