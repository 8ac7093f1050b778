"""What each wrapped call costs: on the thread that makes it, and in CPU time of all threads, its export included.

Run it alone on a quiet machine: python benchmarks/per_call.py [rounds]. What is wrapped has Megatron's names and
signatures and does nothing; it is called where Megatron calls it, inside a step or a pass. Where nemo-lens is installed
(it wants Python 3.13), its trace_fn is measured in turn with ours, in the same process, with the same SDK and
processors.
"""

import contextlib
import gc
import os
import sys
import threading
import time
import types
from functools import partial
from math import inf

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

from megatron_autoinstrument import MegatronInstrumentor
from megatron_autoinstrument.instrumentor import RECORDER
from megatron_autoinstrument.megatron import patching

CALLS, ROUNDS = 1_000, 15
UNIT = "µs"
REFERENCE, NAME = "`get_tracer` and `start_as_current_span`", "megatron.microbatch.forward"

# Megatron's names and signatures, of core 0.19. What others run inside runs the function that it is given.
STANDINS = {
    "torch": "",
    "torch.compiler": "def is_compiling(): return False",
    "torch.cuda": "def is_initialized(): return False\ndef is_available(): return False\ndef device_count(): return 8",
    "torch._C": "def _current_graph_task_id(): return -1",
    "megatron": "",
    "megatron.core": "",
    "megatron.core.distributed": "",
    "megatron.core.optimizer": "",
    "megatron.core.pipeline_parallel": "",
    "megatron.core.transformer": "",
    "megatron.training": "",
    "megatron.core.num_microbatches_calculator": "def get_num_microbatches(): return 64",
    "megatron.core.parallel_state": "def model_parallel_is_initialized(): return True\n"
    + "".join(
        f"def get_{kind}_{what}(): return {value}\n"
        for kind in ("pipeline_model_parallel", "tensor_model_parallel", "data_parallel", "context_parallel")
        for what, value in (("rank", 1), ("world_size", 8))
    ),
    "megatron.core.timers": """
class Timer:
    name = "interval-time"
    def elapsed(self, reset=True, barrier=False): return 4.0
""",
    "megatron.core.pipeline_parallel.schedules": """
def forward_backward_pipelining_without_interleaving(
    *, forward_step_func, data_iterator, model, num_microbatches, seq_length, micro_batch_size,
    decoder_seq_length=None, forward_only=False, collect_non_loss_data=False, first_val_step=None,
    adjust_tensor_shapes_fn=None, p2p_communicator=None, pg_collection=None, force_all_reduce=False,
): return forward_step_func()
def forward_step(
    forward_step_func, data_iterator, model, num_microbatches, input_tensor, forward_data_store, config,
    cp_group_size, collect_non_loss_data=False, checkpoint_activations_microbatch=None, is_first_microbatch=False,
    current_microbatch=None, vp_stage=None, is_last_stage=True,
): return forward_step_func()
def backward_step(input_tensor, output_tensor, output_tensor_grad, config): pass
""",
    "megatron.core.pipeline_parallel.p2p_communication": """
class P2PCommunicator:
    def recv_forward(self, tensor_shapes, is_first_stage): pass
    def send_forward(self, output_tensors, is_last_stage): pass
    def send_forward_recv_backward(self, output_tensors, tensor_shapes, is_last_stage): pass
    def recv_backward(self, tensor_shapes, is_last_stage): pass
    def send_backward(self, input_tensor_grads, is_first_stage): pass
    def send_backward_recv_forward(self, input_tensor_grads, tensor_shapes, is_first_stage): pass
    def send_forward_recv_forward(self, output_tensor, recv_prev, tensor_shape, overlap_p2p_comm=False): pass
    def send_backward_recv_backward(self, input_tensor_grad, recv_next, tensor_shape, overlap_p2p_comm=False): pass
    def send_forward_backward_recv_forward_backward(
        self, output_tensor, input_tensor_grad, recv_prev, recv_next, tensor_shape
    ): pass
""",
    "megatron.core.distributed.distributed_data_parallel": """
class DistributedDataParallel:
    def finish_grad_sync(self, force_all_reduce=False): pass
""",
    "megatron.core.distributed.param_and_grad_buffer": """
class _ParamAndGradBucketGroup:
    def start_grad_sync(self, force_all_reduce=False): pass
""",
    "megatron.core.optimizer.optimizer": """
class MixedPrecisionOptimizer:
    def step(self): return True, 1.5, None
""",
    "megatron.core.rerun_state_machine": """
class RerunDataIterator:
    replaying = False
    def __next__(self): pass
""",
    "megatron.core.transformer.transformer_layer": """
class TransformerLayer:
    def forward(self, *args, **kwargs): pass
    def _forward_attention(self, hidden_states): pass
""",
    "megatron.training.global_vars": "_GLOBAL_ARGS = None",
    "megatron.training.one_logger_utils": "def track_e2e_metrics(log_throughput=False, throughput=None): pass",
    "megatron.training.training": """
from megatron.core.timers import Timer
from megatron.training import one_logger_utils
_TRAIN_START_TIME = 1.0
def train(
    forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator, valid_data_iterator,
    process_non_loss_data_func, config, checkpointing_context, non_loss_data_func, inference_model=None,
    p2p_communicator=None, pg_collection=None,
): return forward_step_func()
def train_step(
    forward_step_func, data_iterator, model, optimizer, opt_param_scheduler, config, forward_backward_func,
    iteration=None, pg_collection=None, p2p_communicator=None,
): return forward_step_func()
def training_log(
    loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag, skipped_iter, grad_norm,
    params_norm, num_zeros_in_grad, max_attention_logit, pg_collection=None, is_first_iteration=False,
    seqlen_squared_sum_in_batch=None, total_real_tokens_in_batch=None,
):
    if iteration % 100 == 0:
        Timer().elapsed(barrier=True, reset=True)
        one_logger_utils.track_e2e_metrics(True, 250.0)
""",
}


