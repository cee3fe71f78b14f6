"""The package spmd_types under funcol.install() while it checks types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import device_type
from spmd_cases import (
    HAS_ASYNC_OP,
    TABLES,
    WORLDS,
    Case,
    I,
    P,
    R,
    S,
    V,
    call,
    error_of,
    on_ranks,
    same,
    sample,
    sent_by_stock,
    spmd,
)
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import funcol

ON_DEVICES = True


def typed_run(rank: int, world: int, case: Case) -> Any:
    """Returns types and values of the result and the gradient, while the package checks types."""
    from spmd_types.checker import typecheck

    group = world_group()
    axis = spmd.MeshAxis.of(group)
    local = V if isinstance(case.source, spmd.Shard) else case.source
    leaf = sample(rank, world, case).requires_grad_()
    with spmd.set_current_mesh(frozenset({axis})), typecheck():
        spmd.assert_type(leaf, {axis: local})
        y = call(case, leaf, group)
        is_pending = funcol.is_pending(y)
        types = dict(spmd.get_local_type(y))
        doubled = y + y
        after = dict(spmd.get_local_type(doubled))
        mixed = error_of(lambda: spmd.assert_type(y, {axis: P if case.target is not P else R}))
    return is_pending, (types, after, mixed and mixed[0]), doubled.detach()


def typed_or_error(rank: int, world: int, case: Case) -> Any:
    try:
        return typed_run(rank, world, case)
    except Exception as error:
        return type(error), str(error).splitlines()[0]


@pytest.mark.parametrize("table", ["COLLECTIVES", "LOCAL"])
@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_types_are_those_of_stock_while_they_are_checked(rank: int, world: int, table: str) -> None:
    cases = sent_by_stock(TABLES[table])
    theirs = [typed_or_error(rank, world, case) for case in cases]
    with funcol.installed():
        ours = [typed_or_error(rank, world, case) for case in cases]
    num_errors = 0
    for case, one, other in zip(cases, ours, theirs, strict=True):
        if len(other) == 2:
            num_errors += 1
            assert one == other, str(case)
            continue
        assert one[1] == other[1], str(case)
        same(one[2], other[2], case)
        if table == "COLLECTIVES":
            assert one[0] == case.is_pending, str(case)
    assert num_errors < len(cases) / 4


def typed_block(rank: int, world: int) -> list[Any]:
    """Returns a block whose activations are sharded along the sequence, its weights along the hidden dim."""
    from spmd_types.checker import typecheck

    mesh = dist.device_mesh.init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = torch.arange(world * 6.0).view(2 * world, 3).chunk(world)[rank].clone().requires_grad_()
    up = torch.full((3, 4), 1.0 + rank).requires_grad_()
    down = torch.full((4, 3), 0.5 * (1 + rank)).requires_grad_()
    scale = torch.ones(3).requires_grad_()
    with spmd.set_current_mesh(mesh), typecheck():
        for tensor in (x, up, down):
            spmd.assert_type(tensor, {"tp": V})
        spmd.assert_type(scale, {"tp": I})
        whole = spmd.all_gather(x, "tp", src=S(0), dst=R)
        hidden = torch.relu(whole @ up) @ down
        partial = spmd.reinterpret(hidden, "tp", src=V, dst=P)
        y = spmd.reduce_scatter(partial, "tp", src=P, dst=S(0))
        y = y * spmd.convert(scale, "tp", src=I, dst=R)
        types = [dict(spmd.get_local_type(tensor)) for tensor in (whole, hidden, partial, y)]
        loss = spmd.all_reduce(spmd.reinterpret(y.sum(), "tp", src=V, dst=P), "tp", src=P, dst=I)
        loss.backward()
    return [types, loss.detach() + 0, *(tensor.grad + 0 for tensor in (x, up, down, scale))]


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_a_typed_block_trains_as_on_stock(rank: int, world: int) -> None:
    theirs = typed_block(rank, world)
    with funcol.installed():
        ours = typed_block(rank, world)
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        same(one, other)


def rest_of_the_api(rank: int, world: int) -> list[Any]:
    """Queries and changes of types on results that may be pending, and what else takes them."""
    from spmd_types.checker import typecheck

    group = world_group()
    axis = spmd.MeshAxis.of(group)
    x, other = torch.full((world, 2), 1.0 + rank).requires_grad_(), torch.full((2, 3), 2.0 + rank)
    found: list[Any] = []

    @spmd.local_map(out_types={axis: V})
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @spmd.no_typecheck()
    def unchecked(a: Tensor) -> Tensor:
        return a.cumsum(0)

    with spmd.set_current_mesh(frozenset({axis})), typecheck():
        assert spmd.is_type_checking()
        spmd.assert_type(x, {axis: P})
        spmd.assert_type(other, {axis: V})
        y = spmd.all_reduce(x, group, src=P, dst=R)
        found.append(spmd.get_axis_local_type(y, group))
        found.append(spmd.maybe_get_axis_local_type(y, axis))
        found.append(spmd.has_local_type(y))
        found.append(str(spmd.get_partition_spec(y)))
        out = product(y, other)
        found.append((dict(spmd.get_local_type(out)), out.detach() + 0))
        scaled = y * spmd.Scalar(3.0, {axis: R})
        found.append((dict(spmd.get_local_type(scaled)), scaled.detach() + 0))
        quiet = spmd.all_reduce(x.detach(), group, src=P, dst=R)
        again = spmd.reinterpret_no_grad(quiet, group, dst=I) if HAS_ASYNC_OP else quiet + 0
        found.append((dict(spmd.get_local_type(again)), again + 0))
        if HAS_ASYNC_OP:
            spmd.mutate_type(again, axis, src=I, dst=R)
        found.append(dict(spmd.get_local_type(again)))
        alias = spmd.reinterpret_mesh(again, frozenset({axis}))
        found.append(dict(spmd.get_local_type(alias)))
        spmd.assert_type_like(alias, quiet if dict(spmd.get_local_type(quiet)) else again)
        found.append(error_of(lambda: spmd.assert_local_type(quiet, {axis: P})) is not None)
    (gradient,) = torch.autograd.grad(scaled.sum(), x)
    found += [unchecked(y).detach() + 0, gradient + 0]
    return found


def with_dtensors(rank: int, world: int) -> list[Any]:
    mesh = dist.device_mesh.init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    local = torch.full((2, 2 * world), 1.0 + rank).requires_grad_()
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    rows, columns = spmd.TensorSharding("tp"), spmd.TensorSharding(None, "tp")
    whole = spmd.spmd_redistribute(x, rows, spmd.TensorSharding())
    cut = spmd.spmd_redistribute(x, rows, columns)
    found: list[Any] = [whole.placements, cut.placements]
    found += [whole.to_local().detach() + 0, cut.to_local().detach() + 0]
    loss = (cut.to_local() * (1 + rank)).sum()
    return [*found, torch.autograd.grad(loss, local)[0] + 0]


def without_types(found: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("world", WORLDS)
@on_ranks()
def test_the_rest_of_the_api_takes_pending_results(rank: int, world: int) -> None:
    programs = (rest_of_the_api, with_dtensors)
    theirs = [program(rank, world) for program in programs]
    with funcol.installed():
        ours = [program(rank, world) for program in programs]
    torch.testing.assert_close(without_types(ours), without_types(theirs), rtol=0, atol=0)
    assert repr(ours) == repr(theirs)
