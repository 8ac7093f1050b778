"""The hot path: what one call of Megatron becomes on its way to a span.

A call costs two clock reads and a record. Records of coarse calls are live OpenTelemetry spans, current while they
run; those of frequent calls become spans later, in a thread of ours, with the times that were read.

The clock is the monotonic one. What it lacks to the wall clock is found out once for each step, or other record that
nothing but the run encloses, and holds for all that is inside: a step of the wall clock moves spans, and bends none.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import get_ident
from time import monotonic, monotonic_ns, sleep
from typing import Any, NamedTuple

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, Status, StatusCode

from megatron_autoinstrument.common import redact
from megatron_autoinstrument.common.finite import finite
from megatron_autoinstrument.common.private_random import random_bits, random_span_id
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.common.semconv import FINALIZED, SPAN_GROUPS
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.megatron.patching import Arguments
from megatron_autoinstrument.recording.connection import Connection
from megatron_autoinstrument.recording.journal import Journal
from megatron_autoinstrument.recording.journal import create as create_journal
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, SILENT, Record, linked, open_record
from megatron_autoinstrument.recording.run import Run
from megatron_autoinstrument.recording.traces import Identity, Traces, span_id

_logger = get_logger(__name__)

Attributes = Mapping[str, Any]
Reader = Callable[[Arguments, Mapping[str, Any]], Any]

RUN_GROUPS = {"job", "model_init", "load_checkpoint", "checkpoint", "evaluate"}
"""What belongs to no step."""
_RUN = frozenset(name for name, group in SPAN_GROUPS.items() if group == "job")
_SCOPES = ("megatron.train_step", "megatron.evaluate")

THREAD = "megatron-autoinstrument"
"""The name of this package's threads."""

MAX_WAITING = 65_536  # records that wait for the thread; more are counted and dropped
_DRAIN_INTERVAL_S = 0.5
_OTHERS_S = 1.5  # of the time at exit, for metrics and logs where spans take all the rest
_FOR_A_FLUSH_S = 5.0  # how long somebody's flush or shutdown waits for what our thread is handing on
_FOR_OTHERS_S = 1.0  # and how long the last one waits for a thread that may never go on
_FLUSH_EVERY = 512  # spans handed on between flushes, so that no batch processor's queue (2048) overflows


class _Place(NamedTuple):
    """Where a span belongs."""

    parent: SpanContext | None
    trace: int | None = None  # the one that it is a root of; None: any
    opens_step: bool = False  # as an outermost span of a step, whatever is current
    around: SpanContext | None = None  # what is around that step: a link


