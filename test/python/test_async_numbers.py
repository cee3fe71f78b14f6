"""Arithmetic with a number, which the first use of a pending tensor converts, is that of a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from test_async_autograd import Make, check_alike, pending
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils.checkpoint import checkpoint

ARITHMETIC: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": lambda t, number: torch.add(t, number, alpha=3),
    "sub": lambda t, number: t - number,
    "mul": lambda t, number: t * number,
    "div": lambda t, number: t / number,
    "reversed": lambda t, number: number - t,
}


def packed_by_hooks(compute: Callable[[Tensor], Tensor], make: Make) -> Any:
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.tolist()) or t, lambda t: t):
        result = compute(make().requires_grad_())
    return packed, result


def second_gradient(compute: Callable[[Tensor], Tensor], make: Make) -> Any:
    t = make().requires_grad_()
    (first,) = torch.autograd.grad((compute(t) ** 2).sum(), t, create_graph=True)
    return first, torch.autograd.grad(first.sum(), t)


def tangent(compute: Callable[[Tensor], Tensor], make: Make) -> Any:
    with forward_ad.dual_level():
        return list(forward_ad.unpack_dual(compute(forward_ad.make_dual(make(), torch.ones(3, 4)))))


def recomputed(compute: Callable[[Tensor], Tensor], make: Make) -> Any:
    t = make().requires_grad_()
    checkpoint(compute, t, use_reentrant=False).sum().backward()
    return t.grad


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Make], Any]] = {
    "packed_by_hooks": packed_by_hooks,
    "second_gradient": second_gradient,
    "tangent": tangent,
    "recomputed": recomputed,
    "jvp": lambda compute, make: jvp(compute, (make(),), (torch.ones(3, 4),)),
    "vmap": lambda compute, make: vmap(compute)(make()),
    "inference_mode": lambda compute, make: torch.inference_mode()(compute)(make()),
    "autocast": lambda compute, make: torch.autocast("cpu")(compute)(make()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("number", [2, 0.1, True, 1j])
@pytest.mark.parametrize("op", ARITHMETIC.values(), ids=ARITHMETIC.keys())
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_arithmetic_with_a_number_is_that_of_a_plain_tensor(
    op: Callable[[Tensor, Any], Tensor], number: Any, way: Callable[..., Any]
) -> None:
    check_alike(lambda make: way(lambda t: op(t, number), make))


def test_the_first_use_saves_the_number_that_it_converted() -> None:
    product = pending().requires_grad_() * 0.1
    assert product.grad_fn._saved_other.dtype == torch.float32  # type: ignore[union-attr]
    assert product.grad_fn._saved_other == torch.tensor(0.1)  # type: ignore[union-attr]
