"""Counts the calls of this package's functions, in every thread: `count(key)` begins to count for that key, and ends
it for the one before; `COUNTS[key]` is then `{thread: {function: calls}}`."""

import sys
import threading
from collections import Counter, defaultdict

COUNTS = {}
_TOOL, _EVENTS = sys.monitoring.PROFILER_ID, sys.monitoring.events
_current = None


def count(key):
    global _current
    _current = None if key is None else COUNTS.setdefault(key, defaultdict(Counter))


def _called(code, offset):
    if "megatron_autoinstrument/" not in code.co_filename:
        return sys.monitoring.DISABLE
    if _current is not None:
        _current[threading.current_thread().name][code.co_qualname] += 1
    return None


sys.monitoring.use_tool_id(_TOOL, "calls of ours")
for event in (_EVENTS.PY_START, _EVENTS.PY_RESUME):
    sys.monitoring.register_callback(_TOOL, event, _called)
sys.monitoring.set_events(_TOOL, _EVENTS.PY_START | _EVENTS.PY_RESUME)
