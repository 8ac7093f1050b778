"""Each version's signatures and ways to call, on the stand-ins of fixtures/standins: the same spans and metrics.

A stand-in's first line names the file of Megatron that it stands for, and is loaded under that module's name.
"""

import contextlib
import sys
import types
from pathlib import Path

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.trace import StatusCode
from test_metrics import Tensor, points

from megatron_autoinstrument import MegatronInstrumentor, instrumentor
from megatron_autoinstrument.recording.run import Run

STANDINS = Path(__file__).parents[2] / "fixtures" / "standins"


# What is called alike in all versions.
SAME = {
    "megatron": "",
    "megatron.core": "",
    "megatron.core.pipeline_parallel": "",
    "megatron.training": "",
    "megatron.core.num_microbatches_calculator": "def get_num_microbatches():\n    return 2",
    "megatron.core.parallel_state": """
stage, stages = 0, 1
def model_parallel_is_initialized():
    return False
def get_pipeline_model_parallel_rank():
    return stage
def get_pipeline_model_parallel_world_size():
    return stages
def is_pipeline_first_stage(ignore_virtual=False, vp_stage=None):
    return stage == 0
def is_pipeline_last_stage(ignore_virtual=False, vp_stage=None):
    return stage == stages - 1
""",
    "megatron.core.pipeline_parallel.utils": """
def is_pp_first_stage(pp_group):
    return pp_group.rank() == 0
def is_pp_last_stage(pp_group):
    return pp_group.rank() == pp_group.size() - 1
""",
    "megatron.core.timers": """
class Timer:
    def __init__(self, name):
        self.name = name
    def elapsed(self, reset=True, barrier=False):
        return 4.0
""",
    "megatron.training.one_logger_utils": "def track_e2e_metrics(log_throughput=False, throughput=None):\n    pass",
    "megatron.training.global_vars": """
from megatron.core.timers import Timer
_GLOBAL_ARGS = None
def set_args(args):
    global _GLOBAL_ARGS
    _GLOBAL_ARGS = args
def get_args():
    return _GLOBAL_ARGS
def get_timers():
    return Timer
""",
    "torch.serialization": "def save(obj, f):\n    pass",
    "torch": "from torch.serialization import save",
    "torch.compiler": "def is_compiling():\n    return False",
    "torch._C": "def _current_graph_task_id():\n    return -1",
    "torch.cuda": """
from contextlib import contextmanager
capturing = False
def is_available():
    return False
def device_count():
    return 0
def is_initialized():
    return True
def is_current_stream_capturing():
    return capturing
@contextmanager
def graph(cuda_graph):
    global capturing
    capturing = True
    yield
    capturing = False
""",
}


@pytest.fixture
def load(fake_module):
    """Loads stand-ins, in this order; gives the last."""
    for name, source in SAME.items():
        fake_module(name, source)
    sys.modules["torch"].cuda = sys.modules["torch.cuda"]

    def load(*names):
        for name in names:
            file = STANDINS / f"{name}.py"
            source = file.read_text()
            module = fake_module(source.split()[0].strip('"').removesuffix(".py").replace("/", "."))
            module.__package__ = module.__name__.rpartition(".")[0]
            exec(compile(source, str(file), "exec"), vars(module))
        return module

    return load


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def instrument(monkeypatch, provider, reader):
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "all")
    monkeypatch.setenv("MEGATRON_OTEL_TRACE_SCOPE", "run")
    monkeypatch.setattr(instrumentor.RECORDER, "run", Run())
    meter_provider = MeterProvider(metric_readers=[reader])
    yield lambda: MegatronInstrumentor().instrument(tracer_provider=provider, meter_provider=meter_provider)
    MegatronInstrumentor().uninstrument()
    instrumentor.RECORDER.reset_after_fork()


