"""megatron/core/parallel_state.py: the moment when a training loop of one's own has its parallel groups."""

from __future__ import annotations

from megatron_autoinstrument.common.groups import FLAGS
from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.targets.global_vars import tells

SEAMS = (Seam("megatron.core.parallel_state", "initialize_model_parallel", {FLAGS}, tells),)
