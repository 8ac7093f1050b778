"""Switched off and on in mid-run, by a signal, a thread, `paused()` and MEGATRON_OTEL_AB: what runs and is recorded."""

import json
import re
from collections import Counter
from functools import cache

from harness import EVERYTHING, PLAIN, SCRIPTS, train

from megatron_autoinstrument import ab

ITERATIONS, BLOCK = 76, 4
OPTIONS = (
    *("--pipeline-model-parallel-size", "2", "--num-layers", "2", "--global-batch-size", "6"),
    *("--train-iters", str(ITERATIONS), "--eval-interval", "1000"),
)
SWITCHED = {3, 4, 7, 8, 11, 12}  # off, by scripts/switching.py: two steps each by a signal, a thread and `paused()`
RANDOM = set(range(15, 41))  # off and on at any time


def run_of(environment, **more):
    run = train(*OPTIONS, environment=environment, **more)
    assert run.status == 0, run.output[-3000:]
    assert len(run.losses) == ITERATIONS + 2
    return run


def results(run):
    decoder = json.JSONDecoder()
    found = [decoder.raw_decode(part.lstrip())[0] for part in run.output.split("PROCESS STATE")[1:]]
    return sorted(found, key=lambda result: result["rank"])


@cache
def uninstrumented():
    return run_of({"CONTROL": "1"}, way=PLAIN, script=SCRIPTS / "switching.py")


@cache
def switched():
    return run_of(EVERYTHING, way=PLAIN, script=SCRIPTS / "switching.py")


@cache
def compared():
    return run_of({**EVERYTHING, "MEGATRON_OTEL_AB": str(BLOCK)})


def names_up(span):
    names = []
    while span is not None:
        names.append(span.name)
        span = span.parent
    return names


def is_part(names, others):
    """Whether `names` are some of `others`, in their order."""
    left = iter(others)
    return all(name in left for name in names)


def test_a_process_that_is_not_instrumented_imports_and_runs_nothing_of_ours():
    for result in results(uninstrumented()):
        assert result["imported"] == []
        assert set(result["calls"]) == {str(step) for step in range(2, 15)}
        assert not any(result["calls"].values())


def test_switched_off_nothing_runs_but_the_one_wrapper_that_the_loop_has_kept_and_nothing_is_replaced():
    for result in results(switched()):
        for step, calls in result["calls"].items():
            here = calls["MainThread"]
            if int(step) in SWITCHED:
                # What the loop holds in a local since before: the schedule.
                assert here == {"_wrap.<locals>.wrapper": 1}
                assert result["replaced"][step] == 0
            else:
                assert here["_wrap.<locals>.wrapper"] > 20
                assert result["replaced"][step] > 20


def test_no_switch_at_any_time_changes_a_loss_or_leaves_a_record_open_or_a_line_in_the_log():
    run = switched()
    assert run.losses == uninstrumented().losses
    assert [result["open"] for result in results(run)] == [False, False]
    assert [line for line in run.ours() if not line.startswith("PROCESS STATE")] == []


def inside(span):
    return Counter(child.name for child in span.children) + sum(map(inside, span.children), Counter())


def test_around_a_switch_between_steps_are_whole_ones_and_within_one_is_no_more_than_in_those():
    for rank in (0, 1):
        steps = [span for span in switched().of(rank) if span.name == "megatron.train_step"]
        recorded = {step.attributes["megatron.iteration"]: inside(step) for step in steps}
        assert len(recorded) == len(steps)
        assert set(recorded) - RANDOM == set(range(1, ITERATIONS + 1)) - SWITCHED - RANDOM
        whole = recorded[2]
        assert len(whole) > 10
        for number, names in recorded.items():
            # Switched off right after its beginning, a step has nothing inside.
            assert names <= whole if number in RANDOM else names == whole, number


def test_whatever_is_switched_within_a_step_what_is_recorded_is_where_it_belongs():
    for rank in (0, 1):
        spans = switched().of(rank)
        assert all(span.parent is not None for span in spans if span.parent_id)
        assert all(span.parent.start <= span.start and span.end <= span.parent.end for span in spans if span.parent)
        # A step is the root of its trace; what is recorded of one whose beginning is not is inside the loop.
        around = ("megatron.train", "megatron.pretrain")
        whole = {tuple(names_up(span)) for span in compared().of(rank)}
        whole = {names if names[-1] in around else names + around for names in whole}
        for names in {tuple(names_up(span)) for span in spans}:
            assert any(is_part(names, others) for others in whole), names


def test_a_comparison_changes_no_loss_and_is_printed_once_in_the_job():
    run = compared()
    assert run.losses == uninstrumented().losses
    found = re.findall(
        r"megatron-autoinstrument, overhead: ([+-][\d.]+) % of a step, 99\.2 % confidence interval ([+-][\d.]+) to "
        r"([+-][\d.]+) % \((\d+) pairs of blocks of 4 steps\)",
        run.output,
    )
    assert len(found) == run.output.count("megatron-autoinstrument") == 1
    percent, low, high, pairs = map(float, found[0])
    assert low <= percent <= high
    assert pairs == (ITERATIONS // BLOCK - 2) // 2


def test_each_rank_has_its_own_figure_on_its_training_loop():
    for rank in (0, 1):
        (loop,) = [span for span in compared().of(rank) if span.name == "megatron.train"]
        percent = loop.attributes["megatron.ab.overhead_percent"]
        low, high = (loop.attributes[f"megatron.ab.overhead_percent.{bound}"] for bound in ("low", "high"))
        assert low <= percent <= high
        assert loop.attributes["megatron.ab.pairs"] == 8


def test_the_steps_of_the_blocks_with_it_are_recorded_whole_and_what_comes_after_the_loop_is_too():
    for rank in (0, 1):
        spans = compared().of(rank)
        steps = [span for span in spans if span.name == "megatron.train_step"]
        assert [step.attributes["megatron.iteration"] for step in steps] == [
            number + 1 for number in range(ITERATIONS) if ab.is_on(number // BLOCK)
        ]
        if rank == 1:
            assert all("megatron.loss" in step.attributes for step in steps)
        assert compared().counts(rank)["megatron.evaluate"] == 2
        assert len({tuple(child.name for child in step.children) for step in steps}) == 1
