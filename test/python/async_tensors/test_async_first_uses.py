"""The first use of a pending tensor does what it does on a plain one, by operators that take a shorter way.

Arithmetic converts the number beside the tensor itself; what needs no gradient does not ask autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from plain_and_pending import Make, autograd_metadata, check_alike, made_in_inference_mode, pending
from slow_collectives import SlowCollective, same, values
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils.checkpoint import checkpoint

import funcol
from funcol.collectives import async_tensor

ON_DEVICES = True

ARITHMETIC: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": lambda t, number: torch.add(t, number, alpha=3),
    "sub": lambda t, number: t - number,
    "mul": lambda t, number: t * number,
    "div": lambda t, number: t / number,
    "reversed": lambda t, number: number - t,
}

OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda t: t + torch.ones(4),
    "add_parameter": lambda t: t + torch.ones(4, requires_grad=True),
    "mul_number_in_place": lambda t: t.mul_(3),
    "addmm": lambda t: torch.addmm(torch.ones(2), t, torch.ones(4, 2)),
    "addmm_parameter": lambda t: torch.addmm(torch.ones(2), t, torch.ones(4, 2, requires_grad=True)),
    "bmm": lambda t: t.view(1, -1, 4).bmm(torch.ones(1, 4, 2)),
    "clone": torch.clone,
    "copy": lambda t: torch.zeros(4).expand(3, 4).clone().copy_(t),
    "mm": lambda t: t.mm(torch.ones(4, 2)),
    "sum": torch.sum,
    "sum_of_rows": lambda t: t.sum(-1),
    "to": lambda t: t.to(torch.float64),
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


def with_metadata(compute: Callable[[Tensor], Tensor], make: Make) -> Any:
    result = compute(make())
    return result, autograd_metadata(result)


WAYS: dict[str, Callable[[Callable[[Tensor], Tensor], Make], Any]] = {
    "with_metadata": with_metadata,
    "packed_by_hooks": packed_by_hooks,
    "second_gradient": second_gradient,
    "tangent": tangent,
    "recomputed": recomputed,
    "jvp": lambda compute, make: jvp(compute, (make(),), (torch.ones(3, 4),)),
    "vmap": lambda compute, make: vmap(compute)(make()),
    "inference_mode": lambda compute, make: torch.inference_mode()(compute)(make()),
    "made_in_inference_mode": lambda compute, make: with_metadata(
        compute, lambda: made_in_inference_mode(make)
    ),
    "without_gradients": lambda compute, make: with_metadata(torch.no_grad()(compute), make),
    "autocast": lambda compute, make: with_metadata(torch.autocast("cpu")(compute), make),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("number", [2, 0.1, True, 1j])
@pytest.mark.parametrize("op", ARITHMETIC.values(), ids=ARITHMETIC.keys())
@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_arithmetic_with_a_number_is_that_of_a_plain_tensor(
    op: Callable[[Tensor, Any], Tensor], number: Any, way: Callable[..., Any]
) -> None:
    check_alike(lambda make: way(lambda t: op(t, number), make))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("op", OPERATORS.values(), ids=OPERATORS.keys())
def test_an_operator_is_that_of_a_plain_tensor(
    op: Callable[[Tensor], Tensor], way: Callable[..., Any]
) -> None:
    check_alike(lambda make: way(op, make))


def test_the_first_use_saves_the_number_that_it_converted() -> None:
    product = pending().requires_grad_() * 0.1
    assert product.grad_fn._saved_other.dtype == torch.float32  # type: ignore[union-attr]
    assert product.grad_fn._saved_other == torch.tensor(0.1)  # type: ignore[union-attr]


def test_the_next_conversion_leaves_a_number_that_a_gradient_needs() -> None:
    inputs = [pending().requires_grad_() for _ in range(3)]
    sum([t * number for t, number in zip(inputs, [0.5, 2, 4], strict=True)]).sum().backward()
    for t, number in zip(inputs, [0.5, 2, 4], strict=True):
        assert torch.equal(t.grad, torch.full((3, 4), number))  # type: ignore[arg-type]


def test_dlpack_orders_streams_after_a_tensor_that_has_settled() -> None:
    collective = SlowCollective(values())
    was_pending = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is async_tensor._stock_dlpack.__code__:
            was_pending.append(funcol.is_pending(collective.tensor))

    sys.setprofile(note)
    try:
        exported = torch.from_dlpack(collective.tensor)
    finally:
        sys.setprofile(None)
    assert was_pending == [False]
    assert same(exported, values())
