"""megatron/core/rerun_state_machine.py: the wait for a batch. All of Megatron's data iterators are of this class."""

from __future__ import annotations

from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.recording.hooks import span

SEAMS = (
    Seam(
        "megatron.core.rerun_state_machine",
        "RerunDataIterator.__next__",
        {"data_loading"},
        span(
            "megatron.data_loading",
            skip=lambda args, kwargs: args[0].replaying,  # a batch that was kept, for an iteration that is run again
            no_fault=StopIteration,  # the end of the data
        ),
    ),
)