@pytest.fixture
def tree(exporter):
    """What was recorded: a line for each span, indented below its parent, with its attributes."""

    def tree(*attributes):
        instrumentor.RECORDER.end_held()
        instrumentor.RECORDER.flush()
        found = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time)
        exporter.clear()

        def below(parent, indent):
            for span in found:
                if (span.parent.span_id if span.parent else None) == parent:
                    shown = [
                        f" {key.removeprefix('megatron.')}={value}"
                        for key, value in span.attributes.items()
                        if not attributes or key.removeprefix("megatron.") in attributes
                    ]
                    yield indent + span.name.removeprefix("megatron.") + "".join(shown)
                    yield from below(span.context.span_id, indent + "  ")

        return list(below(None, ""))

    return tree


def lines(text):
    return text.strip("\n").split("\n")


MODEL = types.SimpleNamespace(config=types.SimpleNamespace(hybrid_context_parallel=False))


def forward(data_iterator, model):
    """A forward step function; the loss is the number of the iteration."""
    return "output", {"lm loss": Tensor(sys.modules["megatron.training.global_vars"].get_args().curr_iteration + 1)}


# ---------------------------------------------------------------------------------------------------- a whole run

P2P_AND_SCHEDULES = {
    "0.10": ("p2p_communication_0_10", "schedules_0_10"),
    "0.13": ("p2p_communication_0_13", "schedules_0_13"),
    "0.14": ("p2p_communication_0_14", "schedules_0_14"),
    "0.15": ("p2p_communication_0_14", "schedules_0_15"),
    "0.16": ("p2p_communication_0_14", "hybrid_cp_schedule_0_16", "schedules_0_16"),
    "0.17": ("p2p_communication_0_17", "hybrid_cp_schedule_0_16", "schedules_0_17"),
    "main": ("p2p_communication_0_17", "hybrid_cp_schedule_0_19", "schedules_0_19"),
}
# Version: its schedules, checkpointing and training, the values that train_step returns, and whether the first
# iteration of the process is logged whatever its number.
RUNS = {
    "0.10": ("0.10", "checkpointing_0_10", "training_0_10", 7, False),
    "0.13": ("0.13", "checkpointing_0_13", "training_0_13", 7, False),
    "0.14": ("0.14", "checkpointing_0_13", "training_0_14", 7, False),
    "0.15": ("0.15", "checkpointing_0_13", "training_0_14", 7, False),
    "0.16": ("0.16", "checkpointing_0_16", "training_0_16", 8, True),
    "0.17": ("0.17", "checkpointing_0_16", "training_0_16", 8, True),
    "0.18": ("0.17", "checkpointing_0_16", "training_0_18", 8, True),
    "main": ("main", "checkpointing_0_19", "training_0_19", 8, True),
}
ONE_VALIDATION_SET = ("0.10", "0.13")


def arguments(version):
    eval_iters = 1 if version in ONE_VALIDATION_SET else [1, 2]
    args = types.SimpleNamespace(
        iteration=2,
        train_iters=6,
        eval_iters=eval_iters,
        log_interval=2,
        log_throughput=True,
        global_batch_size=16,
        micro_batch_size=2,
        data_parallel_size=4,
        seq_length=10,
        decoder_seq_length=None,
        lr=0.25,
        zero=Tensor(0),
        printed=[],
    )

    class DistributedOptimizer(sys.modules["megatron.core.optimizer.optimizer"].MixedPrecisionOptimizer):
        """The update of iteration 5 is skipped."""

        outcome = property(lambda self: (False, None, None) if args.curr_iteration == 4 else (True, 1.5, None))

    args.optimizer_and_scheduler = DistributedOptimizer(), "scheduler"
    return args


def pretrain(version, training, args):
    """As the version's own pretrain_gpt.py calls it."""
    kind = types.SimpleNamespace(name="encoder_or_decoder")
    non_loss = {"process_non_loss_data_func": print}
    if version == "main":
        training.get_args.__globals__["set_args"](args)
        training.pretrain("config", "data", kind, forward, lambda: MODEL, **non_loss)
    elif version == "0.18":
        training.get_args.__globals__["set_args"](args)
        training.pretrain("config", "data", lambda: MODEL, kind, forward, **non_loss)
    else:
        training.pretrain("data", lambda: MODEL, kind, forward, args_defaults={"args": args}, **non_loss)


