"""What torch is doing right now, for spans that must not lie about it.

torch is no dependency and is never imported here: Megatron has loaded it by the time anything of it is wrapped. Each
function looks once and returns a test for the hot path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable


def is_compiling() -> Callable[[], bool]:
    """Whether torch.compile is tracing this call. Its tracer knows torch's function and folds it to a constant."""
    return getattr(sys.modules.get("torch.compiler"), "is_compiling", bool)


def is_capturing() -> Callable[[], bool]:
    """Whether this call is recorded into a CUDA graph, so that nothing runs on the device now, and no Python when
    it does."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None:
        return bool
    # Without a driver the second question is an error.
    return lambda: cuda.is_initialized() and cuda.is_current_stream_capturing()


def in_backward() -> Callable[[], bool]:
    """Whether autograd makes this call, on whatever thread it does so: a forward pass is then a recomputation."""
    graph_task = sys.modules["torch._C"]._current_graph_task_id
    return lambda: graph_task() != -1
