"""Trains the tiny GPT with CUDA graphs of the whole iteration and of the optimizer's step.

Megatron's own wrappers decide when to warm up, to capture and to replay. What is stood in for is the device's part: a
capture runs the Python that it records, and a replay computes nothing.
"""

import contextlib

import cuda_on_cpu  # noqa: F401  (first: it must precede every Megatron import)
import torch
from torch.optim import adam, adamw

capturing = False


class CUDAGraph:
    def register_generator_state(self, state):
        pass

    def replay(self):
        print("REPLAYED")


@contextlib.contextmanager
def graph(*args, **kwargs):
    global capturing
    capturing = True
    yield
    capturing = False
    print("CAPTURED")


class Generator:
    """A random generator of the device, whose state is a generator."""

    def __getattr__(self, name):
        return getattr(torch.default_generator, name)

    def graphsafe_get_state(self):
        return torch.Generator().set_state(torch.get_rng_state())

    def graphsafe_set_state(self, state):
        torch.set_rng_state(state.get_state())

    clone_state = graphsafe_get_state


class Generators(list):
    def __getitem__(self, index):
        return Generator()


torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: capturing
torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, graph
torch.cuda.graph_pool_handle = lambda: None
torch.cuda.default_generators = Generators()
for module in (adam, adamw):
    module._get_capturable_supported_devices = lambda *args, **kwargs: ["cpu"]

import pretrain_tiny_gpt  # noqa: E402

if __name__ == "__main__":
    pretrain_tiny_gpt.main()