MICROBATCHES = """
microbatch.forward microbatch_id=0
microbatch.backward
microbatch.forward microbatch_id=1
microbatch.backward
"""


def expected_run(version):
    def indented(text, depth):
        return ["  " * depth + line for line in lines(text)]

    def step(number, logged, successful=True):
        return [
            f"    train_step iteration={number}{logged}",
            "      forward_backward num_microbatches=2",
            *indented(MICROBATCHES, 4),
            "      optimizer_step update_successful=True grad_norm=1.5"
            if successful
            else "      optimizer_step update_successful=False",
        ]

    def evaluate(iterations):
        return [
            f"  evaluate eval_iters={iterations}",
            *["    evaluate.step", *("      " + line for line in forwards)] * iterations,
            *("    " + line for line in forwards),  # the pass for other data than the loss is no step
        ]

    first_is_logged = RUNS[version][-1]
    forwards = [line for line in lines(MICROBATCHES) if "forward" in line]
    return [
        "pretrain model_type=encoder_or_decoder train_iters=6 global_batch_size=16",
        "  model_init",
        "    load_checkpoint",
        "      load_checkpoint.io_read checkpoint.metadata_only=True",
        "      load_checkpoint.io_read checkpoint.metadata_only=False",
        "  train train_iters=6",
        *step(3, " loss=3.0 grad_norm=1.5" if first_is_logged else ""),
        *step(4, " loss=3.5 grad_norm=1.5"),
        *step(5, "", successful=False),
        *step(6, " loss=6.0 grad_norm=1.5"),
        "  save_checkpoint iteration=6",
        "    save_checkpoint.state_dict",
        "    save_checkpoint.io_write",
        *evaluate(1),
        *(evaluate(2) if version not in ONE_VALIDATION_SET else []),
    ]


@pytest.fixture(params=RUNS)
def version(request):
    return request.param


@pytest.fixture
def training(version, load, instrument):
    schedules, checkpointing, training, _, _ = RUNS[version]
    module = load("optimizer_0_10", *P2P_AND_SCHEDULES[schedules], checkpointing, training)
    instrument()
    return module


def test_a_run_of_each_version_gives_the_same_spans(version, training, tree):
    pretrain(version, training, arguments(version))
    assert tree() == expected_run(version)


def test_the_metrics_are_what_each_version_logs(version, training, reader):
    args = arguments(version)
    pretrain(version, training, args)
    found = points(reader)
    assert found.pop("megatron.training.loss") == args.printed[-1]["lm loss"] == 6.0
    assert found == {
        "megatron.training.step_duration_ms": 4000.0 + 4000.0 if RUNS[version][-1] else 4000.0,
        "megatron.training.throughput_tflops": 250.0,
        "megatron.training.tokens_per_sec": 2 * 4 * 10 * 2 / 2.0,
        "megatron.training.grad_norm": 1.5,
        "megatron.training.skipped_iters": 1,
        "megatron.training.learning_rate": 0.25,
    }


def test_train_step_returns_what_its_version_returns(version, training):
    args = arguments(version)
    training.get_args.__globals__["set_args"](args)
    args.curr_iteration = 2
    call = [forward, "data", MODEL, *args.optimizer_and_scheduler, MODEL.config]
    if version not in ONE_VALIDATION_SET:  # later ones are given the schedule
        call.append(sys.modules["megatron.core.pipeline_parallel.schedules"].get_forward_backward_func())
    result = training.train_step(*call)
    assert type(result) is tuple
    assert result == ({"lm loss": 3.0}, 0, False, False, 0, 1.5, None, 0)[: RUNS[version][-2]]


# ---------------------------------------------------------------------------------------------------- pipelines

