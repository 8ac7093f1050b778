"""The hook that most seams need: one span for one call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_autoinstrument.common.semconv import SPAN_GROUPS
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, argument
from megatron_autoinstrument.recording.record import FREQUENT, LIVE, SILENT, Record
from megatron_autoinstrument.recording.recorder import Recorder

Reader = Callable[[Arguments, Mapping[str, Any]], Any]
"""What reads something from a call's arguments."""


def kind_of(name: str, kind: str, groups: frozenset[str]) -> str:
    """`kind`, or SILENT where the group of the span `name` is off: such a record is only there to be seen."""
    return kind if SPAN_GROUPS[name] in groups else SILENT


def span(
    name: str,
    *,
    live: bool = False,
    given: Mapping[str, str | Reader] | None = None,
    returned: Callable[[Any], dict[str, Any]] | None = None,
    within: str | None = None,
    skip: Reader | None = None,
    no_fault: type[BaseException] | tuple[type[BaseException], ...] = (),
) -> Callable[[Function, Recorder], Hook]:
    """The hook that records one span for one call.

    Args:
        name: The span's name.
        live: Whether the span is current while the call runs; for calls that come a few times per step at most.
        given: Attributes known when the call begins, by the name of the parameter, or a reader of the arguments.
        returned: Attributes from what the call returned.
        within: Record only calls made directly inside the span of this name.
        skip: Tells of which calls nothing is recorded.
        no_fault: Exceptions by which the call says something that is no error.
    """

    def hook(original: Function, recorder: Recorder) -> Hook:
        kind = kind_of(name, LIVE if live else FREQUENT, recorder.groups)
        readers = [
            (attribute, argument(original, source) if isinstance(source, str) else source)
            for attribute, source in (given or {}).items()
        ]

        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
            if within is not None and ((current := recorder.current) is None or current.name != within):
                return None
            if skip is not None and skip(args, kwargs):
                return None
            attributes = None
            if readers:
                attributes = {key: value for key, read in readers if (value := read(args, kwargs)) is not None}
            if kind is FREQUENT:
                return recorder.begin_frequent(name, attributes)
            return recorder.begin(name, kind, attributes)

        if returned is None and not no_fault:
            return Hook(begin, recorder.end_call)

        def end(record: Record, result: Any, error: BaseException | None) -> None:
            if error is not None and isinstance(error, no_fault):
                error = None
            recorder.end(record, error, returned(result) if returned is not None and error is None else None)

        return Hook(begin, end)

    return hook
