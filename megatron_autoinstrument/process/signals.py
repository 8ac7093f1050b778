"""The signals that end a rank from outside: torchrun sends SIGTERM to the others when one has crashed, a scheduler what
it is told to send when time is up, a terminal SIGHUP when it is closed.

Their default action ends the process with nothing unwound and nothing flushed. Our handler, on ranks that export, has
what was recorded exported first, within a bound, and then lets the signal do what it would have done without us.

A Python handler runs only once the main thread is back from C, where it may wait in a collective that never ends: with
a handler alone, SIGTERM would no longer end such a rank. So a thread of ours is told of the signal, too, at once. Where
C code waits and holds Python's lock, neither runs: that rank ends by SIGKILL alone, which torchrun sends after 30 s.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, NamedTuple

from megatron_autoinstrument.common.redact import get_logger

_logger = get_logger(__name__)

Leave = Callable[[str, Callable[[], bool]], object]

ENDING = (
    *(signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2),
    *(signal.SIGALRM, signal.SIGXCPU),
)
"""The signals that people and schedulers send, and whose default action ends a process. The handlers that Python sets
itself are left alone: SIGINT's raises KeyboardInterrupt, which loses nothing."""

_SAME_S = 0.5
"""How long a further signal is the same request: srun signals torchrun and its workers, and torchrun them again."""
_FLUSH_INTERVAL_S = 1.0  # at least, for handlers of somebody's that run often
_DEFAULT, _IGNORED = 0, 1  # in place of a handler's address
_CREDENTIALS = struct.Struct("3i")  # process, user, group


def _action(number: int) -> Any:
    """What the system does on a signal now: C code, such as faulthandler's, may have set that behind Python's back."""
    action = ctypes.create_string_buffer(256)  # a struct sigaction, and more: it begins with the handler's address
    ctypes.CDLL(None).sigaction(number, None, action)
    return action


def _set_action(number: int, action: Any) -> None:
    ctypes.CDLL(None).sigaction(number, action, None)


def _address(action: Any) -> int:
    return ctypes.c_void_p.from_buffer(action).value or _DEFAULT


class _Before(NamedTuple):
    """What a signal did before our handler."""

    handler: Any  # of Python; None where the system's action decides
    action: Any


