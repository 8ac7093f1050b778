"""A training loop of one's own on Megatron core alone: the same spans, with no run and no step around them."""

import re
import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from harness import EVERYTHING, INSTRUMENT, PLAIN, PTH, SCRIPTS, train

VERSION = "0.16.1"  # the newest whose wheel has no megatron.training
OWN = {"script": SCRIPTS / "own_loop.py", "megatron": Path(sys.prefix) / f"megatron-{VERSION}"}
ITERATIONS, MICROBATCHES, LAYERS = 3, 4, 2  # of scripts/own_loop.py, on each stage


@dataclass(frozen=True)
class Loop:
    options: tuple[str, ...] = ()
    way: str = INSTRUMENT
    evaluations: int = 0
    roots: frozenset[str] = frozenset({"megatron.forward_backward", "megatron.optimizer_step"})


FINISH = "megatron.grad_sync.finish"
LOOPS = {
    "distributed optimizer": Loop(),
    "evaluating between iterations": Loop(("--evaluate",), way=PTH, evaluations=1),
    "mixed precision, finalizing gradients itself": Loop(("--bf16", "--finalize-after"), roots=Loop.roots | {FINISH}),
}
loops = pytest.mark.parametrize("name", LOOPS)


@cache
def run_of(name, way=None):
    loop = LOOPS[name]
    run = train(
        *loop.options,
        way=way or loop.way,
        environment={"MEGATRON_OTEL_ENABLED": "0"} if way == PLAIN else EVERYTHING,
        **OWN,
    )
    assert run.status == 0, run.output[-3000:]
    assert f"MEGATRON CORE {VERSION}" in run.output
    return run


def printed(run):
    """Each iteration's and evaluation's losses, of each microbatch and to the last digit, and the gradient norm."""
    return re.findall(r"^(?:ITERATION|EVALUATION).*", run.output, re.MULTILINE)


def expected(loop, stage):
    first, last = stage == 0, stage == 1
    passes = ITERATIONS + loop.evaluations
    forwards, backwards = passes * MICROBATCHES, ITERATIONS * MICROBATCHES
    return +Counter(
        {
            "megatron.forward_backward": passes,
            "megatron.optimizer_step": ITERATIONS,
            "megatron.microbatch.forward": forwards,
            "megatron.microbatch.backward": backwards,
            "megatron.layer.forward": forwards * LAYERS,
            "megatron.layer.self_attention": forwards * LAYERS,
            "megatron.layer.mlp": forwards * LAYERS,
            "megatron.p2p.recv_forward": forwards * (not first),
            "megatron.p2p.send_forward": forwards * (not last),
            "megatron.p2p.recv_backward": backwards * (not last),
            "megatron.p2p.send_backward": backwards * (not first),
            "megatron.pp.recv_forward.linked": passes * (not first),
            FINISH: ITERATIONS,
        }
    )


@loops
def test_each_rank_records_the_right_number_of_every_span(name):
    run = run_of(name)
    assert run.ranks == [0, 1]
    for rank in run.ranks:
        counts = run.counts(rank)
        assert counts.pop("megatron.grad_sync.start") >= ITERATIONS
        assert counts == expected(LOOPS[name], stage=rank)


@loops
def test_what_a_step_would_hold_is_at_the_top_and_all_else_inside_it(name):
    for span in run_of(name).spans:
        assert (not span.parent_id) == (span.name in LOOPS[name].roots), span.name
        if span.parent_id:
            assert span.parent.start <= span.start <= span.end <= span.parent.end


@loops
def test_the_losses_are_those_of_an_uninstrumented_run_to_the_last_digit(name):
    plain = run_of(name, PLAIN)
    assert not plain.spans
    assert len(printed(plain)) == ITERATIONS + LOOPS[name].evaluations
    assert printed(run_of(name)) == printed(plain)


@loops
def test_nothing_of_ours_is_logged(name):
    assert not run_of(name).ours()


def test_a_pass_without_backward_is_told_apart():
    for rank in (0, 1):
        passes = [
            span
            for span in run_of("evaluating between iterations").of(rank)
            if span.name == "megatron.forward_backward"
        ]
        assert [bool(span.attributes.get("megatron.forward_only")) for span in passes] == [False, False, True, False]


@loops
def test_the_resource_tells_what_can_be_known_without_megatrons_arguments(name):
    run = run_of(name)
    for rank in run.ranks:
        for resource in [span.resource for span in run.of(rank)]:
            assert (resource["dl.rank"], resource["dl.world_size"], resource["dl.local_rank"]) == (rank, 2, rank)
            assert [resource[f"dl.{kind}_parallel.size"] for kind in ("tensor", "pipeline", "data")] == [1, 2, 1]
            assert resource["service.instance.id"] == f"{resource['nemo.run.id']}-rank{rank}"
            assert "megatron.num_layers" not in resource
    assert len({span.resource["nemo.run.id"] for span in run.spans}) == 1


def test_the_default_groups_and_the_metrics_find_nothing_to_record():
    run = train(way=PTH, environment={"OTEL_METRICS_EXPORTER": "otlp"}, **OWN)
    assert run.status == 0, run.output[-3000:]
    assert not run.spans
    assert not run.points
    assert not run.ours()
