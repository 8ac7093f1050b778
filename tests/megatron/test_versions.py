"""One save and one load on each other Megatron that can be installed: the same spans, the same losses."""

import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest
from harness import PLAIN, train
from test_metrics import OFTEN, PRINTED, lines, series
from test_spans_of_a_run import PIPELINE, SCENARIOS, expected

OTHERS = ("0.17.1", "0.18.2")
each = pytest.mark.parametrize("version", OTHERS)


@cache
def checkpoints(version, way):
    return tempfile.TemporaryDirectory(prefix="checkpoints-")


@cache
def run_of(version, which, way="opentelemetry-instrument"):
    folder = checkpoints(version, way).name
    options = {
        "saving": ("--save", folder, "--save-interval", "3"),
        "loading": ("--load", folder, "--train-iters", "8", "--override-opt_param-scheduler"),
    }[which]
    if which == "loading":
        run_of(version, "saving", way)
    run = train(
        *PIPELINE,
        *options,
        "--ckpt-format",
        "torch_dist",
        way=way,
        environment=OFTEN if way != PLAIN else {"MEGATRON_OTEL_ENABLED": "0"},
        megatron=Path(sys.prefix) / f"megatron-{version}",
    )
    assert run.status == 0, run.output[-3000:]
    assert f"/megatron-{version}/" in run.output or version in run.output
    return run


@each
@pytest.mark.parametrize(("which", "scenario"), [("saving", "pipeline, saving"), ("loading", "pipeline, loading")])
def test_every_span_is_there_in_the_right_number(version, which, scenario):
    run = run_of(version, which)
    assert run.ranks == [0, 1]
    for rank in run.ranks:
        counts = run.counts(rank)
        assert counts.pop("megatron.grad_sync.start") >= SCENARIOS[scenario].steps
        assert counts == expected(SCENARIOS[scenario], stage=rank)
    assert not run.ours()


@each
def test_the_losses_are_those_of_an_uninstrumented_run(version):
    for which in ("saving", "loading"):
        assert run_of(version, which).losses == run_of(version, which, PLAIN).losses
        assert run_of(version, which).losses


@each
def test_the_metrics_and_the_steps_are_what_was_printed(version):
    run = run_of(version, "saving")
    printed = lines(run)
    assert len(printed) == 6
    for name in ("megatron.training.step_duration_ms", "megatron.training.loss", "megatron.training.grad_norm"):
        assert [PRINTED[name][1].format(value) for value in series(run, 1, name)] == [line[name] for line in printed]
    steps = [span for span in run.of(1) if span.name == "megatron.train_step"]
    assert [step.attributes["megatron.iteration"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert ["{:.6E}".format(step.attributes["megatron.loss"]) for step in steps] == [
        line["megatron.training.loss"] for line in printed
    ]


@each
def test_the_flags_are_known(version):
    run = train(
        "--otel-enabled",
        "--otel-span-groups",
        "step",
        ranks=1,
        way=PLAIN,
        environment={},
        megatron=Path(sys.prefix) / f"megatron-{version}",
    )
    assert run.status == 0, run.output[-3000:]
    assert run.counts(0) == {"megatron.train_step": 6}
