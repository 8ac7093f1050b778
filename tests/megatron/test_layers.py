"""Layers and activation offload on Megatron's real classes, where a training run on a CPU cannot take them."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest
from harness import FIXTURES, MEGATRON, SCRIPTS

FORWARD, ATTENTION, MLP = ("megatron.layer." + name for name in ("forward", "self_attention", "mlp"))
OFFLOAD, RELOAD = "megatron.activation.offload", "megatron.activation.reload"
# Each span with its parent's name.
PLAIN = {
    "transformer": [[FORWARD, None], [ATTENTION, FORWARD], [MLP, FORWARD]],
    "moe": [[FORWARD, None], [ATTENTION, FORWARD], [MLP, FORWARD]],
    "mamba": [[FORWARD, None]],
}
layers = pytest.mark.parametrize("layer", PLAIN)


@cache
def result(script):
    """What the script prints, run without torchrun, and with torch.compile."""
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OTEL_", "MEGATRON_", "NEMO_", "TORCHDYNAMO"))
    }
    process = subprocess.run(
        [sys.executable, str(SCRIPTS / script)],
        env={
            **base,
            "PYTHONPATH": os.pathsep.join(str(path) for path in (MEGATRON, FIXTURES) if path),
            "OMP_NUM_THREADS": "1",
            "MEGATRON_OTEL_SPAN_GROUPS": "layer,activation_offload",
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    assert "megatron_autoinstrument" not in process.stderr
    return json.loads(process.stdout.split("PROCESS STATE")[1])


@layers
def test_a_layer_gives_a_span_with_its_attention_and_its_mlp_inside(layer):
    assert result("layers.py")[layer]["plain"] == [[*span, {}] for span in PLAIN[layer]]


@layers
@pytest.mark.parametrize("how", ["recomputed", "recomputed_in_part"])
def test_a_forward_pass_that_backward_runs_again_is_told_apart(layer, how):
    forward = [[*span, {}] for span in PLAIN[layer]]
    again = [[*span, {"megatron.recomputed": True}] for span in PLAIN[layer]]
    assert result("layers.py")[layer][how] == forward + again


@layers
def test_a_layer_compiles_into_one_graph_of_which_nothing_is_recorded(layer):
    assert result("layers.py")[layer]["compiled"] == []


@layers
def test_the_capture_of_a_cuda_graph_is_not_recorded(layer):
    assert result("layers.py")[layer]["captured"] == []


def test_each_tensor_that_is_offloaded_and_reloaded_gives_a_span():
    warm_up, steady = result("offload.py")
    for iteration in (warm_up, steady):
        assert iteration["same"], "the gradients are those without offload"
        copies = iteration["copies"]
        assert copies["offload"] == copies["reload"] > 0
        assert iteration["spans"] == [OFFLOAD] * copies["offload"] + [RELOAD] * copies["reload"]
        assert iteration["all"] == len(iteration["spans"]) + 1
    assert steady["copies"]["offload"] < warm_up["copies"]["offload"]  # Megatron keeps the last group from then on
