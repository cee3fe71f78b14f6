"""Regions as graphs hold them: what is not a region, or not placements, is refused before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import funcol
from funcol.local_map.regions import Region, placements_of, text_of

MESH = ("cpu", (2, 2), ("dp", "tp"), (0, 1, 2, 3))
PACKED: tuple[Any, ...] = ("f at here.py:1", True, MESH, ("S(0)R", None), ("P(sum)_S(1, 2)",), (None,))


def test_a_region_is_read_as_it_was_packed() -> None:
    region = Region.of(PACKED)
    assert region.packed() == PACKED
    assert [text_of(placements) for placements in region.placements_in()] == ["S(0)R", None]
    assert [text_of(placements) for placements in region.placements_out()] == ["P(sum)_S(1, 2)"]


@pytest.mark.parametrize(
    "text",
    ["S", "S(-1)", "S(0)R;import os", "S(99999999999999999999)", "_S(0, 0)", "_S(0,2)", "P()", "R R", "s(0)"],
)
def test_text_that_is_no_placements_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"funcol\.local_map_hop: .* are not placements\. Write them as in"):
        placements_of(text)


def test_long_text_is_refused_in_a_short_message() -> None:
    with pytest.raises(ValueError, match="are not placements") as refused:
        placements_of("S(" * 100_000)
    assert len(str(refused.value)) < 300


def changed(place: int, value: Any) -> tuple[Any, ...]:
    return (*PACKED[:place], value, *PACKED[place + 1 :])


@pytest.mark.parametrize(
    "packed",
    [
        None,
        "region",
        (),
        PACKED[:-1],
        changed(0, 5),
        changed(1, "yes"),
        changed(2, None),
        changed(2, MESH[:-1]),
        changed(2, ("cpu", ("2", "2"), (), (0, 1, 2, 3))),
        changed(2, ("cpu", (2, 2), ("dp",), (0, 1, 2, 3))),
        changed(2, ("cpu", (2, 2), (), (0, 1))),
        changed(3, "S(0)R"),
        changed(4, (5,)),
        changed(5, (2,)),
        changed(5, (("2",),)),
    ],
)
def test_what_is_no_region_is_refused(packed: Any) -> None:
    with pytest.raises(ValueError, match=r"funcol\.local_map_hop: .* is not a region\. Pass what"):
        Region.of(packed)


def test_placements_for_another_number_of_axes_are_refused() -> None:
    region = Region.of(changed(3, ("S(0)", None)))
    with pytest.raises(ValueError, match=r"'S\(0\)' are 1 placements for a cpu mesh \(dp=2, tp=2\)"):
        region.placements_in()


def test_the_node_refuses_a_region_that_was_changed() -> None:
    with pytest.raises(ValueError, match="is not a region"):
        funcol.local_map.local_map_hop(lambda x: (x,), changed(2, None), torch.ones(2))
