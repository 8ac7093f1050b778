"""What exporters make of what they are given: trouble is told once per exporter, and lost spans are counted."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from types import FunctionType
from typing import Any

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.export.sdk_internals import QUEUE_IS_FULL, exporter_of, holders_of, inner_of, queue_of
from megatron_autoinstrument.recording.record import Record

_logger = get_logger(__name__)

_SAID_ONCE = " (Told once: training goes on.)"
_SAID_ONCE_OF_SPANS = " (Told once: training goes on, and spans that are lost are counted and reported at the end.)"
_at_work = threading.local()  # .export: the Export that this thread is busy with


def is_as_shipped(function: Any) -> bool:
    """Whether it is a function of OpenTelemetry's as it is in its file: a wrapper may have its name and module."""
    return (
        type(function) is FunctionType
        and function.__module__.startswith("opentelemetry.")
        and not hasattr(function, "__wrapped__")
        and function.__code__.co_filename == getattr(sys.modules.get(function.__module__), "__file__", None)
    )


def is_of_this_package(export: Any) -> bool:
    """Whether this package has put it there in place of an exporter's `export`, with nothing of somebody's behind."""
    if type(export) is Export:
        return export.of_this_package
    return type(export) is FunctionType and not hasattr(export, "__wrapped__") and hasattr(export, "of_this_package")


class Tally:
    """A sum that several threads add to. It has no lock, which a fork could find held."""

    def __init__(self) -> None:
        self._of_thread: dict[int, int] = {}
        self.of_one = 0
        """What one thread at a time adds, which is cheaper."""

    def add(self, number: int) -> None:
        thread = get_ident()
        self._of_thread[thread] = self._of_thread.get(thread, 0) + number

    @property
    def total(self) -> int:
        return self.of_one + sum(list(self._of_thread.values()))


