"""Placements of regions as text: read as they were written, or refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_settings import checked
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from funcol.local_map.regions import placements_of, text_of

PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Shard, st.integers(0, 99)),
    st.builds(
        lambda dim, factor: _StridedShard(dim, split_factor=factor), st.integers(0, 9), st.integers(1, 99)
    ),
    st.builds(Partial, st.sampled_from(["sum", "avg", "min", "max", "product", "band", "bor", "bxor"])),
)


@checked(500)
@given(st.lists(PLACEMENTS, max_size=5).map(tuple))
def test_placements_are_read_as_they_were_written(placements: tuple[Placement, ...]) -> None:
    assert placements_of(text_of(placements)) == placements


@checked(500)
@given(st.text(alphabet="RSP_()0123, sumaxvg٣²", max_size=16))
@example("S(٣)")
@example("S(007)")
@example("P(²)")
@example("_S(0, 0)")
@example("S(" + "9" * 5000 + ")")
@example("R" * 1000)
def test_a_text_is_one_that_placements_have_or_is_refused(text: str) -> None:
    assert written_again(text) in (text, "refused")


def written_again(text: str) -> str | None:
    try:
        return text_of(placements_of(text))
    except ValueError:
        return "refused"


@pytest.mark.parametrize("text", ["S(007)", "S(٣)", "P(²)", "_S(0, 0)", "S(0", "RX"])
def test_what_is_nearly_a_placement_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="are not placements"):
        placements_of(text)
