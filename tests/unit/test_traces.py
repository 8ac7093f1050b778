"""A stand-in of the training loop, run by several ranks one after the other, each with a provider of its own."""

import random
import types

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
from standins import Store

from megatron_autoinstrument import MegatronInstrumentor, instrumentor
from megatron_autoinstrument.export import ids
from megatron_autoinstrument.megatron import patching
from megatron_autoinstrument.process import ranks, strategies
from megatron_autoinstrument.recording import traces
from megatron_autoinstrument.recording.record import LIVE
from megatron_autoinstrument.recording.run import Pass, Run
from megatron_autoinstrument.recording.traces import Traces
from megatron_autoinstrument.settings import config
from megatron_autoinstrument.targets import p2p_communication, schedules

TRAINING = """
def pretrain(iterations, inprocess_call_wrapper=None):
    setup_model_and_optimizer()
    train(iterations)
def setup_model_and_optimizer():
    pass
def train(iterations):
    for iteration in iterations:
        train_step(iteration=iteration)
        evaluate(eval_iters=1)
def train_step(iteration=None):
    from megatron.core.pipeline_parallel import schedules
    schedules.forward_backward_no_pipelining(num_microbatches=2, forward_only=False)
    optimizer_step()
def optimizer_step():
    pass
def evaluate(eval_iters):
    from megatron.core.pipeline_parallel import schedules
    schedules.forward_backward_no_pipelining(num_microbatches=1, forward_only=True)
"""
SCHEDULES = """
def forward_backward_no_pipelining(*, num_microbatches, forward_only):
    for number in range(num_microbatches):
        forward_step(current_microbatch=number)
        if not forward_only:
            backward_step()
def forward_step(current_microbatch):
    pass
def backward_step():
    pass
"""


@pytest.fixture
def training(fake_module, monkeypatch):
    for name in ("megatron", "megatron.core", "megatron.core.pipeline_parallel", "megatron.training"):
        fake_module(name)
    fake_module("megatron.training.global_vars", "_GLOBAL_ARGS = None").args = None
    module = fake_module("megatron.core.pipeline_parallel.schedules", SCHEDULES)
    monkeypatch.setitem(vars(__import__("sys").modules["megatron.core.pipeline_parallel"]), "schedules", module)
    return fake_module("megatron.training.training", TRAINING)


@pytest.fixture
def spans_of(training, monkeypatch, torch_distributed):
    """What a rank records of a run of these iterations, each by itself in a process that is new to the run's store."""
    the_run = Store("ab12")

    def spans_of(
        rank,
        iterations,
        sampler=None,
        groups="all",
        generator=None,
        store=the_run,
        program=lambda pretrain, iterations: pretrain(iterations),
        **variables,
    ):
        torch_distributed(rank, 4, store)
        monkeypatch.setattr(ids, "_run", None)
        monkeypatch.setattr(instrumentor.RECORDER, "run", Run())
        for name, value in {
            "MEGATRON_OTEL_SPAN_GROUPS": groups,
            "MEGATRON_OTEL_RANK_STRATEGY": "all_ranks",
            "NEMO_LENS_RUN_ID": "run",
            **variables,
        }.items():
            monkeypatch.setenv(name, str(value))
        exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler=sampler, id_generator=generator)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        recorder = instrumentor.RECORDER
        MegatronInstrumentor().instrument(tracer_provider=provider)
        try:
            program(training.pretrain, iterations)
        finally:
            MegatronInstrumentor().uninstrument()
            recorder.reset_after_fork()
        return exporter.get_finished_spans()

    return spans_of


def steps(spans):
    return {span.attributes["megatron.iteration"]: span for span in spans if span.name == "megatron.train_step"}


def test_each_step_is_a_root_of_a_trace_that_all_ranks_share_linked_to_its_run(spans_of):
    of_ranks = [spans_of(rank, range(3)) for rank in range(3)]
    for number in (1, 2, 3):
        roots = [steps(spans)[number] for spans in of_ranks]
        assert len({root.context.trace_id for root in roots}) == 1
        assert len({root.context.span_id for root in roots}) == 3
        for spans, root in zip(of_ranks, roots, strict=True):
            assert root.parent is None
            (train,) = [span for span in spans if span.name == "megatron.train"]
            assert [link.context for link in root.links] == [train.context]
            inside = [span for span in spans if span.context.trace_id == root.context.trace_id]
            assert len(inside) == 1 + 1 + 2 * 2
    assert len({root.context.trace_id for root in steps(of_ranks[0]).values()}) == 3


