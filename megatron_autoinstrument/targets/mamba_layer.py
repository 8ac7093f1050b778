"""megatron/core/ssm/mamba_layer.py: the forward pass of a Mamba layer, which has neither attention nor MLP."""

from __future__ import annotations

from megatron_autoinstrument.megatron.patching import Seam
from megatron_autoinstrument.targets.transformer_layer import layer_span

SEAMS = (Seam("megatron.core.ssm.mamba_layer", "MambaLayer.forward", {"layer"}, layer_span("megatron.layer.forward")),)
