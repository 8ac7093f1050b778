"""Command-line flags on an unmodified Megatron, which knows none of them, and the export of its log records."""

import re
from functools import cache

import pytest
from harness import EVERYTHING, INSTRUMENT, OLDEST_OTEL, PLAIN, PTH, SCRIPTS, train

PIPELINE = ("--pipeline-model-parallel-size", "2")
OFF = {"MEGATRON_OTEL_ENABLED": "0"}


@cache
def flagged(way):
    run = train(
        *PIPELINE,
        "--otel-enabled",
        "--otel-span-groups=job,step",
        "--otel-service-name",
        "llama",
        way=way,
        environment={"MEGATRON_OTEL_SPAN_GROUPS": "all", "OTEL_SERVICE_NAME": "other"},
    )
    assert run.status == 0, run.output[-3000:]
    return run


@pytest.mark.parametrize("way", [INSTRUMENT, PLAIN])
def test_flags_turn_it_on_and_override_the_variables(way):
    """PLAIN: no wrapper and no variable; the flag alone is seen by the wheel's .pth line."""
    run = flagged(way)
    assert run.ranks == [1]
    assert run.counts(1) == {"megatron.pretrain": 1, "megatron.train": 1, "megatron.train_step": 6}
    assert {span.resource["service.name"] for span in run.spans} == {"llama"}
    assert "otel_span_groups ................................ job,step" in run.output  # Megatron lists its arguments


def test_the_scripts_own_defaults_set_them():
    run = train(ranks=1, script=SCRIPTS / "with_defaults.py", environment={})
    assert run.status == 0, run.output[-3000:]
    assert run.counts(0) == {"megatron.pretrain": 1, "megatron.train": 1, "megatron.train_step": 6}
    assert {span.resource["service.name"] for span in run.spans} == {"llama"}


@pytest.mark.parametrize(
    ("way", "environment"), [(INSTRUMENT, OFF), (PLAIN, OFF), (PTH, OFF), (INSTRUMENT, {"OTEL_SDK_DISABLED": "true"})]
)
def test_with_the_kill_switch_on_they_are_accepted_and_change_nothing(way, environment):
    run = train("--otel-enabled", "--otel-span-groups", "all", ranks=1, way=way, environment=environment)
    assert run.status == 0, run.output[-3000:]
    assert not [span for span in run.spans if span.name.startswith("megatron.")]


def test_other_flags_without_the_one_that_turns_it_on_change_nothing():
    run = train("--otel-span-groups", "all", ranks=1, way=PLAIN, environment={})
    assert run.status == 0, run.output[-3000:]
    assert not run.spans


@pytest.mark.parametrize("environment", [{}, OFF])
def test_megatrons_parser_lists_them(environment):
    run = train(ranks=1, way=INSTRUMENT, script=SCRIPTS / "print_usage.py", environment=environment)
    usage = " ".join(run.output.split())
    assert "[--otel-enabled] [--otel-service-name OTEL_SERVICE_NAME] [--otel-span-groups OTEL_SPAN_GROUPS]" in usage


LOGGING = {**EVERYTHING, "MEGATRON_OTEL_LOGS_ENABLED": "1", "OTEL_LOGS_EXPORTER": "otlp"}
WAYS = {
    "opentelemetry-instrument": {"way": INSTRUMENT},
    "opentelemetry-instrument, oldest release": {"way": INSTRUMENT, "otel": OLDEST_OTEL},
    "the variable alone": {"way": PTH},
}


@cache
def logged(name):
    run = train(*PIPELINE, environment=LOGGING, **WAYS[name])
    assert run.status == 0, run.output[-3000:]
    return run


@pytest.mark.parametrize("name", WAYS)
def test_megatrons_own_log_records_are_exported_with_the_span_they_were_written_in(name):
    run = logged(name)
    by_id = {span.span_id: span for span in run.spans}
    records = [record for record in run.logs if record.logger.startswith("megatron.core")]
    assert records
    inside = [by_id[record.span_id].name for record in records if record.span_id]
    # The rerun state machine warns about each evaluation, in it.
    assert "megatron.evaluate" in inside
    assert all(record.resource["service.instance.id"].startswith(record.resource["nemo.run.id"]) for record in records)
    assert not [record for record in run.logs if record.logger.startswith(("opentelemetry", "megatron_autoinstrument"))]


def test_what_is_printed_stays_as_it_is():
    """On one rank: the lines of several mix."""

    def printed(way, environment):
        output = train(ranks=1, way=way, environment=environment).output
        return re.findall(r"(?:INFO|WARNING|ERROR):megatron[\w.]*:(?!.*time)[^\n]*", output)

    plain = printed(PLAIN, OFF)
    assert plain
    assert printed(PTH, LOGGING) == plain


def test_by_default_no_logs_are_exported():
    run = train(ranks=1, way=PTH, environment={**EVERYTHING, "OTEL_LOGS_EXPORTER": "otlp"})
    assert run.status == 0, run.output[-3000:]
    assert not run.logs
