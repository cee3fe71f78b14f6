"""Progress bars on a terminal during work that takes seconds."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable

import pytest

from funcol._progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _terminals_are_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")


def count_to(num_done: int, total: int | None, *, is_on: bool = True) -> None:
    with Progress("moves", total, is_on=is_on) as progress:
        for piece in range(num_done):
            progress.show(f"piece [{piece}]")
            progress.advance()


def count_one_and_fail() -> None:
    with contextlib.suppress(KeyError), Progress("moves", 5) as progress:
        progress.advance()
        raise KeyError


def written(to: io.StringIO, count: Callable[[], None]) -> str:
    """Returns the output of ``count`` without colours and cursor moves."""
    with contextlib.redirect_stderr(to):
        count()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", to.getvalue())


def test_the_last_state_says_how_many_are_done_and_what_came_last() -> None:
    assert re.search(r"moves\s+3/5 .*piece \[2\]\s*$", written(Terminal(), lambda: count_to(3, 5)))


def test_without_a_total_it_counts() -> None:
    assert re.search(r"moves\s+3/\?", written(Terminal(), lambda: count_to(3, None)))


def test_it_is_drawn_at_times_alone() -> None:
    text = written(Terminal(), lambda: count_to(1000, 1000))
    assert "1000/1000" in text
    assert text.count("moves") < 100


def test_an_error_leaves_what_was_done() -> None:
    assert "1/5" in written(Terminal(), count_one_and_fail)


def test_it_is_off_in_files() -> None:
    assert written(io.StringIO(), lambda: count_to(3, 5)) == ""


def test_it_is_off_where_another_rank_shows_it() -> None:
    assert written(Terminal(), lambda: count_to(3, 5, is_on=False)) == ""
