"""One trace per step on all ranks, and links from what is received to what sent it: without communication."""

import re
from collections import Counter, defaultdict
from functools import cache

import pytest
from harness import EVERYTHING, PLAIN, SCRIPTS, train
from test_spans_of_a_run import SCENARIOS, run_of

PIPELINE = ("--pipeline-model-parallel-size", "2")
FOUR_STAGES = ("--pipeline-model-parallel-size", "4")
RECEIVES = {
    "megatron.pp.recv_forward.linked": "forward",
    "megatron.p2p.recv_forward": "forward",
    "megatron.p2p.recv_backward": "backward",
}
OFF = {"MEGATRON_OTEL_ENABLED": "0"}
scenarios = pytest.mark.parametrize("name", SCENARIOS)


@cache
def run_with(*options, ranks=2, **more):
    run = train(*options, ranks=ranks, **{**more, "environment": {**EVERYTHING, **dict(more.get("environment", ()))}})
    assert run.status == 0, run.output[-3000:]
    return run


def by_iteration(run):
    steps = defaultdict(list)
    for span in run.spans:
        if span.name == "megatron.train_step":
            steps[span.attributes["megatron.iteration"]].append(span)
    return steps


def around(span):
    """The step or evaluation that a span is in, and the number of the pass there."""
    path = [span]
    while path[-1].name not in ("megatron.train_step", "megatron.evaluate"):
        path.append(path[-1].parent)
    passes = [child for child in path[-1].children if child.name == path[-2].name]
    return path[-1], passes.index(path[-2])


def microbatches(passing, what):
    """The microbatches of a pass in one direction, in the order in which they were computed."""
    return [child for child in passing.children if child.name == f"megatron.microbatch.{what}"]


@scenarios
def test_each_iteration_is_one_trace_with_a_root_on_each_rank(name):
    scenario, run = SCENARIOS[name], run_of(name)
    steps = by_iteration(run)
    assert len(steps) == scenario.steps
    traces = {number: {span.trace_id for span in roots} for number, roots in steps.items()}
    assert all(len(ids) == 1 for ids in traces.values())
    assert len(set.union(*traces.values())) == len(steps)
    for number, ids in traces.items():
        roots = [span for span in run.spans if span.trace_id in ids and not span.parent_id]
        assert sorted((span.name, span.resource["dl.rank"]) for span in roots) == [
            ("megatron.train_step", rank) for rank in range(scenario.ranks)
        ], number


@scenarios
def test_what_belongs_to_no_step_is_in_the_runs_trace_on_all_ranks(name):
    run = run_of(name)
    steps = {span.trace_id for roots in by_iteration(run).values() for span in roots}
    others = {span.trace_id for span in run.spans} - steps
    assert others == {span.trace_id for span in run.spans if span.name == "megatron.pretrain"}
    assert len(others) == 1


@scenarios
def test_no_two_spans_share_an_id(name):
    spans = run_of(name).spans
    assert len({span.span_id for span in spans}) == len(spans)


