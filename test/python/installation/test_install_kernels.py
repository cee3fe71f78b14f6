"""Kernels that programs give PyTorch's collectives by torch.library are called under install(), too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as stock
from differential import world_group
from programs import mesh_of
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeWork, Work
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import funcol
from funcol import _C
from funcol.commands.info import info
from funcol.installation import kernels

ON_DEVICES = True

calls: list[str] = []


def reduces(tensor: Tensor, reduce_op: Any, group: Any) -> Tensor:
    calls.append("all_reduce")
    return tensor * 7


def gathers(tensor: Tensor, group_size: int, group: Any) -> Tensor:
    calls.append("all_gather_into_tensor")
    return torch.cat([tensor * 5] * group_size)


def reduces_below(tensors: list[Tensor], *others: Any) -> Any:
    calls.append("allreduce_")
    for tensor in tensors:
        tensor.mul_(7)
    return tensors, Work.boxed(FakeWork())


def gathers_below(output: Tensor, tensor: Tensor, *others: Any) -> Any:
    calls.append("_allgather_base_")
    output.copy_(torch.cat([tensor * 5] * (output.numel() // tensor.numel())).view_as(output))
    return output, Work.boxed(FakeWork())


def scatters_below(output: Tensor, tensor: Tensor, *others: Any) -> Any:
    calls.append("_reduce_scatter_base_")
    output.copy_(tensor.view(-1)[: output.numel()].view_as(output) * 3)
    return output, Work.boxed(FakeWork())


KERNELS: dict[str, Callable[..., Any]] = {"all_reduce": reduces, "all_gather_into_tensor": gathers}
BELOW: dict[str, Callable[..., Any]] = {
    "allreduce_": reduces_below,
    "_allgather_base_": gathers_below,
    "_reduce_scatter_base_": scatters_below,
}
KEYS = ["CPU", "CompositeExplicitAutograd"]


@contextmanager
def registered(name: str, key: str) -> Iterator[None]:
    library = torch.library.Library("c10d" if name in BELOW else "_c10d_functional", "IMPL")
    key = device_type().upper() if key == "CPU" else key
    library.impl(name, (KERNELS | BELOW)[name], key)
    calls.clear()
    try:
        yield
    finally:
        library._destroy()


def program() -> list[Tensor]:
    mesh, x = mesh_of(2), torch.arange(8.0).reshape(4, 2)
    partial = DTensor.from_local(x, mesh, [Partial()]).requires_grad_()
    summed = partial.redistribute(placements=[Replicate()])
    summed.to_local().sum().backward()
    sharded = DTensor.from_local(x, mesh, [Shard(0)])
    local = sharded.redistribute(placements=[Replicate()], async_op=True).to_local()
    results = [
        summed.to_local().detach(),
        sharded.full_tensor(),
        local + 0,
        (sharded.sum() * 2).full_tensor(),
    ]
    results.append(stock.all_reduce(x, "sum", world_group()) + 0)
    results.append(stock.all_gather_tensor(x, 0, world_group()) + 0)
    return results


def sharded_program() -> list[Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    fully_shard(module[0], mesh=mesh_of(2))
    fully_shard(module, mesh=mesh_of(2))
    results = []
    for _ in range(2):
        out = module(torch.arange(8.0).reshape(2, 4))
        out.sum().backward()
        results += [out.detach().clone()]
    for parameter in module.parameters():
        assert isinstance(parameter.grad, DTensor)
        results += [parameter.grad.to_local()]
    return results


def follows(rank: int, world: int, name: str, key: str, when: str, program_name: str) -> None:
    program: Callable[[], list[Tensor]] = globals()[program_name]
    with registered(name, key):
        expected = program()
        counted = list(calls)
        assert counted.count(name) >= 2 or program is sharded_program
    before = [torch._C._dispatch_dump(op) for op in _C.ops_with_core_kernels()]
    with ExitStack() as stack:
        contexts: list[AbstractContextManager[None]] = [registered(name, key), funcol.installed()]
        for context in contexts if when == "before" else reversed(contexts):
            stack.enter_context(context)
        results = program()
        assert calls == counted
        for result, other in zip(results, expected, strict=True):
            assert torch.equal(result, other)
    assert [torch._C._dispatch_dump(op) for op in _C.ops_with_core_kernels()] == before


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", KERNELS)
def test_what_a_program_registered_is_called_as_without_funcol(name: str, key: str, when: str) -> None:
    run_ranks(follows, 2, name, key, when, "program")


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_that_pytorchs_operators_call_is_called_as_without_funcol(when: str) -> None:
    run_ranks(follows, 2, "allreduce_", "CPU", when, "program")


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", ["all_gather_into_tensor", "_allgather_base_", "_reduce_scatter_base_"])
def test_fsdp_calls_it_as_often_as_without_funcol(name: str, when: str) -> None:
    run_ranks(follows, 2, name, "CPU", when, "sharded_program")


@on_ranks(2)
def test_without_it_funcols_is_back(rank: int, world: int) -> None:
    with funcol.installed():

        def kernels_of_funcol() -> list[int]:
            return [
                torch._C._dispatch_dump(op).count("core_kernels.cpp") for op in _C.ops_with_core_kernels()
            ]

        before = kernels_of_funcol()
        with registered("all_reduce", "CPU"):
            pass
        assert kernels_of_funcol() == before
        calls.clear()
        assert funcol.is_pending(stock.all_reduce(torch.ones(2), "sum", world_group()))
        assert calls == []


def test_pytorch_has_none_of_programs() -> None:
    assert kernels.ops_with_program_kernels() == []
    with funcol.installed():
        assert kernels.ops_with_program_kernels() == []


def test_torch_library_is_as_it_was() -> None:
    functions = [vars(torch.library.Library)["impl"], vars(torch.library.Library)["_destroy"]]
    before = [(one.__code__, one.__kwdefaults__, dict(vars(one))) for one in functions]
    with funcol.installed():
        pass
    assert [(one.__code__, one.__kwdefaults__, dict(vars(one))) for one in functions] == before


@pytest.mark.parametrize("context", [nullcontext, funcol.installed])
def test_info_tells_of_it(context: Callable[[], AbstractContextManager[None]]) -> None:
    with registered("all_reduce", "CPU"), context():
        (row,) = [line for line in info().splitlines() if line.startswith("kept from programs")]
    assert row.endswith(" a kernel of a program in the place of _c10d_functional::all_reduce")
