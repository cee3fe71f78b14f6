"""A counter on a terminal for work that takes seconds: how much is done and left, and the time left."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

_MOST_PER_SECOND = 10


class Progress:
    """A line on standard error that says how many of ``total`` pieces are done, and what comes next.

    The line is shown while the context is open, only on a terminal, and not if ``is_on`` is false, as on all
    ranks but one. Without ``total`` it has a count and no bar. No thread draws it: the line changes in
    :meth:`show` and :meth:`advance`, ten times a second at most. Its last state stays on the terminal::

        with Progress("calibrate", total=12) as progress:
            for kind in kinds:
                progress.show(kind)
                measure(kind)
                progress.advance()
    """

    def __init__(self, title: str, total: int | None = None, *, is_on: bool = True) -> None:
        self._title = title
        self._total = total
        self._is_on = is_on and sys.stderr is not None and sys.stderr.isatty()
        self._num_done = 0
        self._text = ""
        self._drawn = 0.0
        self._line: Any = None

    def __enter__(self) -> Self:
        if self._is_on:
            self._line = _line_of(self._title, self._total)
            self._line.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._line is not None:
            self._draw()
            self._line.stop()
            self._line = None

    @property
    def is_shown(self) -> bool:
        return self._line is not None

    def show(self, text: str) -> None:
        """Sets the text that says what is being done."""
        self._text = text
        self._draw_at_times()

    def advance(self, num_pieces: int = 1) -> None:
        """Adds to the number of pieces that are done."""
        self._num_done += num_pieces
        self._draw_at_times()

    def _draw_at_times(self) -> None:
        if self._line is not None and time.monotonic() - self._drawn >= 1 / _MOST_PER_SECOND:
            self._draw()

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        [task] = self._line.task_ids
        self._line.update(task, completed=self._num_done, text=self._text, refresh=True)


def _line_of(title: str, total: int | None) -> Any:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.progress import Progress as Line

    of_total = () if total is None else (BarColumn(), TimeRemainingColumn(compact=True))
    columns = TextColumn("{task.description}"), MofNCompleteColumn(), *of_total, TimeElapsedColumn()
    line = Line(
        *columns,
        TextColumn("{task.fields[text]}", markup=False),
        console=Console(file=sys.stderr),
        auto_refresh=False,
    )
    line.add_task(title, total=total, text="")
    return line