FIRST_STAGE = """
forward_backward num_microbatches=3
  microbatch.forward microbatch_id=0
  p2p.send_forward
  microbatch.forward microbatch_id=1
  p2p.send_forward p2p.combined=True
  p2p.recv_backward p2p.combined=True
  microbatch.backward
  microbatch.forward microbatch_id=2
  p2p.send_forward p2p.combined=True
  p2p.recv_backward p2p.combined=True
  microbatch.backward
  p2p.recv_backward
  microbatch.backward
"""
LAST_STAGE = """
forward_backward num_microbatches=3
  pp.recv_forward.linked dl.pipeline_parallel.rank=1
    p2p.recv_forward
  microbatch.forward microbatch_id=0
  microbatch.backward
  p2p.send_backward p2p.combined=True
  p2p.recv_forward p2p.combined=True
  microbatch.forward microbatch_id=1
  microbatch.backward
  p2p.send_backward p2p.combined=True
  p2p.recv_forward p2p.combined=True
  microbatch.forward microbatch_id=2
  microbatch.backward
  p2p.send_backward
"""
MIDDLE_STAGE_FORWARD = """
forward_backward num_microbatches=3 forward_only=True
  pp.recv_forward.linked dl.pipeline_parallel.rank=1 dl.microbatch_id=0
    p2p.recv_forward
  microbatch.forward microbatch_id=0
  p2p.send_forward
  pp.recv_forward.linked dl.pipeline_parallel.rank=1
    p2p.recv_forward
  microbatch.forward microbatch_id=1
  p2p.send_forward
  p2p.recv_forward
  microbatch.forward microbatch_id=2
  p2p.send_forward
"""
INTERLEAVED = """
forward_backward num_microbatches=1
  p2p.recv_forward
  microbatch.forward microbatch_id=0
  p2p.send_forward p2p.combined=True p2p.overlapped=True
  p2p.recv_forward p2p.combined=True p2p.overlapped=True
  microbatch.forward microbatch_id=0
  microbatch.backward
  p2p.send_forward p2p.combined=True
  p2p.send_backward p2p.combined=True
  p2p.recv_backward p2p.combined=True
  p2p.recv_backward
  microbatch.backward
  p2p.send_backward p2p.overlapped=True
"""


class Group:
    """A process group."""

    def __init__(self, rank, size):
        self.rank, self.size = lambda: rank, lambda: size


@pytest.fixture
def schedule(load, instrument):
    """Runs a version's schedule on a stage: before 0.14 it asks parallel_state for it, then a communicator."""

    def run(version, name, stage, stages, model=MODEL, **more):
        module = load(*P2P_AND_SCHEDULES[version])
        instrument()
        state, p2p = (
            sys.modules[f"megatron.core.{name}"] for name in ("parallel_state", "pipeline_parallel.p2p_communication")
        )
        state.stage, state.stages = stage, stages
        if hasattr(p2p, "P2PCommunicator"):
            more["p2p_communicator"] = p2p.P2PCommunicator(Group(stage, stages), MODEL.config)
            state.__dict__.clear()  # nothing is to ask it
        return getattr(module, name)(
            forward_step_func=lambda data_iterator, model: ("output", "loss"),
            data_iterator=["data"],
            model=model,
            seq_length=10,
            micro_batch_size=2,
            **more,
        )

    return run


@pytest.mark.parametrize("version", P2P_AND_SCHEDULES)
@pytest.mark.parametrize(
    ("stage", "stages", "forward_only", "expected"),
    [(0, 2, False, FIRST_STAGE), (1, 2, False, LAST_STAGE), (1, 3, True, MIDDLE_STAGE_FORWARD)],
)
def test_a_pipeline_of_each_version_gives_the_same_spans(
    schedule, tree, version, stage, stages, forward_only, expected
):
    name = "forward_backward_pipelining_without_interleaving"
    losses = schedule(version, name, stage, stages, num_microbatches=3, forward_only=forward_only)
    assert losses == ["loss"] * 3
    assert tree() == lines(expected)


