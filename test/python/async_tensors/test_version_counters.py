"""Tensors of the caller that collectives overwrite: a backward pass that saved them raises, in all cases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import funcol
from funcol import _C

WORLD = 2
pytestmark = pytest.mark.usefixtures("fake_world")

# write(ops, x, group): overwrites x, which has 4 rows, by an operator of one of the two namespaces.
Write = Callable[[Any, Tensor, str], Any]

WRITES: dict[str, Write] = {
    "all_reduce_": lambda ops, x, group: ops.all_reduce_(x, "sum", group),
    "all_reduce_coalesced_": lambda ops, x, group: ops.all_reduce_coalesced_([x], "sum", group)[0],
    "broadcast_": lambda ops, x, group: ops.broadcast_(x, 0, group),
    "all_gather_into_tensor_out": lambda ops, x, group: ops.all_gather_into_tensor_out(
        torch.ones(2, 3), WORLD, group, out=x
    ),
    "reduce_scatter_tensor_out": lambda ops, x, group: ops.reduce_scatter_tensor_out(
        torch.ones(8, 3), "sum", WORLD, group, out=x
    ),
    "irecv": lambda ops, x, group: ops.irecv(x, 1, 0, group),
    "batch_p2p_ops": lambda ops, x, group: ops.batch_p2p_ops(
        ["isend", "irecv"], [1, 1], [0, 0], [torch.ones(3), x], group
    )[1],
}
for_each_write = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())

CALLERS: dict[str, Callable[[], Any]] = {
    "funcol's operators": lambda: torch.ops.funcol,
    "PyTorch's operators": lambda: torch.ops._c10d_functional,
}
for_each_caller = pytest.mark.parametrize("ops", CALLERS.values(), ids=CALLERS.keys())


def overwritten(write: Write, ops: Any, x: Tensor) -> None:
    ops.wait_tensor(write(ops, x, dist.group.WORLD.group_name))


@pytest.mark.usefixtures("_installed")
@for_each_caller
@for_each_write
def test_a_saved_tensor_that_is_overwritten_has_no_gradient(write: Write, ops: Callable[[], Any]) -> None:
    x = torch.ones(4, 3)
    weight = torch.full((4, 3), 2.0, requires_grad=True)
    loss = (weight * x).sum()
    overwritten(write, ops(), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@for_each_write
def test_a_saved_tensor_with_a_gradient_of_its_own_has_none_either(write: Write) -> None:
    x = torch.ones(4, 3, requires_grad=True) * 1
    loss = (x * x).sum()

    def run() -> None:
        overwritten(write, torch.ops.funcol, x)  # older releases refuse some here
        loss.backward()

    with pytest.raises(RuntimeError, match=r"modified by an inplace operation|is being modified inplace"):
        run()


@for_each_write
def test_so_it_is_where_a_mode_watches(write: Write) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    x = torch.ones(4, 3)
    before = x._version
    with Watching():
        overwritten(write, torch.ops.funcol, x)
    assert x._version > before


@pytest.mark.usefixtures("_installed")
@for_each_caller
@for_each_write
def test_a_view_counts_with_its_base(write: Write, ops: Callable[[], Any]) -> None:
    base = torch.ones(6, 3)
    before = base._version
    overwritten(write, ops(), base[1:5])
    assert base._version > before


@pytest.mark.usefixtures("_installed")
@for_each_caller
@for_each_write
def test_inference_tensors_count_nothing(write: Write, ops: Callable[[], Any]) -> None:
    with torch.inference_mode():
        overwritten(write, ops(), torch.ones(4, 3))


def test_a_receive_from_python_counts() -> None:
    x = torch.ones(4, 3)
    before = x._version
    received = _C.irecv(x, 1, 0, dist.group.WORLD, "")
    assert x._version > before
    funcol.wait_tensor(received)


def test_what_is_only_read_does_not_count() -> None:
    x = torch.ones(4, 3)
    before = x._version
    funcol.wait_tensor(funcol.all_reduce(x, "sum", dist.group.WORLD))
    overwritten(
        lambda ops, out, group: ops.all_gather_into_tensor_out(x, WORLD, group, out=out),
        torch.ops.funcol,
        torch.ones(8, 3),
    )
    assert x._version == before
