"""Autograd and the in-place forms: as if the result of the functional collective had been copied."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from differential import sample
from ranks import on_ranks
from slow_collectives import same
from torch import Tensor

import funcol
from funcol import _C

ON_DEVICES = True

# A form takes a source of shape (4, 3) that needs a gradient, and the number of ranks. It returns the tensors
# that it wrote to.
Form = Callable[[Tensor, int], list[Tensor]]


def stacked(x: Tensor, size: int) -> Tensor:
    return torch.cat([x * (r + 1) for r in range(size)])


FORMS: dict[str, Form] = {
    "all_reduce": lambda x, size: [funcol.all_reduce_inplace(x * 2)],
    "all_reduce avg": lambda x, size: [funcol.all_reduce_inplace(x * 2, "avg")],
    "all_reduce of rows": lambda x, size: [(y := x * 2, funcol.all_reduce_inplace(y[1:3]))[0]],
    "broadcast": lambda x, size: [funcol.broadcast_inplace(x * 2, size - 1)],
    "all_gather_tensor": lambda x, size: [funcol.all_gather_tensor_inplace(torch.zeros(4 * size, 3), x * 2)],
    "all_gather_tensor, of one dim": lambda x, size: [
        funcol.all_gather_tensor_inplace(torch.zeros(12 * size), x * 2)
    ],
    "all_gather_tensor of a number": lambda x, size: [
        funcol.all_gather_tensor_inplace(torch.zeros(size), x.sum())
    ],
    "all_gather_tensor into rows": lambda x, size: [
        (out := torch.ones(4 * size + 1, 3), funcol.all_gather_tensor_inplace(out[1:], x * 2))[0]
    ],
    "reduce_scatter_tensor": lambda x, size: [
        funcol.reduce_scatter_tensor_inplace(torch.zeros(4, 3), stacked(x, size))
    ],
    "reduce_scatter_tensor avg, of one dim": lambda x, size: [
        funcol.reduce_scatter_tensor_inplace(torch.zeros(12), stacked(x, size), "avg")
    ],
    "reduce_scatter_tensor into a number": lambda x, size: [
        funcol.reduce_scatter_tensor_inplace(torch.zeros(()), stacked(x.sum().view(1), size))
    ],
    "reduce_scatter_tensor max": lambda x, size: [
        funcol.reduce_scatter_tensor_inplace(torch.zeros(4, 3), stacked(x, size), "max")
    ],
    "all_gather": lambda x, size: funcol.all_gather_inplace([torch.zeros(4, 3) for _ in range(size)], x * 2),
    "all_gather of numbers": lambda x, size: funcol.all_gather_inplace(
        [torch.zeros(()) for _ in range(size)], x.sum()
    ),
    "reduce_scatter": lambda x, size: [
        funcol.reduce_scatter_inplace(torch.zeros(4, 3), [x * (r + 1) for r in range(size)])
    ],
    "reduce_scatter of numbers": lambda x, size: [
        funcol.reduce_scatter_inplace(torch.zeros(()), [x.sum() * (r + 1) for r in range(size)])
    ],
}


def copying() -> Any:
    """While active, forms copy the result of the functional collective."""
    names = [name for name in dir(_C) if name.endswith(("_into", "_into_list"))]
    return mock.patch.dict(vars(_C), {name: mock.Mock(return_value=NotImplemented) for name in names})


def gradients(rank: int, world: int, form: str) -> list[Tensor]:
    """Returns the written values, and the first and second gradient of a quadratic function of them."""
    x = sample(rank, (4, 3)).requires_grad_()
    written = FORMS[form](x, world)
    loss = sum(((i + 1) * out**2).sum() for i, out in enumerate(written))
    (first,) = torch.autograd.grad(loss, x, create_graph=True)
    (second,) = torch.autograd.grad((first * (rank + 1)).sum(), x)
    return [*(out.detach() for out in written), first.detach(), second]


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@on_ranks()
def test_a_form_has_the_gradients_of_a_copy(rank: int, world: int, form: str) -> None:
    actual = gradients(rank, world, form)
    with copying():
        expected = gradients(rank, world, form)
    for one, other in zip(actual, expected, strict=True):
        assert same(one, other)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2, timeout=40)
def test_compiled_autograd_runs_the_backward_pass_of_a_form(rank: int, world: int, form: str) -> None:
    def gradient(engine: Any) -> Tensor:
        x = sample(rank, (4, 3)).requires_grad_()
        loss = FORMS[form](x, world)[-1].mul(rank + 1).sum()
        with engine:
            loss.backward()
        return x.grad

    expected = gradient(contextlib.nullcontext())
    torch._dynamo.reset()
    for _ in range(2):
        engine = torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager"))
        assert same(gradient(engine), expected)


@on_ranks(2)
def test_a_compiled_backward_pass_starts_collectives_without_the_gil(rank: int, world: int) -> None:
    # Drops the destination at once, so that now and then a thread of Gloo is its last holder.
    for _ in range(300):
        x = torch.ones(4, requires_grad=True)
        loss = funcol.broadcast_inplace(x * 2, 1).mul(rank + 1).sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()


@on_ranks(2)
def test_each_rank_may_use_another_part_of_a_gathered_list(rank: int, world: int) -> None:
    x = torch.ones(2, requires_grad=True)
    parts = funcol.all_gather_inplace([torch.zeros(2) for _ in range(world)], x * 2)
    parts[rank].sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


@pytest.mark.parametrize("form", ["all_reduce", "broadcast"])
@on_ranks(2)
def test_a_leaf_is_refused_before_anything_is_sent(rank: int, world: int, form: str) -> None:
    if rank == 0:
        leaf = torch.ones(2, requires_grad=True)
        with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
            funcol.all_reduce_inplace(leaf) if form == "all_reduce" else funcol.broadcast_inplace(leaf, 0)
    dist.barrier()  # which would wait for ever, or mix with it, had rank 0 sent anything


@on_ranks(2)
def test_what_a_destination_was_made_of_gets_zeros_as_its_gradient(rank: int, world: int) -> None:
    weight = torch.ones(2 * world, requires_grad=True)
    out = weight * 1
    funcol.all_gather_tensor_inplace(out, torch.ones(2))
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    assert gradient.tolist() == [0.0] * (2 * world)


@on_ranks(2)
def test_an_inference_tensor_is_written_in_inference_mode_only(rank: int, world: int) -> None:
    with torch.inference_mode():
        x = torch.ones(3)
        assert funcol.all_reduce_inplace(x).tolist() == [2.0] * 3
    with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
        funcol.all_reduce_inplace(x)


@on_ranks(2)
def test_sources_and_destinations_may_be_pending(rank: int, world: int) -> None:
    pending = funcol.all_reduce(torch.ones(2, 3), "sum", dist.group.WORLD)
    assert funcol.all_reduce_inplace(pending) is pending
    assert pending.tolist() == [[world**2] * 3] * 2
    out = torch.zeros(2 * world, 3)
    funcol.all_gather_tensor_inplace(out, funcol.all_reduce(torch.ones(2, 3), "sum", dist.group.WORLD))
    assert out.tolist() == [[world] * 3] * (2 * world)


@on_ranks(2)
def test_a_form_leaves_nothing_to_be_waited_for(rank: int, world: int) -> None:
    before = funcol.unwaited_collectives()
    x = torch.ones(2)
    funcol.all_reduce_inplace(x)
    funcol.all_gather_inplace([torch.zeros(2) for _ in range(world)], x)
    assert funcol.unwaited_collectives() == before