class Termination:
    """Our handler of the signals that end a process."""

    def __init__(self) -> None:
        self._active = False
        self._before: dict[int, _Before] = {}  # where ours is the handler, or below one set later that may call it
        self._first: tuple[int, float] | None = None  # the signal that ends this process, and when it came
        self._python = 0  # the address of Python's own handler, which calls ours
        self._flushed = 0.0
        self._wakeup: socket.socket | None = None
        self._others = -1  # the file that the system's handler wrote to before

    def install(self, leave: Leave, flush: Callable[[], object]) -> None:
        """Puts our handler in the place of the default action, and above the handlers of Python code. A signal that is
        ignored stays so, and so does one that C code handles. For the main thread alone.

        Args:
            leave: Has everything exported, what is open included, within a bound. It gets the signal's name, and a
                function: once that says so, it gives up.
            flush: Has exported what is closed, without waiting for it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._leave, self._flush_soon = leave, flush
        self._active = True
        for number in ENDING:
            if number not in self._before:
                self._put(number)
        if self._before and self._wakeup is None:
            self._listen()

    def _put(self, number: int) -> None:
        action, handler = _action(number), signal.getsignal(number)
        address = _address(action)
        if address == _IGNORED or handler is signal.default_int_handler:
            return
        if address == _DEFAULT:
            # The system ignores it where this is the first process of a container.
            handler = None if os.getpid() != 1 else _go_on
        elif callable(handler):
            signal.signal(number, handler)
            if _address(_action(number)) != address:  # C code's was above it
                _set_action(number, action)
                return
        elif number == signal.SIGTERM:
            handler = None  # C code handles it, and ends the process
        else:
            return  # C code's may return, and training goes on
        self._before[number] = _Before(handler, action)  # first: the signal may come at once
        signal.signal(number, self._handle)
        self._python = _address(_action(number))

    def uninstall(self) -> None:
        """Puts back what was there; where somebody has set a handler since, theirs stays, and ours below it passes
        through. So it does, too, where another thread than the main one calls this."""
        self._active = False
        if threading.current_thread() is not threading.main_thread():
            return
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            current = signal.set_wakeup_fd(self._others)
            if current != wakeup.fileno():
                signal.set_wakeup_fd(current)
            wakeup.close()  # our thread reads that
        for number, before in list(self._before.items()):
            if self._is_current(number) and _address(_action(number)) == self._python:
                signal.signal(number, before.handler or signal.SIG_DFL)
                _set_action(number, before.action)
                del self._before[number]

    def _is_current(self, number: int) -> bool:
        return signal.getsignal(number) == self._handle

    def _ends(self, number: int) -> bool:
        """Whether this signal ends the process, as far as we know: nobody's Python code decides that."""
        before = self._before.get(number)
        return before is not None and before.handler is None and self._is_current(number)

    def _handle(self, number: int, frame: Any) -> None:
        """In the main thread, between any two instructions: it takes no lock that the thread may hold, and logs
        nothing."""
        before = self._before.get(number)
        if before is not None and before.handler is not None:
            if self._active:
                with contextlib.suppress(Exception):
                    self._flush()
            before.handler(number, frame)  # it decides whether and when the process ends
            return
        now = monotonic()
        number, came = self._first or (number, now)
        if self._first is not None and now - came < _SAME_S:
            return  # what has been interrupted ends the process
        try:
            if self._active and self._first is None:
                self._first = number, now
                self._leave(signal.Signals(number).name, lambda: False)
        finally:
            self._end(number)

    def _flush(self) -> None:
        if monotonic() - self._flushed > _FLUSH_INTERVAL_S:
            self._flushed = monotonic()
            self._flush_soon()

    def _end(self, number: int) -> None:
        if (before := self._before.get(number)) is not None:
            _set_action(number, before.action)
        os.kill(os.getpid(), number)

    def _listen(self) -> None:
        """Has the system's handler write to a socket of ours. What it wrote to before, such as the file of an event
        loop, gets the same from there."""
        if not hasattr(socket, "SO_PASSCRED"):  # Linux has it
            return
        ours, wakeup = socket.socketpair()
        # Who has written: a child that is just being forked has our socket, but its signals are none of ours.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        wakeup.setblocking(False)
        self._others = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        self._wakeup = wakeup
        threading.Thread(target=self._watch, args=(ours,), name="megatron-autoinstrument-signals", daemon=True).start()

    def _watch(self, ours: socket.socket) -> None:
        with ours:
            while (number := _next(ours)) is not None:
                if self._others != -1:
                    with contextlib.suppress(OSError):
                        os.write(self._others, bytes((number,)))
                if number not in self._before:
                    continue
                if not self._ends(number):
                    self._flush()  # what else is to happen, others decide
                    continue
                until = monotonic() + _SAME_S

                def hurried(until: float = until) -> bool:
                    return self._ends(_next(ours, socket.MSG_DONTWAIT) or 0) and monotonic() > until

                try:
                    self._leave(signal.Signals(number).name, hurried)
                finally:
                    self._end(number)


def _next(ours: socket.socket, flags: int = 0) -> int | None:
    """The next signal that this process got; 0 for anything else, None at the end."""
    try:
        data, ancillary, *_ = ours.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), flags)
    except BlockingIOError:
        return 0
    if not data:
        return None
    return data[0] if ancillary and _CREDENTIALS.unpack(ancillary[0][2])[0] == os.getpid() else 0


def _go_on(number: int, frame: Any) -> None:
    """The handler of a signal that ends nothing."""


TERMINATION = Termination()


class _Fork:
    """A forked child is ended by signals as without us. While it is being forked, Python would lose one: it forgets
    in the child what came in there before."""

    def __init__(self) -> None:
        self._masks: dict[int, Any] = {}  # of the threads that are forking

    def before(self) -> None:
        if TERMINATION._before:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, set(TERMINATION._before))
            self._masks[threading.get_ident()] = mask

    def after(self) -> None:
        if (mask := self._masks.pop(threading.get_ident(), None)) is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def after_in_child(self) -> None:
        try:
            TERMINATION.uninstall()
        finally:
            self.after()


_fork = _Fork()
os.register_at_fork(before=_fork.before, after_in_parent=_fork.after, after_in_child=_fork.after_in_child)
atexit.register(TERMINATION.uninstall)  # before the recorder registers its own exit, so that this runs after it


def install(leave: Leave, flush: Callable[[], object]) -> None:
    """See `Termination.install`; without it, recording goes on."""
    try:
        TERMINATION.install(leave, flush)
    except Exception:
        with contextlib.suppress(Exception):  # a handler without its thread would keep a rank that hangs alive
            TERMINATION.uninstall()
        _logger.warning("Signals can't be handled: if one ends this rank, what is open then is lost.", exc_info=True)
