"""The page of errors quotes texts that funcol has."""

from __future__ import annotations

import re

import pytest
from guides import DOCS

ROOT = DOCS.parent


def quoted() -> list[str]:
    """Returns the texts of the page's headings; those that are commands or code name no error."""
    page = (DOCS / "troubleshooting.md").read_text()
    return re.findall(r"^### `([^`]+)`$", page, re.MULTILINE)


def strings_of_sources() -> str:
    """Returns all sources, with literals that continue one another joined."""
    files = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h"), *(ROOT / "python").rglob("*.py")]
    text = "\n".join(file.read_text() for file in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.fixture(scope="module")
def sources() -> str:
    return strings_of_sources()


@pytest.mark.parametrize("error", quoted())
def test_each_part_of_a_quoted_error_is_in_the_sources(error: str, sources: str) -> None:
    for part in error.split("..."):
        assert part.strip(" ;,'") in sources


def test_the_page_has_the_errors_of_every_part() -> None:
    assert len(quoted()) > 20