def test_evaluations_are_in_the_trace_of_the_run_on_all_ranks(spans_of):
    run = {
        span.context.trace_id
        for rank in (0, 1)
        for span in spans_of(rank, range(3))
        if span.name in ("megatron.pretrain", "megatron.train", "megatron.evaluate", "megatron.evaluate.step")
    }
    assert len(run) == 1


@pytest.mark.parametrize(
    "again",
    [
        {"store": Store("cd34")},  # another launch, or a restart of torchrun or SLURM
        {"NEMO_LENS_RUN_ID": "other"},
        {"iterations": [4, 0]},  # back to an earlier one
    ],
)
def test_an_iteration_that_is_run_again_has_another_trace(spans_of, again):
    first = steps(spans_of(0, [0]))[1]
    again = {"iterations": [0], **again}
    second = steps(spans_of(0, again.pop("iterations"), **again))[1]
    assert first.context.trace_id != second.context.trace_id
    assert first.context.span_id != second.context.span_id


def test_a_rank_that_is_instrumented_in_mid_run_joins_its_traces(spans_of, training):
    def twice(pretrain, iterations):
        pretrain(iterations)
        pretrain(iterations)

    def late(pretrain, iterations):
        """Its own first run goes unrecorded, and of the second the first step."""
        provider = MegatronInstrumentor()._given["traces"]
        MegatronInstrumentor().uninstrument()
        in_steps = iter([bool, bool, bool, lambda: MegatronInstrumentor().instrument(tracer_provider=provider)])
        training.optimizer_step = lambda: next(in_steps, bool)()
        twice(training.pretrain, iterations)

    ordinary = spans_of(0, range(3), program=twice)
    spans = spans_of(1, range(3), program=late)
    assert sorted(steps(spans)) == [2, 3]
    for number, step in steps(spans).items():
        _, second = [span for span in ordinary if span.attributes.get("megatron.iteration") == number]
        assert step.context.trace_id == second.context.trace_id
    _, run = [span.context.trace_id for span in ordinary if span.name == "megatron.pretrain"]
    assert {span.context.trace_id for span in spans if span.name == "megatron.evaluate"} == {run}


def test_a_loop_of_ones_own_is_a_run_and_shares_its_traces(spans_of, training):
    def loop(pretrain, iterations):
        for _ in range(2):  # with the same arguments of Megatron's: one run, of which the second part goes back
            training.setup_model_and_optimizer()
            for iteration in iterations:
                training.train_step(iteration=iteration)
            training.evaluate(eval_iters=1)

    of_ranks = [spans_of(rank, range(2), program=loop) for rank in (0, 1)]
    found = [[s.context.trace_id for s in spans if s.name == "megatron.train_step"] for spans in of_ranks]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4
    run = {
        s.context.trace_id
        for spans in of_ranks
        for s in spans
        if s.name in ("megatron.model_init", "megatron.evaluate")
    }
    assert len(run) == 1


def test_a_ratio_keeps_whole_steps_the_same_ones_on_every_rank(spans_of):
    kept = []
    for rank in range(4):
        spans = spans_of(rank, range(200), ParentBased(TraceIdRatioBased(0.3)))
        kept.append(set(steps(spans)))
        names = [span.name for span in spans]
        assert names.count("megatron.pretrain") == names.count("megatron.train") == 1
        assert names.count("megatron.evaluate") == 200
        assert names.count("megatron.microbatch.backward") == 2 * len(kept[-1])
    assert kept[0] == kept[1] == kept[2] == kept[3]
    assert 30 < len(kept[0]) < 90


def test_a_step_that_the_sampler_drops_makes_no_record_of_what_is_inside(spans_of, monkeypatch):
    recorder = instrumentor.RECORDER
    kept = []
    begin = recorder.begin_frequent

    def keeping(name, *more):
        if (record := begin(name, *more)) is not None:
            kept.append(name)
        return record

    monkeypatch.setattr(recorder, "begin_frequent", keeping)
    for groups in ("all", "job,microbatch"):  # asked once, by the step's span or for it
        kept.clear()
        assert not spans_of(0, range(3), ALWAYS_OFF, groups)
        assert "megatron.microbatch.backward" not in kept
        spans_of(0, range(3), None, groups)
        assert kept.count("megatron.microbatch.backward") == 6


