"""The hot path: what one call of Megatron becomes on its way to a span.

A call costs two clock reads and a record. Records of coarse calls are live OpenTelemetry spans, current while they
run; those of frequent calls become spans later, in this package's thread, with the times that were read.

The clock is the monotonic one. What it lacks to the wall clock is found out once for each step, or other record that
nothing but the run encloses, and holds for all that is inside: a step of the wall clock moves spans, and bends none.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import get_ident
from time import monotonic_ns
from typing import Any

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.metrics import Meter

from megatron_autoinstrument.common import redact
from megatron_autoinstrument.common.private_random import random_bits, random_span_id
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.common.semconv import FINALIZED, SPAN_GROUPS
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.recording import outbox
from megatron_autoinstrument.recording.connection import Connection
from megatron_autoinstrument.recording.journal import (
    FIRST_END,
    MASK,
    NO_TRACE,
    RING_AT,
    SLOT_BYTES,
    SLOT_WORDS,
    SURE,
    pack_plain_into,
)
from megatron_autoinstrument.recording.journal import create as create_journal
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, SILENT, Record, open_record
from megatron_autoinstrument.recording.run import Run
from megatron_autoinstrument.recording.spans import Spans, mark
from megatron_autoinstrument.recording.traces import Identity, Traces, span_id
from megatron_autoinstrument.recording.workers import Worker

_logger = get_logger(__name__)

_RUN = frozenset(name for name, group in SPAN_GROUPS.items() if group == "job")
_SCOPES = ("megatron.train_step", "megatron.evaluate")


def _random_base() -> int:
    """What span ids are made of, with the call's number in the journal: to draw each takes several times longer. Two
    processes share an id no likelier than if they did. Its highest bit keeps ids from being 0."""
    return random_bits(63) | 1 << 63


class Recorder(Spans):
    """What is running now. State is explicit and one for all threads: autograd's have an empty OpenTelemetry context,
    and what runs there belongs under what the training thread is doing."""

    def __init__(self) -> None:
        super().__init__()
        self.current: Record | None = None
        self.muted = 0
        """How many reasons there are why calls are of no interest for now."""
        self.groups: frozenset[str] = frozenset()
        """The span groups, and what else is recorded, that are on."""
        self.all_counted = True
        """Whether every call that a `Pass` counts is seen, as far as this rank can know."""
        self.when_arguments_known: Callable[[Any], None] = lambda args: None
        """Called with Megatron's arguments when they are parsed, and when its parallel groups are made."""
        self._ready = False
        self._connect: Callable[[], Connection] | None = None
        self._confirm: Callable[[], None] = lambda: None
        self._plan: Callable[[Connection, int], Traces | None] = lambda connection, run: None
        self._deferred: Record | None = None
        self._held: Record | None = None
        self._muted_by: Record | None = None  # a step that the sampler drops
        self._training_thread = 0
        self._elsewhere: dict[int, Record] = {}  # what is running on other threads, by the thread
        self._background: list[Record] = []
        self._id_base = _random_base()
        self._reported_error = (0, 0)  # an error's id, and the start of the record it was raised in

    # ------------------------------------------------------------------------------------------ the hot path

    def begin(
        self,
        name: str,
        kind: str,
        attributes: dict[str, Any] | None = None,
        identity: Identity | None = None,
        root: int | None = None,
    ) -> Record | None:
        """Opens a record inside the one that is running. None where that has the same name: it is the same call.

        Args:
            name: The name of its span.
            kind: LIVE, FREQUENT or SILENT.
            attributes: What is known by now.
            identity: What the span's id is to be worked out from, where other ranks name it.
            root: The trace that it, and what is inside it, belongs to; else that of what encloses it.
        """
        if kind is FREQUENT and root is None:
            return self.begin_frequent(name, attributes, identity)
        if not self._ready and not self._get_ready():
            return None
        parent = self.current
        if parent is None:
            self._training_thread = get_ident()
        elif parent.name == name:
            return None
        elif (thread := get_ident()) != self._training_thread:
            return self._begin_elsewhere(thread, name, kind, attributes)
        record = open_record(name, kind, parent, attributes)
        if identity is not None:
            record.identity = identity
            record.root = root
        if parent is not None and parent.name in _RUN:
            record.anchor()
        if kind is LIVE:
            self._open(record)
        elif root is not None:
            # What is inside belongs to another trace than what is around, and has no parent.
            record.trace, record.span_id = None, 0
        self.current = record
        if root is not None and not self._is_sampled(record, root):
            self.mute(True)
            self._muted_by = record  # last: who instruments anew between the two resets both
        return record

    def begin_frequent(
        self, name: str, attributes: dict[str, Any] | None = None, identity: Identity | None = None
    ) -> Record | None:
        """`begin` for a FREQUENT record: most calls come here, so that it calls nothing that it can do itself."""
        if not self._ready and not self._get_ready():
            return None
        parent = self.current
        if parent is None:
            self._training_thread = get_ident()
            return self._begin_outermost(name, attributes, identity)
        if parent.name == name:
            return None
        if (thread := get_ident()) != self._training_thread:
            return self._begin_elsewhere(thread, name, FREQUENT, attributes)
        record = Record()
        record.name = name
        record.kind = FREQUENT
        record.parent = parent
        record.attributes = attributes
        record.identity = identity
        record.owned = True
        record.link = record.root = record.span = record.token = record.current_in = record.error = None
        record.handed_by = record.ended = None
        record.begun = begun = monotonic_ns()
        record.offset = offset = parent.offset
        record.trace = trace = parent.trace
        parent_id, journal = parent.span_id, self.journal
        if journal is None or len(self._waiting) >= outbox.MAX_WAITING:
            record.slot = 0
            record.span_id = parent_id
            self.current = self._enqueue(record)
            return record
        record.slot = journal.latest = number = next(journal.numbers)
        if trace is None:
            record.span_id = own_id = 0
        else:
            record.span_id = own_id = self._id_base ^ number if identity is None else span_id(identity)
        at, plain = RING_AT + (number & MASK) * SLOT_BYTES, journal.plain
        if attributes or name not in plain:
            journal.write(at, number, record, parent_id)
        else:
            pack_plain_into(
                journal.memory, at, plain[name], begun, offset, trace or NO_TRACE, own_id, parent_id, number
            )
        self._waiting.append(record)
        self.current = record
        return record

    def _begin_outermost(self, name: str, attributes: dict[str, Any] | None, identity: Identity | None) -> Record:
        record = open_record(name, FREQUENT, None, attributes)
        record.identity = identity
        self.current = self._enqueue(record)
        return record

    def begin_together(
        self, names: Sequence[str], attributes: dict[str, Any], identities: Sequence[Identity | None] = ()
    ) -> list[Record] | None:
        """Opens one frequent record for each thing that a call does at once: same parent, same times, the first of
        them running. Close them with `end_together`."""
        first = self.begin_frequent(names[0], attributes or None, identities[0] if identities else None)
        if first is None:
            return None
        records = [first]
        for index, name in enumerate(names[1:], 1):
            other = open_record(name, FREQUENT, first.parent, attributes, owned=False)
            other.identity = identities[index] if identities else None
            other.begun, other.offset = first.begun, first.offset
            records.append(self._enqueue(other))
        return records

    def end(
        self,
        record: Record,
        error: BaseException | None = None,
        attributes: dict[str, Any] | None = None,
        hold: bool = False,
    ) -> None:
        """Closes a record now.

        Args:
            record: The record.
            error: What its call raised.
            attributes: What is known only now.
            hold: Whether to keep its span, with this end, for what is known only later; see `end_held`.
        """
        ended = monotonic_ns()
        if record.owned:
            self.current = record.parent
        else:
            self._end_elsewhere(record)
        if attributes:
            record.attributes = {**record.attributes, **attributes} if record.attributes else attributes
        if error is not None:
            record.error = self._describe(error, record)
        if record is self._muted_by:
            self._muted_by = None
            self.mute(False)
        if record.slot and (journal := self.journal) is not None:
            if error is not None:
                journal.fail(record.slot)
            if record.slot > 0:
                journal.end(record.slot, ended)
            else:
                journal.end_kept(record.slot, ended)
        if record.kind is LIVE:
            self._close(record, ended, hold and self._holds)
        record.ended = ended  # last: from here on the thread may take it

    def end_call(self, record: Record, result: Any, error: BaseException | None) -> None:
        """`end`, as the end of a hook, of a call whose result says nothing. Most calls come here, so that it calls
        nothing that it can do itself."""
        if error is not None or record.kind is not FREQUENT:
            self.end(record, error)
            return
        ended = monotonic_ns()
        if record.owned:
            self.current = record.parent
        else:
            self._end_elsewhere(record)
        if (slot := record.slot) and (journal := self.journal) is not None and journal.latest - slot < SURE:
            journal.words[FIRST_END + (slot & MASK) * SLOT_WORDS] = ended  # as `Journal.end` does
        record.ended = ended  # last: from here on the thread may take it

    def link(self, record: Record, to: Identity) -> None:
        """Says what a record is linked to."""
        record.link = to
        if record.slot and (journal := self.journal) is not None:
            journal.link(record.slot, to[0][0].to_bytes(16, "big"), span_id(to))

    def end_together(self, records: list[Record], error: BaseException | None) -> None:
        """Closes them now."""
        first = records[0]
        self.end_call(first, None, error)
        # An exception is recorded once, on the first of them.
        marked = {"exception.type": first.error["exception.type"]} if first.error else None
        for other in records[1:]:
            other.error = marked
            if other.slot and first.ended is not None and (journal := self.journal) is not None:
                journal.end(other.slot, first.ended)
            other.ended = first.ended

    def _begin_elsewhere(self, thread: int, name: str, kind: str, attributes: dict[str, Any] | None) -> Record | None:
        """Opens a record on another thread than the training one, such as autograd's. What runs there nests in
        itself, and the outermost of it in what the training thread does. It is current in no context, so that what
        would be live is frequent."""
        parent = self._elsewhere.get(thread, self.current)
        if parent is not None and parent.name == name:
            return None
        kind = SILENT if kind is SILENT else FREQUENT
        record = self._elsewhere[thread] = open_record(name, kind, parent, attributes, owned=False)
        return record if kind is SILENT else self._enqueue(record)

    def _end_elsewhere(self, record: Record) -> None:
        if record.parent is None or record.parent.owned:
            self._elsewhere.pop(get_ident(), None)
        else:
            self._elsewhere[get_ident()] = record.parent

    def _enqueue(self, record: Record) -> Record:
        if len(self._waiting) < outbox.MAX_WAITING:
            self._identify(record)
            self._waiting.append(record)
        else:
            self._drop(record)
        return record

    def _identify(self, record: Record) -> None:
        """Gives a record that opens its ids and its place in the journal."""
        parent_id = record.span_id
        if record.trace is not None:
            record.span_id = random_span_id() if record.identity is None else span_id(record.identity)
        else:
            record.span_id = 0
        if (journal := self.journal) is not None:
            of_another = not record.owned and (thread := get_ident()) != self._training_thread
            record.slot = journal.begin(record, parent_id, thread if of_another else 0)

    # ------------------------------------------------------------------------------------------ coarse calls

    def begin_deferred(self, name: str, kind: str = LIVE, run: int | None = None) -> Record | None:
        """Opens a live record whose span starts when the next record begins, or when it ends itself: before that,
        the run has no identity and perhaps no provider. The span's start is now all the same.

        Args:
            name: The name of its span.
            kind: LIVE, or SILENT where its group is off.
            run: The number of this run in the job, if a restart in the process has one; else they are counted. What
                an earlier number has left open ends here: it was aborted at any point.
        """
        if run is not None and run != self.run.number:
            self._close_aborted_run()
        if self.current is not None:
            return None
        self.run = Run(self.run.number + 1 if run is None else run)
        self._training_thread = get_ident()
        self.current = open_record(name, kind, None, None)
        self._deferred = self.current if kind is LIVE else None
        self._ready = False
        return self.current

    def _close_aborted_run(self) -> None:
        """Ends all that a run left open which an exception ended at any point, be it inside this class."""
        self.close_open_records()
        now = monotonic_ns()
        for record in [*self._unfinished, *self._waiting]:
            if record.ended is None:
                record.ended = now
        if self.journal is not None:
            self.journal.end_all(now)
        self._elsewhere.clear()
        self.muted = 0
        self._muted_by = None
        context_api.attach(context_api.Context())  # the context that is current may be that of a span which has ended

    def set_groups(self, groups: frozenset[str]) -> None:
        """The groups that are on from here on, known perhaps only since the deferred record began: a flag may leave it
        out."""
        self.groups = groups
        self.run.passing = None  # in the middle of a pass nobody has counted its calls
        self.all_counted = True
        if self._deferred is not None and SPAN_GROUPS[self._deferred.name] not in groups:
            self._deferred.kind = SILENT
            self._deferred = None

    def connect(self, begins: bool = False) -> None:
        """The run's identity is known: connects, and opens the deferred record.

        Args:
            begins: Whether a run begins here, unless one is going on: in a loop of one's own.
        """
        begins = begins and self.current is None
        if begins:
            self.run.traces = None
            self._ready = False
        if not self._ready:
            self._get_ready()
        if begins and self.run.traces is None:  # else it is known whether that run goes on
            self.run = Run(self.run.number)

    def is_in_the_runs_trace(self) -> bool:
        """Whether what begins now and opens no step belongs to the trace that every rank works out alike: not where
        the application has a trace of its own around the run."""
        context = self.current.nearest_context if self.current is not None else None
        context = context or trace.get_current_span().get_span_context()
        traces = self.run.traces  # another thread may instrument anew
        return traces is not None and (not context.is_valid or context.trace_id == traces.run)

    def scope(self) -> Identity | None:
        """Of the step or evaluation that is running, if any."""
        record = self.current
        while record is not None and (record.identity is None or record.name not in _SCOPES):
            record = record.parent
        return None if record is None else record.identity

    def mute(self, muted: bool) -> None:
        """Whether there is one more reason, or one less, why calls are of no interest at all for now."""
        self.muted = max(0, self.muted + (1 if muted else -1))
        self._ready = False

    def _is_sampled(self, record: Record, root: int) -> bool:
        """Whether the sampler keeps the trace that `record` is the outermost of. It is asked once for all that is
        inside: a step is kept whole, or costs next to nothing."""
        assert self._connection is not None
        if not self._connection.drops_whole_traces:
            return True  # a sampler of somebody's, which may keep what is inside
        if record.span is not None:
            return record.span.is_recording() or record.span.get_span_context().trace_flags.sampled
        return self._connection.keeps(root, record.name)

    def connect_by(
        self,
        connect: Callable[[], Connection] | None,
        plan: Callable[[Connection, int], Traces | None] = lambda connection, run: None,
        confirm: Callable[[], None] = lambda: None,
    ) -> None:
        """How the next record is to connect, and how each run of this process then gets its traces.

        Args:
            connect: Makes the connection; None: this rank records nothing.
            plan: Gives a run its traces.
            confirm: Asked before `connect` is; it may come here again with another one, or none.
        """
        self._connect = connect
        self._confirm = confirm
        self._plan = plan
        self._holds = True
        self.run.traces = None
        self.muted = 0
        self._muted_by = None  # its end comes yet, if it is running
        self._ready = False

    @property
    def meter(self) -> Meter | None:
        """What metrics are recorded with, once connected."""
        return self._connection.meter if self._connection is not None else None

    @property
    def log_handler(self) -> logging.Handler | None:
        """What log records are exported by, once connected."""
        return self._connection.log_handler if self._connection is not None else None

    def _get_ready(self) -> bool:
        if self.muted:
            return False
        self._ready = True  # before: who instruments anew meanwhile has it connect once more
        connect = self._connect
        try:
            return self._connect_now()
        except Exception:
            if patching.reraise_internal_errors:
                raise
            _logger.warning("OpenTelemetry could not be set up; nothing is recorded.", exc_info=True)
            self._connect = None
            self._deferred = None
            self._muted_by = None
            self.mute(True)
            return False
        except BaseException:  # a restart in the process: the next run connects
            self._connect = self._connect or connect
            self._ready = False
            raise

    def _connect_now(self) -> bool:
        """Whether this rank records, as it has turned out."""
        if self._connect is not None:
            self._confirm()
        connect, self._connect = self._connect, None
        if connect is None and self._connection is None:
            return False
        if connect is not None:
            self.disconnect()
            self._connection = connect()
            self._connection.watch(self._drain_for_others)
            if self.journal is None:
                with suppress(Exception):  # to record without one is better than not to
                    self.journal = create_journal()
        if self.run.traces is None and self._connection is not None:
            self._follow(self._plan(self._connection, self.run.number))
        if self._thread is None:
            # Now, not at exit: Python 3.12 starts no thread there.
            self._thread = Worker("spans", self._drain_and_count)
            atexit.register(self.exit)
        if self._other_thread is None and self._connection is not None and self._connection.others:
            self._other_thread = Worker(self._connection.others)
        deferred, self._deferred = self._deferred, None
        if deferred is not None:
            self._open(deferred)
        return True

    def _follow(self, traces: Traces | None) -> None:
        """Gives the run its traces. Where they are those of another one, it has begun unseen, while nothing was
        patched."""
        if traces is not None:
            if self.run.key not in (None, traces.key):
                self.run = Run(self.run.number)
            self.run.key = traces.key
        self.run.traces = traces

    def end_held(self, attributes: dict[str, Any] | None = None) -> None:
        """Ends the span that is held, if any, with the end that its call had."""
        held, self._held = self._held, None
        if held is not None and held.span is not None:
            held.attributes = {**(held.attributes or {}), **(attributes or {})}
            self._end(held, held.span)

    def _close(self, record: Record, ended: int, hold: bool) -> None:
        if record is self._deferred:
            self._get_ready()
        span = record.span
        if record.token is not None:
            context_api.detach(record.token)  # before a processor of somebody's may fail
            record.current_in = None
        if self._held is not None and (hold or self._held.parent is record):
            self.end_held()
        if span is None:
            return
        if record.error is not None:
            mark(span, record, ended + record.offset)
        record.ended = ended  # before another thread may release or take it
        if hold:
            self._held = record
            if not self._holds:  # since a moment ago: whoever said so may have looked before it was there
                self.end_held()
        else:
            self._end(record, span)

    def _describe(self, error: BaseException, record: Record) -> dict[str, str] | None:
        """What a span says of an exception: its stack, too, where it was raised; its type alone on the spans around."""
        if issubclass(type(error), SystemExit) and not getattr(error, "code", None):
            return None
        # The error's id alone may be another error's by now; one raised inside this record began after it.
        if record.kind is SILENT or (self._reported_error[0] == id(error) and record.begun <= self._reported_error[1]):
            return {"exception.type": redact.type_name(error)}
        self._reported_error = (id(error), record.begun)
        try:
            return redact.described(error)
        except Exception:  # noqa: BLE001
            return {"exception.type": redact.type_name(error)}  # raised where the stack is all but used up, perhaps

    # ------------------------------------------------------------------------------------------ work in the background

    def begin_background(self, name: str, parent: Record | None, attributes: dict[str, Any], link: Record) -> Record:
        """Opens a record of work that goes on while training does. It is no one's parent."""
        record = open_record(name, FREQUENT, parent, attributes, owned=False)
        self._identify(record)
        if (context := link.nearest_context) is not None:
            record.link = context
        self._background.append(record)
        return record

    def end_background(self, record: Record) -> None:
        """Closes such a record now."""
        record.ended = monotonic_ns()
        if record in self._background:
            self._background.remove(record)
            if record.slot and self.journal is not None:
                self.journal.end(record.slot, record.ended)
            if len(self._waiting) < outbox.MAX_WAITING:
                self._waiting.append(record)
            else:
                self._drop(record)

    # ------------------------------------------------------------------------------------------ towards OpenTelemetry

    def _still_open(self) -> int:
        """The spans that the last flush was to end, as long as it hasn't."""
        request, record = self._last.get("spans"), self.current
        if request is None or request.done is not None:
            return 0
        number = len(self._background) + (self._held is not None)
        while record is not None:
            number += record.kind is LIVE and record.span is not None
            record = record.parent
        return number

    def _is_lost(self, record: Record) -> bool:
        """Whether a fault of ours has left an open record behind: what encloses it has ended, and it runs on no other
        thread, where a call may take longer."""
        if record.parent is None or record.parent.ended is None:
            return False
        for innermost in list(self._elsewhere.values()):
            at: Record | None = innermost
            while at is not None and not at.owned:
                if at is record:
                    return False
                at = at.parent
        return True

    def close_open_records(self, terminated_by: str | None = None) -> None:
        """Ends what is still running, from the inside out: the process is about to end.

        Args:
            terminated_by: The signal that ends it, if one does: what was running has not run to its end then.
        """
        error = {"exception.type": terminated_by} if terminated_by else None
        for record in list(self._background):
            record.attributes = {**(record.attributes or {}), FINALIZED: False}
            self.end_background(record)
        for record in reversed([*self._unfinished, *self._waiting]):
            # On other threads, and what a call does beside the thing that is current.
            if not record.owned and record.ended is None and not self._is_lost(record):
                record.error = error
                record.ended = monotonic_ns()
        while (current := self.current) is not None:
            current.error = error
            current.token = None  # of another thread's context, which ends with it
            self.end(current)
        self.end_held()

    def reset_after_fork(self) -> None:
        """This is a forked child: what is open or waiting is its parent's to record."""
        record = self.current
        while record is not None:
            record.span = record.trace = None  # a wrapper that is on the stack here as well will end the record
            record = record.parent
        self.journal = None  # its memory is shared
        self._id_base = _random_base()
        self.current = self._deferred = self._held = self._thread = self._other_thread = None
        self._draining, self._draining_thread = threading.Lock(), 0  # our thread may have held it
        self._last = {}
        self._waiting.clear()
        self._unfinished.clear()
        self._background.clear()
        self._elsewhere.clear()