class Loss(float):
    """What Megatron's loss tensor is asked for."""

    item = float.__float__


class Group:
    """A process group of so many ranks, of which this is the second."""

    def __init__(self, size):
        self._size = size

    def rank(self):
        return 1

    def size(self):
        return self._size


class Sent:
    """In the place of gRPC's client: takes requests as it does, and sends nothing."""

    spans = 0

    def Export(self, request, **more):
        Sent.spans += sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)
        request.SerializeToString()
        return trace_service_pb2.ExportTraceServiceResponse()


def load():
    """Puts the stand-ins where Megatron's modules would be; returns them by the last part of their names."""
    for name, source in STANDINS.items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(source, vars(module))
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    sys.modules["megatron.training.global_vars"]._GLOBAL_ARGS = types.SimpleNamespace(
        log_interval=100, micro_batch_size=1, data_parallel_size=16, seq_length=4096, curr_iteration=0, train_iters=1
    )
    return types.SimpleNamespace(**{name.rpartition(".")[2]: sys.modules[name] for name in STANDINS})


def nothing():
    pass


def run_pass(of, inside, num_microbatches=64):
    of.schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=inside,
        data_iterator=None,
        model=None,
        num_microbatches=num_microbatches,
        seq_length=4096,
        micro_batch_size=1,
    )


def run_step(of, inside, number=0):
    of.training.train_step(inside, *[None] * 6, iteration=number)


def log_step(of, iteration):
    of.training.training_log({"lm loss": Loss(1.5)}, {}, 1e-4, iteration, 1.0, False, 0, 1.5, None, None, None)


def outer(of):
    """What calls are made inside of: each runs the function that it is given."""
    return {
        "train": lambda inside: of.training.train(inside, *[None] * 9),
        "step": partial(run_step, of),
        "pass": partial(run_pass, of),
        "warm-up": partial(run_pass, of, num_microbatches=10 * CALLS),
        "microbatch": lambda inside: of.schedules.forward_step(inside, *[None] * 7),
        "autograd's thread": on_another_thread,
    }


