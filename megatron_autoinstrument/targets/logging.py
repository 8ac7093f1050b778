"""Python's logging: records on their way to whatever handlers there are.

Not by a handler of ours: the first handler of the root logger silences `logging.basicConfig`, and what Python prints
where there is none.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument import redact
from megatron_autoinstrument.groups import LOGS
from megatron_autoinstrument.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.spans import RECORDER

# The exporter's own records, and those of what it exports with, would feed on themselves.
_OURS = ("opentelemetry", "megatron_autoinstrument", "grpc", "urllib3", "requests")


def _call_handlers(original: Function, groups: frozenset[str]) -> Hook:
    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        record = args[1]
        if (handler := RECORDER.log_handler) is not None and record.name.partition(".")[0] not in _OURS:
            handler.emit(_without_exception(record) if record.exc_info else record)

    return Hook(begin, lambda token, result, error: None)


def _without_exception(record: logging.LogRecord) -> logging.LogRecord:
    """A copy with what may leave of its exception, in the attributes that the SDK's handler would take from it."""
    error = record.exc_info[1] if record.exc_info else None
    record = copy.copy(record)
    record.exc_info = record.exc_text = None
    if error is not None:
        vars(record).update(redact.described(error))
    return record


SEAMS = (Seam("logging", "Logger.callHandlers", {LOGS}, _call_handlers),)
