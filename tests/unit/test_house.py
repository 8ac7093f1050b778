"""The house: imports run downwards only, whether they are made at the top, in a function or for types alone."""

import ast
import runpy
from pathlib import Path
from types import SimpleNamespace

import megatron_autoinstrument
from megatron_autoinstrument.common import semconv
from megatron_autoinstrument.megatron.patching import Patcher

REPOSITORY = Path(__file__).parents[2]
MODULES = SimpleNamespace(**runpy.run_path(str(REPOSITORY / "docs" / "modules.py")))
ROOT = Path(megatron_autoinstrument.__file__).parent
SOURCES = {MODULES.module_of(str(path.relative_to(ROOT.parent))): path.read_text() for path in ROOT.rglob("*.py")}


def test_no_import_runs_upwards():
    floor = {module: -MODULES.ROWS.index(MODULES.row_of(module)) for module in SOURCES}
    found = list(MODULES.imports(SOURCES))
    assert len(found) > 150
    assert [f"{module} imports {other}" for module, other in found if floor[other] > floor[module]] == []


def test_each_package_says_what_it_is_for():
    for package in filter(None, MODULES.ROWS):
        assert ast.get_docstring(ast.parse(SOURCES[package])), package


def test_the_seam_that_the_guide_adds_is_recorded(recorder, exporter, fake_module, monkeypatch):
    _, _, code = (REPOSITORY / "CONTRIBUTING.md").read_text().partition("```python\n")
    monkeypatch.setitem(semconv.SPAN_GROUPS, "megatron.takes_long", "layer")
    namespace = {}
    exec(code.partition("```")[0], namespace)
    megatron = fake_module("megatron.core.my_module", "def takes_long(size): return 2 * size")
    patcher = Patcher()
    patcher.install(namespace["SEAMS"], frozenset({"layer"}), recorder)
    try:
        assert megatron.takes_long(7) == 14
    finally:
        patcher.uninstall()
    recorder.drain()
    (span,) = exporter.get_finished_spans()
    assert (span.name, dict(span.attributes)) == ("megatron.takes_long", {"megatron.size": 7})
