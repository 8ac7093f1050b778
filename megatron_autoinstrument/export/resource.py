"""What is the same for all that this process records: the resource attributes."""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

from megatron_autoinstrument.common.finite import is_finite
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.process.ranks import Rank

# Attribute: Megatron's argument.
_ARGUMENTS = {
    "dl.tensor_parallel.size": "tensor_model_parallel_size",
    "dl.pipeline_parallel.size": "pipeline_model_parallel_size",
    "dl.data_parallel.size": "data_parallel_size",
    "dl.batch_size": "global_batch_size",
    "dl.sequence_length": "seq_length",
    "megatron.num_layers": "num_layers",
    "megatron.hidden_size": "hidden_size",
    "megatron.num_attention_heads": "num_attention_heads",
    "megatron.train_iters": "train_iters",
    "megatron.micro_batch_size": "micro_batch_size",
    "megatron.ckpt_format": "ckpt_format",
}

# Attribute: the function of parallel_state that knows it where there are no arguments.
_PARALLEL_SIZES = {
    "dl.tensor_parallel.size": "get_tensor_model_parallel_world_size",
    "dl.pipeline_parallel.size": "get_pipeline_model_parallel_world_size",
    "dl.data_parallel.size": "get_data_parallel_world_size",
}

# Attribute: the variables that tell it, in the order in which they are believed. Where well-kept detector packages are
# installed, OTEL_EXPERIMENTAL_RESOURCE_DETECTORS brings what they find; none is kept for SLURM or for pods' variables.
_VARIABLES = {
    "nemo.user.id": ("NEMO_LENS_USER_ID",),
    "slurm.job.id": ("SLURM_JOB_ID",),
    "slurm.job.name": ("SLURM_JOB_NAME",),
    "slurm.nodelist": ("SLURM_NODELIST",),
    "slurm.nnodes": ("SLURM_NNODES",),
    "slurm.ntasks": ("SLURM_NTASKS",),
    "slurm.partition": ("SLURM_PARTITION", "SLURM_JOB_PARTITION"),
    "slurm.cluster.name": ("SLURM_CLUSTER_NAME",),
    "k8s.namespace.name": ("K8S_NAMESPACE",),
    "k8s.pod.name": ("K8S_POD_NAME",),
    "k8s.pod.uid": ("K8S_POD_UID",),
    "k8s.node.name": ("K8S_NODE_NAME",),
    "k8s.container.name": ("K8S_CONTAINER_NAME",),
    "k8s.job.name": ("K8S_JOB_NAME",),
}

# Names that pods are often given them by; elsewhere they mean other things. A pod's host is named after it.
_IN_A_POD = {
    "k8s.namespace.name": ("POD_NAMESPACE",),
    "k8s.pod.name": ("POD_NAME", "HOSTNAME"),
    "k8s.pod.uid": ("POD_UID",),
    "k8s.node.name": ("NODE_NAME",),
    "k8s.container.name": ("CONTAINER_NAME",),
}


def attributes(place: Rank, run_id: str) -> dict[str, str | int | float | bool]:
    """The attributes of `place` in the run `run_id`. Anything that the user set by `OTEL_*` variables wins, and what
    is not known is left out."""
    found: dict[str, Any] = {
        "service.name": "megatron-lm",
        "service.instance.id": f"{run_id}-rank{place.rank}",
        "nemo.run.id": run_id,
        "dl.rank": place.rank,
        "dl.world_size": place.world_size,
        # Megatron's is 0 also where nobody tells it.
        "dl.local_rank": state.arg("local_rank") or place.local_rank,
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "host.gpu.count": _gpu_count(),
        "megatron.precision": _precision(),
        **{attribute: state.arg(argument) for attribute, argument in _ARGUMENTS.items()},
        **{attribute: _first_set(*variables) for attribute, variables in _VARIABLES.items()},
    }
    if state.args() is None:
        found.update(_parallel_sizes())
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        for attribute, variables in _IN_A_POD.items():
            found[attribute] = found[attribute] or _first_set(*variables)
    return {key: value for key, value in found.items() if isinstance(value, (str, int, float)) and is_finite(value)}


def _first_set(*variables: str) -> str | None:
    return next((value for variable in variables if (value := os.environ.get(variable, "").strip())), None)


def _parallel_sizes() -> dict[str, int]:
    """For a training loop of one's own on Megatron core."""
    groups = state.parallel_state()
    if groups is None:
        return {}
    return {attribute: getattr(groups, function)() for attribute, function in _PARALLEL_SIZES.items()}


def _gpu_count() -> int | None:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda.device_count() if cuda is not None else None


def _precision() -> str | None:
    if state.args() is None:
        return None
    return "bf16" if state.arg("bf16") else "fp16" if state.arg("fp16") else "fp32"
