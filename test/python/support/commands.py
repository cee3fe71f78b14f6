"""Runs of ``python -m funcol`` in this process, on arguments that it may refuse."""

from __future__ import annotations

import pytest

from funcol.__main__ import main


def printed_or_refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str | None:
    """Runs a command, and returns None, or the one line that refuses its arguments with exit status 2."""
    status = None
    try:
        main(list(arguments))
    except SystemExit as ended:
        status = ended.code
    line = capsys.readouterr().err
    if status is None:
        assert line == ""
        return None
    assert status == 2
    assert line.startswith("python -m funcol")
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert len(line) < 2500
    return line


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs a command that is refused, and returns the line that says why."""
    line = printed_or_refused(capsys, *arguments)
    assert line is not None
    return line
