"""Nothing is in the contract that no real run of Megatron has produced, and nothing is wrapped that none has called,
fixtures/unproven.toml excepted; and nothing of ours arrives that is neither in the contract nor in docs/spans.md.
"""

import re
from fnmatch import fnmatch
from functools import cache

import pytest
import test_flags_and_logs
import test_metrics
import test_resource
import test_ways_in
import tomllib
from harness import FIXTURES, INSTRUMENT, PLAIN, PTH, ROOT, SCRIPTS, train
from test_spans_of_a_run import SCENARIOS, run_of

from megatron_autoinstrument.targets import SEAMS

CONTRACT = tomllib.loads((FIXTURES / "telemetry.toml").read_text())
UNPROVEN = tomllib.loads((FIXTURES / "unproven.toml").read_text())
UNPROVEN_FUNCTIONS = [name for entry in UNPROVEN["function"] for name in entry["names"]]
FUNCTIONS = [f"{seam.module}:{seam.path}" for seam in SEAMS]
SPANS_PAGE = (ROOT / "docs" / "spans.md").read_text()
SPANS = {span["name"]: span for span in CONTRACT["span"]}
TYPES = {"str": str, "int": int, "float": float, "bool": bool}


@cache
def spans():
    runs = [*map(run_of, SCENARIOS), test_metrics.run_of(INSTRUMENT, "--log-throughput")]
    return [span for run in runs for span in run.spans]


@cache
def configured():
    """A run in which many variables say something that can be told from any other."""
    run = train(
        "--pipeline-model-parallel-size",
        "2",
        way=PTH,
        script=SCRIPTS / "telling_seams.py",
        environment={
            "MEGATRON_OTEL_RANK_STRATEGY": "single_rank",
            "MEGATRON_OTEL_EXPORT_RANK": "0",
            "MEGATRON_OTEL_SPAN_GROUPS": "job,optimizer",
            "MEGATRON_OTEL_LOGS_ENABLED": "1",
            "OTEL_LOGS_EXPORTER": "otlp",
            "NEMO_LENS_RUN_ID": "run-7",
            "NEMO_LENS_USER_ID": "me",
        },
    )
    assert run.status == 0, run.output[-3000:]
    return run


@cache
def sampled(rate, **more):
    """A run of which a share of the ranks records; 0.618 is rank 1's place among them."""
    run = train(
        "--pipeline-model-parallel-size",
        "2",
        way=PTH,
        environment={
            "MEGATRON_OTEL_EXPORT_STRATEGY": "sampled",
            "MEGATRON_OTEL_EXPORT_SAMPLE_RATE": rate,
            **more,
        },
    )
    assert run.status == 0, run.output[-3000:]
    return run


# Variable or flag: what a real run shows of it.
EFFECTS = {
    "MEGATRON_OTEL_ENABLED": lambda: (
        configured().spans
        and not [span for span in test_ways_in.killed(PTH).spans if span.name.startswith("megatron.")]
    ),
    "MEGATRON_OTEL_RANK_STRATEGY": lambda: configured().ranks == [0] and run_of("pipeline, saving").ranks == [0, 1],
    "MEGATRON_OTEL_EXPORT_RANK": lambda: configured().ranks == [0] and test_flags_and_logs.flagged(PLAIN).ranks == [1],
    "MEGATRON_OTEL_EXPORT_STRATEGY": lambda: sampled("1").ranks == [0, 1],
    "MEGATRON_OTEL_EXPORT_SAMPLE_RATE": lambda: sampled("0.5").ranks == [0],
    "MEGATRON_OTEL_SAMPLING_STRATEGY": lambda: (
        sampled("1", MEGATRON_OTEL_SAMPLING_STRATEGY="rank_aware", OTEL_TRACES_SAMPLER="always_off").spans
    ),
    "MEGATRON_OTEL_TRACES_ENABLED": lambda: not test_metrics.without("TRACES").spans,
    "MEGATRON_OTEL_METRICS_ENABLED": lambda: not test_metrics.without("METRICS").points,
    "MEGATRON_OTEL_LOGS_ENABLED": lambda: configured().logs and not test_metrics.without("TRACES").logs,
    "MEGATRON_OTEL_SPAN_GROUPS": lambda: (
        set(configured().counts(0)) == {"megatron.pretrain", "megatron.train", "megatron.optimizer_step"}
    ),
    "MEGATRON_OTEL_EXPORTER": lambda: not test_ways_in.on_the_console().spans,
    "NEMO_LENS_RUN_ID": lambda: {span.resource["nemo.run.id"] for span in configured().spans} == {"run-7"},
    "NEMO_LENS_USER_ID": lambda: {span.resource["nemo.user.id"] for span in configured().spans} == {"me"},
    "--otel-enabled": lambda: test_flags_and_logs.flagged(PLAIN).spans,
    "--otel-service-name": lambda: (
        {span.resource["service.name"] for span in test_flags_and_logs.flagged(PLAIN).spans} == {"llama"}
    ),
    "--otel-span-groups": lambda: "megatron.train_step" in test_flags_and_logs.flagged(PLAIN).counts(1),
}


@pytest.mark.parametrize("name", SPANS)
def test_each_span_comes_with_each_of_its_attributes(name):
    found = [span for span in spans() if span.name == name]
    assert bool(found) == (name not in {span["name"] for span in UNPROVEN["span"]})
    for attribute, kind in SPANS[name].get("attributes", {}).items():
        values = {type(span.attributes[attribute]) for span in found if attribute in span.attributes}
        assert values == {TYPES[kind.split()[0]]}, attribute


def test_what_else_arrives_is_documented():
    for span in spans():
        documented = SPANS.get(span.name, {}).get("attributes", {})
        for name in {span.name, *span.attributes} - SPANS.keys() - documented.keys():
            assert f"`{name}`" in SPANS_PAGE, (span.name, name)


@pytest.mark.parametrize("name", [metric["name"] for metric in CONTRACT["metric"]])
def test_each_metric_comes_and_measures_something(name):
    runs = [test_metrics.run_of(INSTRUMENT, *options) for options in (("--log-throughput",), test_metrics.OVERFLOWING)]
    values = [point.value for run in runs for point in run.points if point.name == name]
    assert values
    assert any(values) == (name not in {metric["name"] for metric in UNPROVEN["metric"]})


def test_what_is_wrapped_is_called_in_a_run_or_listed_as_unproven():
    runs = [*map(run_of, SCENARIOS), test_metrics.run_of(INSTRUMENT, "--log-throughput"), configured()]
    called = {name for run in runs for line in re.findall(r"^CALLED (.*)$", run.output, re.M) for name in line.split()}
    listed = {name for name in FUNCTIONS if any(fnmatch(name, pattern) for pattern in UNPROVEN_FUNCTIONS)}
    assert called | listed == set(FUNCTIONS)
    assert not called & listed


@pytest.mark.parametrize("key", CONTRACT["resource"])
def test_each_resource_key_comes(key):
    run = test_resource.run_of("opentelemetry-instrument")
    assert all(key in record.resource for record in [*run.spans, *run.points])


@pytest.mark.parametrize("name", [*CONTRACT["environment"], *CONTRACT["flags"]])
def test_each_variable_and_each_flag_has_its_effect(name):
    assert EFFECTS[name]()
