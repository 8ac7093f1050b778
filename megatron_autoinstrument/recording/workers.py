"""This package's own threads, and what they are asked for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

from megatron_autoinstrument.common.redact import get_logger

_logger = get_logger(__name__)

THREAD = "megatron-autoinstrument"
"""The name of this package's threads."""

DRAIN_INTERVAL_S = 0.5


class Request:
    """What a thread of ours is asked for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.deadline = 0.0
        self.done: bool | None = None  # whether it succeeded, once it is over
        self.answered = threading.Event()


class Worker:
    """A thread of ours: it exports what it is asked for, and does `between` from time to time."""

    def __init__(self, exports: str, between: Callable[[], None] | None = None) -> None:
        self._exports = exports
        self._between = between
        self._asked: SimpleQueue[Request] = SimpleQueue()  # one that a signal handler may put into
        self._failed = False
        threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def ask(self, request: Request) -> Request:
        self._asked.put(request)
        return request

    def _run(self) -> None:
        while True:
            try:
                request = self._asked.get(timeout=DRAIN_INTERVAL_S if self._between is not None else None)
            except Empty:
                assert self._between is not None
                self._do(self._between)
                continue
            if request.done is None:
                request.done = self._do(request.work)
                request.answered.set()

    def _do(self, work: Callable[[], None]) -> bool:
        try:
            work()
        except BaseException:  # such as asyncio's CancelledError, from a processor: it would end this thread
            level = logging.DEBUG if self._failed else logging.WARNING  # told once
            _logger.log(level, "Exporting %s failed; some of it is lost.", self._exports, exc_info=True)
            self._failed = True
            return False
        return True
