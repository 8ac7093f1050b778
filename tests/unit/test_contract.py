"""The names that users rely on, held against the project's copy of the contract; the tables in docs/ against them."""

import fnmatch
import re
from pathlib import Path

import pytest

from megatron_autoinstrument.common import groups, semconv
from megatron_autoinstrument.export import metrics
from megatron_autoinstrument.settings import flags
from megatron_autoinstrument.settings.table import SETTINGS
from megatron_autoinstrument.targets import SEAMS

ROOT = Path(__file__).parents[2]
SPANS_PAGE = (ROOT / "docs" / "spans.md").read_text()
SETTINGS_PAGE = (ROOT / "docs" / "settings.md").read_text()
SITUATIONS = (ROOT / "docs" / "situations.md").read_text()

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
CONTRACT = tomllib.loads((ROOT / "fixtures" / "telemetry.toml").read_text())
UNPROVEN = tomllib.loads((ROOT / "fixtures" / "unproven.toml").read_text())
BEYOND = {"megatron.save_checkpoint.async_write", "megatron.data_loading"}
METRICS_BEYOND = {"megatron.training.nonfinite_iters"}
VARIABLES_BEYOND = {"MEGATRON_OTEL_TRACE_SCOPE", "MEGATRON_OTEL_AB", "MEGATRON_OTEL_EXCEPTION_TEXT"}
# Unset, something else may decide these first: how the run is started, and OpenTelemetry's own variables.
DEFAULTS_ELSEWHERE = {"MEGATRON_OTEL_ENABLED": "0", "MEGATRON_OTEL_EXPORTER": "otlp"}


def test_the_groups_are_the_contracts():
    assert CONTRACT["groups"] == groups.GROUPS


def test_the_presets_are_the_contracts():
    for name, members in CONTRACT["presets"].items():
        assert groups.PRESETS[name] == (frozenset(groups.GROUPS) if name == "all" else frozenset(members))


def test_the_spans_and_their_groups_are_the_contracts():
    documented = {span["name"]: span["group"] for span in CONTRACT["span"]}
    assert {name: group for name, group in semconv.SPAN_GROUPS.items() if name not in BEYOND} == documented


def test_what_is_unproven_exists_and_is_shown_with_a_reason_and_what_is_tried_instead():
    assert {span["name"] for span in UNPROVEN["span"]} <= semconv.SPAN_GROUPS.keys()
    assert {metric["name"] for metric in UNPROVEN["metric"]} <= metrics.INSTRUMENTS.keys()
    functions = [f"{seam.module}:{seam.path}" for seam in SEAMS]
    for name in (name for entry in UNPROVEN["function"] for name in entry["names"]):
        assert fnmatch.filter(functions, name), name
    rows = [row.strip("| ").split(" | ") for row in SITUATIONS.partition("## What no run")[2].splitlines()]
    entries = [*UNPROVEN["span"], *UNPROVEN["metric"], *UNPROVEN["function"]]
    for entry in entries:
        shown = ", ".join(f"`{name}`" for name in entry.get("names", [entry.get("name")]))
        assert [shown, entry["why"], re.sub(r"(test_\w+(\.py)?)", r"`\1`", entry["instead"])] in rows, shown
    assert len([row for row in rows if len(row) == 3 and row[0].startswith("`")]) == len(entries)


def test_there_is_a_row_for_each_span():
    for name, group in semconv.SPAN_GROUPS.items():
        assert f"| `{name}` | `{group}` |" in SPANS_PAGE


def test_there_is_a_row_for_each_attribute_and_it_names_the_spans_that_carry_it():
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (`.*?`) \|", SPANS_PAGE, re.MULTILINE))
    carriers = {}
    for span in CONTRACT["span"]:
        for attribute in span.get("attributes", {}):
            carriers.setdefault(attribute, []).append(f"`{span['name'].removeprefix('megatron.')}`")
    for attribute, spans in carriers.items():
        assert set(rows[attribute].split(", ")) >= set(spans)
    for name, value in vars(semconv).items():
        if name.isupper() and isinstance(value, str):
            assert value in rows


def test_each_resource_key_and_each_flag_is_named():
    for key in CONTRACT["resource"]:
        assert f"`{key}" in SPANS_PAGE, key
    for key in CONTRACT["flags"]:
        assert f"`{key}" in SETTINGS_PAGE, key


def test_the_variables_their_defaults_and_their_fallbacks_are_the_contracts():
    settings = [setting for setting in SETTINGS.values() if not setting.name.startswith("OTEL_")]
    defaults = {setting.name: setting.default for setting in settings} | {
        setting.alias: "" for setting in settings if setting.alias
    }
    assert all(not defaults[name] for name in DEFAULTS_ELSEWHERE)
    defaults |= DEFAULTS_ELSEWHERE
    assert {name: defaults[name] for name in defaults.keys() - VARIABLES_BEYOND} == CONTRACT["environment"]
    for setting in (setting for setting in settings if setting.kind):
        names = [setting.name, *([setting.alias] if setting.alias else [])]
        assert setting.variables == [*names, *(name.replace("MEGATRON_OTEL_", "NEMO_LENS_") for name in names)]


def test_the_flags_are_the_contracts():
    with_value = {setting.flag: setting.flag in flags.WITH_VALUE for setting in SETTINGS.values() if setting.flag}
    assert with_value == {flag: kind != "flag" for flag, kind in CONTRACT["flags"].items()}


def test_the_table_of_variables_is_that_of_the_settings():
    rows = re.search(r"^\| Variable \| Default \| \|\n\|---\|---\|---\|\n((?:\|.*\n)+)", SETTINGS_PAGE, re.MULTILINE)[1]
    assert rows.splitlines() == [
        f"| `{setting.name}` |{f' `{setting.default}`' if setting.default else ''} | {setting.meaning}"
        f"{f'; also read as `{setting.alias}`' if setting.alias else ''} |"
        for setting in SETTINGS.values()
    ]


def test_the_metrics_are_the_contracts_and_there_is_a_row_for_each():
    documented = {metric["name"]: (metric["type"], metric.get("unit", "")) for metric in CONTRACT["metric"]}
    made = {name: (instrument.kind, instrument.unit) for name, instrument in metrics.INSTRUMENTS.items()}
    assert {name: made[name] for name in made.keys() - METRICS_BEYOND} == documented
    for name, (kind, _) in made.items():
        assert f"| `{name}` | {kind} |" in SPANS_PAGE


def test_each_situation_names_tests_that_are_there():
    files = list((ROOT / "tests").glob("*/test_*.py"))
    there = {path.name for path in files}.union(
        *(re.findall(r"^def (test_\w+)", path.read_text(), re.M) for path in files)
    )
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", SITUATIONS, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(test_\w+(?:\.py)?)`", row)]
    assert len(named) > 50
    assert set(named) <= there
