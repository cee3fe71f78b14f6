"""Drawn programs of 5 to 20 operators on DTensors: on funcol, on PyTorch alone, and in one process.

What funcol gives has to be what one process gives; what PyTorch runs rightly, funcol has to run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from dtensor_programs import OPERATORS, Input, Program, Step, difference, is_finite, outcome
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_settings import checked
from ranks import RankError, run_ranks
from sharded import mesh_of, placed

import funcol

WORDS = ("R", "S0", "S1", "Psum", "Pavg", "Pmax")


def words_of(shape: Sequence[int], num_axes: int) -> st.SearchStrategy[tuple[str, ...]]:
    """Returns a placement for each axis; partials of one kind, since the order of several would matter."""
    fitting = [word for word in WORDS if word[0] != "S" or int(word[1]) < len(shape)]
    drawn = st.tuples(*[st.sampled_from(fitting)] * num_axes)
    return drawn.filter(lambda words: len({word for word in words if word[0] == "P"}) <= 1)


def inputs(num_axes: int) -> st.SearchStrategy[Input]:
    shapes = st.lists(st.sampled_from([4, 2, 3, 1, 5, 6, 8]), min_size=1, max_size=3).map(tuple)
    return shapes.flatmap(
        lambda shape: st.builds(Input, st.just(shape), words_of(shape, num_axes), st.integers(0, 99))
    )


def programs(num_axes: int) -> st.SearchStrategy[Program]:
    numbers = st.integers(0, 11)
    steps = st.builds(Step, st.sampled_from(sorted(OPERATORS)), numbers, numbers, numbers)
    return st.builds(
        Program,
        st.lists(inputs(num_axes), min_size=1, max_size=3).map(tuple),
        st.lists(steps, min_size=5, max_size=20).map(tuple),
        st.booleans(),
    )


def runs_on(
    rank: int, world: int, program: Program, mesh_shape: tuple[int, ...], with_funcol: bool
) -> str | None:
    """Returns None, a difference from the expected outcome, or "raised" and the error."""
    mesh = mesh_of(mesh_shape)
    expected = outcome(program, lambda whole, _: whole)
    assert not isinstance(expected, str)
    with funcol.installed() if with_funcol else nullcontext():
        actual = outcome(program, lambda whole, layout: placed(whole, layout, mesh))
    return f"raised {actual}" if isinstance(actual, str) else difference(actual, expected)


def check(program: Program, mesh_shape: tuple[int, ...]) -> None:
    if not is_finite(outcome(program, lambda whole, _: whole)):
        return  # no program of one process either
    world = math.prod(mesh_shape)
    ours = run_ranks(runs_on, world, program, mesh_shape, True)
    wrong = [f"rank {rank}: {one}" for rank, one in enumerate(ours) if one and not one.startswith("raised")]
    assert not wrong, f"{program}\n" + "\n".join(wrong)
    if any(ours):
        try:
            stock = run_ranks(runs_on, world, program, mesh_shape, False, timeout=30)
        except (RankError, TimeoutError):
            return  # PyTorch's ranks part
        assert any(stock), f"{program}\nPyTorch runs it, funcol: {ours[0]}"


@checked(20)
@given(programs(1))
def test_a_program_gives_on_two_ranks_what_it_gives_on_one(program: Program) -> None:
    torch.set_num_threads(1)
    check(program, (2,))


@pytest.mark.long
@checked(2000)
@given(programs(1))
def test_two_thousand_programs_give_on_two_ranks_what_they_give_on_one(program: Program) -> None:
    check(program, (2,))


@pytest.mark.long
@checked(300)
@given(programs(2))
def test_programs_give_on_a_mesh_what_they_give_on_one_rank(program: Program) -> None:
    check(program, (2, 2))
