"""Every documented span of a real run: its number on each rank, its parent, its time; and the run's losses."""

import re
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache

import pytest
import tomllib
from harness import EVERYTHING, FIXTURES, INSTRUMENT, PLAIN, SCRIPTS, Run, plain_losses, train

CONTRACT = tomllib.loads((FIXTURES / "telemetry.toml").read_text())
DOCUMENTED_PARENT = {span["name"]: span.get("parent") for span in CONTRACT["span"]}

PIPELINE = ("--pipeline-model-parallel-size", "2")
INTERLEAVED = (*PIPELINE, "--num-layers-per-virtual-pipeline-stage", "1")
OVERLAP = (*PIPELINE, "--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-bucket-size", "20000")
# Without a persistent worker Megatron 0.19 turns --async-save off again.
RECOMPUTE = ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1")
ASYNC = ("--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore")


@dataclass(frozen=True)
class Scenario:
    options: tuple[str, ...]
    ranks: int = 2
    data_parallel: int = 1
    chunks: int = 1  # of the model, on each stage
    save: str | None = None  # checkpoint format
    load: str | None = None  # the name of the scenario that saved
    steps: int = 6
    evaluations: int = 4  # two in the loop, one each on the validation and the test set after it
    more: tuple[str, ...] = field(default=())
    recompute: bool = False  # every layer, in the backward pass
    script: str = "telling_seams.py"

    @property
    def stages(self) -> int:
        return self.ranks // self.data_parallel

    @property
    def microbatches(self) -> int:
        return 8 // 2 // self.data_parallel

    @property
    def layers(self) -> int:
        """Of each chunk."""
        return 4 // self.stages // self.chunks


SCENARIOS = {
    "pipeline, saving": Scenario(PIPELINE, save="torch_dist"),
    "pipeline, loading": Scenario(PIPELINE, load="pipeline, saving", steps=2, evaluations=2),
    "one rank, saving": Scenario((), ranks=1, save="torch"),
    "one rank, loading": Scenario((), ranks=1, load="one rank, saving", steps=2, evaluations=2),
    "four stages": Scenario(("--pipeline-model-parallel-size", "4"), ranks=4),
    "interleaved": Scenario(INTERLEAVED, chunks=2),
    "overlapped gradients": Scenario(OVERLAP, ranks=4, data_parallel=2),
    "recomputing": Scenario(PIPELINE + RECOMPUTE, recompute=True),
    "saving asynchronously": Scenario(PIPELINE, save="torch_dist", more=ASYNC, script="with_writers.py"),
}

scenarios = pytest.mark.parametrize("name", SCENARIOS)


@cache
def checkpoints(name: str, way: str) -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="checkpoints-")


def options(name: str, way: str) -> tuple[str, ...]:
    scenario = SCENARIOS[name]
    added = scenario.options + scenario.more
    if scenario.save:
        added += ("--save", checkpoints(name, way).name, "--save-interval", "3", "--ckpt-format", scenario.save)
    if scenario.load:
        added += ("--load", checkpoints(scenario.load, way).name, "--ckpt-format", SCENARIOS[scenario.load].save)
        added += ("--train-iters", str(6 + scenario.steps), "--override-opt_param-scheduler")
    return added


@cache
def run_of(name: str) -> Run:
    scenario = SCENARIOS[name]
    if scenario.load:
        run_of(scenario.load)
    script = SCRIPTS / scenario.script
    run = train(*options(name, INSTRUMENT), ranks=scenario.ranks, script=script, environment=EVERYTHING)
    assert run.status == 0, run.output[-3000:]
    return run


def expected(scenario: Scenario, stage: int) -> Counter[str]:
    first, last = stage == 0, stage == scenario.stages - 1
    trained = scenario.steps * scenario.microbatches
    passed = trained + scenario.evaluations * 2 * scenario.microbatches  # --eval-iters 2
    passes = scenario.steps + scenario.evaluations * 2
    warmup_receives = min(scenario.stages - stage - 1, scenario.microbatches) + 1
    saves = 2 if scenario.save else 0
    layers = (passed + trained * scenario.recompute) * scenario.chunks * scenario.layers
    counts = Counter(
        {
            "megatron.pretrain": 1,
            "megatron.model_init": 1,
            "megatron.train": 1,
            "megatron.train_step": scenario.steps,
            "megatron.forward_backward": scenario.steps,
            "megatron.optimizer_step": scenario.steps,
            "megatron.evaluate": scenario.evaluations,
            "megatron.evaluate.step": scenario.evaluations * 2,
            "megatron.microbatch.forward": passed * scenario.chunks,
            "megatron.microbatch.backward": trained * scenario.chunks,
            "megatron.layer.forward": layers,
            "megatron.layer.self_attention": layers,
            "megatron.layer.mlp": layers,
            "megatron.data_loading": passed * scenario.chunks,  # the tiny GPT's script has every chunk read
            # Each chunk passes on what it has, but for the first and the last of the model.
            "megatron.p2p.recv_forward": passed * (scenario.chunks - first),
            "megatron.p2p.send_forward": passed * (scenario.chunks - last),
            "megatron.p2p.recv_backward": trained * (scenario.chunks - last),
            "megatron.p2p.send_backward": trained * (scenario.chunks - first),
            "megatron.pp.recv_forward.linked": 0 if first or scenario.chunks > 1 else passes * warmup_receives,
            "megatron.grad_sync.finish": scenario.steps * scenario.chunks,
            "megatron.save_checkpoint": saves,
            "megatron.save_checkpoint.state_dict": saves,
            "megatron.save_checkpoint.io_write": saves,
            "megatron.save_checkpoint.async_write": saves if scenario.more == ASYNC else 0,
            "megatron.load_checkpoint": 1 if scenario.load else 0,
            # A distributed checkpoint's common state is read before its tensors.
            "megatron.load_checkpoint.io_read": (1 + (scenario.stages > 1)) if scenario.load else 0,
        }
    )
    return +counts


