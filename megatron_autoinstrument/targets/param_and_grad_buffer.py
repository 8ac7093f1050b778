"""megatron/core/distributed/param_and_grad_buffer.py: the launch of a bucket group's reduction.

With `--overlap-grad-reduce` autograd's hooks launch each group as soon as its gradients are there; without it,
`finish_grad_sync` does. A launch inside `DistributedDataParallel.start_grad_sync` is part of that span.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_autoinstrument.megatron.patching import Arguments, Seam
from megatron_autoinstrument.recording.hooks import span


def _is_launched(args: Arguments, kwargs: Mapping[str, Any]) -> bool:
    """Whether Megatron does nothing: in the first batch a group may have been launched already."""
    group = args[0]
    return getattr(group, "is_first_batch", False) and group.grad_reduce_handle is not None


SEAMS = (
    Seam(
        "megatron.core.distributed.param_and_grad_buffer",
        "_ParamAndGradBucketGroup.start_grad_sync",
        {"communication"},
        span("megatron.grad_sync.start", skip=_is_launched),
    ),
)
