"""What has ended, on its way to the exporters: handed on and flushed by this package's threads, and counted where it is
lost. A signal handler may ask for that, and waits for no lock."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from time import monotonic, sleep

from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.recording.connection import Connection
from megatron_autoinstrument.recording.journal import Journal
from megatron_autoinstrument.recording.record import SILENT, Record
from megatron_autoinstrument.recording.workers import Request, Worker

_logger = get_logger(__name__)

MAX_WAITING = 65_536  # records that wait for the thread; more are counted and dropped
_OTHERS_S = 1.5  # of the time at exit, for metrics and logs where spans take all the rest
_FOR_A_FLUSH_S = 5.0  # how long somebody's flush or shutdown waits for what this package's thread is handing on
_FOR_OTHERS_S = 1.0  # and how long the last one waits for a thread that may never go on
_FLUSH_EVERY = 512  # spans handed on between flushes, so that no batch processor's queue (2048) overflows


class Outbox:
    """What waits, and the threads that hand it on. `Recorder` fills it."""

    def __init__(self) -> None:
        self.dropped = 0  # spans that never reached OpenTelemetry
        self.journal: Journal | None = None
        """What the process leaves behind, however it ends; None before it is connected."""
        self._connection: Connection | None = None
        self._waiting: deque[Record] = deque()
        self._unfinished: list[Record] = []  # those of them that were running when their turn came
        self._counted = 0  # lost spans that are in the metric already
        self._reported = 0  # and those that have been told of
        self._not_exported = 0  # of connections that were let go
        self._holds = True  # whether somebody will release the span that is held for what is known later
        self._thread: Worker | None = None
        self._other_thread: Worker | None = None  # for metrics and logs, when spans keep the first one busy
        self._last: dict[str, Request] = {}  # of the process: its exit and a signal share them
        self._terminated_by: str | None = None  # the signal
        self._told_of_signal = False
        self._stopped = False  # the export of spans, before the metrics left with the number of those lost
        self._handed = 0  # spans handed to OpenTelemetry so far
        self._draining = threading.Lock()
        self._draining_thread = 0

    # What the recorder knows of what is running.

    def close_open_records(self, terminated_by: str | None = None) -> None:
        """Ends what is still running."""
        raise NotImplementedError

    def end_held(self) -> None:
        """Ends the span that is held, if any."""
        raise NotImplementedError

    def _still_open(self) -> int:
        raise NotImplementedError

    def _is_lost(self, record: Record) -> bool:
        raise NotImplementedError

    def _emit(self, record: Record, end: int) -> None:
        raise NotImplementedError

    def _drop(self, record: Record) -> None:
        """Counts a record that gives no span: what is inside belongs to what is around."""
        self.dropped += 1
        record.kind = SILENT
        record.span_id = record.parent.span_id if record.parent is not None else 0

    def _drain_and_count(self) -> None:
        self.drain()
        self._count_lost()

    def _lost(self, final: bool) -> int:
        """How many spans are lost, as far as it is known now. It takes no lock: a signal handler may call it."""
        if self._connection is None:
            return 0
        lost = self.dropped + self._not_exported + self._connection.lost(final)
        if final:
            lost += len(self._waiting) + len(self._unfinished) + self._still_open()
        return lost

    def _certainly_lost(self) -> int:
        """How many are lost whatever happens: where the last flush has not ended, what it was to export may arrive."""
        last = self._last.get("spans")
        return self._lost(final=self._stopped or (last is not None and last.done is True))

    def _on_its_way(self) -> str:
        """What is to be said of what an exporter has got, and has no answer for."""
        sent = self._connection.sent if self._connection is not None else 0
        return f", of which {sent} were on their way and may have arrived" if sent else ""

    def _count_lost(self) -> None:
        """Brings the metric of lost spans up to date."""
        lost = self._certainly_lost()
        if self._connection is not None and lost > self._counted:
            self._connection.count_lost(lost - self._counted)
            self._counted = lost

    def _ask(self, final: bool, end_held: bool = False) -> Request:
        """Asks our thread for a flush; the last one closes what is open, and there is one of it."""
        thread, connection = self._thread, self._connection
        assert thread is not None
        assert connection is not None

        def flush_spans() -> None:
            if final:
                try:
                    self.close_open_records(self._terminated_by)
                except Exception:
                    _logger.warning("What was still running could not be recorded.", exc_info=True)
            elif end_held:
                self.end_held()
            self.drain(final)
            connection.flush_spans(final)

        request = self._last.setdefault("spans", Request(flush_spans)) if final else Request(flush_spans)
        request.deadline = request.deadline or monotonic() + connection.exit_timeout_s
        return thread.ask(request)

    def _ask_others(self, final: bool, deadline: float) -> Request | None:
        """Asks for a flush of metrics and logs, if there are any."""
        thread, connection = self._other_thread, self._connection
        if thread is None or connection is None:
            return None

        def flush_others() -> None:
            last = self._last.get("spans")
            if final and (last is None or last.done is None):
                self._stopped = connection.stop_failing()
            self._count_lost()  # before the metrics leave
            connection.flush_others(final)

        request = Request(flush_others)
        request = self._last.setdefault("others", request) if final else request
        request.deadline = deadline
        return thread.ask(request)

    def drain(self, final: bool = False, seconds: float = -1, look: bool = True) -> bool:
        """Hands the closed records on. Any thread may call it; the training thread has no need to.

        Args:
            final: Whether to give up those that are still open, and to go on beside another thread that does so
                already and takes long: a signal may have interrupted that one.
            seconds: How long to wait for such a thread otherwise; -1: until it is done.
            look: Whether to see first what the application has done to its providers.

        Returns:
            Whether that is done, or goes on in this very thread.
        """
        if self._draining_thread == get_ident():
            return True  # a flush in between
        draining = self._draining  # a forked child gets another
        its_turn = draining.acquire(timeout=_FOR_OTHERS_S if final else seconds)
        if not its_turn and not final:
            return False
        self._draining_thread = get_ident()
        try:
            if look and self._connection is not None:
                self._connection.look(final)
            for record in list(self._unfinished):
                if record.ended is not None or self._is_lost(record):
                    with suppress(ValueError):  # the thread that the last drain doesn't wait for has taken it
                        self._unfinished.remove(record)
                        self._hand_over(record)
            while self._waiting:
                try:
                    record = self._hand_over_usual() or self._waiting.popleft()
                except IndexError:  # no more: all was usual, or the thread that the last drain doesn't wait for has it
                    break
                running = record.ended is None and not self._is_lost(record)
                if running and len(self._unfinished) < MAX_WAITING:
                    self._unfinished.append(record)
                else:
                    self._hand_over(record)
            if final:
                self.dropped += len(self._unfinished)
                self._unfinished.clear()
        finally:
            self._draining_thread = 0
            if its_turn:
                draining.release()
        return True

    def _drain_for_others(self) -> bool:
        """Somebody flushes the provider, or shuts it down. After the last flush of ours, nobody waits any more."""
        look = bool(self._waiting or self._unfinished)  # to look at the providers takes longer than all the rest
        return self.drain(seconds=0 if "spans" in self._last else _FOR_A_FLUSH_S, look=look)

    def _hand_over_usual(self) -> Record | None:
        """Hands over what waits, as long as there is nothing special about it: most of all records, at half the cost.

        Returns:
            The first with something special, if one was taken.
        """
        connection = self._connection
        if connection is None or connection.closed:
            return None
        try:
            most = _FLUSH_EVERY - self._handed % _FLUSH_EVERY
            handed, record = connection.direct.hand_on_usual(self._waiting, most)
            if handed:
                self._count_handed(handed)
        except Exception:
            if patching.reraise_internal_errors:
                raise
            _logger.debug("Records could not be handed on together", exc_info=True)
            return None
        return record

    def _count_handed(self, spans: int) -> None:
        self._handed = handed = self._handed + spans
        if handed % _FLUSH_EVERY == 0 and self._connection is not None:
            try:
                self._connection.flush_spans()
            except Exception:
                _logger.debug("Spans could not be flushed", exc_info=True)

    def _hand_over(self, record: Record) -> None:
        """Makes a span of what is over, or counts what is lost."""
        connection = self._connection
        try:
            if record.ended is None:
                self._drop(record)
            elif connection is None or connection.closed:
                self.dropped += 1
            elif record.error is not None or not connection.direct.hand_on(record):
                self._emit(record, record.ended + record.offset)
        except Exception:
            self._drop(record)  # by a processor or sampler of somebody's
            _logger.debug("A span could not be handed on", exc_info=True)
        self._count_handed(1)

    def flush(self, final: bool = False, end_held: bool = False) -> bool:
        """Has our thread hand on and export what is closed, and waits for that within the connection's bound. What
        is lost is counted and reported.

        Args:
            final: Whether this is the last time: what is open is given up, and the provider shut down if it is ours.
            end_held: Whether to end the span that is held: in our thread, since a signal handler that asks for it may
                have interrupted a span processor.

        Returns:
            Whether all was exported in time.
        """
        if end_held:
            self._holds = False  # also of a call that is about to begin
        thread, connection = self._thread, self._connection
        if thread is None or connection is None:
            return True
        spans = self._ask(final, end_held)
        reserve = _OTHERS_S if self._other_thread is not None else 0.0
        spans.answered.wait(spans.deadline - reserve - monotonic())
        others = self._ask_others(final, spans.deadline)
        asked = {"spans": spans} | ({connection.others: others} if others is not None else {})
        late = [what for what, request in asked.items() if not request.answered.wait(request.deadline - monotonic())]
        if final:
            # Somebody's shutdown exports once more: where that took most of the time already, there is none for it.
            connection.give_up(late=spans.deadline - monotonic() < connection.exit_timeout_s / 2)
        self._count_lost()
        lost = self._lost(final)  # only now: what was on its way has had its time
        of = "" if late == ["spans"] else f" of {' and '.join(late)}"
        given_up = f" What was not exported{of} after {connection.exit_timeout_s:g} s was given up." if late else ""
        if lost > self._reported:
            self._reported = lost
            reasons = [f"{lost - self.dropped} were not exported{self._on_its_way()}"] if lost > self.dropped else []
            if self.dropped:
                reasons.append(
                    f"{self.dropped} did not reach the exporter, since more than {MAX_WAITING} waited, or they could "
                    "not be closed or handed on, or OpenTelemetry had been shut down before"
                )
            _logger.warning("%d spans were dropped: %s.%s", lost, "; ".join(reasons), given_up)
        elif late:
            _logger.warning("Exporting %s took too long.%s", " and ".join(late), given_up)
        return all(request.done for request in asked.values())

    def catch_up(self, seconds: float) -> None:
        """Has our thread export what is closed, and waits for that so long at most."""
        if self._thread is not None and self._connection is not None:
            self._ask(final=False).answered.wait(seconds)

    def request_flush(self, end_held: bool = False) -> None:
        """Has our thread export what is closed, and doesn't wait; see `flush`. A signal handler may call it."""
        if end_held:
            self._holds = False
        if self._thread is not None and self._connection is not None:
            self._ask(final=False, end_held=end_held)

    def terminate(self, by: str, hurried: Callable[[], bool]) -> None:
        """A signal ends the process: does what `exit` does, or joins it. A signal handler may call it: only our threads
        could wait for a lock that the interrupted one holds, and this waits for them within the bound.

        Args:
            by: The signal's name.
            hurried: Whether to wait no longer.
        """
        if self._thread is None or self._connection is None:
            return
        self._terminated_by = by
        spans = self._ask(final=True)
        reserve = _OTHERS_S if self._other_thread is not None else 0.0
        others: Request | None = None
        while monotonic() < spans.deadline and not hurried():
            if others is None and (spans.done is not None or monotonic() > spans.deadline - reserve):
                others = self._ask_others(True, spans.deadline)
                reserve = 0.0
            if spans.done is not None and (others is None or others.done is not None):
                break
            sleep(0.01)
        lost = self._lost(final=True)
        if spans.done is not None and not lost and self.journal is not None:
            self.journal.remove()
        if (spans.done is None or lost) and not self._told_of_signal:
            self._told_of_signal = True
            what = f"{lost or 'some'} spans are lost{self._on_its_way()}"
            # Not by logging, whose locks and streams the interrupted thread may be using.
            os.write(2, f"megatron_autoinstrument: {by} ended this rank; {what}.\n".encode())

    def disconnect(self) -> None:
        """Lets go of the exporters: what they do from now on is not watched."""
        if self._connection is not None:
            self._not_exported += self._connection.lost(final=False)
            self._connection.unhook()

    def exit(self) -> None:
        """The process ends: closes what is open and exports it."""
        try:
            self.flush(final=True)
        except KeyboardInterrupt:  # whoever interrupts once more doesn't want to wait
            if self._connection is not None:
                self._connection.give_up(late=True)
