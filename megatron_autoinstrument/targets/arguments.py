"""megatron/training/arguments.py: its parser is taught our flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.common.groups import FLAGS
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Patcher, Seam
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.settings import flags


def _adding(original: Function, recorder: Recorder) -> Hook:
    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
        return True

    def end(token: Any, parser: Any, error: BaseException | None) -> None:
        flags.add(parser)

    return Hook(begin, end)


SEAMS = (
    Seam(flags.MODULE, flags.FUNCTIONS[0], {FLAGS}, _adding),
    Seam(flags.MODULE, flags.FUNCTIONS[1], {FLAGS}, _adding, unless=flags.FUNCTIONS[0]),
)

# Apart from all the other seams, so that what fails there takes no flag away.
PATCHER = Patcher()


def teach(rebind: bool = True) -> None:
    """Has Megatron's parser know the flags, now or when it is imported.

    Args:
        rebind: As for `Patcher.install`.
    """
    if not PATCHER.groups:
        PATCHER.install(SEAMS, frozenset({FLAGS}), rebind=rebind)
