"""Arguments of the commands: what is read from text, and files that are written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def argument_read_by(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the ``type`` of an argument that ``read`` reads. Its ``ValueError`` becomes argparse's own,
    which keeps the message."""

    def argument(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return argument


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Names ``path`` in errors of the code that writes it."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(f"{path} cannot be written: {why}. Pass another file.") from None
