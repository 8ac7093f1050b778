"""SIGTERM, which ends a rank from outside: torchrun sends it to the others when one has crashed, a scheduler when time
is up.

Its default action ends the process with nothing unwound and nothing flushed. Ours, on ranks that export, has what was
recorded exported first, within a bound, and then lets the signal do what it would have done without us.

A Python handler runs only once the main thread is back from C, where it may wait in a collective that never ends: with
a handler alone, SIGTERM would no longer end such a rank. So a thread of ours is told of the signal, too, at once. Where
C code waits and holds Python's lock, neither runs: that rank ends by SIGKILL alone, which torchrun sends after 30 s.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger(__name__)

Leave = Callable[[Callable[[], bool]], object]

_CREDENTIALS = struct.Struct("3i")  # process, user, group


def _action() -> Any:
    """What the system does on SIGTERM now: C code, such as faulthandler's, may have set that behind Python's back."""
    action = ctypes.create_string_buffer(256)  # a struct sigaction, and more: it begins with the handler's address
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action


def _set_action(action: Any) -> None:
    ctypes.CDLL(None).sigaction(signal.SIGTERM, action, None)


def _address(action: Any) -> int | None:
    return ctypes.c_void_p.from_buffer(action).value


class Termination:
    """Our handler of SIGTERM."""

    def __init__(self) -> None:
        self._active = False
        self._installed = False  # ours is the handler, or below one that was set later and may call it
        self._ending = False
        self._previous: Any = None  # the handler before ours, as Python knows it
        self._before: Any = None  # and as the system does
        self._address: int | None = None  # of Python's own handler, which calls ours
        self._wakeup: socket.socket | None = None

    def install(self, leave: Leave, hand_on: Callable[[], object]) -> None:
        """Puts ours above the handler that is there, where the signal isn't ignored. For the main thread alone.

        Args:
            leave: Has everything exported, what is open included, within a bound; it gives up once the function that
                it gets says so.
            hand_on: Has exported what is closed, without waiting for it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._leave, self._hand_on = leave, hand_on
        previous = signal.getsignal(signal.SIGTERM)
        if previous is signal.SIG_IGN or self._active:
            return
        self._active = True
        if not self._installed:  # else ours is below another's already, and above it would be called in a circle
            self._previous, self._before = previous, _action()
            signal.signal(signal.SIGTERM, self._handle)
            self._address = _address(_action())
            self._installed = True
        self._listen()

    def uninstall(self) -> None:
        """Puts back what was there; where somebody has set a handler since, theirs stays, and ours below it passes
        through. So it does, too, where another thread than the main one calls this."""
        self._active = False
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        wakeup, self._wakeup = self._wakeup, None
        if wakeup is not None:
            current = signal.set_wakeup_fd(-1)
            if current != wakeup.fileno():
                signal.set_wakeup_fd(current)
            wakeup.close()  # our thread reads that
        if self._is_current() and _address(_action()) == self._address:
            signal.signal(signal.SIGTERM, self._previous or signal.SIG_DFL)
            _set_action(self._before)
            self._installed = False

    def _is_current(self) -> bool:
        return signal.getsignal(signal.SIGTERM) == self._handle

    def _handle(self, number: int, frame: Any) -> None:
        """In the main thread, between any two instructions: it takes no lock that the thread may hold, and logs
        nothing."""
        if callable(self._previous):
            if self._active:
                with contextlib.suppress(Exception):
                    self._hand_on()
            self._previous(number, frame)  # it decides whether and when the process ends
            return
        try:
            if self._active and not self._ending:  # a second signal ends at once
                self._ending = True
                self._leave(lambda: False)
        finally:
            self._end()

    def _end(self) -> None:
        _set_action(self._before)
        os.kill(os.getpid(), signal.SIGTERM)

    def _listen(self) -> None:
        """Has the system's handler write to a socket of ours, unless somebody uses that already."""
        if not hasattr(socket, "SO_PASSCRED"):  # Linux has it
            return
        ours, wakeup = socket.socketpair()
        # Who has written: a child that is just being forked has our socket, but its signals are none of ours.
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        wakeup.setblocking(False)
        others = signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        if others != -1:
            signal.set_wakeup_fd(others)
            ours.close()
            wakeup.close()
            return
        self._wakeup = wakeup
        threading.Thread(target=self._watch, args=(ours,), name="megatron-autoinstrument-signals", daemon=True).start()

    def _watch(self, ours: socket.socket) -> None:
        with ours:
            while (number := _next(ours)) is not None:
                if number != signal.SIGTERM:
                    continue
                if not self._is_current() or callable(self._previous):
                    self._hand_on()  # what else is to happen, others decide
                    continue
                try:
                    self._leave(lambda: _next(ours, socket.MSG_DONTWAIT) == signal.SIGTERM)
                finally:
                    self._end()


def _next(ours: socket.socket, flags: int = 0) -> int | None:
    """The next signal that this process got; 0 for anything else, None at the end."""
    try:
        data, ancillary, *_ = ours.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size), flags)
    except BlockingIOError:
        return 0
    if not data:
        return None
    return data[0] if ancillary and _CREDENTIALS.unpack(ancillary[0][2])[0] == os.getpid() else 0


TERMINATION = Termination()


class _Fork:
    """A forked child is ended by signals as without us. While it is being forked, Python would lose one: it forgets
    in the child what came in there before."""

    def __init__(self) -> None:
        self._masks: dict[int, Any] = {}  # of the threads that are forking

    def before(self) -> None:
        if TERMINATION._installed:
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
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


def install(leave: Leave, hand_on: Callable[[], object]) -> None:
    """See `Termination.install`; without it, recording goes on."""
    try:
        TERMINATION.install(leave, hand_on)
    except Exception:
        _logger.warning("SIGTERM can't be handled: if one comes, what is open then is lost.", exc_info=True)
