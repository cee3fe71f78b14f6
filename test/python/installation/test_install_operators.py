"""With funcol under DTensor, losses, means and places of extremes over shards of any length are those of the
whole, and so are gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharded import layouts, mesh_of
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional
from twins import check_twin, numbers, placed

import funcol

REDUCTIONS = ["mean", "sum", "none"]
Loss = Callable[..., Tensor]


def weighted(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy(x, y, weight=x.detach() + 1, reduction=reduction)


def with_logits(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy_with_logits(x, y, pos_weight=y[0] + 1, reduction=reduction)


LOSSES: dict[str, Loss] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functools.partial(functional.smooth_l1_loss, beta=0.3),
    "huber": functools.partial(functional.huber_loss, delta=0.3),
    "binary cross entropy": functional.binary_cross_entropy,
    "weighted binary cross entropy": weighted,
    "binary cross entropy with logits": functional.binary_cross_entropy_with_logits,
    "binary cross entropy with logits and weights": with_logits,
    "soft margin": functional.soft_margin_loss,
    "divergence": functional.kl_div,
    "poisson": functional.poisson_nll_loss,
}


def loss_of(name: str, reduction: str, x: Tensor, y: Tensor) -> Tensor:
    return LOSSES[name](x, y.detach(), reduction=reduction)


def clear_of_ties(*shape: int) -> list[Tensor]:
    return [0.1 + 0.8 * numbers(*shape, seed=seed) for seed in (1, 2)]


CUTS = [("S0", "S0"), ("S1", "S1"), ("S0", "R"), ("Psum", "R"), ("R", "S1")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("words", CUTS, ids=",".join)
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_shards_is_that_of_the_whole(
    name: str, reduction: str, size: int, words: tuple[str, str]
) -> None:
    check_twin(functools.partial(loss_of, name, reduction), clear_of_ties(size, 3), *words)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("words", CUTS, ids=",".join)
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_of_a_loss_of_shards_is_that_of_the_whole(
    name: str, reduction: str, size: int, words: tuple[str, str]
) -> None:
    check_twin(functools.partial(loss_of, name, reduction), clear_of_ties(size, 3), *words, backward=True)


@pytest.mark.parametrize("words", ["S0 S0", "S0 S1", "R S0"])
@pytest.mark.parametrize("name", ["mse", "huber", "weighted binary cross entropy"])
def test_a_loss_of_shards_of_two_axes_has_the_gradient_of_the_whole(name: str, words: str) -> None:
    check_twin(
        functools.partial(loss_of, name, "mean"),
        clear_of_ties(5, 3),
        words,
        words,
        mesh=(2, 2),
        backward=True,
    )


def cross_entropy(reduction: str, x: Tensor, classes: Tensor, weight: Tensor) -> Tensor:
    return functional.cross_entropy(x, classes, weight=weight.detach(), reduction=reduction, ignore_index=1)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("words", [("S0", "S0", "R"), ("S0", "R", "R"), ("Psum", "R", "R")], ids=",".join)
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_cross_entropy_of_shards_is_that_of_the_whole(
    reduction: str, size: int, words: tuple[str, ...], backward: bool
) -> None:
    classes = torch.tensor([0, 2, 1, 1, 2])[:size]
    tensors = [numbers(size, 3), classes, 1 + numbers(3)]
    check_twin(functools.partial(cross_entropy, reduction), tensors, *words, backward=backward)


MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "variance": lambda x: x.var(),
    "variance of rows": lambda x: x.var(0, unbiased=False),
    "deviation": lambda x: x.std(0, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "mean without nan": lambda x: x.nanmean(0),
    "logsumexp": lambda x: x.logsumexp(0),
}


def mean_of(name: str, x: Tensor) -> Tensor:
    return MEANS[name](x)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("words", ["S0", "S1", "Psum", "Pavg"])
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_of_uneven_shards_is_that_of_the_whole(name: str, words: str, backward: bool) -> None:
    check_twin(functools.partial(mean_of, name), [numbers(5, 3)], words, backward=backward)


def sends_nothing(rank: int, world: int) -> Any:
    layout = layouts("S0")[0]
    x, y = (placed(one, layout, mesh_of((world,))) for one in clear_of_ties(5, 3))
    x.requires_grad_()
    with funcol.installed(), CommDebugMode() as during:
        functional.mse_loss(x, y).backward()
    return during.get_total_counts()


def test_the_gradient_of_a_mean_over_shards_needs_no_communication() -> None:
    assert run_ranks(sends_nothing, 2) == [0, 0]


def first_of_the_largest(x: Tensor) -> Tensor:
    return x.argmax()


def first_of_the_smallest_of_rows(x: Tensor) -> Tensor:
    return x.argmin(1, keepdim=True)


def with_ties(size: int) -> Tensor:
    return torch.tensor([[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 0, 1]], dtype=torch.float64)[:, :size]


@pytest.mark.parametrize("words", ["S0", "S1", "Psum"])
@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("place", [first_of_the_largest, first_of_the_smallest_of_rows])
def test_the_first_of_equal_extremes_is_found(place: Loss, size: int, words: str) -> None:
    check_twin(place, [with_ties(size)], words)


@pytest.mark.parametrize("words", ["S0 S1", "S1 S0", "S0 S0", "S1 R"])
def test_the_first_of_equal_extremes_is_found_over_two_axes(words: str) -> None:
    check_twin(first_of_the_largest, [with_ties(5)], words, mesh=(2, 2))


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.conv2d(x, weight, bias, padding=1)


def convolved_apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.conv2d(x, weight, bias, stride=2, dilation=2)


def convolved_back(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.conv_transpose2d(x, weight, bias, stride=2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(
    "words",
    [("S0", "R", "R"), ("S1", "R", "R"), ("S3", "R", "R"), ("R", "S0", "S0"), ("Psum", "R", "R")],
    ids=",".join,
)
@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("convolution", [convolved, convolved_apart, convolved_back])
def test_a_convolution_of_shards_is_that_of_the_whole(
    convolution: Loss, size: int, words: tuple[str, ...], backward: bool
) -> None:
    tensors = [numbers(3, 2, 6, size), numbers(2, 2, 3, 3), numbers(2)]
    check_twin(convolution, tensors, *words, backward=backward)


def split_into_nothing(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, 0, 0, 0))


@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
def test_a_view_of_nothing_ends(words: str) -> None:
    check_twin(split_into_nothing, [numbers(4, 0)], words)
