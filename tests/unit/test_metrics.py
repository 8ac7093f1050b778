import math
import types

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from megatron_autoinstrument.common.groups import METRICS
from megatron_autoinstrument.export import metrics
from megatron_autoinstrument.export.metrics import NONFINITE
from megatron_autoinstrument.megatron import state
from megatron_autoinstrument.recording.record import LIVE
from megatron_autoinstrument.recording.run import Run
from megatron_autoinstrument.targets import training
from megatron_autoinstrument.targets import training_log as training_log_target


@pytest.fixture
def reader():
    return InMemoryMetricReader()


@pytest.fixture
def meter(reader):
    return MeterProvider(metric_readers=[reader]).get_meter("test")


def points(reader):
    data = reader.get_metrics_data()
    found = {}
    for scope in data.resource_metrics[0].scope_metrics if data and data.resource_metrics else ():
        for metric in scope.metrics:
            for point in metric.data.data_points:
                found[metric.name] = point.sum if hasattr(point, "sum") else point.value
    return found


def test_what_is_no_finite_number_poisons_no_instrument(reader, meter, recorder, monkeypatch):
    monkeypatch.setattr(type(recorder), "meter", property(lambda self: meter))
    for value in (100.0, math.nan, math.inf, -math.inf, None, 50.0):
        metrics.record(recorder, dict.fromkeys(metrics.INSTRUMENTS, value))
    found = points(reader)
    assert set(found) == set(metrics.INSTRUMENTS)
    assert found["megatron.training.step_duration_ms"] == found["megatron.training.skipped_iters"] == 150.0
    assert found["megatron.training.loss"] == 50.0


class Tensor(float):
    """A number that must be asked for."""

    def item(self):
        return float(self)

    def __add__(self, other):
        return Tensor(float(self) + float(other))

    def float(self):
        return self

    def sum(self):
        return self


def training_log(
    loss_dict,
    total_loss_dict,
    learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
    grad_norm,
    params_norm,
    num_zeros_in_grad,
    max_attention_logit,
    is_first_iteration=False,
):
    pass


@pytest.fixture
def log(monkeypatch, fake_module, recorder, meter):
    """Calls the hook as Megatron calls `training_log`, with --log-interval 2 and 4 s for an interval."""
    arguments = type("Args", (), {"log_interval": 2, "micro_batch_size": 2, "data_parallel_size": 4, "seq_length": 10})
    fake_module("megatron.training.global_vars")._GLOBAL_ARGS = arguments
    fake_module("megatron.core.num_microbatches_calculator").get_num_microbatches = lambda: 5
    monkeypatch.setattr(type(recorder), "meter", property(lambda self: meter))
    recorder.groups = frozenset({METRICS, "step"})
    hook = training_log_target._training_log(training_log, recorder)
    totals = {}

    def call(iteration, loss, skipped=0, grad_norm=1.5, learning_rate=0.1, is_first=False):
        losses = {"lm loss": Tensor(loss)} if loss is not None else {}
        args = (losses, totals, learning_rate, iteration, 1.0, False, skipped, grad_norm, None, None, None, is_first)
        token = hook.begin(args, {})
        totals["advanced iterations"] = totals.get("advanced iterations", 0) + (not skipped)
        totals["skipped iterations"] = totals.get("skipped iterations", 0) + skipped
        if losses and not skipped:
            totals["lm loss"] = totals.get("lm loss", Tensor(0)) + losses["lm loss"]
        if recorder.run.logging is not None:
            recorder.run.logging.elapsed_s = 4.0
            recorder.run.logging.tflops = 300.0
        hook.end(token, None, None)
        if iteration % 2 == 0:
            totals.clear()

    return call


def test_the_averages_of_an_interval_are_megatrons(log, reader):
    log(1, 3.0)
    assert points(reader) == {}
    log(2, 4.0)
    found = points(reader)
    assert found["megatron.training.loss"] == 3.5
    assert found["megatron.training.step_duration_ms"] == 2000.0
    assert found["megatron.training.tokens_per_sec"] == 2 * 4 * 10 * 5 / 2.0
    assert found["megatron.training.throughput_tflops"] == 300.0
    assert found["megatron.training.learning_rate"] == 0.1
    assert found["megatron.training.grad_norm"] == 1.5


def test_skipped_iterations_are_counted_once_and_left_out_of_the_loss(log, reader):
    log(1, 9.0, skipped=1)
    log(2, 4.0)
    assert points(reader)["megatron.training.loss"] == 4.0
    assert points(reader)["megatron.training.skipped_iters"] == 1
    log(3, 9.0, skipped=1)
    log(4, 9.0, skipped=1)
    assert points(reader)["megatron.training.skipped_iters"] == 3


def finished(exporter):
    spans = [dict(span.attributes) for span in exporter.get_finished_spans()]
    exporter.clear()
    return spans


@pytest.fixture
def step(log, recorder):
    """A step, and its log."""

    def call(iteration, loss, **logged):
        recorder.end(recorder.begin("megatron.train_step", LIVE), hold=True)
        log(iteration, loss, **logged)

    return call


NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_loss_that_is_not_finite_is_said_to_be_so_and_no_gauge_repeats_the_last_one_that_was(
    step, reader, exporter, bad
):
    step(1, 4.0)
    step(2, 4.0)
    assert points(reader)["megatron.training.loss"] == 4.0
    assert NONFINITE not in points(reader)
    finished(exporter)
    step(3, 4.0)
    step(4, bad, grad_norm=bad)
    assert finished(exporter) == [{}, {"megatron.loss.finite": False, "megatron.grad_norm.finite": False}]
    for _ in range(2):  # a cumulative export goes on
        found = points(reader)
        assert not {"megatron.training.loss", "megatron.training.grad_norm"} & set(found)
        assert found[NONFINITE] == 1
        assert found["megatron.training.learning_rate"] == 0.1
    step(5, 4.0)
    step(6, 5.0)
    assert finished(exporter)[1] == {"megatron.loss": 4.5, "megatron.grad_norm": 1.5}
    assert points(reader)["megatron.training.loss"] == 4.5
    assert points(reader)[NONFINITE] == 1


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_an_iteration_that_is_not_finite_counts_once_whenever_megatron_reads_it(step, reader, exporter, bad):
    step(1, bad, grad_norm=bad)  # its norm is known at once, its loss by the average of the interval
    assert finished(exporter) == [{"megatron.grad_norm.finite": False}]
    assert points(reader)[NONFINITE] == 1
    step(2, 4.0)
    assert finished(exporter) == [{"megatron.loss.finite": False, "megatron.grad_norm": 1.5}]
    assert points(reader)[NONFINITE] == 1
    step(3, bad, grad_norm=None)
    assert points(reader)[NONFINITE] == 1
    step(4, bad, grad_norm=None)  # the average tells of one of the two
    assert points(reader)[NONFINITE] == 2


@pytest.mark.parametrize("bad", NOT_FINITE)
def test_a_skipped_iteration_whose_loss_is_not_finite_counts_as_both(step, reader, exporter, bad):
    step(1, bad, skipped=1, grad_norm=None)
    step(2, 4.0)
    assert finished(exporter) == [{"megatron.loss.finite": False}, {"megatron.loss": 4.0, "megatron.grad_norm": 1.5}]
    step(3, bad, skipped=1, grad_norm=None)
    step(4, bad, skipped=1, grad_norm=None)
    assert points(reader)[NONFINITE] == points(reader)["megatron.training.skipped_iters"] == 3
    step(5, 4.0, skipped=1, grad_norm=None)
    assert points(reader)["megatron.training.skipped_iters"] == 4
    assert points(reader)[NONFINITE] == 3


def test_a_loss_is_read_only_where_megatron_has_just_read_it(step, monkeypatch):
    read = []
    monkeypatch.setattr(Tensor, "item", lambda self: read.append(1) or float(self))
    step(1, math.nan)
    assert not read
    step(2, 4.0)
    assert len(read) == 1
    step(3, math.nan, skipped=1)  # Megatron looks whether it is NaN
    assert len(read) == 2


def test_the_first_iteration_that_is_logged_beside_its_interval_counts_once(log, reader):
    log(1, math.nan, grad_norm=None, is_first=True)
    assert points(reader)[NONFINITE] == 1
    log(2, 4.0)
    assert "megatron.training.loss" not in points(reader)
    assert points(reader)[NONFINITE] == 1


def test_what_is_known_of_a_run_does_not_outlive_it(log, reader, recorder):
    def pretrain(model_type=None, inprocess_call_wrapper=None):
        pass

    def setup_model_and_optimizer():
        pass

    around = training._pretrain(pretrain, recorder)
    model = training._setup_model_and_optimizer(setup_model_and_optimizer, recorder)
    everything = dict.fromkeys({*Run.__slots__} - {"number", "traces"}, "left behind")

    def leave_behind():
        log(2, 4.0)
        for name, value in everything.items():
            setattr(recorder.run, name, value)

    def is_left():
        return [name for name in everything if getattr(recorder.run, name) == "left behind"]

    leave_behind()
    run = around.begin((), {})
    assert not is_left()
    assert "megatron.training.loss" not in points(reader)  # a gauge would tell the last run's
    leave_behind()
    model.end(model.begin((), {}), None, None)
    assert around.begin((), {}) is None
    assert len(is_left()) == len(everything)  # still the same one
    around.end(run, None, None)
    model.end(model.begin((), {}), None, None)  # a loop of one's own
    assert not is_left()


def test_what_a_rank_does_not_hold_is_not_recorded(log, reader):
    log(1, None, grad_norm=None)
    log(2, None, grad_norm=None, learning_rate=None)
    assert not {"megatron.training.loss", "megatron.training.grad_norm", "megatron.training.learning_rate"} & set(
        points(reader)
    )


def test_the_peak_of_the_device_memory_is_in_gib(log, reader, fake_module):
    cuda = types.SimpleNamespace(is_available=lambda: True, max_memory_allocated=lambda: 3 * 2**29)
    fake_module("torch").cuda = cuda
    log(2, 4.0)
    assert points(reader)["megatron.training.memory_allocated_gb"] == 1.5
    cuda.is_available = lambda: False
    assert state.peak_device_memory_gib() is None