class Recorder:
    """What is running now, and what waits to become spans. State is explicit and global: autograd's threads have an
    empty OpenTelemetry context, and what runs there belongs under what the training thread is doing."""

    def __init__(self) -> None:
        self.current: Record | None = None
        self.dropped = 0  # spans that never reached OpenTelemetry
        self._counted = 0  # lost spans that are in the metric already
        self._reported = 0  # and those that have been told of
        self._not_exported = 0  # of connections that were let go
        self._connect: Callable[[], Connection] | None = None
        self._connection: Connection | None = None
        self._ready = False
        self.muted = 0
        """How many reasons there are why calls are of no interest for now."""
        self._muted_by: Record | None = None  # a step that the sampler drops
        self._confirm: Callable[[], None] = lambda: None
        self._plan: Callable[[Connection, int], Traces | None] = lambda connection, run: None
        self.run = Run()
        self.groups: frozenset[str] = frozenset()
        """The span groups, and what else is recorded, that are on."""
        self.all_counted = True
        """Whether every call that a `Pass` counts is seen, as far as this rank can know."""
        self.when_arguments_known: Callable[[Any], None] = lambda args: None
        """Called with Megatron's arguments when they are parsed, and when its parallel groups are made."""
        self.journal: Journal | None = None
        """What the process leaves behind, however it ends; None before it is connected."""
        self._deferred: Record | None = None
        self._held: Record | None = None
        self._holds = True  # whether somebody will release it
        self._training_thread = 0
        self._elsewhere: dict[int, Record] = {}  # what is running on other threads, by the thread
        self._waiting: deque[Record] = deque()
        self._unfinished: list[Record] = []  # those of them that were running when their turn came
        self._background: list[Record] = []
        self._reported_error = (0, 0)  # an error's id, and the start of the record it was raised in
        self._thread: _Thread | None = None
        self._other_thread: _Thread | None = None  # for metrics and logs, when spans keep the first one busy
        self._last: dict[str, _Request] = {}  # of the process: its exit and a signal share them
        self._cut_off_by: str | None = None  # the signal
        self._told_of_signal = False
        self._told_of_loss = False
        self._stopped = False  # the export of spans, before the metrics left with the number of those lost
        self._handed = 0  # spans handed to OpenTelemetry so far
        self._draining = threading.Lock()
        self._draining_thread = 0

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
        if root is not None and not self._keeps(record, root):
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
        record.begun = monotonic_ns()
        record.offset = parent.offset
        trace = record.trace = parent.trace
        if len(self._waiting) >= MAX_WAITING:
            record.slot = 0
            self._drop(record)
        else:
            if trace is None:
                record.span_id = 0
            else:
                record.span_id = random_bits(64) or 1 if identity is None else span_id(identity)
            journal = self.journal
            record.slot = 0 if journal is None else journal.begin(record, parent.span_id, 0)
            self._waiting.append(record)
        self.current = record
        return record

    def _begin_outermost(self, name: str, attributes: dict[str, Any] | None, identity: Identity | None) -> Record:
        record = open_record(name, FREQUENT, None, attributes)
        record.identity = identity
        self.current = self._keep(record)
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
            records.append(self._keep(other))
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
            hold: Whether to keep its span, with this end, for what is known only later; see `release`.
        """
        ended = monotonic_ns()
        if record.owned:
            self.current = record.parent
        else:
            self._end_elsewhere(record)
        if error is None and not attributes and record.kind is FREQUENT:
            if (slot := record.slot) and (journal := self.journal) is not None:
                journal.end(slot, ended)
        else:
            self._end_with_more(record, ended, error, attributes, hold)
        record.ended = ended  # last: from here on the thread may take it

    def end_call(self, record: Record, result: Any, error: BaseException | None) -> None:
        """`end`, as the end of a hook: of a call whose result says nothing."""
        if error is not None or record.kind is not FREQUENT or not record.owned:
            self.end(record, error)
            return
        ended = monotonic_ns()
        self.current = record.parent
        if (slot := record.slot) and (journal := self.journal) is not None:
            journal.end(slot, ended)
        record.ended = ended  # last: from here on the thread may take it

    def _end_with_more(
        self,
        record: Record,
        ended: int,
        error: BaseException | None,
        attributes: dict[str, Any] | None,
        hold: bool,
    ) -> None:
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

    def link(self, record: Record, to: Identity) -> None:
        """Says what a record is linked to."""
        record.link = to
        if record.slot and (journal := self.journal) is not None:
            journal.link(record.slot, to[0][0].to_bytes(16, "big"), span_id(to))

    def end_together(self, records: list[Record], error: BaseException | None) -> None:
        """Closes them now."""
        first = records[0]
        self.end(first, error)
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
        return record if kind is SILENT else self._keep(record)

    def _end_elsewhere(self, record: Record) -> None:
        if record.parent is None or record.parent.owned:
            self._elsewhere.pop(get_ident(), None)
        else:
            self._elsewhere[get_ident()] = record.parent

    def _keep(self, record: Record) -> Record:
        if len(self._waiting) < MAX_WAITING:
            self._identify(record)
            self._waiting.append(record)
        else:
            self._drop(record)
        return record

    def _drop(self, record: Record) -> None:
        """Counts a record that gives no span: what is inside belongs to what is around."""
        self.dropped += 1
        record.kind = SILENT
        record.span_id = record.parent.span_id if record.parent is not None else 0

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

    def choose(self, groups: frozenset[str]) -> None:
        """The groups that are on from here on, known perhaps only since the deferred record began: a flag may leave it
        out."""
        self.groups = groups
        self.run.passing = None  # in the middle of a pass nobody has counted its calls
        self.all_counted = True
        if self._deferred is not None and SPAN_GROUPS[self._deferred.name] not in groups:
            self._deferred.kind = SILENT
            self._deferred = None

    def settle(self, begins: bool = False) -> None:
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

    def _keeps(self, record: Record, root: int) -> bool:
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
            self._thread = _Thread("spans", self._hand_on)
            atexit.register(self.exit)
        if self._other_thread is None and self._connection is not None and self._connection.others:
            self._other_thread = _Thread(self._connection.others)
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

    def _open(self, record: Record) -> None:
        assert self._connection is not None
        around, context = record.parent, context_api.get_current()
        if (
            around is not None
            and around.current_in is context  # nothing of the application's is between, as nearly always
            and around.span is not None
            and record.trace is not None
            and record.root is None
        ):
            attributes = finite(record.attributes) if record.attributes else None
            wanted = None if record.identity is None else span_id(record.identity)
            of_it = (record.name, record.begun + record.offset, attributes, (), wanted)
            span = self._connection.direct.start(around.span.get_span_context(), None, *of_it)
            if span is not None:
                record.span = span
                parent_id, record.span_id = record.span_id, span.get_span_context().span_id
                if (journal := self.journal) is not None:
                    record.slot = journal.keep(record, parent_id)
                record.current_in = context = trace.set_span_in_context(span, context)
                record.token = context_api.attach(context)
                return
        self._open_anywhere(record)

    def _open_anywhere(self, record: Record) -> None:
        assert self._connection is not None
        place = self._place(record)
        described = _described(record, place)
        context: context_api.Context | None = None
        span: trace.Span | None = None
        direct = False
        if place.opens_step:
            span = self._connection.direct.start(None, place.trace, *described)
            if span is None:
                context = trace.set_span_in_context(trace.INVALID_SPAN)
        elif (current := trace.get_current_span().get_span_context()) is place.parent:
            span = self._connection.direct.start(current, None, *described)
            direct = span is not None
        elif not current.is_valid:
            context = _context_of(place.parent)
        if span is None:
            try:
                span = self._connection.start_span(context, place.trace, *described)
            except Exception as error:  # noqa: BLE001
                record.kind = SILENT  # what is inside belongs to what is around
                if record.root is not None:
                    record.trace, record.span_id = None, 0
                self._lose(error)
                return
        record.span = span
        parent_id, made = record.span_id, span.get_span_context()
        record.span_id = made.span_id
        if not direct or record.trace is None:  # else it is in the trace of what is around
            known = made.trace_flags.sampled and not made.trace_state
            record.trace = made.trace_id.to_bytes(16, "big") if known else None
        if (journal := self.journal) is not None:
            record.slot = journal.keep(record, parent_id)
        if not self._connection.chooses_ids:
            record.trace = None
        record.current_in = trace.set_span_in_context(span)
        record.token = context_api.attach(record.current_in)

    def _place(self, record: Record) -> _Place:
        at: Record | None = record
        while at is not None:
            if at.span is not None:
                return _Place(at.span.get_span_context())
            if at.handed_by is not None:
                return _Place(at.nearest_context)
            if at.root is not None:
                return _Place(None, at.root, True, at.parent.nearest_context if at.parent is not None else None)
            at = at.parent
        traces = self.run.traces  # another thread may instrument anew
        if traces is not None and (not traces.per_step or SPAN_GROUPS[record.name] in RUN_GROUPS):
            return _Place(None, traces.run)
        return _Place(None)

    def release(self, attributes: dict[str, Any] | None = None) -> None:
        """Ends the span that is held, if any, with the end that its call had."""
        held, self._held = self._held, None
        if held is not None and held.span is not None:
            held.attributes = {**(held.attributes or {}), **(attributes or {})}
            self._end(held, held.span)

    def _end(self, record: Record, span: trace.Span) -> None:
        """Ends the span of a live record: in our thread, where nobody has asked the span for anything."""
        if (
            self._connection is not None
            and len(self._waiting) < MAX_WAITING
            and self._connection.direct.finish(span, record.end, record.attributes)
        ):
            self._waiting.append(record)
            return
        try:
            if record.attributes:
                span.set_attributes(finite(record.attributes))
            span.end(record.end)
        except Exception as error:  # noqa: BLE001
            self._lose(error)
        if self._connection is not None and self._connection.closed:
            self.dropped += 1

    def _lose(self, error: Exception) -> None:
        """A sampler or a processor of the application's has failed, which costs one span and not its recording."""
        self.dropped += 1
        level = logging.DEBUG if self._told_of_loss else logging.WARNING
        self._told_of_loss = True
        _logger.log(
            level,
            "A span was lost, since a sampler or processor of spans raised %s. (Told once: training goes on, and spans "
            "that are lost are counted and reported at the end.)",
            type(error).__name__,
        )

    def _close(self, record: Record, ended: int, hold: bool) -> None:
        if record is self._deferred:
            self._get_ready()
        span = record.span
        if record.token is not None:
            context_api.detach(record.token)  # before a processor of somebody's may fail
            record.current_in = None
        if self._held is not None and (hold or self._held.parent is record):
            self.release()
        if span is None:
            return
        if record.error is not None:
            _mark(span, record, ended + record.offset)
        record.ended = ended  # before another thread may release or take it
        if hold:
            self._held = record
            if not self._holds:  # since a moment ago: whoever said so may have looked before it was there
                self.release()
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
            if len(self._waiting) < MAX_WAITING:
                self._waiting.append(record)
            else:
                self._drop(record)

    # ------------------------------------------------------------------------------------------ towards OpenTelemetry

    def _hand_on(self) -> None:
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

    def _ask(self, final: bool, release: bool = False) -> _Request:
        """Asks our thread for a flush; the last one closes what is open, and there is one of it."""
        thread, connection = self._thread, self._connection
        assert thread is not None
        assert connection is not None

        def flush_spans() -> None:
            if final:
                try:
                    self.close_open_records(self._cut_off_by)
                except Exception:
                    _logger.warning("What was still running could not be recorded.", exc_info=True)
            elif release:
                self.release()
            self.drain(final)
            connection.flush_spans(final)

        request = self._last.setdefault("spans", _Request(flush_spans)) if final else _Request(flush_spans)
        request.deadline = request.deadline or monotonic() + connection.exit_timeout_s
        return thread.ask(request)

    def _ask_others(self, final: bool, deadline: float) -> _Request | None:
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

        request = _Request(flush_others)
        request = self._last.setdefault("others", request) if final else request
        request.deadline = deadline
        return thread.ask(request)

    def drain(self, final: bool = False, seconds: float = -1) -> bool:
        """Hands the closed records on. Any thread may call it; the training thread has no need to.

        Args:
            final: Whether to give up those that are still open, and to go on beside another thread that does so
                already and takes long: a signal may have interrupted that one.
            seconds: How long to wait for such a thread otherwise; -1: until it is done.

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
            if self._connection is not None:
                self._connection.look(final)
            for record in list(self._unfinished):
                if record.ended is not None or self._is_lost(record):
                    with suppress(ValueError):  # the thread that the last drain doesn't wait for has taken it
                        self._unfinished.remove(record)
                        self._hand_over(record)
            while self._waiting:
                unusual = self._hand_over_usual()
                if unusual is None and not self._waiting:
                    break
                record = unusual or self._waiting.popleft()
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
        return self.drain(seconds=0 if "spans" in self._last else _FOR_A_FLUSH_S)

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

    def _emit(self, record: Record, end: int) -> None:
        """By the tracer."""
        span = record.span or self._start(record)
        if record.attributes:
            span.set_attributes(finite(record.attributes))
        _mark(span, record, end)
        span.end(end)

    def _start(self, record: Record) -> trace.Span:
        """Starts the span of a frequent record, in our thread."""
        assert self._connection is not None
        self._start_around(record)
        place = self._place(record)
        context = _context_of(place.parent)
        record.span = self._connection.start_span(context, place.trace, *_described(record, place))
        return record.span

    def _start_around(self, record: Record) -> None:
        """Starts the span of the frequent record around this one, which is still running: nobody waits for its end."""
        around = record.parent
        while around is not None and around.span is None and around.kind is not FREQUENT:
            around = around.parent
        if around is not None and around.span is None and around.handed_by is None:
            self._start(around)

    def close_open_records(self, cut_off_by: str | None = None) -> None:
        """Ends what is still running, from the inside out: the process is about to end.

        Args:
            cut_off_by: The signal that ends it, if one does: what was running has not run to its end then.
        """
        error = {"exception.type": cut_off_by} if cut_off_by else None
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
        self.release()

    def flush(self, final: bool = False, release: bool = False) -> bool:
        """Has our thread hand on and export what is closed, and waits for that within the connection's bound. What
        is lost is counted and reported.

        Args:
            final: Whether this is the last time: what is open is given up, and the provider shut down if it is ours.
            release: Whether to end the span that is held: in our thread, since a signal handler that asks for it may
                have interrupted a span processor.

        Returns:
            Whether all was exported in time.
        """
        if release:
            self._holds = False  # also of a call that is about to begin
        thread, connection = self._thread, self._connection
        if thread is None or connection is None:
            return True
        spans = self._ask(final, release)
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

    def hand_on(self, release: bool = False) -> None:
        """Has our thread export what is closed, and doesn't wait; see `flush`. A signal handler may call it."""
        if release:
            self._holds = False
        if self._thread is not None and self._connection is not None:
            self._ask(final=False, release=release)

    def cut_off(self, by: str, hurried: Callable[[], bool]) -> None:
        """A signal ends the process: does what `exit` does, or joins it. A signal handler may call it: only our threads
        could wait for a lock that the interrupted one holds, and this waits for them within the bound.

        Args:
            by: The signal's name.
            hurried: Whether to wait no longer.
        """
        if self._thread is None or self._connection is None:
            return
        self._cut_off_by = by
        spans = self._ask(final=True)
        reserve = _OTHERS_S if self._other_thread is not None else 0.0
        others: _Request | None = None
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
            self._connection.release()

    def abandon(self) -> None:
        """This is a forked child: what is open or waiting is its parent's to record."""
        record = self.current
        while record is not None:
            record.span = record.trace = None  # a wrapper that is on the stack here as well will end the record
            record = record.parent
        self.journal = None  # its memory is shared
        self.current = self._deferred = self._held = self._thread = self._other_thread = None
        self._draining, self._draining_thread = threading.Lock(), 0  # our thread may have held it
        self._last = {}
        self._waiting.clear()
        self._unfinished.clear()
        self._background.clear()
        self._elsewhere.clear()

    def exit(self) -> None:
        """The process ends: closes what is open and exports it."""
        try:
            self.flush(final=True)
        except KeyboardInterrupt:  # whoever interrupts once more doesn't want to wait
            if self._connection is not None:
                self._connection.give_up(late=True)


