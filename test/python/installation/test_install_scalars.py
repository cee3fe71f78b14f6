"""With funcol under DTensor, numbers beside DTensors: complex ones, zeros and infinities; and views in
inference mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import on_ranks
from sharded import layouts, mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from twins import check_twin, numbers, placed

import funcol

Function = Callable[[Tensor], Any]

COMPLEX: dict[str, Function] = {
    "equal": lambda x: x == 1j,
    "not equal": lambda x: x != 0.5 + 1j,
    "power": lambda x: x**1j,
    "add": lambda x: x + 2j,
    "multiply": lambda x: x * 1j,
    "divide": lambda x: x / 2j,
    "fill": lambda x: torch.full_like(x, 1j, dtype=torch.complex128),
    "lists": lambda x: torch._foreach_mul([x], 1j)[0],
}


def with_complex(name: str, x: Tensor) -> Any:
    return COMPLEX[name](x)


@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
def test_a_complex_number_is_an_argument(name: str, dtype: torch.dtype, words: str) -> None:
    if name == "lists" and dtype == torch.float64:
        pytest.skip("PyTorch multiplies no list of real tensors by a complex number")
    if name == "add" and words == "Psum" and torch.__version__ < "2.15":
        pytest.skip("the rule of older PyTorch releases adds the number on every rank")
    check_twin(functools.partial(with_complex, name), [numbers(4, 3).to(dtype)], words)


def divided(x: Tensor) -> Any:
    return [x / 2, x / 0, x / -0.0, x / 0.0, x / 3]


def multiplied(x: Tensor) -> Any:
    return [x * 2, x * float("inf"), x * -float("inf"), x * 3]


def added(x: Tensor) -> Any:
    return [x + float("inf"), torch.add(x, x, alpha=float("inf")), torch.addcmul(x, x, x, value=float("inf"))]


def of_lists(x: Tensor) -> Any:
    return [
        *torch._foreach_div([x], 0.0),
        *torch._foreach_div([x], [0.0]),
        *torch._foreach_mul([x], float("inf")),
        *torch._foreach_mul([x], [float("inf")]),
        *torch._foreach_div([x], 2.0),
    ]


def in_place(x: Tensor) -> Any:
    return [x.clone().div_(0), x.clone().mul_(float("inf")), x.clone().div_(2)]


@pytest.mark.parametrize("words", ["Psum", "Pavg", "Pmax", "S0"])
@pytest.mark.parametrize("function", [divided, multiplied, added, of_lists, in_place])
def test_a_pending_tensor_meets_zero_and_infinity_as_its_values_do(function: Function, words: str) -> None:
    if words != "S0" and torch.__version__ < "2.15":
        pytest.skip("the rules of older PyTorch releases scale the parts")
    whole = numbers(4, 3)
    whole[1] = -whole[1]
    check_twin(function, [whole], words)


VIEWS: dict[str, Function] = {
    "view": lambda x: x.view(12),
    "slice": lambda x: x[1:3],
    "row": lambda x: x[0],
    "transpose": lambda x: x.t(),
    "split": lambda x: x.split(2),
    "chunk": lambda x: x.chunk(3, 1),
    "unbind": lambda x: x.unbind(0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 3),
    "detach": lambda x: x.detach(),
    "reshape": lambda x: x.reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "permute": lambda x: x.permute(1, 0),
    "diagonal": lambda x: x.diagonal(),
}


def in_inference_mode(name: str, x: Tensor) -> Any:
    with torch.inference_mode():
        views = VIEWS[name](x)
        return [view + 1 for view in tree_leaves(views)]


@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_in_inference_mode_has_its_values(name: str, words: str) -> None:
    check_twin(functools.partial(in_inference_mode, name), [numbers(4, 3)], words)


@pytest.mark.parametrize("words", ["R", "S0"])
@on_ranks(2)
def test_a_view_in_inference_mode_of_a_normal_tensor_is_normal(rank: int, world: int, words: str) -> None:
    x = placed(numbers(4, 3), layouts(words)[0], mesh_of((world,))).requires_grad_()
    with funcol.installed():
        with torch.inference_mode():
            view, computed = x.t(), x + 1
            of_inference = computed.t()
        assert isinstance(view, DTensor)
        assert not view.is_inference()
        assert view.requires_grad  # as a plain one
        assert computed.is_inference()
        assert of_inference.is_inference()
        (x.t() * view).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor().cpu(), numbers(4, 3))  # type: ignore[union-attr]
