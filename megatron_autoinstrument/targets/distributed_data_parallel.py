"""megatron/core/distributed/distributed_data_parallel.py: gradient synchronisation of a model chunk.

`finish_grad_sync` ends it in every run. `start_grad_sync` runs only where the schedule aligns the launches
(`--align-grad-reduce`, the default of interleaving); all other launches are in param_and_grad_buffer.py.
"""

from __future__ import annotations

from megatron_autoinstrument.patching import Seam
from megatron_autoinstrument.spans import span

_MODULE = "megatron.core.distributed.distributed_data_parallel"

SEAMS = (
    Seam(_MODULE, "DistributedDataParallel.start_grad_sync", {"communication"}, span("megatron.grad_sync.start")),
    Seam(_MODULE, "DistributedDataParallel.finish_grad_sync", {"communication"}, span("megatron.grad_sync.finish")),
)