def test_what_comes_after_a_dropped_step_is_recorded(spans_of):
    spans = spans_of(0, range(40), ParentBased(TraceIdRatioBased(0.3)))
    kept = steps(spans)
    assert 0 < len(kept) < 40
    assert sum(span.name == "megatron.forward_backward" for span in spans) == len(kept)


def test_without_their_group_the_spans_inside_are_roots_of_the_steps_trace(spans_of):
    whole = steps(spans_of(0, range(2)))
    spans = spans_of(1, range(2), groups="job,microbatch")
    train = next(span for span in spans if span.name == "megatron.train")
    inside = [span for span in spans if span.name == "megatron.microbatch.backward"]
    assert [span.context.trace_id for span in inside] == [whole[n].context.trace_id for n in (1, 1, 2, 2)]
    for span in inside:
        assert span.parent is None
        assert [link.context for link in span.links] == [train.context]


def test_in_the_runs_scope_steps_are_inside_it(spans_of):
    spans = spans_of(0, range(2), MEGATRON_OTEL_TRACE_SCOPE="run")
    assert len({span.context.trace_id for span in spans}) == 1
    train = next(span for span in spans if span.name == "megatron.train")
    assert {step.parent.span_id for step in steps(spans).values()} == {train.context.span_id}
    assert not any(step.links for step in steps(spans).values())


def test_a_step_is_a_root_also_where_the_application_has_a_span_around_the_run(spans_of):
    with TracerProvider().get_tracer("theirs").start_as_current_span("job") as job:
        spans = spans_of(0, range(2))
    pretrain = next(span for span in spans if span.name == "megatron.pretrain")
    assert pretrain.parent.span_id == job.get_span_context().span_id
    assert all(step.parent is None for step in steps(spans).values())
    assert all(step.context.trace_id != pretrain.context.trace_id for step in steps(spans).values())


def test_an_id_generator_that_someone_chose_is_left_alone(spans_of):
    class Chosen(RandomIdGenerator):
        def generate_trace_id(self):
            return 7 << 100 | super().generate_trace_id() >> 28

    spans = spans_of(0, range(2), generator=Chosen())
    assert {span.context.trace_id >> 100 for span in spans} == {7}
    train = next(span for span in spans if span.name == "megatron.train")
    assert {step.parent.span_id for step in steps(spans).values()} == {train.context.span_id}


def test_pythons_random_state_stays_as_it_is(spans_of):
    before = random.getstate()
    spans_of(0, range(3))
    assert random.getstate() == before


def test_inside_a_step_its_span_is_the_current_one(spans_of, training):
    seen = []
    training.optimizer_step = lambda: seen.append(trace.get_current_span().get_span_context())
    spans = spans_of(0, range(1))
    assert [context.span_id for context in seen] == [steps(spans)[1].context.span_id]


@pytest.mark.parametrize("groups", ["step,forward_backward", "all"])
def test_two_runs_in_one_process_share_no_id(spans_of, groups):
    def twice(pretrain, iterations):
        pretrain(iterations)
        pretrain(iterations)

    spans = spans_of(0, [0], groups=groups, program=twice)
    ids = [(span.context.trace_id, span.context.span_id) for span in spans if span.name == "megatron.train_step"]
    assert len(ids) == len(set(ids)) == 2


@pytest.mark.parametrize("ratio", [0.01, 1e-6, 1e-12])
def test_the_runs_own_trace_is_kept_however_few_steps_are(spans_of, ratio):
    for word in "abcde":
        spans = spans_of(0, range(3), ParentBased(TraceIdRatioBased(ratio)), store=Store(word))
        assert sum(span.name == "megatron.evaluate" for span in spans) == 3


def test_what_an_aborted_run_left_behind_ends_with_its_restart(spans_of):
    """An in-process restart raises into any line, of ours too, and calls `pretrain` again."""
    recorder = instrumentor.RECORDER

    def restarted(pretrain, iterations):
        pretrain(iterations, inprocess_call_wrapper=types.SimpleNamespace(iteration=7))
        recorder.begin("megatron.evaluate", LIVE)
        recorder.mute(True)
        recorder.run.passing = object()
        pretrain(iterations, inprocess_call_wrapper=types.SimpleNamespace(iteration=8))

    spans = spans_of(0, range(2), program=restarted)
    names = [span.name for span in spans]
    assert names.count("megatron.pretrain") == names.count("megatron.train") == 2
    assert names.count("megatron.train_step") == 4
    assert names.count("megatron.evaluate") == 2 * 2 + 1
    assert len({span.context.trace_id for span in spans if span.name == "megatron.train_step"}) == 4


