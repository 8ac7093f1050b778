import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from megatron_autoinstrument.common import groups
from megatron_autoinstrument.process.ranks import Rank
from megatron_autoinstrument.settings import config, declarative
from megatron_autoinstrument.settings.table import SETTINGS


def read():
    return config.from_environment(Rank(0, 8, 0))


def test_defaults(alone):
    settings = config.from_environment(alone)
    assert settings == config.Config(
        enabled=None,
        rank_strategy="single_rank",
        export_rank=-1,
        export_sample_rate=1.0,
        traces_enabled=True,
        span_groups=groups.PRESETS["default"],
        metrics_enabled=True,
        exception_text=False,
        logs_enabled=False,
        trace_scope="step",
        sampling_strategy=None,
        ab=0,
        service_name=None,
        exporter=None,
    )


NONSENSE = {
    "ENABLED": "maybe",
    "RANK_STRATEGY": "some_ranks",
    "EXPORT_RANK": "last",
    "EXPORT_SAMPLE_RATE": "nan",
    "TRACES_ENABLED": "2",
    "METRICS_ENABLED": "y",
    "LOGS_ENABLED": "some",
    "SAMPLING_STRATEGY": "often",
    "SPAN_GROUPS": "default,steps",
    "EXPORTER": "zipkin",
    "EXCEPTION_TEXT": "full",
    "TRACE_SCOPE": "job",
    "AB": "3",
}


def test_each_row_that_is_read_is_a_field_and_has_been_tried_with_nonsense():
    read = [setting for setting in SETTINGS.values() if setting.kind]
    assert {setting.field for setting in read} == {field.name for field in fields(config.Config)}
    assert {setting.name for setting in read if setting.variables} == {f"MEGATRON_OTEL_{name}" for name in NONSENSE}


@pytest.mark.parametrize(("name", "value"), NONSENSE.items())
def test_a_bad_value_is_named_once_with_what_is_allowed_and_the_default_stands(monkeypatch, caplog, name, value):
    defaults = read()
    monkeypatch.setenv(f"MEGATRON_OTEL_{name}", value)
    assert read() == read() == defaults
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"MEGATRON_OTEL_{name}={value!r} is ignored. Allowed: ")


def test_only_the_first_rank_warns(monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_OTEL_EXPORTER", "zipkin")
    config.from_environment(Rank(1, 2, 1))
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "value", "field", "parsed"),
    [
        ("ENABLED", "Yes", "enabled", True),
        ("ENABLED", "off", "enabled", False),
        ("RANK_STRATEGY", "all_ranks", "rank_strategy", "all_ranks"),
        ("EXPORT_STRATEGY", "sampled", "rank_strategy", "sampled"),
        ("EXPORT_RANK", "3", "export_rank", 3),
        ("EXPORT_SAMPLE_RATE", "0.25", "export_sample_rate", 0.25),
        ("TRACES_ENABLED", "0", "span_groups", frozenset()),
        ("METRICS_ENABLED", "0", "metrics_enabled", False),
        ("LOGS_ENABLED", "1", "logs_enabled", True),
        ("SAMPLING_STRATEGY", "rank_aware", "sampling_strategy", "rank_aware"),
        ("SPAN_GROUPS", "step", "span_groups", frozenset({"step"})),
        ("EXPORTER", "console", "exporter", "console"),
        ("EXCEPTION_TEXT", "1", "exception_text", True),
        ("TRACE_SCOPE", "run", "trace_scope", "run"),
        ("AB", "20", "ab", 20),
    ],
)
def test_each_variable_and_its_fallback(monkeypatch, name, value, field, parsed):
    monkeypatch.setenv(f"NEMO_LENS_{name}", value)
    assert getattr(read(), field) == parsed
    monkeypatch.delenv(f"NEMO_LENS_{name}")
    monkeypatch.setenv(f"MEGATRON_OTEL_{name}", value)
    assert getattr(read(), field) == parsed


def test_megatrons_own_name_beats_its_alias_and_the_fallbacks(monkeypatch):
    monkeypatch.setenv("NEMO_LENS_RANK_STRATEGY", "first_rank_per_node")
    monkeypatch.setenv("MEGATRON_OTEL_EXPORT_STRATEGY", "sampled")
    assert read().rank_strategy == "sampled"
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "all_ranks")
    assert read().rank_strategy == "all_ranks"


def test_the_first_place_that_has_a_setting_decides_it(monkeypatch, caplog):
    file = {"rank_strategy": "c", "export_strategy": "d"}
    monkeypatch.setattr(declarative, "is_set", lambda: True)
    monkeypatch.setattr(declarative, "settings", lambda: file)
    config.given.update(rank_strategy="a", export_strategy="b")
    variables = [f"{of}_{name}_STRATEGY" for of in ("MEGATRON_OTEL", "NEMO_LENS") for name in ("RANK", "EXPORT")]
    for name in variables:
        monkeypatch.setenv(name, "no strategy")
    for place in (config.given, file):
        for name in list(place):
            read()
            del place[name]
    for name in variables:
        read()
        monkeypatch.delenv(name)
    read()
    assert [record.getMessage().partition(" is ignored")[0] for record in caplog.records] == [
        "instrument(rank_strategy=…)='a'",
        "instrument(export_strategy=…)='b'",
        "rank_strategy in OTEL_CONFIG_FILE='c'",
        "export_strategy in OTEL_CONFIG_FILE='d'",
        *(f"{name}='no strategy'" for name in variables),
    ]


def test_what_is_no_setting_is_named_with_those_that_there_are(caplog):
    config.take({"metrics_enabled": False, "service_name": "llama"})
    assert read().metrics_enabled is False
    (record,) = caplog.records
    assert record.getMessage() == (
        "instrument(service_name=…) is ignored: there is no such setting. Allowed: ab, enabled, exception_text, "
        "export_rank, export_sample_rate, export_strategy, exporter, logs_enabled, metrics_enabled, rank_strategy, "
        "sampling_strategy, span_groups, trace_scope, traces_enabled."
    )


def test_an_empty_value_is_none(monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", " ")
    assert read().span_groups == groups.PRESETS["default"]
    assert not caplog.records


def test_the_sdks_own_switch_turns_everything_off(monkeypatch):
    monkeypatch.setenv("MEGATRON_OTEL_ENABLED", "1")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert read().enabled is False


def test_a_flag_beats_the_variables(monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_OTEL_SPAN_GROUPS", "step")
    config.flags["--otel-span-groups"] = "job,optimizer"
    assert read().span_groups == {"job", "optimizer"}
    config.flags["--otel-span-groups"] = "steps"
    assert read().span_groups == groups.PRESETS["default"]
    assert caplog.records[0].getMessage().startswith("--otel-span-groups='steps' is ignored. Allowed: presets")


def test_a_bad_strategy_lists_the_known_ones(monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_OTEL_RANK_STRATEGY", "some_ranks")
    read()
    assert "Allowed: single_rank, all_ranks, sampled, first_rank_per_node." in caplog.records[0].getMessage()


def test_what_teaches_megatron_the_flags_imports_nothing_that_may_be_broken():
    code = (
        "import sys\nfrom megatron_autoinstrument.settings import flags\n"
        "print({name.partition('.')[0] for name in sys.modules} & {'opentelemetry', 'wrapt'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout == "set()\n"
