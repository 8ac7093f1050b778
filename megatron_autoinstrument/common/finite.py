"""Neither NaN nor infinity leaves the process: one of them in an attribute makes backends drop, or not show, all that
was sent with it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence, Set
from math import isfinite
from typing import Any

_NO_NUMBERS = frozenset({bool, int, str, bytes, type(None)})
_DEEPEST = 8


def is_finite(value: Any, depth: int = _DEEPEST) -> bool:
    """Whether there is neither in `value`, however deep; False, too, where it is deeper than anyone would look."""
    if type(value) in _NO_NUMBERS:
        return True
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (Sequence, Set)) or isinstance(value, (str, bytes, bytearray)):
        return True
    return depth > 0 and all(is_finite(part, depth - 1) for part in value)


def finite(attributes: Mapping[str, Any], depth: int = _DEEPEST) -> Mapping[str, Any]:
    """`attributes` with NAME.finite = False in the place of each NAME that is not, or holds what is not."""
    for value in attributes.values():
        if type(value) not in _NO_NUMBERS and not is_finite(value):
            break
    else:
        return attributes
    found: dict[str, Any] = {}
    for name, value in attributes.items():
        if is_finite(value):
            found[name] = value
        elif isinstance(value, Mapping) and depth > 0:
            found[name] = finite(value, depth - 1)
        else:
            found[f"{name}.finite"] = False
    return found


def finite_log(record: logging.LogRecord) -> logging.LogRecord:
    """`record`, or a copy for an exporter where its attributes or its message are not finite: what is no text, and
    logged as the message, is then sent as logging prints it."""
    attributes = dict(vars(record))
    message, arguments = attributes.pop("msg"), attributes.pop("args")
    sent = finite(attributes)
    is_text = bool(arguments) or is_finite(message)
    if is_text and sent is attributes:
        return record
    found = copy.copy(record)
    vars(found).clear()
    vars(found).update(sent, msg=message, args=arguments)
    if not is_text:
        found.msg = record.getMessage()
    return found
