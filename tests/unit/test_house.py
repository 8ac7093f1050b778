"""The house: imports run downwards only, whether they are made at the top, in a function or for types alone."""

import ast
from pathlib import Path

import megatron_autoinstrument
from megatron_autoinstrument.common import semconv
from megatron_autoinstrument.megatron.patching import Patcher

ROOT = Path(megatron_autoinstrument.__file__).parent
FLOORS = ("common", "process", "settings", "megatron", "recording", "export", "targets", "", "tools")
"""The packages from the ground up; "" is the ways in, beside which only `version` may be imported from anywhere."""


def _floor(module):
    package = module.partition(".")[0]
    if package in ("version", ""):
        return 0  # the package itself imports the ways in only when they are asked for
    return FLOORS.index(package if package in FLOORS else "")


def _imports():
    """(module, imported module), both without the package's name."""
    for path in ROOT.rglob("*.py"):
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if module == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == ROOT.name:
                package = node.module.partition(".")[2]
                for name in (alias.name for alias in node.names):
                    inside = f"{package}.{name}".lstrip(".")
                    is_module = (ROOT / Path(*inside.split("."))).with_suffix(".py").exists()
                    yield module, inside if is_module else package


def test_no_import_runs_upwards():
    found = list(_imports())
    assert len(found) > 150
    upwards = [f"{module} imports {other}" for module, other in found if _floor(other) > _floor(module)]
    assert upwards == []


def test_each_package_says_what_it_is_for():
    for package in filter(None, FLOORS):
        assert ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())), package


def test_the_seam_that_the_guide_adds_is_recorded(recorder, exporter, fake_module, monkeypatch):
    _, _, code = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text().partition("```python\n")
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