def on_another_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


def calls(of):
    """Each row of the table: inside of what Megatron makes the call, and the call, which is told its number."""
    communicator = of.p2p_communication.P2PCommunicator()
    communicator.prev_rank, communicator.next_rank, communicator.pp_group = 0, 2, Group(8)
    deep = of.p2p_communication.P2PCommunicator()
    deep.prev_rank, deep.next_rank, deep.pp_group = 0, 2, Group(100 * CALLS)
    optimizer, layer = of.optimizer.MixedPrecisionOptimizer(), of.transformer_layer.TransformerLayer()
    iterator, model = of.rerun_state_machine.RerunDataIterator(), of.distributed_data_parallel.DistributedDataParallel()
    buckets = of.param_and_grad_buffer._ParamAndGradBucketGroup()
    in_step, in_pass = ("train", "step"), ("train", "step", "pass")
    return {
        "`train_step` and its `training_log`": (
            ("train",),
            lambda number: (run_step(of, nothing, number), log_step(of, 1)),
        ),
        "the same, logged, with metrics": (
            ("train",),
            lambda number: (run_step(of, nothing, number), log_step(of, 100)),
        ),
        "the schedule": (in_step, lambda number: run_pass(of, nothing)),
        "`optimizer.step`": (in_step, lambda number: optimizer.step()),
        "`forward_step`": (
            in_pass,
            lambda number: of.schedules.forward_step(nothing, *[None] * 7, current_microbatch=number),
        ),
        "`backward_step`": (in_pass, lambda number: of.schedules.backward_step(None, None, None, None)),
        "`recv_forward` in the warm-up: two spans, two links": (
            ("train", "step", "warm-up"),
            lambda number: deep.recv_forward(None, False),
        ),
        "`recv_forward`, linked": (in_pass, lambda number: communicator.recv_forward(None, False)),
        "`send_forward`": (in_pass, lambda number: communicator.send_forward(None, False)),
        "`send_forward_recv_backward`: two spans, a link": (
            in_pass,
            lambda number: communicator.send_forward_recv_backward(None, None, False),
        ),
        "`TransformerLayer.forward`, without its halves": (
            (*in_pass, "microbatch"),
            lambda number: layer.forward(None, attention_mask=None),
        ),
        "the wait for a batch": ((*in_pass, "microbatch"), lambda number: iterator.__next__()),
        "`finish_grad_sync`": (in_pass, lambda number: model.finish_grad_sync(force_all_reduce=False)),
        "`start_grad_sync`": (in_pass, lambda number: buckets.start_grad_sync(force_all_reduce=False)),
        "the same, on autograd's thread": (
            (*in_pass, "autograd's thread"),
            lambda number: buckets.start_grad_sync(force_all_reduce=False),
        ),
    }


def reading():
    """What was used so far: time, and CPU time of all threads, in µs. instructions.py counts something else."""
    return time.perf_counter() * 1e6, time.process_time() * 1e6


class Meter:
    """Measures calls, in the stand-ins' module `of`."""

    def __init__(self, of, rounds):
        self._outer = outer(of)
        self._rounds = rounds

    def least(self, calls):
        """Of one call of each: the least that it used on its thread, the least in all threads, and how many spans
        it gave. In turn, so that what the machine does else falls on all of them alike."""
        figures = {name: [inf, inf, inf] for name in calls}
        gc.disable()
        for _ in range(self._rounds):
            for name, (inside, call) in calls.items():
                figures[name] = list(map(min, figures[name], self._once(inside, call)))
            gc.collect()
        return figures

    def _once(self, inside, call):
        readings = []

        def loop():
            readings.append(reading())
            for number in range(CALLS):
                call(number)
            readings.append(reading())

        run, before = loop, Sent.spans
        for name in reversed(inside):
            run = partial(self._outer[name], run)
        run()
        while not RECORDER.flush():  # its bound is one of seconds, which valgrind takes
            pass
        trace.get_tracer_provider().force_flush()
        (started, started_all), (called, _), (_, ended_all) = *readings, reading()
        # Those around the calls are too few to show.
        spans = round((Sent.spans - before) / CALLS)
        return (called - started) / CALLS, (ended_all - started_all) / CALLS, spans