@scenarios
def test_each_rank_records_the_right_number_of_every_span(name):
    scenario, run = SCENARIOS[name], run_of(name)
    assert run.ranks == list(range(scenario.ranks))
    for rank in run.ranks:
        counts = run.counts(rank)
        launches = counts.pop("megatron.grad_sync.start")
        assert counts == expected(scenario, stage=rank // scenario.data_parallel)
        assert launches >= scenario.steps * scenario.chunks


@scenarios
def test_each_span_has_its_documented_parent(name):
    by_id = {span.span_id: span for span in run_of(name).spans}
    for span in run_of(name).spans:
        # A step is the root of a trace, linked to what it is in.
        assert (span.parent is None) == (span.name in ("megatron.pretrain", "megatron.train_step")), span.name
        ancestors = [span.name]
        above = span
        while above.name != "megatron.pretrain":
            above = above.parent or by_id[above.links[0]]
            assert above.resource == span.resource
            ancestors.append(above.name)
        documented = DOCUMENTED_PARENT.get(span.name, "megatron.train")  # for those beyond the guide
        if "megatron.evaluate.step" in ancestors[1:]:
            documented = "megatron.evaluate.step"  # what runs in an evaluation has no step around it
        elif span.name == "megatron.evaluate" and "megatron.train" not in ancestors:
            documented = "megatron.pretrain"  # after the training loop
        elif span.name == "megatron.layer.forward" and span.attributes.get("megatron.recomputed"):
            documented = "megatron.microbatch.backward"
        assert documented is None or documented in ancestors[1:], ancestors


@scenarios
def test_each_span_lies_within_its_parents_time(name):
    for span in run_of(name).spans:
        assert span.start <= span.end
        if span.parent is not None:
            assert span.parent.start <= span.start, (span.name, span.parent.name)
            assert span.end <= span.parent.end, (span.name, span.parent.name)


@scenarios
def test_the_losses_are_those_of_an_uninstrumented_run_to_the_last_digit(name):
    scenario, run = SCENARIOS[name], run_of(name)
    if scenario.load:
        plain_losses(*options(scenario.load, PLAIN), ranks=scenario.ranks)
    plain = plain_losses(*options(name, PLAIN), ranks=scenario.ranks)
    assert len(plain) == scenario.steps + scenario.evaluations
    assert run.losses == plain


@scenarios
def test_nothing_of_ours_is_logged_in_a_run_that_goes_well(name):
    assert not run_of(name).ours()


@scenarios
def test_no_call_gives_two_spans_of_one_name(name):
    for span in run_of(name).spans:
        assert span.parent is None or span.parent.name != span.name
    leaves = Counter((span.resource["dl.rank"], span.parent_id, span.name, span.start) for span in run_of(name).spans)
    assert max(leaves.values()) == 1


def test_steps_and_microbatches_carry_the_numbers_that_megatron_prints():
    run = run_of("pipeline, loading")
    for rank in run.ranks:
        steps = [span for span in run.of(rank) if span.name == "megatron.train_step"]
        assert [step.attributes["megatron.iteration"] for step in steps] == [7, 8]
        for step in steps:
            (forward_backward, _) = step.children
            assert forward_backward.attributes["megatron.num_microbatches"] == 4
            forwards = [span for span in forward_backward.children if span.name == "megatron.microbatch.forward"]
            assert [span.attributes["megatron.microbatch_id"] for span in forwards] == [0, 1, 2, 3]


@scenarios
def test_each_layer_has_one_attention_and_one_mlp(name):
    for layer in (span for span in run_of(name).spans if span.name == "megatron.layer.forward"):
        assert [child.name for child in layer.children] == ["megatron.layer.self_attention", "megatron.layer.mlp"]
        assert len({span.attributes.get("megatron.recomputed") for span in [layer, *layer.children]}) == 1


@scenarios
def test_layers_are_marked_as_recomputed_in_a_backward_pass_and_there_alone(name):
    scenario, run = SCENARIOS[name], run_of(name)
    for span in run.spans:
        if span.name == "megatron.microbatch.forward":
            layers = [child for child in span.children if child.name == "megatron.layer.forward"]
            assert len(layers) == scenario.layers
            assert not any("megatron.recomputed" in layer.attributes for layer in layers)
        if span.name == "megatron.microbatch.backward":
            layers = [child for child in span.children if child.name == "megatron.layer.forward"]
            assert len(layers) == scenario.layers * scenario.recompute
            assert all(layer.attributes["megatron.recomputed"] is True for layer in layers)


def test_recomputing_gives_the_losses_of_a_run_without():
    losses = [(iteration, loss) for iteration, loss, *_ in run_of("recomputing").losses]
    assert losses == [(iteration, loss) for iteration, loss, *_ in plain_losses(*PIPELINE)]


def test_a_microbatch_waits_for_its_batch():
    for span in run_of("pipeline, saving").spans:
        if span.name == "megatron.microbatch.forward":
            assert next(child.name for child in span.children) == "megatron.data_loading"


def test_a_combined_call_is_one_span_per_direction_with_the_same_times_and_marked():
    run = run_of("pipeline, saving")
    for step in (span for span in run.spans if span.name == "megatron.forward_backward"):
        combined = [span for span in step.children if span.attributes.get("megatron.p2p.combined")]
        pairs = [combined[at : at + 2] for at in range(0, len(combined), 2)]
        assert len(pairs) == 3  # 1F1B's steady state: three of four microbatches, on both stages
        for one, other in pairs:
            assert (one.start, one.end) == (other.start, other.end)
            assert {one.name, other.name} in (
                {"megatron.p2p.send_forward", "megatron.p2p.recv_backward"},
                {"megatron.p2p.send_backward", "megatron.p2p.recv_forward"},
            )


def test_overlapped_calls_of_the_interleaved_schedule_are_marked():
    transfers = [span for span in run_of("interleaved").spans if span.name.startswith("megatron.p2p.")]
    in_training = [span for span in transfers if span.parent.name == "megatron.forward_backward"]
    assert any(span.attributes.get("megatron.p2p.overlapped") for span in in_training)
    assert any(not span.attributes.get("megatron.p2p.overlapped") for span in in_training)


def test_a_linked_receive_encloses_the_receive_itself_and_names_its_stage():
    linked = [span for span in run_of("pipeline, saving").spans if span.name == "megatron.pp.recv_forward.linked"]
    for span in linked:
        assert [child.name for child in span.children] == ["megatron.p2p.recv_forward"]
        assert span.attributes["dl.pipeline_parallel.rank"] == 1


def test_the_linked_receives_of_the_warm_up_carry_their_microbatch_and_the_one_after_it_does_not():
    run = run_of("four stages")
    for rank in (1, 2, 3):
        for step in (span for span in run.of(rank) if span.name == "megatron.forward_backward"):
            linked = [span for span in step.children if span.name == "megatron.pp.recv_forward.linked"]
            assert [span.attributes.get("dl.microbatch_id") for span in linked] == [*range(3 - rank), None]


def test_overlapped_gradients_are_launched_while_the_backward_pass_runs():
    run = run_of("overlapped gradients")
    first_stage = [span for rank in (0, 1) for span in run.of(rank) if span.name == "megatron.grad_sync.start"]
    assert any(span.parent.name == "megatron.microbatch.backward" for span in first_stage)
    for rank in run.ranks:
        steps = [span for span in run.of(rank) if span.name == "megatron.train_step"]
        launches = [
            sum(_within(span, step) for span in run.of(rank) if span.name == "megatron.grad_sync.start")
            for step in steps
        ]
        assert len(set(launches)) == 1, "every step launches the same buckets"


def test_an_asynchronous_save_tells_launching_apart_from_writing():
    run = run_of("saving asynchronously")
    assert "scheduled an async checkpoint save" in run.output  # or it was no asynchronous one at all
    by_id = {span.span_id: span for span in run.spans}
    writes = [span for span in run.spans if span.name == "megatron.save_checkpoint.async_write"]
    assert len(writes) == 4
    for write in writes:
        save = by_id[write.links[0]]
        assert save.name == "megatron.save_checkpoint"
        assert save.resource["dl.rank"] == write.resource["dl.rank"]
        assert save.attributes["megatron.iteration"] == write.attributes["megatron.iteration"]
        assert save.start <= write.start <= save.end < write.end
        assert "megatron.checkpoint.finalized" not in write.attributes
        launches = [child for child in save.children if child.name == "megatron.save_checkpoint.io_write"]
        assert all(span.attributes["megatron.checkpoint.async"] for span in [save, *launches])
    assert not any("megatron.checkpoint.async" in span.attributes for span in run_of("pipeline, saving").spans)


def test_the_processes_that_write_an_asynchronous_save_record_and_export_nothing():
    run = run_of("saving asynchronously")
    ranks = {span.resource["process.pid"] for span in run.spans}
    writers = re.findall(r"^WRITER (\d+) (.*)$", run.output, re.MULTILINE)
    assert len(ranks) == 2
    assert len(writers) >= 2  # one for each rank at least
    for process, at_work in writers:
        assert int(process) not in ranks
        assert at_work == "[]"


def _within(span, ancestor):
    while span is not None and span is not ancestor:
        span = span.parent
    return span is ancestor