def test_a_processor_that_fails_as_a_step_ends_does_not_silence_what_comes_after(spans_of, monkeypatch):
    """The span of a step is held until the next one ends, be that one that the sampler drops."""
    recorder = instrumentor.RECORDER
    end, failed = recorder._end, []

    def ending(span, *args):
        if getattr(span, "name", None) == "megatron.train_step" and recorder._held is None and not failed:
            failed.append(span)
            raise RuntimeError("a processor of theirs")
        end(span, *args)

    monkeypatch.setattr(patching, "reraise_internal_errors", False)
    monkeypatch.setattr(recorder, "_end", ending)
    spans = spans_of(0, range(40), ParentBased(TraceIdRatioBased(0.3)))
    assert failed
    assert recorder.muted == 0
    assert sum(span.name == "megatron.evaluate" for span in spans) == 40


def test_an_install_in_mid_pass_leaves_the_rest_of_the_pass_unnumbered(spans_of):
    """Nobody has counted the microbatches that went by: better no id than another's."""

    def in_mid_pass(pretrain, iterations):
        instrumentor.RECORDER.run.passing = object()
        instrumentor._patch(frozenset({"microbatch"}))
        assert instrumentor.RECORDER.run.passing is None

    spans_of(0, [0], program=in_mid_pass)


# ------------------------------------------------------------------------------------------ which microbatch it is


def table(microbatches, chunks, group):
    """The order in which the interleaved schedule computes (microbatch, chunk) forward, as Megatron's table has it."""
    return [
        (microbatch, chunk)
        for start in range(0, microbatches, group)
        for chunk in range(chunks)
        for microbatch in range(start, min(start + group, microbatches))
    ]


@pytest.mark.parametrize(("microbatches", "chunks", "group", "stages"), [(8, 2, 2, 2), (8, 3, 4, 4), (10, 2, 4, 4)])
def test_round_the_ends_of_the_pipeline_the_chunk_at_the_end_sends_nothing(microbatches, chunks, group, stages):
    run = types.SimpleNamespace(chunks=chunks, group_size=None if group == stages else group)
    forward = table(microbatches, chunks, group)
    backward = [(microbatch, chunks - 1 - chunk) for microbatch, chunk in forward]
    for what, order, end in (("forward", forward, chunks - 1), ("backward", backward, 0)):
        sent = [number for number, (_, chunk) in enumerate(order) if chunk != end]
        first = 0 if what == "forward" else stages - 1
        for stage in range(stages):
            expected = sent if stage == first else list(range(len(order)))
            pp_group = types.SimpleNamespace(rank=lambda stage=stage: stage, size=lambda: stages)
            args = (types.SimpleNamespace(pp_group=pp_group),)
            found = [p2p_communication._of_sender(run, what, number, args) for number in range(len(expected))]
            assert found == expected


def test_ids_that_are_worked_out_are_valid_and_spread(monkeypatch):
    found = {traces.span_id(((1, rank, "forward", 1, 0, 0), number)) for rank in range(100) for number in range(100)}
    assert len(found) == 10_000
    assert all(0 < id < 1 << 64 for id in found)
    halves = [traces.trace_id("run", number) >> 127 for number in range(1000)]
    assert 400 < sum(halves) < 600


