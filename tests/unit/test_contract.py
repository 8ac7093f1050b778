"""The names that users rely on, held against the project's copy of the contract; the README's tables against them."""

import re
from pathlib import Path

import pytest

from megatron_autoinstrument import environment_variables, groups, metrics, semconv

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on
CONTRACT = tomllib.loads((ROOT / "fixtures" / "telemetry.toml").read_text())
UNPROVEN = tomllib.loads((ROOT / "fixtures" / "unproven.toml").read_text())
BEYOND = {"megatron.save_checkpoint.async_write", "megatron.data_loading"}
VARIABLES_BEYOND = {"MEGATRON_OTEL_TRACE_SCOPE", "MEGATRON_OTEL_AB", "MEGATRON_OTEL_EXCEPTION_TEXT"}


def test_the_groups_are_the_contracts():
    assert CONTRACT["groups"] == groups.GROUPS


def test_the_presets_are_the_contracts():
    for name, members in CONTRACT["presets"].items():
        assert groups.PRESETS[name] == (frozenset(groups.GROUPS) if name == "all" else frozenset(members))


def test_the_spans_and_their_groups_are_the_contracts():
    documented = {span["name"]: span["group"] for span in CONTRACT["span"]}
    assert {name: group for name, group in semconv.SPAN_GROUPS.items() if name not in BEYOND} == documented


def test_what_is_unproven_is_documented_and_says_why():
    for span in UNPROVEN["span"]:
        assert span["name"] in semconv.SPAN_GROUPS
        assert span["why"]
        assert span["instead"]


def test_the_readme_has_a_row_for_each_span():
    for name, group in semconv.SPAN_GROUPS.items():
        assert f"| `{name}` | `{group}` |" in README


def test_the_readme_has_a_row_for_each_attribute_and_names_the_spans_that_carry_it():
    rows = dict(re.findall(r"^\| `([\w.]+)` \| (`.*?`) \|", README, re.MULTILINE))
    carriers = {}
    for span in CONTRACT["span"]:
        for attribute in span.get("attributes", {}):
            carriers.setdefault(attribute, []).append(f"`{span['name'].removeprefix('megatron.')}`")
    for attribute, spans in carriers.items():
        assert set(rows[attribute].split(", ")) >= set(spans)
    for name, value in vars(semconv).items():
        if name.isupper() and isinstance(value, str):
            assert value in rows


def test_the_readme_has_each_resource_key_and_each_flag():
    for key in (*CONTRACT["resource"], *CONTRACT["flags"]):
        assert f"`{key}" in README, key


def test_the_readme_and_the_contract_have_each_variable_that_is_read():
    for name in (name for name in vars(environment_variables) if name.isupper()):
        assert name in CONTRACT["environment"] or name in VARIABLES_BEYOND
        assert name in README


def test_the_metrics_are_the_contracts_and_the_readme_has_a_row_for_each():
    documented = {metric["name"]: (metric["type"], metric.get("unit", "")) for metric in CONTRACT["metric"]}
    assert {name: (made.kind, made.unit) for name, made in metrics.INSTRUMENTS.items()} == documented
    for name, (kind, _) in documented.items():
        assert f"| `{name}` | {kind} |" in README


def test_each_situation_names_tests_that_are_there():
    files = list((ROOT / "tests").glob("*/test_*.py"))
    there = {path.name for path in files}.union(
        *(re.findall(r"^def (test_\w+)", path.read_text(), re.M) for path in files)
    )
    rows = re.findall(r"^\| .* \| .* \| (.*) \|$", (ROOT / "docs" / "situations.md").read_text(), re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(test_\w+(?:\.py)?)`", row)]
    assert len(named) > 50
    assert set(named) <= there
