"""The metrics and the step's attributes of a real run equal what Megatron printed."""

import re
from functools import cache

import pytest
from google.protobuf.json_format import MessageToJson
from harness import EVERYTHING, INSTRUMENT, PTH, SCRIPTS, plain_losses, train

PIPELINE = ("--pipeline-model-parallel-size", "2")
OFTEN = {**EVERYTHING, "OTEL_METRICS_EXPORTER": "otlp", "OTEL_METRIC_EXPORT_INTERVAL": "10"}

# Every iteration is skipped: what is so scaled overflows.
OVERFLOWING = ("--fp16", "--initial-loss-scale", "1e30", "--hysteresis", "1")

# What a line of training_log says, and how it prints it.
PRINTED = {
    "iteration": (r"iteration +(\d+)/", "{:d}"),
    "megatron.training.step_duration_ms": (r"elapsed time per iteration \(ms\): (\S+)", "{:.1f}"),
    "megatron.training.throughput_tflops": (r"throughput per GPU \(TFLOP/s/GPU\): (\S+)", "{:.1f}"),
    "megatron.training.learning_rate": (r"learning rate: (\S+)", "{:.6E}"),
    "megatron.training.loss": (r"lm loss: (\S+)", "{:.6E}"),
    "megatron.training.grad_norm": (r"grad norm: (\S+)", "{:.3f}"),
    "global batch size": (r"global batch size: +(\d+)", "{:d}"),
    "skipped": (r"number of skipped iterations: +(\d+)", "{:d}"),
}


@cache
def run_of(way, *options):
    run = train(*PIPELINE, *options, way=way, script=SCRIPTS / "telling_seams.py", environment=OFTEN)
    assert run.status == 0, run.output[-3000:]
    return run


def lines(run):
    found = []
    for line in run.output.splitlines():
        if "elapsed time per iteration" in line:
            found.append(
                {name: match[1] for name, (pattern, _) in PRINTED.items() if (match := re.search(pattern, line))}
            )
    return found


def series(run, rank, name):
    """The values that a metric took on a rank, one after the other; of a histogram, those that were added to it."""
    points = [point for point in run.points if point.name == name and point.resource["dl.rank"] == rank]
    values = [(point.count, point.value) for point in points]
    changes = [value for at, value in enumerate(values) if at == 0 or value != values[at - 1]]
    if points and points[0].kind == "histogram":
        assert [count for count, _ in changes] == list(range(1, len(changes) + 1)), "exported too seldom for this test"
        return [value - (changes[at - 1][1] if at else 0.0) for at, (_, value) in enumerate(changes)]
    return [value for _, value in changes]


@pytest.mark.parametrize("way", [INSTRUMENT, PTH])
def test_each_logged_iteration_gives_the_values_that_megatron_printed(way):
    run = run_of(way, "--log-throughput")
    printed = lines(run)
    assert [line["iteration"] for line in printed] == ["1", "2", "3", "4", "5", "6"]
    for name in (
        "megatron.training.step_duration_ms",
        "megatron.training.loss",
        "megatron.training.grad_norm",
        "megatron.training.learning_rate",
    ):
        form = PRINTED[name][1]
        assert [form.format(value) for value in series(run, 1, name)] == [line[name] for line in printed], name
    throughput = PRINTED["megatron.training.throughput_tflops"][1].format(
        series(run, 1, "megatron.training.throughput_tflops")[-1]
    )
    assert throughput == printed[-1]["megatron.training.throughput_tflops"]
    for tokens, line in zip(series(run, 1, "megatron.training.tokens_per_sec"), printed, strict=True):
        expected = int(line["global batch size"]) * 64 / float(line["megatron.training.step_duration_ms"]) * 1e3
        assert tokens == pytest.approx(expected, rel=0.01)
    assert run.losses == plain_losses(*PIPELINE)


def test_every_metric_of_the_contract_arrives_with_its_unit_and_type_and_the_resource():
    run = run_of(INSTRUMENT, "--log-throughput")
    got = {point.name: point for point in run.points if point.resource["dl.rank"] == 1}
    assert {name: (point.kind, point.unit) for name, point in got.items() if name.startswith("megatron.")} == {
        "megatron.training.step_duration_ms": ("histogram", "ms"),
        "megatron.training.loss": ("gauge", ""),
        "megatron.training.throughput_tflops": ("gauge", ""),
        "megatron.training.tokens_per_sec": ("gauge", ""),
        "megatron.training.grad_norm": ("gauge", ""),
        "megatron.training.skipped_iters": ("sum", ""),
        "megatron.training.learning_rate": ("gauge", ""),
        "megatron.training.memory_allocated_gb": ("gauge", ""),
    }
    bounds = got["megatron.training.step_duration_ms"].bounds
    assert (bounds[0], bounds[-1]) == (10, 600_000)
    span = next(span for span in run.spans if span.resource["dl.rank"] == 1)
    assert got["megatron.training.loss"].resource == span.resource


