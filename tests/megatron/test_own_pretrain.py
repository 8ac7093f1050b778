"""A loop of one's own around Megatron's steps, on ranks that are told late which they are: one run all the same."""

from functools import cache

from harness import PTH, SCRIPTS, train

STEPS, STEP = 2, "megatron.train_step"


@cache
def run_of_it():
    run = train(
        *("--pipeline-model-parallel-size", "2", "--train-iters", str(STEPS), "--num-layers", "2"),
        *("--global-batch-size", "4"),
        script=SCRIPTS / "own_pretrain.py",
        way=PTH,
    )
    assert run.status == 0, run.output[-3000:]
    return run


def test_each_rank_is_known_by_its_place_in_one_run():
    run = run_of_it()
    assert run.ranks == [0, 1]
    (run_id,) = {span.resource["nemo.run.id"] for span in run.spans}
    for rank in run.ranks:
        assert {span.resource["service.instance.id"] for span in run.of(rank)} == {f"{run_id}-rank{rank}"}
        assert {span.resource["dl.world_size"] for span in run.of(rank)} == {2}
        assert run.counts(rank)[STEP] == STEPS
        assert run.counts(rank)["megatron.evaluate"] == STEPS
    assert not run.ours()


def test_each_step_is_one_trace_and_what_belongs_to_none_another_on_both_ranks():
    run = run_of_it()
    traces = {
        name: {span.trace_id for span in run.spans if span.name == name}
        for name in (STEP, "megatron.evaluate", "megatron.model_init")
    }
    assert [len(found) for found in traces.values()] == [STEPS, 1, 1]
    assert traces["megatron.evaluate"] == traces["megatron.model_init"]
    assert not traces[STEP] & traces["megatron.evaluate"]


def test_every_receive_names_what_was_sent():
    run = run_of_it()
    spans = {span.span_id: span for span in run.spans}
    links = [(span, link) for span in run.spans for link in span.links]
    assert {span.name for span, _ in links} == {
        "megatron.p2p.recv_forward",
        "megatron.p2p.recv_backward",
        "megatron.pp.recv_forward.linked",
    }
    for span, link in links:
        assert spans[link].resource["dl.rank"] != span.resource["dl.rank"]