@pytest.mark.parametrize("version", ["0.10", "0.13", "0.14", "0.17"])
def test_an_interleaved_pipeline_of_each_version_gives_the_same_spans(schedule, tree, version):
    name = "forward_backward_pipelining_with_interleaving"
    assert schedule(version, name, 1, 3, model=[MODEL, MODEL], num_microbatches=1) == ["loss"] * 2
    assert tree() == lines(INTERLEAVED)


def hybrid_context_parallel(load, instrument, version):
    schedules = load(*P2P_AND_SCHEDULES[version])
    instrument()
    return schedules.forward_backward_no_pipelining(
        forward_step_func=lambda data_iterator, model: ("output", "loss"),
        data_iterator="data",
        model=types.SimpleNamespace(config=types.SimpleNamespace(hybrid_context_parallel=True)),
        num_microbatches=2,
        seq_length=10,
        micro_batch_size=2,
    )


@pytest.mark.parametrize("version", ["0.16", "main"])
def test_hybrid_context_parallelism_gives_the_spans_of_its_microbatches(load, instrument, tree, version):
    assert hybrid_context_parallel(load, instrument, version) == ["loss", "loss"]
    assert tree() == ["forward_backward num_microbatches=2", *("  " + line for line in lines(MICROBATCHES))]


def test_a_call_that_megatron_gets_wrong_fails_as_it_does_without_us(load, instrument, exporter):
    with pytest.raises(TypeError, match=r"backward_step\(\) takes 4 positional arguments but 5 were given"):
        hybrid_context_parallel(load, instrument, "0.17")
    instrumentor.RECORDER.flush()
    statuses = {span.name: span.status.status_code for span in exporter.get_finished_spans()}
    assert statuses == {
        "megatron.microbatch.forward": StatusCode.UNSET,
        "megatron.microbatch.backward": StatusCode.ERROR,
        "megatron.forward_backward": StatusCode.ERROR,
    }


# ---------------------------------------------------------------------------------------------------- the rest

SINCE_0_16 = ("param_and_grad_buffer_0_16", "distributed_data_parallel_0_16")
ONE_STEP = ["optimizer_step update_successful=True grad_norm=1.5"]


def test_optimizers_that_hold_others_give_one_span(load, instrument, tree):
    optimizer = load("optimizer_0_10")
    instrument()
    both = [optimizer.MixedPrecisionOptimizer(), optimizer.FP32Optimizer()]
    for step in (optimizer.ChainedOptimizer(both).step, *(one.step for one in both)):
        assert step() == (True, 1.5, None)
        assert tree() == ONE_STEP


@pytest.mark.parametrize("standin", ["layer_wise_optimizer_0_16", "layer_wise_optimizer_0_18"])
def test_the_layer_wise_optimizer_gives_one_span_whether_or_not_its_step_is_its_own(load, instrument, tree, standin):
    module = load("optimizer_0_10", standin)
    instrument()
    optimizer = module.LayerWiseDistributedOptimizer([])
    optimizer.chained_optimizers = [sys.modules["megatron.core.optimizer.optimizer"].FP32Optimizer()]
    assert optimizer.step() == (True, 1.5, None)
    assert tree() == ONE_STEP


@pytest.fixture(params=[("param_and_grad_buffer_0_10", "distributed_data_parallel_0_10"), SINCE_0_16])
def data_parallel(request, load, instrument):
    """Makes a model of two bucket groups, and those; and the arguments of its finish_grad_sync."""
    load(*request.param)
    instrument()
    buffer, model = (
        sys.modules[f"megatron.core.distributed.{name}"]
        for name in ("param_and_grad_buffer", "distributed_data_parallel")
    )

    def make(overlap):
        groups = [buffer._ParamAndGradBucketGroup(overlap_grad_reduce=overlap) for _ in range(2)]
        return model.DistributedDataParallel(groups), groups

    return make, {"force_all_reduce": False} if request.param is SINCE_0_16 else {}


