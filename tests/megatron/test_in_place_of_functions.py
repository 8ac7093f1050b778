"""Runs in which Megatron takes something else in the place of the functions that most spans are of."""

from functools import cache

from harness import EVERYTHING, MEGATRON, PLAIN, PTH, SCRIPTS, train

GRAPHS = ("--cuda-graph-impl", "full_iteration", "--optimizer-cuda-graph", "--te-rng-tracker")
CAPTURED = 3  # training, evaluation, the optimizer
if MEGATRON is not None and MEGATRON.name.endswith("-0.17.1"):  # it has no flag for the optimizer
    GRAPHS, CAPTURED = ("--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration", "--te-rng-tracker"), 2
COMBINED = (
    *(
        "--overlap-moe-expert-parallel-comm",
        "--moe-token-dispatcher-type",
        "alltoall",
        "--bf16",
        "--disable-bias-linear",
    ),
    *("--num-experts", "4", "--expert-model-parallel-size", "2", "--moe-router-topk", "2"),
)
WARM_UP, STEPS, EVALUATED = 3, 6, 8  # of Megatron's wrappers; of the run: its iterations, and those of its evaluations


@cache
def with_graphs(way=None):
    run = train(
        *GRAPHS,
        ranks=1,
        script=SCRIPTS / "with_cuda_graphs.py",
        **({"way": way, "environment": {"MEGATRON_OTEL_ENABLED": "0"}} if way else {}),
    )
    assert run.status == 0, run.output[-3000:]
    return run


@cache
def combined(way=None):
    off = {"MEGATRON_OTEL_ENABLED": "0"} if way else EVERYTHING
    run = train(
        *COMBINED,
        script=SCRIPTS / "with_combined_1f1b.py",
        environment={**off, "CUDA_DEVICE_MAX_CONNECTIONS": "32"},
        **({"way": way} if way else {}),
    )
    assert run.status == 0, run.output[-3000:]
    return run


def test_a_replayed_iteration_is_a_pass_with_nothing_but_its_data_inside():
    run = with_graphs()
    assert run.output.count("CAPTURED") == CAPTURED
    passes = [span for span in run.spans if span.name in ("megatron.forward_backward", "megatron.evaluate.step")]
    assert len(passes) == STEPS + EVALUATED
    for kind in ("megatron.forward_backward", "megatron.evaluate.step"):
        for at, span in enumerate(span for span in passes if span.name == kind):
            inside = {child.name for child in span.children}
            assert len([child for child in span.children if child.name == "megatron.data_loading"]) == 4
            assert (inside == {"megatron.data_loading"}) == (at >= WARM_UP), (kind, at)
    counts = run.counts(0)
    assert counts["megatron.microbatch.forward"] == 4 * 2 * WARM_UP
    assert counts["megatron.layer.forward"] == 4 * 4 * 2 * WARM_UP
    assert counts["megatron.microbatch.backward"] == 4 * WARM_UP
    assert counts["megatron.grad_sync.finish"] == WARM_UP


def test_a_replayed_optimizer_step_is_one_with_its_outcome():
    steps = [span for span in with_graphs().spans if span.name == "megatron.optimizer_step"]
    assert len(steps) == STEPS
    assert all(step.attributes["megatron.update_successful"] is True for step in steps)


def test_microbatches_that_run_at_once_share_their_time_and_are_marked():
    run = combined()
    for rank in run.ranks:
        passes = [span for span in run.of(rank) if span.name == "megatron.forward_backward"]
        assert len(passes) == STEPS
        for span in passes:
            both = [child for child in span.children if child.name.startswith("megatron.microbatch.")]
            assert [
                (
                    child.name.rpartition(".")[2],
                    child.attributes.get("megatron.microbatch_id"),
                    child.attributes.get("megatron.microbatch.combined"),
                )
                for child in both
            ] == [("forward", 0, None), ("forward", 1, True), ("backward", None, True), ("backward", None, None)]
            assert (both[1].start, both[1].end) == (both[2].start, both[2].end)
            for child in both:
                layers = [inner for inner in child.children if inner.name == "megatron.layer.self_attention"]
                assert len(layers) == (4 if child.name == "megatron.microbatch.forward" else 0)


def test_what_is_trained_is_what_an_uninstrumented_run_trains():
    for run in (with_graphs, combined):
        assert run().losses
        assert run().losses == run(PLAIN).losses
        assert not run().ours()


def test_what_others_have_put_in_the_place_of_functions_is_recorded_as_those_would_be():
    options = ("--train-iters", "2", "--eval-iters", "1", "--num-layers", "2", "--global-batch-size", "4")
    replaced, usual = (
        train(*options, ranks=1, way=PTH, environment={**EVERYTHING, "OTEL_METRICS_EXPORTER": "otlp"}, **script)
        for script in ({"script": SCRIPTS / "replacing_later.py"}, {})
    )
    assert replaced.status == usual.status == 0, replaced.output[-3000:]
    assert replaced.output.count("CHANGED") == 2
    assert replaced.counts(0) == usual.counts(0)
    assert {point.name for point in replaced.points} == {point.name for point in usual.points}
    assert replaced.losses == usual.losses
    assert replaced.losses
    assert not replaced.ours()
