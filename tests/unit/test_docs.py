"""The pages: each link leads somewhere, and what the README repeats of the other pages is what they say."""

import re
from pathlib import Path

import pytest

from megatron_autoinstrument.common import semconv
from megatron_autoinstrument.common.groups import PRESETS
from megatron_autoinstrument.settings.table import SETTINGS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def prose(page):
    """The page without its blocks of code, whose brackets are no links and whose comments are no headings."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """As GitHub makes them: in lower case, without punctuation, hyphens for spaces, a number where there are two."""
    found = []
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        found.append(f"{anchor}-{found.count(anchor)}" if anchor in found else anchor)
    return found


def links(page):
    """What the page links to, but for other sites; code in backticks is none."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose(page)))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_leads_to_a_file_and_a_heading(page):
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.is_file(), link
        if anchor:
            assert anchor in anchors(target), link


def test_the_readme_leads_to_each_page_and_each_of_its_chapters():
    readme = PAGES[0]
    chapters = re.findall(r"^## (.+)$", prose(readme), re.MULTILINE)
    assert len(chapters) > 5
    assert {f"#{name.lower().replace(' ', '-')}" for name in chapters} <= set(links(readme))
    assert {link.partition("#")[0] for link in links(readme)} - {""} == {
        str(page.relative_to(ROOT)) for page in PAGES[1:]
    }


def rows(page, head):
    """The cells of the table whose first column is called that."""
    table = re.search(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page.read_text(), re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split(" |")] for line in table.splitlines()]


def test_the_readmes_settings_are_those_of_their_page():
    page = (ROOT / "docs" / "settings.md").read_text().splitlines()
    shown = [line for line in PAGES[0].read_text().splitlines() if re.match(r"\| `[A-Z_]+` \|", line)]
    known = [line for line in shown if line.split("`")[1] in SETTINGS]
    assert len(known) == len(shown) - 1  # the endpoint is OpenTelemetry's own
    assert set(known) <= set(page)


def test_the_readme_has_each_group_that_has_spans_with_the_first_preset_that_has_it():
    shown = {
        group: preset.strip("`") for names, _, preset in rows(PAGES[0], "Groups") for group in names[1:-1].split("`, `")
    }
    assert shown == {
        group: next(name for name in ("default", "per_step", "all") if group in PRESETS[name])
        for group in semconv.SPAN_GROUPS.values()
    }


def test_the_readmes_costs_are_those_of_their_page():
    page = (ROOT / "docs" / "cost.md").read_text()
    for preset, _, spans, measured, worked_out in rows(PAGES[0], "Preset"):
        assert re.search(rf"^\| {preset} \| {spans} \| [\d,]+ \| .* \| {re.escape(measured)} \|", page, re.MULTILINE)
        assert re.search(rf"^\| {preset} \| all: 1,024 \| [\d,]+ \| {re.escape(worked_out)} \|", page, re.MULTILINE)
