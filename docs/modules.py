"""Draws which module imports which, as an SVG: python docs/modules.py [REVISION] > modules.svg

Each row is a package, the ways in at the top, and one without packages has its modules in rows by how deep their
imports go. An import that runs downwards is grey; one that runs upwards, or to and fro between rows, is red.
"""

import ast
import subprocess
import sys
from html import escape
from itertools import groupby

PACKAGE = "megatron_autoinstrument"
# From the top, held by tests/unit/test_house.py. "" is the ways in, beside which `version` is for all to import.
ROWS = ("tools", "", "targets", "export", "recording", "megatron", "settings", "process", "common")
STYLE = (
    "text{font:11px sans-serif}.row{font-weight:bold}rect{fill:#eef;stroke:#88a}"
    ".down{stroke:#ccc}.up{stroke:#d22;stroke-width:2}"
)
WIDE, HIGH, LEFT, CHARACTER = 1500, 92, 120, 6.6


def module_of(path):
    """The module in a file of the package, without the package's name."""
    return path.removeprefix(f"{PACKAGE}/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def sources(revision):
    """Module: source, in the revision."""
    listing = ["git", "ls-tree", "-r", "--name-only", revision, PACKAGE]
    names = [name for name in subprocess.check_output(listing, text=True).split() if name.endswith(".py")]
    return {
        module_of(name): subprocess.check_output(["git", "show", f"{revision}:{name}"], text=True) for name in names
    }


def imports(modules):
    """(module, imported module), wherever in its file it imports that."""
    for module, source in modules.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
                package = node.module.partition(".")[2]
                for alias in node.names:
                    inside = f"{package}.{alias.name}".lstrip(".")
                    other = inside if inside in modules else package
                    if module not in ("__init__", other) and other in modules:
                        yield module, other


def rows(modules, edges):
    """The modules of each row, from the top, under the row's name."""
    names = sorted({*modules} - {"__init__"} - {row for row in ROWS if not any(one == row for one, _ in edges)})
    if "common" in modules:
        return [(row or "ways in", [module for module in names if row_of(module) == row]) for row in ROWS]
    depths = {}

    def depth(module, above=()):
        if module not in depths and module not in above:
            below = [depth(other, (*above, module)) for one, other in edges if one == module]
            depths[module] = 1 + max(below, default=-1)
        return depths.get(module, 0)

    by_depth = sorted(names, key=lambda module: -depth(module))
    return [(f"{number} below", list(found)) for number, found in groupby(by_depth, depth)]


def row_of(module):
    package = module.partition(".")[0]
    return "common" if module == "version" else package if package in ROWS else ""


def draw(modules):
    edges = sorted(set(imports(modules)))
    laid_out = rows(modules, edges)
    place, shapes = {}, []
    for number, (title, names) in enumerate(laid_out):
        top = 44 + HIGH * number
        shapes.append(f'<text x="4" y="{top}" class="row">{escape(title)}</text>')
        for index, name in enumerate(names):
            x = LEFT + (WIDE - 2 * LEFT) / max(1, len(names) - 1) * index if len(names) > 1 else WIDE / 2
            y = top + 18 * (index % 3)
            place[name] = (number, x, y)
            label = name.rpartition(".")[2]
            width = CHARACTER * len(label) + 10
            shapes.append(f'<rect x="{x - width / 2:.0f}" y="{y - 12}" width="{width:.0f}" height="16" rx="3"/>')
            shapes.append(f'<text x="{x:.0f}" y="{y}" text-anchor="middle">{escape(label)}</text>')
    lines = []
    for one, other in edges:
        if one in place and other in place:
            (row, x, y), (row_below, x_below, y_below) = place[one], place[other]
            kind = "up" if row_below < row else "down"
            lines.append(f'<line class="{kind}" x1="{x:.0f}" y1="{y}" x2="{x_below:.0f}" y2="{y_below}"/>')
    up = sum('class="up"' in line for line in lines)
    yield f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {60 + HIGH * len(laid_out)}">'
    yield f"<style>{STYLE}</style>"
    yield f'<text x="4" y="16">{len(place)} modules, {len(lines)} imports, {up} of them upwards</text>'
    yield from sorted(lines)  # red over grey
    yield from shapes
    yield "</svg>"


if __name__ == "__main__":
    print("\n".join(draw(sources(sys.argv[1] if len(sys.argv) > 1 else "HEAD"))))
