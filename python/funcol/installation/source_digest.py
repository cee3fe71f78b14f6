"""Digests of sources, by which funcol recognises the functions and modules that it was written for."""

from __future__ import annotations

import functools
import itertools
import linecache
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import CodeType


def _lines_from(code: CodeType) -> list[str]:
    """Returns the lines of a function's file from its first decorator on; none if there is no source."""
    return linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]


def _end_lines(code: CodeType) -> Iterator[int]:
    """Yields lines on which operations of a function end, those of the functions within it included."""
    yield from (end or line or 0 for line, end, _, _ in code.co_positions())
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _end_lines(constant)


@functools.cache
def num_decorators(code: CodeType) -> int:
    """Counts the decorators in a function's source."""
    lines = (line.lstrip() for line in _lines_from(code))
    head = itertools.takewhile(lambda line: not line.startswith(("def ", "async def ")), lines)
    return sum(line.startswith("@") for line in head)


@functools.cache
def digest_of(code: CodeType) -> str:
    """Returns the digest of a function's source, to its last statement, without spaces and without lines of
    comments; ``"no source"`` if there is none."""
    lines = _lines_from(code)[: max(_end_lines(code)) - code.co_firstlineno + 1]
    if not lines:
        return "no source"
    text = "".join(line for line in lines if not line.lstrip().startswith("#"))
    return _digest("".join(text.split()).encode())


def digest_of_file(file: Path) -> str:
    """The digest of a module's source as it is."""
    return _digest(file.read_bytes())


def _digest(source: bytes) -> str:
    return f"{zlib.crc32(source):08x}"