class Export(logging.Filter):
    """Stands in for an exporter's `export` until it is released, and filters what is logged about that."""

    def __init__(self, signal: str, exporter: Any, holder: Any, queue: Any, ended: Tally, scope: str) -> None:
        """
        Args:
            signal: What is exported.
            exporter: The exporter.
            holder: The processor or reader that calls it.
            queue: What waits for it, if it is a queue.
            ended: How many spans of `scope` have been handed to the holder.
            scope: The instrumentation scope whose spans are counted.
        """
        super().__init__()
        self.failing = False  # as of the last attempt
        self.given_up = False  # what comes now is lost
        self._signal = signal
        self._exporter = exporter
        self._holder = holder
        self._own = vars(exporter).get("export")  # of this one alone
        self._export: Callable[..., Any] = exporter.export
        self._queue = queue if isinstance(queue, deque) else None
        self._ended = ended
        self._scope = scope
        self._exported = Tally()
        self.sent = 0
        """Spans that the exporter has now: they may have arrived already."""
        self._lost = 0  # for certain, so far
        self._process = os.getpid()
        self._said: set[str] = set()
        self._said_once = _SAID_ONCE_OF_SPANS if signal == "traces" else _SAID_ONCE
        # What they log is logged under their modules' names.
        classes = [kind for part in (exporter, holder, inner_of(holder)) for kind in type(part).__mro__]
        modules = {kind.__module__ for kind in classes}
        self._loggers = [
            logging.getLogger(name) for name in modules if name.partition(".")[0] not in sys.stdlib_module_names
        ]
        exporter.export = self  # before the rest: an exporter may refuse it
        for logger in self._loggers:
            logger.addFilter(self)

    @property
    def of_this_package(self) -> bool:
        """Whether nothing of somebody's stands behind it."""
        return self._own is None or is_of_this_package(self._own)

    def unhook(self) -> None:
        """Puts the exporter's own `export` back."""
        if vars(self._exporter).get("export") is self:
            if self._own is None:
                del self._exporter.export
            else:
                self._exporter.export = self._own
        for logger in self._loggers:
            logger.removeFilter(self)

    def leave_out_of_shutdown(self) -> bool:
        """Has a shutdown of the provider pass over the processor or reader that exports this. False if it can't be."""
        try:
            self._holder.shutdown = _nothing
        except Exception:  # noqa: BLE001
            return False  # it takes no attributes
        return True

    def __call__(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if os.getpid() != self._process:
            return self._export(batch, *args, **kwargs)
        spans = self._of_scope(batch)
        # Whatever ended, and is neither exported nor here nor in the queue, did not fit into the queue.
        # The number that ended comes first: some more may end meanwhile.
        unexported = self.unexported
        waiting = spans + len(self._queue or ())
        self._lost = max(self._lost, unexported - waiting)
        if self.given_up:
            return None
        self.sent = spans
        with self.at_work():
            try:
                result = self._export(batch, *args, **kwargs)
                self.failing = getattr(result, "name", "SUCCESS") != "SUCCESS"
            except Exception as error:  # noqa: BLE001
                # The SDK would log it, each time; a result it doesn't look at.
                result, self.failing = None, True
                self._say("failed", "%s: %s", type(error).__name__, error)
        self.sent = 0
        if self.failing:
            self._lost += spans
            self._say("failed", "the exporter reports a failure")
        else:
            self._exported.add(spans)
        return result

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """What this thread logs meanwhile is about this export."""
        before = getattr(_at_work, "export", None)
        _at_work.export = self
        try:
            yield
        finally:
            _at_work.export = before

    @property
    def lost(self) -> int:
        """Spans that are lost for certain, so far."""
        return self.unexported if self.given_up else self._lost

    @property
    def unexported(self) -> int:
        """Spans that ended and are not exported: at the end, all that is lost."""
        return max(0, self._ended.total - self._exported.total)

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets one line through, of each kind: trouble with the export, and a queue that is full."""
        if record.levelno < logging.WARNING:
            return True
        full = str(record.msg).startswith(QUEUE_IS_FULL) and self._is_full()
        if not full and getattr(_at_work, "export", None) is not self:
            return True  # another exporter's
        if not full:
            self.sent = 0  # an attempt has failed: what is tried again has not arrived
        kind = "full" if full else "failed"
        if kind in self._said:
            return False
        self._said.add(kind)
        try:
            record.msg, record.args = record.getMessage() + self._said_once, ()
        except Exception:  # noqa: BLE001
            return True  # its handlers will say what is wrong with it
        return True

    def _say(self, kind: str, what: str, *args: object) -> None:
        if kind not in self._said:
            self._said.add(kind)
            _logger.warning("Exporting %s failed: " + what + self._said_once, self._signal, *args)

    def _is_full(self) -> bool:
        return self._queue is not None and self._queue.maxlen is not None and len(self._queue) >= self._queue.maxlen

    def _of_scope(self, batch: Any) -> int:
        if self._signal != "traces":
            return 0
        spans = [span for span in batch if type(span) is not Record]
        of_scope = [
            span for span in spans if getattr(getattr(span, "instrumentation_scope", None), "name", None) == self._scope
        ]
        return len(batch) - len(spans) + len(of_scope)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def watch_exporters(signal: str, provider: Any, ended: Tally, scope: str) -> list[Export]:
    """Watches the exporters that the SDK's own processors and readers of `provider` export with; other processors'
    are out of sight."""
    watched = []
    for holder in holders_of(provider) or ():
        if not type(holder).__module__.startswith("opentelemetry.sdk."):
            continue
        try:
            if (exporter := exporter_of(holder)) is not None:
                watched.append(Export(signal, exporter, holder, queue_of(holder), ended, scope))
        except Exception:
            _logger.debug("An exporter can't be watched", exc_info=True)  # it takes no attributes
    return watched


def is_patched(thing: Any) -> bool:
    """Whether it has something of its own in the place of what its class has."""
    return any(hasattr(type(thing), name) for name in vars(thing))
