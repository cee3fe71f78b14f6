"""Collectives reject tensors with tangents, from any caller: no tangent is lost silently."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import funcol

WORLD = 2
pytestmark = pytest.mark.usefixtures("fake_world")

Call = Callable[[Tensor, Any], Any]  # of a 2 x 2 tensor and the default group


def zeros(*sizes: int) -> Tensor:
    return torch.zeros(*sizes)


CALLS: dict[str, Call] = {
    "all_reduce": lambda x, group: funcol.all_reduce(x, "sum", group),
    "all_reduce max": lambda x, group: funcol.all_reduce(x, "max", group),
    "all_reduce_coalesced": lambda x, group: funcol.all_reduce_coalesced([torch.ones(2), x], "sum", group)[1],
    "all_gather_tensor": lambda x, group: funcol.all_gather_tensor(x, 1, group),
    "all_gather_tensor, uneven": lambda x, group: funcol.all_gather_tensor(x, 0, group, split_sizes=[2, 3]),
    "all_gather_into_tensor_coalesced": lambda x, group: funcol.all_gather_into_tensor_coalesced([x], group)[
        0
    ],
    "reduce_scatter_tensor": lambda x, group: funcol.reduce_scatter_tensor(x, "sum", 0, group),
    "reduce_scatter_tensor, uneven": lambda x, group: funcol.reduce_scatter_tensor(
        x, "sum", 0, group, split_sizes=[2, 0]
    ),
    "reduce_scatter_tensor_coalesced": lambda x, group: funcol.reduce_scatter_tensor_coalesced(
        [x], "sum", [0], group
    )[0],
    "all_to_all_single": lambda x, group: funcol.all_to_all_single(x, None, None, group),
    "all_to_all": lambda x, group: funcol.all_to_all([torch.ones_like(x), x], None, group)[0],
    "permute_tensor": lambda x, group: funcol.permute_tensor(x, [1, 0], group),
    "broadcast": lambda x, group: funcol.broadcast(x, 0, group),
    "reduce": lambda x, group: funcol.reduce(x, "sum", 0, group),
    "scatter": lambda x, group: funcol.scatter(x, 0, 0, group),
    "gather": lambda x, group: funcol.gather(x, 0, 0, group),
    "all_reduce_inplace": lambda x, group: funcol.all_reduce_inplace(x * 1, "sum", group),
    "broadcast_inplace": lambda x, group: funcol.broadcast_inplace(x * 1, 0, group),
    "all_gather_inplace": lambda x, group: funcol.all_gather_inplace([zeros(2, 2), zeros(2, 2)], x, group)[0],
    "all_gather_tensor_inplace": lambda x, group: funcol.all_gather_tensor_inplace(zeros(4, 2), x, group),
    "reduce_scatter_inplace": lambda x, group: funcol.reduce_scatter_inplace(
        zeros(2, 2), [x, x], group=group
    ),
    "reduce_scatter_tensor_inplace": lambda x, group: funcol.reduce_scatter_tensor_inplace(
        zeros(1, 2), x, group=group
    ),
    "all_to_all_inplace": lambda x, group: funcol.all_to_all_inplace(zeros(2, 2), x, group=group),
}

# Operators that PyTorch's namespace has, too.
OPERATORS: dict[str, Callable[[Any, Tensor, str], Any]] = {
    "all_reduce": lambda ops, x, group: ops.all_reduce(x, "sum", group),
    "all_reduce_": lambda ops, x, group: ops.all_reduce_(x, "sum", group),
    "all_reduce_coalesced": lambda ops, x, group: ops.all_reduce_coalesced([x], "sum", group),
    "all_reduce_coalesced_": lambda ops, x, group: ops.all_reduce_coalesced_([x], "sum", group),
    "all_gather_into_tensor": lambda ops, x, group: ops.all_gather_into_tensor(x, 2, group),
    "all_gather_into_tensor_out": lambda ops, x, group: ops.all_gather_into_tensor_out(
        x, 2, group, out=zeros(4, 2)
    ),
    "all_gather_into_tensor_out, into it": lambda ops, x, group: ops.all_gather_into_tensor_out(
        zeros(1, 2), 2, group, out=x
    ),
    "reduce_scatter_tensor": lambda ops, x, group: ops.reduce_scatter_tensor(x, "sum", 2, group),
    "reduce_scatter_tensor_out": lambda ops, x, group: ops.reduce_scatter_tensor_out(
        x, "sum", 2, group, out=zeros(1, 2)
    ),
    "all_to_all_single": lambda ops, x, group: ops.all_to_all_single(x, [1, 1], [1, 1], group),
    "broadcast": lambda ops, x, group: ops.broadcast(x, 0, group),
    "broadcast_": lambda ops, x, group: ops.broadcast_(x, 0, group),
    "isend": lambda ops, x, group: ops.isend(x, 1, 0, group),
    "irecv": lambda ops, x, group: ops.irecv(x, 1, 0, group),
    "batch_p2p_ops": lambda ops, x, group: ops.batch_p2p_ops(["irecv"], [1], [0], [x], group),
}
needs_grad = pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
for_each_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())


def refused() -> Any:
    return pytest.raises(NotImplementedError, match=r"funcol::.* has a tangent")


@needs_grad
@for_each_call
def test_a_dual_tensor_is_refused(call: Call, requires_grad: bool) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 2, requires_grad=requires_grad), torch.ones(2, 2))
        with refused():
            call(dual, dist.group.WORLD)


@for_each_call
def test_so_it_is_under_jvp(call: Call) -> None:
    with refused():
        torch.func.jvp(lambda x: call(x, dist.group.WORLD), (torch.ones(2, 2),), (torch.ones(2, 2),))


@for_each_call
def test_so_it_is_where_a_transform_is_inside_of_jvp(call: Call) -> None:
    with refused():
        torch.func.hessian(lambda x: (call(x, dist.group.WORLD) ** 2).sum())(torch.ones(2, 2))


@needs_grad
@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS.keys())
def test_operators_refuse_a_dual_tensor(call: Callable[[Any, Tensor, str], Any], requires_grad: bool) -> None:
    with forward_ad.dual_level():
        primal = torch.ones(2, 2, requires_grad=requires_grad) * 1
        dual = forward_ad.make_dual(primal, torch.ones(2, 2))
        with refused():
            call(torch.ops.funcol, dual, dist.group.WORLD.group_name)


@pytest.mark.usefixtures("_installed")
@pytest.mark.parametrize("call", OPERATORS.values(), ids=OPERATORS.keys())
def test_so_do_operators_of_pytorch_under_install(call: Callable[[Any, Tensor, str], Any]) -> None:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(2, 2), torch.ones(2, 2))
        with refused():
            call(torch.ops._c10d_functional, dual, dist.group.WORLD.group_name)


@needs_grad
@pytest.mark.parametrize("wait", [funcol.wait_tensor, lambda x: funcol.wait_tensors([x])[0]])
def test_waiting_keeps_the_tangent(wait: Callable[[Tensor], Tensor], requires_grad: bool) -> None:
    with forward_ad.dual_level():
        primal = torch.ones(2, requires_grad=requires_grad)
        dual = forward_ad.make_dual(primal, torch.full((2,), 3.0))
        assert forward_ad.unpack_dual(wait(dual)).tangent.tolist() == [3.0, 3.0]


def test_waiting_under_jvp_is_refused() -> None:
    with refused():
        torch.func.jvp(funcol.wait_tensor, (torch.ones(2),), (torch.ones(2),))


def test_a_tangent_of_what_is_overwritten_does_not_stay() -> None:
    with forward_ad.dual_level():
        out = forward_ad.make_dual(torch.ones(4, 2), torch.ones(4, 2))
        funcol.all_gather_tensor_inplace(out, torch.ones(2, 2), dist.group.WORLD)
        tangent = forward_ad.unpack_dual(out).tangent
        assert tangent is None or tangent.tolist() == [[0.0] * 2] * 4


def test_dual_tensors_may_be_made_of_results() -> None:
    with forward_ad.dual_level():
        total, tangent = (funcol.all_reduce(torch.full((2,), x), "sum", dist.group.WORLD) for x in (1.0, 3.0))
        doubled = forward_ad.unpack_dual(forward_ad.make_dual(total, tangent) * 2)
        assert [part.tolist() for part in doubled] == [[2.0, 2.0], [6.0, 6.0]]
