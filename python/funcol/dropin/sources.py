"""Digests of sources, by which funcol recognises the functions and modules that it was written for."""

from __future__ import annotations

import functools
import inspect
import io
import textwrap
import tokenize
import zlib
from pathlib import Path
from types import CodeType


def source_of(code: CodeType) -> str:
    """The source of a function, decorators included; empty if there is none."""
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return ""


@functools.cache
def digest_of(code: CodeType) -> str:
    """The digest of a function's source without spaces and comments; ``"no source"`` if there is none."""
    source = source_of(code)
    if not source:
        return "no source"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = "".join(token.string for token in tokens if token.type != tokenize.COMMENT)
    return _digest("".join(text.split()).encode())


def digest_of_file(file: Path) -> str:
    """The digest of a module's source as it is."""
    return _digest(file.read_bytes())


def _digest(source: bytes) -> str:
    return f"{zlib.crc32(source):08x}"