LAUNCHES = ["grad_sync.start"] * 2
FINISH_LAUNCHES = ["grad_sync.finish", *("  " + line for line in LAUNCHES)]


def test_without_overlap_finish_launches_the_reductions(data_parallel, tree):
    make, finish = data_parallel
    model, _ = make(overlap=False)
    model.finish_grad_sync(**finish)
    assert tree() == FINISH_LAUNCHES


def test_with_overlap_gradients_launch_their_reductions(data_parallel, tree):
    make, finish = data_parallel
    model, groups = make(overlap=True)
    if finish:
        # In its first batch, 0.16 doesn't know yet how often each gradient comes.
        for group in groups:
            group.register_grad_ready("param")
        model.finish_grad_sync(**finish)
        assert tree() == FINISH_LAUNCHES
    for group in groups:
        group.is_first_batch = False
        group.register_grad_ready("param")
    model.finish_grad_sync(**finish)
    assert tree() == [*LAUNCHES, "grad_sync.finish"]


def test_what_the_schedule_has_launched_is_not_launched_again(data_parallel, tree):
    make, finish = data_parallel
    model, _ = make(overlap=True)
    model.start_grad_sync("unused")
    model.finish_grad_sync(**finish)
    assert tree() == ["grad_sync.start", "grad_sync.finish"]


WHOLE_LAYER = ["layer.forward", "  layer.self_attention", "  layer.mlp"]


@pytest.mark.parametrize(
    ("standin", "name"),
    [
        ("transformer_layer_0_12", "TransformerLayer"),
        ("transformer_layer_0_13", "TransformerLayer"),
        ("transformer_layer_0_16", "MoETransformerLayer"),
        ("transformer_layer_main", "TransformerLayer"),
        ("transformer_layer_main", "MoETransformerLayer"),
        ("transformer_layer_main", "HyperConnectionTransformerLayer"),
    ],
)
def test_a_layer_of_each_version_gives_one_span_of_each_kind(load, instrument, tree, standin, name):
    layer = getattr(load(standin), name)()
    instrument()
    assert layer.forward("hidden", attention_mask=None) == ("hidden", None)
    assert tree() == WHOLE_LAYER


# -------------------------------------------------------------------------------------------- what needs new seams


def test_a_layer_before_0_12_has_its_attention_and_its_mlp_elsewhere(load, instrument, tree):
    module = load("attention_0_10", "mlp_0_10", "transformer_layer_0_10")
    transformer = "megatron.core.transformer."
    attention = sys.modules[transformer + "attention"].SelfAttention()
    instrument()
    no_cross_attention = types.SimpleNamespace(forward=lambda hidden, **others: (hidden, None))  # an IdentityOp
    layer = module.TransformerLayer(attention, no_cross_attention, sys.modules[transformer + "mlp"].MLP())
    assert layer.forward("hidden") == ("hidden", None)
    assert tree() == WHOLE_LAYER


def test_the_gathering_of_parameters_is_part_of_the_layer_wise_step(load, instrument, monkeypatch):
    module = load("optimizer_0_10", "layer_wise_optimizer_0_16")
    during = []
    name_of_current = lambda self: during.append(getattr(instrumentor.RECORDER.current, "name", None))  # noqa: E731
    monkeypatch.setattr(module.LayerWiseDistributedOptimizer, "allgather_params", name_of_current)
    instrument()
    module.LayerWiseDistributedOptimizer([]).step()
    assert during == ["megatron.optimizer_step"]


@pytest.mark.parametrize(
    ("standin", "name"),
    [
        ("custom_fsdp_0_12", "FullyShardedDataParallel"),
        ("megatron_fsdp_0_14", "MegatronFSDP"),
        ("megatron_fsdp_0_16", "MegatronFSDP"),
    ],
)
def test_fsdp_without_overlap_starts_its_synchronisation_in_finish(load, instrument, tree, standin, name):
    model = getattr(load(standin), name)(overlap_grad_reduce=False)
    instrument()
    model.finish_grad_sync(**({"force_all_reduce": False} if standin.endswith("16") else {}))
    assert tree() == ["grad_sync.finish", "  grad_sync.start"]