class _Request:
    """What a thread of ours is asked for."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.deadline = 0.0
        self.done: bool | None = None  # whether it succeeded, once it is over
        self.answered = threading.Event()


class _Thread:
    """A thread of ours: it exports what it is asked for, and does `between` from time to time."""

    def __init__(self, exports: str, between: Callable[[], None] | None = None) -> None:
        self._exports = exports
        self._between = between
        self._asked: SimpleQueue[_Request] = SimpleQueue()  # one that a signal handler may put into
        self._failed = False
        threading.Thread(target=self._run, name=THREAD, daemon=True).start()

    def ask(self, request: _Request) -> _Request:
        self._asked.put(request)
        return request

    def _run(self) -> None:
        while True:
            try:
                request = self._asked.get(timeout=_DRAIN_INTERVAL_S if self._between is not None else None)
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


def _context_of(parent: SpanContext | None) -> context_api.Context:
    # Never the caller's context: in our thread it says nothing of where the call was made.
    return (
        trace.set_span_in_context(NonRecordingSpan(parent), context_api.Context()) if parent else context_api.Context()
    )


def _described(record: Record, place: _Place) -> tuple[str, int, Attributes | None, tuple[Link, ...], int | None]:
    """What is known of its span when it starts: name, start, attributes, links and id."""
    links = () if place.around is None else _links_around(place.around)
    if record.link is not None:
        links += (Link(linked(record.link), {}),)
    attributes = finite(record.attributes) if record.attributes else None
    return record.name, record.start, attributes, links, _wanted_id(record)


_latest_around: tuple[SpanContext | None, tuple[Link, ...]] = (None, ())


def _links_around(context: SpanContext) -> tuple[Link, ...]:
    """A link to it: all steps of a run have the same one, which takes long to make."""
    global _latest_around
    latest, links = _latest_around
    if latest is not context:
        # An exporter may take each link's attributes for a mapping, as the SDK's are.
        links = (Link(context, {}),)
        _latest_around = context, links
    return links


def _wanted_id(record: Record) -> int | None:
    """The id that others may know its span by already."""
    if record.kind is FREQUENT and record.trace is not None:
        return record.span_id
    return span_id(record.identity) if record.identity is not None else None


def _mark(span: trace.Span, record: Record, now: int) -> None:
    if record.error is not None and span.is_recording():
        name = record.error["exception.type"]
        span.set_attribute("error.type", name)
        span.set_status(Status(StatusCode.ERROR, name))
        if "exception.stacktrace" in record.error:
            span.add_event("exception", record.error, timestamp=now)
