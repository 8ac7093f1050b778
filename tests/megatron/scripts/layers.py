"""Real TransformerLayer, MoETransformerLayer and MambaLayer, called in every way that matters, and printed as JSON: the
spans of each.

Stand-ins are the mixers inside: Mamba's needs CUDA kernels and attention CUDA's random state. Not under
cuda_on_cpu: torch.compile asks its device, which isn't there, for a stream.
"""

import json

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer import TransformerConfig, TransformerLayer, TransformerLayerSubmodules
from megatron.core.transformer.transformer_layer import MoETransformerLayer
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.utils.checkpoint import checkpoint

from megatron_autoinstrument import MegatronInstrumentor
from megatron_autoinstrument.instrumentor import RECORDER

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
MegatronInstrumentor().instrument(tracer_provider=provider)


class Mixer(torch.nn.Module):
    """In the place of attention, of an MLP and of Mamba's mixer."""

    def __init__(self, config, **kwargs):
        super().__init__()
        self.linear = torch.nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden_states, **kwargs):
        return self.linear(hidden_states), None


class Norm(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size, eps=1e-5):
        super().__init__(hidden_size, eps)


torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, hidden_size=16, num_attention_heads=2, use_cpu_initialization=True, hidden_dropout=0.0
)
submodules = TransformerLayerSubmodules(
    input_layernorm=Norm,
    self_attention=Mixer,
    self_attn_bda=get_bias_dropout_add,
    pre_mlp_layernorm=Norm,
    mlp=Mixer,
    mlp_bda=get_bias_dropout_add,
)
torch.manual_seed(1)
transformer, moe = (cls(config, submodules) for cls in (TransformerLayer, MoETransformerLayer))
moe.use_partial_cudagraphs = False
mamba = MambaLayer(
    config,
    MambaLayerSubmodules(norm=Norm, mixer=Mixer, mamba_bda=get_bias_dropout_add),
    pg_collection=ProcessGroupCollection(tp=None),
)
hidden = torch.randn(4, 1, config.hidden_size, requires_grad=True)


def first(result):
    return result[0] if isinstance(result, tuple) else result


def captured(layer):
    """As if the call were captured into a CUDA graph."""
    before = torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing
    torch.cuda.is_initialized = torch.cuda.is_current_stream_capturing = lambda: True
    try:
        return first(layer(hidden))
    finally:
        torch.cuda.is_initialized, torch.cuda.is_current_stream_capturing = before


def compiled(layer):
    torch._dynamo.reset()
    run = torch.compile(lambda x: first(layer(x)) * 2, fullgraph=True, backend="eager")
    run(hidden)
    return run(hidden) / 2


def recomputed(layer, use_reentrant=True):
    result = checkpoint(lambda x: first(layer(x)), hidden, use_reentrant=use_reentrant)
    result.sum().backward()
    return result


def recomputed_in_part(layer):
    """torch stops as soon as it has the last tensor that it needs, by an exception."""
    return recomputed(layer, use_reentrant=False)


def spans():
    RECORDER.drain()
    # A drain from time to time hands on what is inside a call before the call itself.
    found = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
    assert all(span.status.is_unset for span in found)
    names = {span.context.span_id: span.name for span in found}
    exporter.clear()
    return [
        [span.name, names.get(span.parent.span_id) if span.parent else None, dict(span.attributes)] for span in found
    ]


found = {}
for name, layer in {"transformer": transformer, "moe": moe, "mamba": mamba}.items():
    plain = first(layer(hidden))
    found[name] = {"plain": spans()}
    for way in (captured, compiled, recomputed, recomputed_in_part):
        same = bool(torch.equal(way(layer), plain))
        found[name][way.__name__] = spans() if same else "another result"
print("PROCESS STATE", json.dumps(found))
