"""Fine-grained activation offload on its real classes, in two iterations, and what was recorded, as JSON.

Stand-ins: CUDA's streams and events, pinned memory, Transformer Engine's switch, and the device that a tensor must
be on to be offloaded. What is offloaded, when it comes back and on which call is Megatron's own doing.
"""

import cuda_on_cpu  # noqa: F401  # isort: skip

import json
import types

import torch
from megatron.core.extensions import transformer_engine
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megatron_autoinstrument import MegatronInstrumentor
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.recording.record import LIVE

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
MegatronInstrumentor().instrument(tracer_provider=provider)

from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload  # noqa: E402

transformer_engine.cpu_offload = types.SimpleNamespace()
torch.Tensor.record_stream = lambda self, stream: None
empty = torch.empty
torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
offload.ChunkOffloadHandler._can_manage_tensor_for_offload = staticmethod(
    lambda tensor: not isinstance(tensor, torch.nn.Parameter)
)
copies = {"offload": 0, "reload": 0}
copy_ = torch.Tensor.copy_


def counted(self, source, **kwargs):
    # Both directions name non_blocking, and nothing else here copies.
    copies["reload" if source.data_ptr() in on_host else "offload"] += 1
    on_host[self.data_ptr()] = self.untyped_storage()  # kept, or another tensor would get its address
    return copy_(self, source, **kwargs)


on_host = {}
torch.Tensor.copy_ = counted

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.manual_seed(1)
weights = [torch.nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
data = torch.randn(8, 8)


IS_OF_0_19 = hasattr(offload.FineGrainedActivationOffloadingInterface, "group_offload")


def forward_backward(offloaded):
    interface = offload.FineGrainedActivationOffloadingInterface
    hidden = data
    if offloaded:
        interface.init_chunk_handler(*((0, 1, None, 1, 0, 1.0) if IS_OF_0_19 else (1, None, 1)))
    for weight in weights:
        group = interface(offloaded, hidden, "mlp_norm")
        with group as tensor:
            hidden = (tensor @ weight).relu()
        hidden = group.group_offload(hidden) if IS_OF_0_19 else interface.group_commit(hidden, "mlp_norm")
    hidden.sum().backward()
    gradients = [weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    if offloaded:
        interface.reset()
    return gradients


expected = forward_backward(offloaded=False)
found = []
for _ in range(2):
    copies.update(offload=0, reload=0)
    record = RECORDER.begin("megatron.forward_backward", LIVE)
    gradients = forward_backward(offloaded=True)
    RECORDER.end(record)
    RECORDER.drain()
    spans = exporter.get_finished_spans()
    (parent,) = (span for span in spans if span.name == "megatron.forward_backward")
    found.append(
        {
            "same": all(map(torch.equal, gradients, expected)),
            "copies": dict(copies),
            "spans": [span.name for span in spans if span.parent and span.parent.span_id == parent.context.span_id],
            "all": len(spans),
        }
    )
    exporter.clear()
print("PROCESS STATE", json.dumps(found))