def test_a_rank_that_holds_no_loss_records_none():
    run = run_of(INSTRUMENT, "--log-throughput")
    names = {point.name for point in run.points if point.resource["dl.rank"] == 0}
    assert "megatron.training.grad_norm" in names
    assert "megatron.training.loss" not in names


def test_steps_carry_the_loss_and_the_gradient_norm_that_megatron_printed():
    run = run_of(INSTRUMENT, "--log-throughput")
    printed = lines(run)
    steps = [span for span in run.of(1) if span.name == "megatron.train_step"]
    assert ["{:.6E}".format(step.attributes["megatron.loss"]) for step in steps] == [
        line["megatron.training.loss"] for line in printed
    ]
    assert [f"{step.attributes['megatron.grad_norm']:.3f}" for step in steps] == [
        line["megatron.training.grad_norm"] for line in printed
    ]
    others = [span for span in run.of(0) if span.name == "megatron.train_step"]
    assert all("megatron.loss" not in step.attributes for step in others)
    assert all("megatron.grad_norm" in step.attributes for step in others)


def test_over_a_longer_interval_the_averages_are_megatrons_and_only_logged_steps_carry_them():
    run = run_of(INSTRUMENT, "--log-interval", "3")
    printed = lines(run)
    assert [line["iteration"] for line in printed] == ["1", "3", "6"]  # the first, too, is logged from core 0.16 on
    for name in ("megatron.training.step_duration_ms", "megatron.training.loss", "megatron.training.learning_rate"):
        form = PRINTED[name][1]
        assert [form.format(value) for value in series(run, 1, name)] == [line[name] for line in printed], name
    steps = {span.attributes["megatron.iteration"]: span for span in run.of(1) if span.name == "megatron.train_step"}
    assert [number for number, step in sorted(steps.items()) if "megatron.loss" in step.attributes] == [1, 3, 6]


def test_skipped_iterations_are_counted_once_and_have_neither_loss_nor_norm():
    run = run_of(INSTRUMENT, *OVERFLOWING)
    printed = lines(run)
    # From core 0.16 on the first iteration is logged for itself, and counted again in the first interval.
    assert [int(line["skipped"]) for line in printed] == [1, 2, 1, 1, 1, 1]
    assert max(point.value for point in run.points if point.name == "megatron.training.skipped_iters") == 6
    durations = series(run, 1, "megatron.training.step_duration_ms")
    assert [f"{value:.1f}" for value in durations] == [line["megatron.training.step_duration_ms"] for line in printed]
    assert not series(run, 1, "megatron.training.loss")
    assert not series(run, 1, "megatron.training.grad_norm")
    for span in run.spans:
        if span.name == "megatron.optimizer_step":
            assert span.attributes == {"megatron.update_successful": False}
        if span.name == "megatron.train_step":
            assert not {"megatron.loss", "megatron.grad_norm"} & set(span.attributes)


def test_a_loss_that_is_not_finite_is_said_to_be_so_and_leaves_on_no_signal():
    options = ("--no-check-for-nan-in-loss-and-grad", "--train-iters", "4", "--global-batch-size", "2")
    logs = {"MEGATRON_OTEL_LOGS_ENABLED": "1", "OTEL_LOGS_EXPORTER": "otlp"}
    run = train(*options, ranks=1, way=PTH, script=SCRIPTS / "loss_is_nan.py", environment={**OFTEN, **logs})
    assert run.status == 0, run.output[-3000:]
    assert run.output.count("grad norm: nan") == 2
    sent = [MessageToJson(request) for requests in run.requests.values() for request in requests]
    assert len(sent) > 3
    assert not [text for text in sent if re.search("NaN|Infinity", text)]
    steps = [span.attributes for span in run.spans if span.name == "megatron.train_step"]
    assert ["megatron.loss" in step for step in steps] == [True, True, False, False]
    assert [step.get("megatron.loss.finite") for step in steps] == [None, None, False, False]
    assert [step.get("megatron.grad_norm.finite") for step in steps] == [None, None, False, False]
    updates = [span.attributes for span in run.spans if span.name == "megatron.optimizer_step"]
    assert [update.get("megatron.grad_norm.finite") for update in updates] == [None, None, False, False]
    assert max(point.value for point in run.points if point.name == "megatron.training.nonfinite_iters") == 2
    latest = max(point.time for point in run.points)
    assert "megatron.training.learning_rate" in {point.name for point in run.points if point.time == latest}
    assert "megatron.training.loss" not in {point.name for point in run.points if point.time == latest}
    (log, *_) = [log for log in run.logs if log.logger == "user"]
    assert log.body == "bad loss"
    assert "loss.finite" in str(sent)


@cache
def without(signal):
    run = train(*PIPELINE, way=PTH, environment={**OFTEN, f"MEGATRON_OTEL_{signal}_ENABLED": "0"})
    assert run.status == 0, run.output[-3000:]
    return run


def test_metrics_can_be_turned_off():
    run = without("METRICS")
    assert not run.points
    assert run.spans


def test_metrics_come_without_spans():
    run = without("TRACES")
    assert not run.spans
    assert {point.name for point in run.points} >= {"megatron.training.loss", "megatron.training.step_duration_ms"}
