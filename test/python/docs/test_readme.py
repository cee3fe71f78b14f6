"""README.md and CONTRIBUTING.md, which are read outside of the built documentation."""

from __future__ import annotations

import re

import pytest
from guides import DOCS

ROOT = DOCS.parent
FILES = ["README.md", "CONTRIBUTING.md"]


@pytest.mark.parametrize("name", FILES)
def test_links_and_named_files_are_there(name: str) -> None:
    text = (ROOT / name).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    named = re.findall(r"`((?:docs|tools|test|csrc|python)/[\w./]+)`", text)
    missing = [path for path in [*links, *named] if not (ROOT / path).exists()]
    assert missing == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
