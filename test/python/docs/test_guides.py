"""Every code block of the documentation runs and prints what the page says."""

from __future__ import annotations

from pathlib import Path

import pytest
from guides import (
    DOCS,
    blocks,
    commands,
    expected_output,
    on_the_newest_pytorch,
    output_of_command,
    program,
    run_page,
)

PAGES = sorted(page for page in DOCS.rglob("*.md") if blocks(page))
LANGUAGES = {"python", "text", "console", "bash"}

# How many blocks of each page are not run: shell commands, and Python that needs what is not there.
NOT_RUN = {
    "guides/check": 1,
    "guides/integrations": 1,
    "guides/pictures": 2,
    "guides/redistribution": 1,
    "guides/simulated_gpu": 1,
    "index": 1,
    "instruction_counts": 1,
    "migrating": 1,
    "performance": 13,
    "start": 5,
    "testing": 2,
}

pytestmark = on_the_newest_pytorch


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS).with_suffix(""))


pages = pytest.mark.parametrize("page", PAGES, ids=name_of)


@pages
def test_the_code_of_a_page_runs_and_prints_what_it_says(page: Path, tmp_path: Path) -> None:
    if program(page).strip():
        assert run_page(page, tmp_path) == expected_output(page)
    else:
        assert expected_output(page) == ""


@pytest.mark.parametrize(
    ("command", "printed"),
    [pytest.param(*one, id=f"{name_of(page)}-{i}") for page in PAGES for i, one in enumerate(commands(page))],
)
def test_a_command_of_a_page_prints_what_it_says(command: str, printed: str) -> None:
    assert output_of_command(command).rstrip("\n") == printed.rstrip("\n")


def test_no_page_leaves_out_more_blocks_than_it_is_known_to() -> None:
    left_out = {
        name_of(page): sum(block.language == "bash" or block.not_run is not None for block in blocks(page))
        for page in PAGES
    }
    assert {name: number for name, number in left_out.items() if number} == NOT_RUN


@pages
def test_blocks_are_in_languages_that_the_tests_know(page: Path) -> None:
    assert {block.language for block in blocks(page)} <= LANGUAGES
