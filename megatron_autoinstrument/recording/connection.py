"""What the recorder asks of the way out. `export` has what answers; nothing here knows how."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from opentelemetry.context import Context
from opentelemetry.metrics import Meter
from opentelemetry.trace import Link, Span, SpanContext

from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.traces import Traces

SpanStart = tuple[str, int, Mapping[str, Any] | None, Sequence[Link], int | None]
"""What a span starts with: its name, its start in ns since the epoch, its attributes, its links, and its id; None for a
random one."""


class Direct(Protocol):
    """Spans without a tracer, where nobody could tell the difference."""

    def start(self, parent: SpanContext | Span | None, trace_id: int | None, what: SpanStart) -> Span | None:
        """Starts a span that may be current. None where the tracer has to."""

    def finish(self, span: Any, end: int | None, attributes: Mapping[str, Any] | None) -> bool:
        """Ends such a span, if nobody has asked it for more than its context."""
        ...

    def hand_on(self, record: Record) -> bool:
        """Hands on what ended without error. False where the tracer has to."""
        ...

    def hand_on_usual(self, waiting: deque[Record], most: int) -> tuple[int, Record | None]:
        """Hands on what `waiting` begins with, at most so many, as long as there is nothing special about it.

        Returns:
            How many they were, and the first with something special, if one was taken.
        """
        ...


class Connection(Protocol):
    """The providers of the signals that are recorded."""

    meter: Meter
    log_handler: logging.Handler | None
    closed: bool
    """Whether somebody shut the tracer provider down."""
    drops_whole_traces: bool
    """Whether the sampler drops all that is inside a span that it drops, and need not be asked."""
    exit_timeout_s: float
    others: str
    """The signals beside spans, for people; empty if there are none."""
    chooses_ids: bool
    """Whether a span can be given the id that it is to have."""

    @property
    def direct(self) -> Direct:
        """The way without a tracer."""
        ...

    @property
    def sent(self) -> int:
        """How many spans an exporter has now: they may have arrived."""
        ...

    def start_span(self, context: Context | None, trace_id: int | None, what: SpanStart) -> Span:
        """Starts a span by the tracer, with these ids where they are given and the provider lets one choose."""
        ...

    def traces_of(
        self, key: str | None, rank: int, per_step: bool, is_recorded: Callable[[int], bool] = lambda rank: False
    ) -> Traces | None:
        """The traces of the run `key`; None where it has none, or the provider ids of its own kind."""
        ...

    def keeps(self, trace_id: int, name: str) -> bool:
        """Whether the sampler keeps a root span `name` in the trace `trace_id`."""
        ...

    def watch(self, hand_on: Callable[[], bool]) -> None:
        """Has `hand_on` called before somebody flushes the tracer provider or shuts it down."""

    def look(self, final: bool = False) -> None:
        """Sees what the application has done since the last look."""

    def flush_spans(self, final: bool = False) -> None:
        """Asks the tracer provider to export what it holds."""

    def flush_others(self, final: bool = False) -> None:
        """Asks the other providers to export what they hold."""

    def lost(self, final: bool) -> int:
        """How many spans the exporters lost; with `final`, what isn't exported by now counts."""
        ...

    def stop_failing(self) -> bool:
        """Has no more spans exported where the last attempt has failed, and says whether it has anywhere."""
        ...

    def count_lost(self, spans: int) -> None:
        """Adds to the metric of lost spans."""

    def give_up(self, late: bool) -> None:
        """Leaves out of the shutdowns at exit what would wait for a collector."""

    def unhook(self) -> None:
        """Lets the exporters alone again."""
