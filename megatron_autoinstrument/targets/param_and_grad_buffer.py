"""megatron/core/distributed/param_and_grad_buffer.py: the launch of a bucket group's reduction.

With `--overlap-grad-reduce` autograd's hooks launch each group as soon as its gradients are there; without it,
`finish_grad_sync` does. A launch inside `DistributedDataParallel.start_grad_sync` is part of that span.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.recorder import span


def _start_grad_sync(original: Function, groups: frozenset[str]) -> Hook:
    hook = span("megatron.grad_sync.start")(original, groups)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        group = args[0]
        if getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None:
            return None  # launched already: Megatron does nothing then
        return hook.begin(args, kwargs)

    return Hook(begin, hook.end)


SEAMS = (
    Seam(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        {"communication"},
        _start_grad_sync,
    ),
)