@pytest.mark.parametrize(
    ("strategy", "recording"),
    [("all_ranks", [0, 1, 2, 3]), ("single_rank", [3]), ("first_rank_per_node", [0, 2])],
)
@pytest.mark.parametrize(
    "environment",
    [
        {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
    ],
)
def test_whether_another_rank_records_is_known_from_the_strategy(monkeypatch, environment, strategy, recording):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", strategy)
    settings = config.from_environment(ranks.current())
    assert [rank for rank in range(4) if strategies.records(rank, settings)] == recording


@pytest.mark.parametrize(("previous", "linked"), [(6, True), ([6, 7], False)])
def test_a_receive_that_is_called_by_keyword_alone_finds_its_sender(
    fake_module, monkeypatch, recorder, previous, linked
):
    """As core 0.10 to 0.13 call it; there the previous rank is several where an encoder has a size of its own."""
    state = fake_module("megatron.core.parallel_state")
    state.get_pipeline_model_parallel_prev_rank = lambda: previous
    recorder.groups = frozenset({"communication", "microbatch"})
    recorder.run.traces = Traces("run", 7, True, 1, lambda rank: True)
    step = recorder.begin("megatron.train_step", LIVE, None, ((1, 7, "megatron.train_step", 1, 0), 0))
    recorder.run.passing = Pass(recorder.scope(), 0, 4, interleaved=True)

    def send_forward_recv_forward(output_tensor, recv_prev, tensor_shape, config, overlap_p2p_comm=False):
        raise AssertionError("only its signature is read")

    hook = p2p_communication._operation("send_forward_recv_forward", send_forward_recv_forward, recorder)
    token = hook.begin((), {"output_tensor": None, "recv_prev": True, "tensor_shape": None, "config": None})
    hook.end(token, None, None)
    recorder.end(step)
    _, (record,) = token
    assert record.link == (((1, 6, "forward", "megatron.train_step", 1, 0, 0), 0) if linked else None)


def test_what_a_call_does_at_once_has_the_ids_that_other_ranks_name(recorder, exporter):
    """As the forward and the backward of two microbatches that --overlap-moe-expert-parallel-comm combines."""
    recorder.run.traces = Traces("run", 7, True, 1)
    step = recorder.begin("megatron.train_step", LIVE, None, ((1, 7, "megatron.train_step", 1, 0), 0), 1)
    names = ["megatron.microbatch.forward", "megatron.microbatch.backward"]
    identities = [((1, 7, what, 0), 3) for what in ("forward", "backward")]
    recorder.end_together(recorder.begin_together(names, {}, identities), None)
    recorder.end(step)
    recorder.flush()
    found = {span.name: span.context.span_id for span in exporter.get_finished_spans()}
    assert [found[name] for name in names] == [traces.span_id(identity) for identity in identities]


P2P = """
def recv_forward(tensor_shape, config, is_first_stage): pass
def send_backward_recv_forward(input_tensor_grad, tensor_shape, config, is_first_stage): pass
"""


@pytest.mark.parametrize("fault", [None, "a call fails", "no function", "microbatches"])
def test_links_are_told_from_numbers_only_where_every_call_is_counted(fake_module, monkeypatch, recorder, fault):
    monkeypatch.setattr("megatron_autoinstrument.megatron.patching.reraise_internal_errors", False)
    state = fake_module("megatron.core.parallel_state")
    state.get_pipeline_model_parallel_prev_rank = lambda: 6
    state.get_pipeline_model_parallel_rank, state.get_pipeline_model_parallel_world_size = (lambda: 1), (lambda: 2)
    module = fake_module("megatron.core.pipeline_parallel.p2p_communication", P2P)
    if fault == "no function":
        module.recv_forward = type("Receive", (), {"__init__": lambda self, *args: None})
    source = "" if fault == "microbatches" else "def forward_step(): pass\ndef backward_step(): pass"
    fake_module("megatron.core.pipeline_parallel.schedules", source)
    recorder.groups = frozenset({"communication", "microbatch"})
    recorder.run.traces = Traces("run", 7, True, 1, lambda rank: True)
    seams = [
        seam
        for seam in (*p2p_communication.SEAMS, *schedules.SEAMS)
        if seam.path in ("recv_forward", "send_backward_recv_forward", "forward_step", "backward_step")
    ]
    ledger = patching.Patcher()
    ledger.install(seams, recorder.groups, recorder)
    step = recorder.begin("megatron.train_step", LIVE, None, ((1, 7, "megatron.train_step", 1, 0), 0))
    recorder.run.passing = Pass(recorder.scope(), 0, 4)
    if fault == "a call fails":
        with monkeypatch.context() as patched:
            patched.setattr(p2p_communication, "_link", lambda recorder, record, source: 1 / 0)
            module.recv_forward(None, None, False)
    else:
        module.recv_forward(None, None, False)
    recorder.current = step
    module.send_backward_recv_forward(None, None, None, False)
    record = next(record for record in reversed(recorder._waiting) if record.name == "megatron.p2p.recv_forward")
    expected = ((1, 6, "forward", "megatron.train_step", 1, 0, 0), 1)
    assert record.link == (expected if fault is None else None)
    recorder.end(step)
    ledger.uninstall()