@pytest.mark.parametrize("standin", ["combined_1f1b_0_14", "combined_1f1b_0_18"])
def test_combined_1f1b_gives_the_forward_of_one_microbatch_and_the_backward_of_another(load, instrument, tree, standin):
    module = load(standin)
    instrument()
    call = [forward, "data", MODEL, 2, None, None, ["loss"], MODEL.config, False, None, False]
    result = module.combined_1f1b_schedule_for_no_pipelining(*call, contextlib.nullcontext, 0, lambda first: first)
    assert result == (["loss"], 0)
    got = tree("microbatch_id")
    first, *combined, last = [line.strip() for line in got]
    assert (first, last) == ("microbatch.forward microbatch_id=0", "microbatch.backward")
    assert sorted(combined) == ["microbatch.backward", "microbatch.forward microbatch_id=1"]


@pytest.mark.parametrize("standin", ["full_cuda_graph_0_14", "full_cuda_graph_0_18"])
def test_a_cuda_graph_of_the_iteration_gives_one_pass_each_time_it_runs(load, instrument, tree, standin):
    schedules = load(*P2P_AND_SCHEDULES["0.14"])
    wrapper = load(standin).FullCudaGraphWrapper
    instrument()
    run = wrapper(schedules.forward_backward_no_pipelining, cuda_graph_warmup_steps=1)
    call = {"model": MODEL, "data_iterator": "data", "num_microbatches": 2, "seq_length": 10, "micro_batch_size": 2}
    call["forward_step_func"] = lambda data_iterator, model: ("output", "loss")
    for _ in range(3):  # warm-up, capture with a replay, a replay
        result = run(forward_only=False, **call)
        assert result == ["loss", "loss"]
        got = tree()
        assert got[0] == "forward_backward num_microbatches=2"
        assert sum("forward_backward" in line for line in got) == 1


@pytest.mark.parametrize("standin", ["optimizer_cuda_graph_0_17", "optimizer_cuda_graph_0_18"])
def test_a_cuda_graph_of_the_optimizer_gives_one_step_each_time_it_runs(load, instrument, tree, standin):
    wrapper = load("optimizer_0_10", standin).OptimizerCudaGraphWrapper
    instrument()
    optimizer = sys.modules["megatron.core.optimizer.optimizer"].FP32Optimizer()
    optimizer.step = wrapper(optimizer.step, cuda_graph_warmup_steps=1)
    for _ in range(3):
        assert optimizer.step() == (True, 1.5, None)
        assert [line.split()[0] for line in tree()] == ["optimizer_step"]


@pytest.mark.parametrize(
    ("name", "tensors", "result", "directions"),
    [
        ("send_forward", ["tensor"], None, ["send_forward"]),
        ("recv_forward", [], "received", ["recv_forward"]),
        ("send_backward", ["gradient"], None, ["send_backward"]),
        ("recv_backward", [], "received", ["recv_backward"]),
        ("send_forward_recv_backward", ["tensor"], "received", ["send_forward", "recv_backward"]),
        ("send_backward_recv_forward", ["gradient"], "received", ["send_backward", "recv_forward"]),
    ],
)
def test_a_bridge_between_modules_gives_the_spans_of_its_directions(
    load, instrument, tree, name, tensors, result, directions
):
    bridge = load("bridge_communicator_0_15").BridgeCommunicator()
    instrument()
    assert getattr(bridge, name)(*tensors) == result
    combined = " p2p.combined=True" if len(directions) > 1 else ""
    assert tree("p2p.combined") == [f"p2p.{direction}{combined}" for direction in directions]


def test_each_stand_in_is_loaded_by_a_test():
    here = Path(__file__).read_text()
    assert [file.stem for file in STANDINS.glob("*.py") if f'"{file.stem}"' not in here] == []