def less(figures, bare):
    return {name: [a - b for a, b in zip(figures[name], bare[name], strict=True)] for name in figures}


def provider_with(sampler):
    # As many attributes as a run's resource has.
    resource = Resource.create({f"dl.attribute.{number}": number for number in range(24)})
    provider = TracerProvider(sampler=sampler, shutdown_on_exit=False, resource=resource)
    # By the clock nothing leaves: it would leave while something else is measured.
    exporter = trace_exporter.OTLPSpanExporter(endpoint="127.0.0.1:1", insecure=True)
    exporter._client = Sent()
    processor = BatchSpanProcessor(exporter, max_queue_size=100_000, schedule_delay_millis=3_600_000)
    provider.add_span_processor(processor)
    return provider


@contextlib.contextmanager
def instrumented(groups, provider):
    os.environ["MEGATRON_OTEL_SPAN_GROUPS"] = groups
    metrics = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    MegatronInstrumentor().instrument(tracer_provider=provider, meter_provider=metrics)
    try:
        yield
    finally:
        MegatronInstrumentor().uninstrument()


def references():
    """What a span costs by other means, as the rows are."""

    def bare(number, current_microbatch=None):
        return number

    def by_opentelemetry(number):
        with trace.get_tracer("reference").start_as_current_span(NAME):
            bare(number, current_microbatch=number)

    inside = ("train",)
    calls = {
        "nothing": (inside, lambda number: bare(number, current_microbatch=number)),
        REFERENCE: (inside, by_opentelemetry),
    }
    try:
        from nemo.lens import helpers, state
    except ImportError:
        print("nemo-lens is not installed; its trace_fn calls get_tracer and start_as_current_span.\n")
    else:
        state.set_enabled_span_groups(frozenset({"microbatch"}))
        theirs = helpers.trace_fn("microbatch", NAME)(bare)
        calls["nemo-lens's `trace_fn`"] = (inside, lambda number: theirs(number, current_microbatch=number))
    return calls


def costs(rounds):
    """Of each row: on the thread that calls, of all threads, and the spans that it gives."""
    patching.reraise_internal_errors = True  # what fails would cost nothing
    os.environ["MEGATRON_OTEL_RANK_STRATEGY"] = "all_ranks"
    of = load()
    meter, rows = Meter(of, rounds), calls(of)
    provider = provider_with(None)
    trace.set_tracer_provider(provider)
    bare = meter.least(rows)

    def beyond_bare(*names):
        return less(meter.least({name: rows[name] for name in names}), bare)

    with instrumented("all", provider):
        found = beyond_bare(*rows)
        kept = of.schedules.backward_step
        others = meter.least(references())
    found |= less(others, dict.fromkeys(others, others.pop("nothing")))
    with instrumented("all", provider_with(TraceIdRatioBased(0))):
        found["`backward_step` in a step that the sampler drops"] = beyond_bare("`backward_step`")["`backward_step`"]
    with instrumented("default", provider):
        found["the schedule with the default groups, without a span"] = beyond_bare("the schedule")["the schedule"]
    of.schedules.backward_step = kept
    found["a wrapper that somebody kept after `uninstrument()`"] = beyond_bare("`backward_step`")["`backward_step`"]
    return found


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS
    found = costs(rounds)
    print(f"| {UNIT} per call | spans | the thread that calls | all threads, encoding included |\n|---|---|---|---|")
    for name, (calling, everywhere, spans) in found.items():
        print(f"| {name} | {spans} | {calling:.2f} | {everywhere:.2f} |")


if __name__ == "__main__":
    main()
