"""Unit tests need no torch and no Megatron: stand-ins take their modules' names."""

import sys
import types

import pytest
from opentelemetry import context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from megatron_autoinstrument import instrumentor
from megatron_autoinstrument.common.groups import GROUPS
from megatron_autoinstrument.export import ids, providers
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.process import ranks, store
from megatron_autoinstrument.recording.recorder import Recorder
from megatron_autoinstrument.settings import config


@pytest.fixture(autouse=True)
def _no_fault_hides(monkeypatch):
    monkeypatch.setattr(patching, "reraise_internal_errors", True)


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith(("MEGATRON_OTEL_", "NEMO_LENS_", "OTEL_", "SLURM_", "OMPI_", "PMI_", "TORCHELASTIC_")):
            monkeypatch.delenv(name)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _nothing_is_current():
    token = context.attach(context.Context())
    yield
    context.detach(token)


@pytest.fixture(autouse=True)
def _no_flags(monkeypatch):
    monkeypatch.setattr(config, "flags", {})
    monkeypatch.setattr(config, "given", {})
    monkeypatch.setattr(config, "_warned", set())


@pytest.fixture(autouse=True)
def _another_process(monkeypatch):
    """What a process learns of its run."""
    monkeypatch.setattr(ids, "_run", None)
    monkeypatch.setattr(store, "_told", False)
    monkeypatch.setattr(store, "_number_on_node", None)
    monkeypatch.setattr(instrumentor, "_decision", None)
    monkeypatch.setattr(instrumentor, "_said", set())


@pytest.fixture(autouse=True)
def _no_recorder_outlives_its_test(monkeypatch):
    """Its thread would: it looks at providers, and may log what is wrong with them while another test listens."""
    made, init = [instrumentor.RECORDER], Recorder.__init__

    def initialise(self):
        made.append(self)
        init(self)

    monkeypatch.setattr(Recorder, "__init__", initialise)
    yield
    for recorder in made:
        draining = recorder._draining
        waited = draining.acquire(timeout=5)
        recorder._connection = None
        if waited:
            draining.release()


@pytest.fixture
def torch_distributed(fake_module):
    """Has torch.distributed be initialised, as this rank of so many, with this store."""

    def initialise(rank, world_size, store=None):
        torch = fake_module("torch.distributed")
        torch.is_initialized, torch.get_rank, torch.get_world_size = lambda: True, lambda: rank, lambda: world_size
        c10d = fake_module("torch.distributed.distributed_c10d")
        c10d._get_default_store = lambda: store
        return torch

    return initialise


@pytest.fixture
def fake_module(monkeypatch):
    """Makes a module from source and puts it into sys.modules."""

    def make(name, source=""):
        module = types.ModuleType(name)
        exec(source, vars(module))
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


ALL = frozenset(GROUPS)


@pytest.fixture
def recorder(monkeypatch, provider):
    """A recorder of the test's own, connected to `provider`, in the place of the process's."""
    recorder = Recorder()
    recorder.groups = ALL
    recorder.connect_by(lambda: providers.connect({"traces": provider}, None, {}))
    monkeypatch.setattr("megatron_autoinstrument.instrumentor.RECORDER", recorder)
    yield recorder
    recorder.reset_after_fork()


@pytest.fixture
def alone():
    return ranks.Rank(0, 1, 0)
