"""Python's logging: records on their way to whatever handlers there are.

Not by a handler of ours: the first handler of the root logger silences `logging.basicConfig`, and what Python prints
where there is none.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common import redact
from megatron_autoinstrument.common.finite import finite_log
from megatron_autoinstrument.common.groups import LOGS
from megatron_autoinstrument.common.redact import get_logger
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.recording.workers import THREAD

_logger = get_logger(__name__)

# The exporter's own records, and those of what it exports with, would feed on themselves.
_OURS = ("opentelemetry", "megatron_autoinstrument", "grpc", "urllib3", "requests")


def _call_handlers(original: Function, recorder: Recorder) -> Hook:
    from opentelemetry.instrumentation.utils import is_instrumentation_enabled

    here = threading.local()  # .busy: with a record, whose processor may log another
    failed = False

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> None:
        nonlocal failed
        record = args[1]
        handler = recorder.log_handler
        if handler is None or record.name.partition(".")[0] in _OURS or getattr(here, "busy", False):
            return
        # An exporter logs under any name, in whatever thread it is called: the SDK marks what that does meanwhile.
        if record.threadName == THREAD or not is_instrumentation_enabled():
            return
        here.busy = True
        try:
            handler.emit(finite_log(_without_exception(record) if record.exc_info else record))
        except Exception as error:  # noqa: BLE001
            # One that can't be formatted, or a processor of somebody's; the others are recorded all the same.
            if not failed:
                failed = True
                _logger.warning("A log record could not be exported (%s). (Told once.)", type(error).__name__)
        finally:
            here.busy = False

    return Hook(begin)


def _without_exception(record: logging.LogRecord) -> logging.LogRecord:
    """A copy with what may leave of its exception, in the attributes that the SDK's handler would take from it."""
    error = record.exc_info[1] if record.exc_info else None
    record = copy.copy(record)
    record.exc_info = record.exc_text = None
    if error is not None:
        vars(record).update(redact.described(error))
    return record


SEAMS = (Seam("logging", "Logger.callHandlers", {LOGS}, _call_handlers),)
