"""megatron/core/distributed/distributed_data_parallel.py: gradient synchronisation of a model chunk.

`finish_grad_sync` ends it in every run. `start_grad_sync` runs only where the schedule aligns the launches
(`--align-grad-reduce`, the default of interleaving); all other launches are in param_and_grad_buffer.py.
Megatron's FSDP stands in its place; with torch's (`--use-torch-fsdp2`) the two functions do nothing.
"""

from __future__ import annotations

from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.recording.hooks import span

_CLASSES = (
    ("distributed_data_parallel", "DistributedDataParallel"),
    ("fsdp.src.megatron_fsdp.megatron_fsdp", "MegatronFSDP"),  # core 0.14 on
    ("custom_fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"),  # 0.12 and 0.13
)

SEAMS = tuple(
    Seam(f"megatron.core.distributed.{module}", f"{name}.{phase}_grad_sync", {"communication"}, hook)
    for phase, hook in (("start", span("megatron.grad_sync.start")), ("finish", span("megatron.grad_sync.finish")))
    for module, name in _CLASSES
)
