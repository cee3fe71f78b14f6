"""The documentation builds without a warning, and its pages fit the screens of desks and phones."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, browser_on, chromium
from guides import DOCS, on_the_newest_pytorch

import funcol

pytestmark = on_the_newest_pytorch

needs_chromium = pytest.mark.skipif(chromium() is None, reason="no chromium: apt-get install chromium")

WIDTHS = [1280, 390]
PAGES = ["index.html", "under_the_hood.html", "performance.html", "api/collectives.html"]
EVERY_PAGE = sorted(str(page.relative_to(DOCS).with_suffix(".html")) for page in DOCS.rglob("*.md"))
BAR = ["Start", "Guides", "Performance", "Reference", "Help", "Project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the pages, built anew: warnings are errors."""
    folder = tmp_path_factory.mktemp("docs")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html"]
    done = subprocess.run([*command, str(DOCS), str(folder)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def browser(built: Path) -> Iterator[Browser]:
    with browser_on(built) as browser:
        yield browser


def test_every_page_of_the_source_is_built(built: Path) -> None:
    sources = {page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")}
    assert sources <= {page.relative_to(built).with_suffix("") for page in built.rglob("*.html")}


@pytest.mark.parametrize(
    "name",
    [
        "funcol.all_reduce",
        "funcol.install",
        "funcol.redistribution.Plan.local_indices",
        "funcol.sharding.operators",
    ],
)
def test_the_reference_has_an_entry_with_types(built: Path, name: str) -> None:
    [entry] = [
        text
        for page in (built / "api").glob("*.html")
        for text in page.read_text().split('<dt class="sig')
        if f'id="{name}"' in text.partition(">")[0]
    ]
    assert "sig-return-typehint" in entry


Measures = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def measures(browser: Browser) -> Measures:
    """Measures a page in the browser at each of :data:`WIDTHS`."""
    return functools.cache(lambda page: browser.measured(page, WIDTHS))


@pytest.fixture(scope="module")
def names_in_the_reference(built: Path) -> set[str]:
    """Returns names with an entry of their own, and those that stand in code."""
    text = "".join(page.read_text() for page in (built / "api").glob("*.html"))
    return {
        *re.findall(r'id="funcol\.(\w+)"', text),
        *re.findall(r'<span class="pre">(\w+)</span></code>', text),
    }


@pytest.mark.parametrize("name", sorted(funcol.__all__))
def test_every_public_name_is_in_the_reference(names_in_the_reference: set[str], name: str) -> None:
    assert name in names_in_the_reference


@needs_chromium
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_nothing_overflows(measures: Measures, page: str, width: int) -> None:
    measured = measures(page)[WIDTHS.index(width)]
    assert measured["title"]
    assert measured["width"] == width
    assert measured["content"] <= width
    assert measured["wide"] == []
    assert measured["broken"] == []


@needs_chromium
@pytest.mark.parametrize("page", EVERY_PAGE)
def test_no_block_of_code_is_cut_on_a_desk(measures: Measures, page: str) -> None:
    assert measures(page)[WIDTHS.index(1280)]["cut"] == []


@needs_chromium
@pytest.mark.parametrize("page", EVERY_PAGE)
def test_no_inline_code_leaves_a_phone(measures: Measures, page: str) -> None:
    assert measures(page)[WIDTHS.index(390)]["outside"] == []


def test_the_bar_has_six_parts_the_logo_and_the_version(built: Path) -> None:
    text = (built / "index.html").read_text()
    bar = text[text.index('class="bd-header') : text.index('class="bd-container')]
    names = re.findall(r'<a class="nav-link nav-internal"[^>]*>\s*(.+?)\s*</a>', bar)
    assert names[: len(BAR)] == BAR
    assert f">{funcol.__version__}</span>" in bar
    assert "logo.svg" in bar
    assert re.search(r'<link rel="icon" href="[^"]*logo\.svg', text)


@pytest.mark.parametrize("page", ["index", "guides/index", "help", "project"])
def test_a_list_of_pages_says_what_each_is_for(page: str) -> None:
    rows = [line for line in (DOCS / f"{page}.md").read_text().splitlines() if "](" in line]
    listed = [row.strip("| ").split(" | ") for row in rows if row.startswith("| ")]
    assert len(listed) >= 4
    assert [cells for cells in listed if len(cells) != 2 or len(min(cells, key=len)) < 4] == []


@needs_chromium
@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_a_screenshot(browser: Browser, page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.png"
    browser.screenshot(page, WIDTHS, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 20_000  # of an empty page it is a tenth of that
