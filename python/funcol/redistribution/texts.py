"""Numbers, ranks, meshes and shapes in untrusted text: read within bounds, or refused in one line."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

MOST_RANKS = 2**31 - 1
"""The largest number of ranks of a mesh."""

MOST_ELEMENTS = 2**48  # so that no sum of bytes over ranks exceeds 64 bits
MOST_BYTES = 2**63 - 1

MOST_RANK = 2**24 - 1
"""The largest rank of a plan between meshes, which has tables with an entry a rank of the world."""

_MOST_SIZE = 10**10 - 1  # of an axis: what is read, and then refused by its number
_MOST_QUOTED = 60
_MOST_IN_LINE = 2000


def number_of(text: str, most: int) -> int | None:
    """Returns the number from 0 to ``most`` that ``text`` has in decimal digits; None if it has none."""
    if not text.isdecimal() or len(text) > len(str(most)):
        return None
    number = int(text)
    return number if number <= most else None


def mesh_sizes(text: str) -> dict[str, int]:
    """Reads the axes of a mesh: ``"dp=2,tp=4"``, or ``"2,4"``, whose axes are ``axis0`` and ``axis1``."""
    sizes: dict[str, int] = {}
    given = text.split(",")
    if all(number_of(entry.strip(), _MOST_SIZE) is not None for entry in given):
        given = [f"axis{number}={size}" for number, size in enumerate(given)]
    for entry in given:
        name, _, digits = (part.strip() for part in entry.partition("="))
        size = number_of(digits, _MOST_SIZE)
        if not name or size is None or name in sizes:
            raise ValueError(
                f"funcol: '{quoted(entry.strip())}' in the mesh '{quoted(text)}' is not an axis. Write each "
                'axis once, with its number of ranks: "dp=2,tp=4"; or the numbers alone: "2,4".'
            )
        sizes[name] = size
    return sizes


def rank_numbers(text: str, most: int) -> list[int]:
    """Reads numbers and ranges of ranks: ``"0-3,8"``. At most ``most`` may be listed."""
    ranks: list[int] = []
    for entry in text.split(","):
        ends = [number_of(part.strip(), MOST_RANK) for part in entry.split("-")]
        first, last = ends[0], ends[-1]
        if len(ends) > 2 or first is None or last is None or first > last:
            raise ValueError(
                f'"{quoted(entry)}" is not a rank: write numbers and ranges that count up, 0-3,8, '
                f"to {MOST_RANK} at most"
            )
        if len(ranks) + last + 1 - first > most:
            raise ValueError(f'"{quoted(text)}" lists more than {most} ranks: pass fewer')
        ranks.extend(range(first, last + 1))
    return ranks


def rank_text(ranks: tuple[int, ...], most: int) -> str:
    """Formats ``ranks``: a range if they count up, a list of up to ``most``, else their number and bounds."""
    if all(after == before + 1 for before, after in pairwise(ranks)):
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    if len(ranks) <= most:
        return ",".join(map(str, ranks))
    return f"{len(ranks)} from {min(ranks)} to {max(ranks)}"


def shape_of(text: str) -> list[int]:
    """Reads the sizes of a tensor: ``"1024x4096"`` or ``"1024,4096"``, empty for a scalar."""
    sizes: list[int] = []
    for digits in text.split("," if "," in text else "x") if text else ():
        size = number_of(digits, MOST_ELEMENTS)
        if size is None:
            raise ValueError(
                f'"{quoted(text)}" is not a shape: write sizes with an x or a comma between them, 1024x4096, '
                "2^48 elements at most"
            )
        sizes.append(size)
    return sizes


# PyTorch's names of placements, and their short forms.
_LONG_FORMS = tuple(
    (re.compile(form), short)
    for form, short in (
        (r"_StridedShard\(\s*(?:dim=)?(-?\w+)\s*,\s*(?:(?:sf|split_factor)=)?(\w+)\s*\)", r"_S(\1, \2)"),
        (r"\bShard\(\s*(?:dim=)?(-?\w+)\s*\)", r"S(\1)"),
        (r"\bReplicate\(\s*\)", "R"),
        (r"\bPartial\(\s*\)", "P"),
        (r"\bPartial\(\s*(?:reduce_op=)?['\"]?(\w+)['\"]?\s*\)", r"P(\1)"),
    )
)


def short_placements(text: str) -> str:
    """Returns placements as C++ reads them: ``"Shard(0),Replicate()"`` as ``"S(0),R"``. Brackets around
    all of them, as PyTorch prints placements, are left out; short forms stay as they are."""
    inner = text.strip()
    if inner[:1] + inner[-1:] in ("()", "[]") and len(inner) > 1:
        inner = inner[1:-1].strip().removesuffix(",")
    for form, short in _LONG_FORMS:
        inner = form.sub(short, inner)
    return inner


def bytes_of(text: str) -> int:
    """Reads a number of bytes."""
    number = number_of(text, MOST_BYTES)
    if number is None:
        raise ValueError(f'"{quoted(text)}" is not a number of bytes: write one from 0 to {MOST_BYTES}')
    return number


def check_characters(what: str, text: str) -> None:
    """Raises ValueError for text that UTF-8 cannot encode, such as undecodable bytes of an argument."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"funcol: {what} '{quoted(text)}' cannot be written in UTF-8. Use other characters."
        ) from None


def quoted(text: str) -> str:
    """Returns ``text`` for an error: in one line, and shortened."""
    return one_line(text if len(text) <= _MOST_QUOTED else f"{text[:_MOST_QUOTED]}...")


def short_repr(value: Any) -> str:
    """Returns ``repr(value)``, which may be of any length, shortened for an error."""
    try:
        text = repr(value)
    except ValueError:  # an int of too many digits
        return "a number of thousands of digits"
    except RecursionError:
        return "a value that is nested deeply"
    return text if len(text) <= 80 else f"{text[:77]}..."


def one_line(text: str) -> str:
    """Returns ``text`` with unprintable characters escaped, and without its middle if it is too long."""
    half = _MOST_IN_LINE // 2
    shown = text if len(text) <= _MOST_IN_LINE else f"{text[:half]} ... {text[-half:]}"
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in shown
    )