@pytest.mark.parametrize("name", ["four stages", "overlapped gradients", "interleaved", "pipeline, loading"])
def test_every_receive_is_linked_to_the_microbatch_that_it_got_from_its_neighbour(name):
    scenario, run = SCENARIOS[name], run_of(name)
    by_id = {(span.trace_id, span.span_id): span for span in run.spans}
    counted = Counter()
    for rank in run.ranks:
        stage, place = divmod(rank, scenario.data_parallel)
        for passing in run.of(rank):
            if passing.name not in ("megatron.forward_backward", "megatron.evaluate.step"):
                continue
            for name, what in RECEIVES.items():
                step = 1 if what == "backward" else -1
                sender = (stage + step) % scenario.stages * scenario.data_parallel + place
                received = [span for span in passing.children if span.name == name]
                if name == "megatron.p2p.recv_forward":
                    received = [
                        child
                        for span in passing.children
                        for child in (span.children if span.name.endswith(".linked") else [span])
                        if child.name == name
                    ]
                targets = [by_id[span.trace_id, span.links[0]] for span in received]
                assert all(len(span.links) == 1 for span in received)
                assert len({target.span_id for target in targets}) == len(targets)
                for span, target in zip(received, targets, strict=True):
                    assert target.name == f"megatron.microbatch.{what}"
                    assert target.resource["dl.rank"] == sender
                    mine, theirs = around(span), around(target)
                    assert (mine[0].name, mine[0].attributes.get("megatron.iteration"), mine[1]) == (
                        theirs[0].name,
                        theirs[0].attributes.get("megatron.iteration"),
                        theirs[1],
                    )
                    if not span.attributes.get("megatron.p2p.overlapped"):  # else it is the launch alone
                        assert target.start < span.end
                    counted[name] += 1
                if not targets or name.endswith(".linked"):
                    continue
                # In the order in which they were computed there; and here what was received is computed next. The
                # first stage computes chunks for which it receives nothing, and so does the last, backward.
                there = microbatches(targets[0].parent, what)
                order = [there.index(target) for target in targets]
                assert order == sorted(order)
                here = microbatches(passing, what)
                own = list(range(len(here)))
                if scenario.chunks > 1 and stage == (0 if what == "forward" else scenario.stages - 1):
                    own = [at for at in own if at // scenario.stages % scenario.chunks > 0]
                if what == "forward":
                    ids = "megatron.microbatch_id"
                    assert [target.attributes[ids] for target in targets] == [here[at].attributes[ids] for at in own]
                assert len(own) == len(targets)
    assert counted["megatron.p2p.recv_forward"] > 0
    assert counted["megatron.p2p.recv_backward"] > 0
    assert (counted["megatron.pp.recv_forward.linked"] > 0) == (scenario.chunks == 1)


def test_a_step_tells_where_its_rank_is():
    for name, (tensor, pipeline, data) in {"four stages": (1, 4, 1), "overlapped gradients": (1, 2, 2)}.items():
        steps = [span for span in run_of(name).spans if span.name == "megatron.train_step"]
        kinds = {"tensor": tensor, "pipeline": pipeline, "data": data}
        for kind, size in kinds.items():
            assert {span.attributes[f"dl.{kind}_parallel.rank"] for span in steps} == set(range(size))
        for step in steps:
            rank = step.attributes["dl.pipeline_parallel.rank"] * data + step.attributes["dl.data_parallel.rank"]
            assert rank == step.resource["dl.rank"]


def test_the_random_state_is_that_of_an_uninstrumented_run():
    script = SCRIPTS / "printing_random_state.py"
    plain = train(*PIPELINE, way=PLAIN, script=script, environment=OFF)
    states = [
        sorted(re.findall(r"RANDOM STATE \d [0-9a-f]{64}", run.output))
        for run in (run_with(*PIPELINE, script=script), plain)
    ]
    assert len(states[0]) == 2
    assert states[0] == states[1]


def test_a_rank_that_is_turned_off_by_hand_leaves_links_of_others_alone():
    run = run_with(*FOUR_STAGES, ranks=4, script=SCRIPTS / "without_rank_1.py")
    assert run.ranks == [0, 2, 3]
    by_id = {span.span_id: span for span in run.spans}
    for rank, neighbours in {
        0: {"megatron.p2p.recv_backward": None},
        2: {"megatron.p2p.recv_forward": None},
        3: {},
    }.items():
        for span in run.of(rank):
            if span.name in ("megatron.p2p.recv_forward", "megatron.p2p.recv_backward"):
                (link,) = span.links
                if span.name in neighbours:
                    assert link not in by_id  # it names what was not recorded, and nothing else
                else:
                    step = 1 if "backward" in span.name else -1
                    assert by_id[link].resource["dl.rank"] == rank + step
                    assert by_id[link].trace_id == span.trace_id


def test_a_rank_that_exports_alone_links_to_steps_and_says_that_their_spans_are_not_there():
    run = run_with(*PIPELINE, environment=(("MEGATRON_OTEL_RANK_STRATEGY", "single_rank"),))
    assert run.ranks == [1]
    ids = {span.span_id for span in run.spans}
    received = [span for span in run.spans if span.name in RECEIVES]
    assert received
    links = defaultdict(set)
    for span in received:
        assert span.attributes["megatron.p2p.sender_recorded"] is False
        assert span.links[0] not in ids
        links[around(span)[0].span_id].add(span.links[0])
    in_steps = [links[span.span_id] for span in run.spans if span.name == "megatron.train_step"]
    assert all(len(named) == 1 for named in in_steps)  # the other rank's step
    assert len(set.union(*in_steps)) == 6


def test_a_restarted_run_is_told_apart():
    run = run_with(
        *PIPELINE,
        torchrun=("--max-restarts", "1"),
        script=SCRIPTS / "crashing_once.py",
        environment=(("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"),),  # else gloo finds the first attempt's addresses
    )
    assert "this rank crashes" in run.output
    steps = by_iteration(run)
    first, second = steps[2][0].trace_id, steps[2][-1].trace_id
    assert first != second
    for number in (1, 2, 3):
        # The second attempt has both ranks; of the first, torchrun may have killed one before it could export.
        per_trace = Counter(span.trace_id for span in steps[number])
        assert len(per_trace) == 2
        assert max(per_trace.values()) == 2
    for number in (5, 6):
        assert len({span.trace_id for span in steps[number]}) == 1
    spans = run.spans
    assert len({(span.trace_id, span.span_id) for span in spans}) == len(spans)
    by_id = {span.span_id: span for span in spans}
    for span in spans:
        if span.name in RECEIVES and span.links[0] in by_id:
            assert by_id[span.links[0]].trace_id == span.trace_id


def test_a_ratio_keeps_whole_steps_the_same_on_all_ranks_and_all_of_the_run():
    environment = {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.5"}
    run = run_with(*PIPELINE, "--train-iters", "12", environment=tuple(environment.items()))
    kept = [
        {span.attributes["megatron.iteration"] for span in run.of(rank) if span.name == "megatron.train_step"}
        for rank in (0, 1)
    ]
    assert kept[0] == kept[1]
    assert len(kept[0]) < 12
    for rank in (0, 1):
        counts = run.counts(rank)
        assert counts["megatron.pretrain"] == counts["megatron.train"] == 1
        assert counts["megatron.evaluate.step"] == 2 * counts["megatron.evaluate"] == 2 * 6
        assert counts["megatron.microbatch.backward"] == 4 * len(kept[0])
        assert counts["megatron.optimizer_step"] == counts["megatron.forward_backward"] == len(kept[0])


def test_in_the_runs_scope_everything_is_one_trace_with_the_documented_tree():
    run = run_with(*PIPELINE, environment=(("MEGATRON_OTEL_TRACE_SCOPE", "run"),))
    assert len({span.trace_id for span in run.spans}) == 1
    by_id = {span.span_id: span for span in run.spans}
    for span in run.spans:
        assert (span.parent is None) == (span.name == "megatron.pretrain")
        if span.name == "megatron.train_step":
            assert span.parent.name == "megatron.train"
        if span.name in RECEIVES:
            assert by_id[span.links[0]].resource["dl.rank"] != span.resource["dl.rank"]


def test_without_the_groups_around_them_spans_still_belong_to_their_steps_trace():
    run = run_with(*PIPELINE, environment=(("MEGATRON_OTEL_SPAN_GROUPS", "job,communication"),))
    trains = {span.resource["dl.rank"]: span for span in run.spans if span.name == "megatron.train"}
    in_steps = [span for span in run.spans if span.trace_id != trains[0].trace_id]
    assert len({span.trace_id for span in in_steps}) == 6
    for span in in_steps:
        if span.parent is None:
            assert span.links[0] == trains[span.resource["dl.rank"]].span_id
    for trace in {span.trace_id for span in in_steps}:
        assert {span.resource["dl.rank"] for span in in_steps if span.trace_id == trace} == {0, 1}
    for span in in_steps:
        if span.name in RECEIVES:
            assert span.attributes["megatron.p2p.sender_recorded"] is False
