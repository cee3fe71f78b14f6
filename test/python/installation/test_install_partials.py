"""With funcol under DTensor, partial values are read and written as the values that they stand for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from twins import check_twin, numbers, replicated

PARTIALS = ["Psum", "Pavg", "Pmax", "Pmin"]


def item(x: Tensor) -> Any:
    return x.sum().item()


def as_float(x: Tensor) -> Any:
    return float(x.mean())


def as_integer(x: Tensor) -> Any:
    return int((x * 100).round().sum())


def largest(x: Tensor) -> Any:
    return x.max().item()


def norm(x: Tensor) -> Any:
    return torch.linalg.vector_norm(x).item()


def truth(x: Tensor) -> Any:
    return bool(x.sum() - 3)


def equality(x: Tensor) -> Any:
    return torch.equal(x, x + 0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["S0", "S1", *PARTIALS])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("read", [item, as_float, as_integer, largest, norm, truth, equality])
def test_a_number_is_that_of_all_ranks(read: Callable[[Tensor], Any], size: int, words: str) -> None:
    check_twin(read, [numbers(size, 3)], words)


@pytest.mark.parametrize("words", ["Psum R", "R Psum", "Psum Psum", "S0 Pmax"])
def test_a_number_is_that_of_all_ranks_of_two_axes(words: str) -> None:
    check_twin(item, [numbers(4, 3)], words, mesh=(2, 2))


def filled(x: Tensor) -> Tensor:
    return x.fill_(3)


def filled_with_a_tensor(x: Tensor) -> Tensor:
    return x.fill_(replicated(torch.tensor(3.0, dtype=torch.float64), x))


def zeroed(x: Tensor) -> Tensor:
    return x.zero_()


def copied(x: Tensor) -> Tensor:
    return x.copy_(replicated(torch.ones(5, 3, dtype=torch.float64), x))


def masked(x: Tensor) -> Tensor:
    return x.masked_fill_(x > 0.5, 2)


def full(x: Tensor) -> Tensor:
    return torch.full_like(x, 2)


def made_of_ones(x: Tensor) -> Tensor:
    return torch.ones_like(x) + x.new_ones(5, 3) + x.new_full((5, 3), 3)


def shifted(x: Tensor) -> Tensor:
    return (x + 1) + (1 - x) * 2


@pytest.mark.parametrize("words", PARTIALS)
@pytest.mark.parametrize(
    "write",
    [filled, filled_with_a_tensor, zeroed, copied, masked, full, made_of_ones, shifted],
)
def test_a_partial_value_is_written_as_a_whole(write: Callable[[Tensor], Tensor], words: str) -> None:
    check_twin(write, [numbers(5, 3)], words)


@pytest.mark.parametrize("words", ["Psum S0", "S1 Pavg", "Psum Psum"])
def test_a_partial_value_of_two_axes_is_filled(words: str) -> None:
    check_twin(filled, [numbers(5, 3)], words, mesh=(2, 2))


# In-place operators on lists: what a list of one tensor becomes.
ON_LISTS: dict[str, Callable[[list[Tensor]], None]] = {
    "neg": torch._foreach_neg_,
    "erfc": torch._foreach_erfc_,
    "mul": lambda xs: torch._foreach_mul_(xs, -2.0),
    "mul of each": lambda xs: torch._foreach_mul_(xs, [-2.0]),
    "div": lambda xs: torch._foreach_div_(xs, -2.0),
    "sub of each": lambda xs: torch._foreach_sub_(xs, [3.0]),
    "mul, order kept": lambda xs: torch._foreach_mul_(xs, 2.0),
    "zero": torch._foreach_zero_,
}


def written(x: Tensor, name: str) -> Tensor:
    held = x.placements if isinstance(x, DTensor) else None
    try:
        ON_LISTS[name]([x])
    except (RuntimeError, ValueError):
        assert isinstance(x, DTensor)  # refused, and not written: the caller compares with the result
        x = x.redistribute(placements=[Replicate()])
        ON_LISTS[name]([x])
        return x
    assert not isinstance(x, DTensor) or x.placements == held
    return x


@pytest.mark.parametrize("words", PARTIALS)
@pytest.mark.parametrize("name", ON_LISTS)
def test_lists_are_written_as_values_or_not_at_all(name: str, words: str) -> None:
    check_twin(functools.partial(written_copy, name=name), [numbers(4, 3)], words)


def written_copy(x: Tensor, name: str) -> Tensor:
    return written(x.clone(), name)


LERPS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "a number": lambda x, y: torch._foreach_lerp_([x], [y], 0.25),
    "numbers": lambda x, y: torch._foreach_lerp_([x], [y], [0.25]),
    "tensors": lambda x, y: torch._foreach_lerp_(
        [x], [y], [replicated(torch.full((4, 3), 0.25, dtype=torch.float64), x)]
    ),
}


def interpolated(x: Tensor, y: Tensor, name: str) -> Tensor:
    x = x.clone()
    LERPS[name](x, y)
    return x


@pytest.mark.parametrize("words", [("Psum", "Psum"), ("Pavg", "Pavg"), ("S0", "Psum"), ("R", "Psum")])
@pytest.mark.parametrize("name", LERPS)
def test_lists_are_interpolated_as_values(name: str, words: tuple[str, str]) -> None:
    check_twin(functools.partial(interpolated, name=name), [numbers(4, 3), numbers(4, 3, seed=1)], *words)
