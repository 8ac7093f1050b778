"""Seams that ask torch what it is doing, on stand-ins for it; and the wait for a batch."""

import threading
import types

import pytest
from opentelemetry.trace import StatusCode

from megatron_autoinstrument.megatron.patching import Patcher
from megatron_autoinstrument.recording.record import FREQUENT
from megatron_autoinstrument.targets import (
    fine_grained_activation_offload,
    mamba_layer,
    rerun_state_machine,
    transformer_layer,
)

LAYER = """
class TransformerLayer:
    def forward(self, x):
        return self._forward_mlp(self._forward_attention(x))
    def _forward_attention(self, x):
        return x + 1
    def _forward_mlp(self, x):
        return x + 1

class MoETransformerLayer(TransformerLayer):
    def _forward_mlp(self, x):
        return super()._forward_mlp(x)
"""
ITERATOR = """
class RerunDataIterator:
    def __init__(self, batches):
        self.batches, self.replaying, self.kept = iter(batches), False, []
    def __next__(self):
        if self.replaying:
            return self.kept[-1]
        self.kept.append(next(self.batches))
        return self.kept[-1]
"""
OFFLOAD = """
class ChunkOffloadHandler:
    def offload(self, tensor):
        return (tensor,)
    @staticmethod
    def reload(state):
        return state[0]
"""
GROUPS = frozenset({"layer", "data_loading", "activation_offload"})


@pytest.fixture
def torch(fake_module):
    """What torch says it is doing."""
    says = types.SimpleNamespace(compiling=False, initialized=True, capturing=False, graph_task=-1)
    fake_module("torch.compiler").is_compiling = lambda: says.compiling
    cuda = fake_module("torch.cuda")
    cuda.is_initialized = lambda: says.initialized
    cuda.is_current_stream_capturing = lambda: says.capturing if says.initialized else 1 / 0
    fake_module("torch._C")._current_graph_task_id = lambda: says.graph_task
    return says


@pytest.fixture
def install(torch, recorder, monkeypatch, fake_module):
    ledger, recorder.groups = Patcher(), GROUPS

    def install(target, source):
        module = fake_module(target.SEAMS[0].module, source)
        ledger.install(target.SEAMS, GROUPS, recorder)
        return module

    yield install
    ledger.uninstall()


@pytest.fixture
def recorded(recorder, exporter):
    def recorded():
        recorder.drain()
        found = exporter.get_finished_spans()
        names = {span.context.span_id: span.name.removeprefix("megatron.layer.") for span in found}
        exporter.clear()
        return [(names[span.context.span_id], span.parent and names[span.parent.span_id]) for span in found]

    return recorded


INSIDE = [("forward", None), ("self_attention", "forward"), ("mlp", "forward")]


@pytest.mark.parametrize("name", ["TransformerLayer", "MoETransformerLayer"])
def test_a_layer_gives_one_span_of_each_kind(install, recorded, name):
    layer = getattr(install(transformer_layer, LAYER), name)()
    assert layer.forward(1) == 3
    assert recorded() == INSIDE


def test_nothing_is_recorded_while_torch_compiles_or_captures(install, recorded, torch):
    layer = install(transformer_layer, LAYER).TransformerLayer()
    torch.compiling = True
    assert layer.forward(1) == 3
    torch.compiling, torch.capturing = False, True
    assert layer.forward(1) == 3
    assert recorded() == []
    torch.initialized = False  # on a machine without a driver nothing is captured, and to ask is an error
    assert layer.forward(1) == 3
    assert recorded() == INSIDE


def test_what_autograd_runs_again_is_marked(install, recorder, exporter, torch):
    layer = install(transformer_layer, LAYER).TransformerLayer()
    layer.forward(1)
    torch.graph_task = 0
    layer.forward(1)
    recorder.drain()
    marks = [span.attributes.get("megatron.recomputed") for span in exporter.get_finished_spans()]
    assert marks == [None] * 3 + [True] * 3


def test_a_recomputation_that_torch_breaks_off_is_no_error(install, recorder, exporter):
    class _StopRecomputationError(Exception):
        pass

    source = LAYER.replace("return x + 1", "raise x")
    layer = install(transformer_layer, source).TransformerLayer()
    for error in (_StopRecomputationError(), ValueError()):
        with pytest.raises(type(error)):
            layer.forward(error)
    recorder.drain()
    status = [span.status.status_code for span in exporter.get_finished_spans()]
    assert status == [StatusCode.UNSET] * 2 + [StatusCode.ERROR] * 2


def test_on_autograds_thread_a_layer_nests_as_on_the_training_thread(install, recorder, recorded):
    layer = install(transformer_layer, LAYER).MoETransformerLayer()
    backward = recorder.begin("megatron.microbatch.backward", FREQUENT)
    thread = threading.Thread(target=lambda: (layer.forward(1), layer.forward(1)))
    thread.start()
    thread.join()
    assert recorder.current is backward
    recorder.end(backward)
    again = [("forward", "megatron.microbatch.backward"), *INSIDE[1:]]
    assert recorded() == [("megatron.microbatch.backward", None), *again, *again]
    assert not recorder._elsewhere


def test_a_mamba_layer_gives_a_span(install, recorded):
    module = install(mamba_layer, "class MambaLayer:\n    def forward(self, x): return x")
    assert module.MambaLayer().forward(1) == 1
    assert recorded() == [("forward", None)]


def test_each_copy_of_an_activation_gives_a_span_unless_it_is_captured(install, recorded, torch):
    handler = install(fine_grained_activation_offload, OFFLOAD).ChunkOffloadHandler()
    assert handler.reload(handler.offload("tensor")) == "tensor"
    torch.capturing = True
    assert handler.reload(handler.offload("tensor")) == "tensor"
    assert recorded() == [("megatron.activation.offload", None), ("megatron.activation.reload", None)]


def test_a_batch_that_is_replayed_is_no_wait_and_the_end_of_the_data_no_error(install, recorder, exporter):
    batches = install(rerun_state_machine, ITERATOR).RerunDataIterator([7])
    assert next(batches) == 7
    batches.replaying = True
    assert next(batches) == 7
    batches.replaying = False
    with pytest.raises(StopIteration):
        next(batches)
    recorder.drain()
    found = exporter.get_finished_spans()
    assert [(span.name, span.status.status_code) for span in found] == [("megatron.data_loading", StatusCode.UNSET)] * 2
