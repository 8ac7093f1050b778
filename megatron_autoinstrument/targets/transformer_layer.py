"""megatron/core/transformer/transformer_layer.py: a layer's forward pass, its attention and its MLP.

Each of the two is all of that half of the layer: with its norm, dropout and residual, and attention with
cross-attention too. A layer of a hybrid model that has only one of them passes through the other.
`--overlap-moe-expert-parallel-comm` takes a layer apart: its attention then comes without the layer around it, as does
its MLP, and experts not at all.
Before core 0.12 a layer was one function: there the two are what it calls, without norm, dropout and residual.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megatron_autoinstrument.common.semconv import RECOMPUTED
from megatron_autoinstrument.megatron import torch_state
from megatron_autoinstrument.megatron.patching import Arguments, Function, Hook, Seam
from megatron_autoinstrument.recording.record import Record
from megatron_autoinstrument.recording.recorder import Recorder

_TRANSFORMER = "megatron.core.transformer"
_MODULE = f"{_TRANSFORMER}.transformer_layer"
_HALVES = f"{_MODULE}:TransformerLayer._forward_attention"  # its package imports that module before all others
_AGAIN = {RECOMPUTED: True}


def layer_span(name: str) -> Callable[[Function, Recorder], Hook]:
    """One span for one call, marked where it is activation recomputation that runs the layer again."""

    def hook(original: Function, recorder: Recorder) -> Hook:
        is_capturing, in_backward = torch_state.is_capturing(), torch_state.in_backward()

        def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Record | None:
            if is_capturing():
                return None
            return recorder.begin_frequent(name, _AGAIN if in_backward() else None)

        def end(record: Record, result: Any, error: BaseException | None) -> None:
            # torch.utils.checkpoint leaves a recomputation by an exception once it has what it needs: no fault.
            if error is not None and type(error).__name__ == "_StopRecomputationError":
                error = None
            recorder.end_call(record, result, error)

        return Hook(begin, end)

    return hook


def _self_attention(original: Function, recorder: Recorder) -> Hook:
    hook = layer_span("megatron.layer.self_attention")(original, recorder)

    def begin(args: Arguments, kwargs: Mapping[str, Any]) -> Any:
        if getattr(args[0], "attention_type", None) == "cross":
            return None
        return hook.begin(args, kwargs)

    return Hook(begin, hook.end)


_MLP = layer_span("megatron.layer.mlp")

SEAMS = (
    Seam(_MODULE, "TransformerLayer.forward", {"layer"}, layer_span("megatron.layer.forward")),
    *(
        Seam(_MODULE, path, {"layer"}, hook, optional=True)
        for path, hook in (
            ("TransformerLayer._forward_attention", layer_span("megatron.layer.self_attention")),
            ("TransformerLayer._forward_mlp", _MLP),
            ("MoETransformerLayer._forward_mlp", _MLP),  # calls the one above, unless CUDA graphs split it
            ("HyperConnectionTransformerLayer.forward", layer_span("megatron.layer.forward")),  # calls the halves
        )
    ),
    *(
        Seam(f"{_TRANSFORMER}.{module}", path, {"layer"}, hook, unless=_HALVES)
        for module, path, hook in (
            ("attention", "Attention.forward", _self_attention),
            ("multi_latent_attention", "MultiLatentAttention.forward", _self_attention),
            ("mlp", "MLP.forward", _MLP),
            ("moe.moe_layer", "MoELayer.forward", _MLP),
        )
    ),
)
