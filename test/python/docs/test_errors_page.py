"""The page of error types names the types that funcol makes, with their bases."""

from __future__ import annotations

import re

import pytest
from guides import DOCS

from funcol.collectives import errors

PAGE = (DOCS / "errors.md").read_text()
ROWS = re.findall(r"^\| `(\w+)` \| (`.*`) \| ", PAGE, re.MULTILINE)
BUILT_IN = {kind.__name__: kind for kind in (RuntimeError, AssertionError, IndexError, ValueError, TypeError)}
BUILT_IN |= {kind.__name__: kind for kind in (NotImplementedError, AttributeError)}


def made_types() -> dict[str, type[BaseException]]:
    """Returns all types that an error may get: of ours, and of PyTorch's for the same mistakes."""
    theirs = {kind for _, kind in errors._PYTORCH_TYPES} | {RuntimeError}
    made = (
        errors._combined_type(ours, kind)
        for ours in errors._FUNCOL_TYPES
        for kind in theirs
        if ours is not kind
    )
    return {kind.__name__: kind for kind in made}


def test_the_table_has_rows() -> None:
    assert len(ROWS) >= 8


@pytest.mark.parametrize(("name", "bases"), ROWS)
def test_a_type_of_the_page_has_the_bases_that_it_names(name: str, bases: str) -> None:
    kind = made_types()[name]
    named = [BUILT_IN[base] for base in re.findall(r"`(\w+)`", bases)]
    assert all(issubclass(kind, base) for base in named)
    assert {base for base in kind.__mro__ if base in BUILT_IN.values()} <= {
        parent for base in named for parent in base.__mro__
    }
