import os
import types

import pytest

from megatron_autoinstrument.export import resource
from megatron_autoinstrument.process.ranks import Rank


def test_megatrons_arguments_are_told(fake_module):
    arguments = types.SimpleNamespace(
        local_rank=1, tensor_model_parallel_size=2, global_batch_size=8, ckpt_format="torch_dist", bf16=True, fp16=False
    )
    fake_module("megatron.training.global_vars")._GLOBAL_ARGS = arguments
    told = resource.attributes(Rank(5, 8, 3), "run7")
    assert told["dl.local_rank"] == 1
    assert told["dl.tensor_parallel.size"] == 2
    assert told["dl.batch_size"] == 8
    assert told["megatron.ckpt_format"] == "torch_dist"
    assert told["megatron.precision"] == "bf16"
    assert "megatron.num_layers" not in told
    assert told["process.pid"] == os.getpid()


def test_without_megatrons_arguments_the_launcher_tells_the_local_rank():
    told = resource.attributes(Rank(5, 8, 3), "run7")
    assert (told["dl.rank"], told["dl.world_size"], told["dl.local_rank"]) == (5, 8, 3)
    assert "megatron.precision" not in told


def test_without_megatrons_arguments_its_core_tells_the_sizes(fake_module):
    state = fake_module("megatron.core.parallel_state")
    initialized = False
    state.model_parallel_is_initialized = lambda: initialized
    for size, what in ((2, "tensor_model"), (4, "pipeline_model"), (1, "data")):
        setattr(state, f"get_{what}_parallel_world_size", lambda size=size: size)
    assert "dl.tensor_parallel.size" not in resource.attributes(Rank(5, 8, 3), "run7")
    initialized = True
    told = resource.attributes(Rank(5, 8, 3), "run7")
    assert [told[f"dl.{what}_parallel.size"] for what in ("tensor", "pipeline", "data")] == [2, 4, 1]


@pytest.mark.parametrize(
    ("environment", "attribute", "value"),
    [
        ({"NEMO_LENS_USER_ID": "me"}, "nemo.user.id", "me"),
        ({"SLURM_JOB_ID": "77"}, "slurm.job.id", "77"),
        ({"SLURM_JOB_PARTITION": "h100"}, "slurm.partition", "h100"),
        ({"K8S_NAMESPACE": "team"}, "k8s.namespace.name", "team"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "POD_NAMESPACE": "team"}, "k8s.namespace.name", "team"),
        ({"NODE_NAME": "jenkins-7"}, "k8s.node.name", None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "HOSTNAME": "job-0-xyz"}, "k8s.pod.name", "job-0-xyz"),
        ({"HOSTNAME": "workstation"}, "k8s.pod.name", None),
    ],
)
def test_what_the_environment_tells(monkeypatch, environment, attribute, value):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for name, told in environment.items():
        monkeypatch.setenv(name, told)
    assert resource.attributes(Rank(0, 1, 0), "run7").get(attribute) == value
