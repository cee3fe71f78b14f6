"""README.md and CONTRIBUTING.md, which are read outside of the built documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import step_chart
from guides import DOCS

ROOT = DOCS.parent
README = (ROOT / "README.md").read_text()
FILES = ["README.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("name", FILES)
def test_links_and_named_files_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:docs|tools|test|csrc|python)/[\w./]+)`", text)
    missing = [path for path in [*links, *named] if not (ROOT / path).exists()]
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130


def test_a_number_with_a_unit_is_in_a_row_of_the_performance_page() -> None:
    text = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S)
    rows = [line for line in step_chart.PAGE.read_text().splitlines() if line.startswith("|")]
    numbers = set(re.findall(r"\d+(?:\.\d+)?x?", " ".join(rows)))
    named = re.findall(r"(\d+(?:\.\d+)?x)(?![\w.])|(\d+(?:\.\d+)?) (?:ms|us)\b", text)
    assert named
    assert {times or time for times, time in named} <= numbers


def test_the_first_sentence_has_the_times_of_the_first_row() -> None:
    first = step_chart.steps()[0]
    sentence = README.split("\n\n")[1].replace("\n", " ")
    assert f"{first.stock} ms on stock PyTorch costs it {first.funcol} ms" in sentence


def test_the_chart_is_described_by_its_rows() -> None:
    assert f'alt="{step_chart.description(step_chart.steps())}"' in README


@pytest.mark.parametrize("theme", step_chart.THEMES)
def test_the_chart_is_that_of_the_performance_page(theme: str) -> None:
    path = step_chart.path_of(theme)
    assert path.read_text() == step_chart.drawn(step_chart.steps(), theme), "run tools/step_chart.py"
    assert str(path.relative_to(ROOT)) in README


def test_the_performance_page_describes_its_chart() -> None:
    text = step_chart.PAGE.read_text()
    for theme in step_chart.THEMES:
        described = f"![{step_chart.description(step_chart.steps())}](pictures/steps_{theme}.svg)"
        assert described in text


def ratio_rows() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yields each row of the performance page with ratios: its first cell, all cells, the table's head."""
    head: list[str] = []
    for line in step_chart.PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|"):
            head = []
        elif not head:
            head = cells
        elif {"stock / funcol", "raw / funcol"} & set(head) and not cells[0].startswith("---"):
            yield cells[0], cells, head


@pytest.mark.parametrize("baseline", ["stock", "raw"])
def test_ratios_of_the_performance_page_are_those_of_its_times(baseline: str) -> None:
    num_checked = 0
    for name, cells, head in ratio_rows():
        row = {title.partition(",")[0]: cell for title, cell in zip(head, cells, strict=True)}
        title = f"{baseline} / funcol"
        if title not in row or not {baseline, "funcol"} <= set(row) or "-" in row[baseline]:
            continue
        pairs = zip(row[baseline].split(" / "), row["funcol"].split(" / "), strict=True)
        expected = " / ".join(step_chart.as_ratio(float(theirs) / float(ours)) for theirs, ours in pairs)
        assert row[title] == expected, name
        num_checked += 1
    assert num_checked >= 10
