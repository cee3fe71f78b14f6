"""``redistribute_tensor``: plain tensors by layouts, with gradients, compiled and traced."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import device_type, on_ranks, require_compiled_kernels, run_ranks
from sharded import Layout, layouts, local_of, mesh_of, reduced, shard_of, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import funcol
from funcol.redistribution import PartitionSpec, Varying, redistribute_tensor

ON_DEVICES = True

# Older PyTorch releases build the gradient of to_local() outside the graph.
_TO_LOCAL_IS_DIFFERENTIABLE_TWICE = torch.__version__ >= "2.15"

SHAPES = [(8, 12), (5, 3), (0, 4)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "Psum", "Pmax")
TWO_AXES = layouts("R R", "S0 R", "S0 S0", "S0 S1", "S1 S0", "Psum R", "Psum S0")


def moves(rank: int, world: int, mesh_shape: tuple[int, ...], chosen: list[Layout]) -> None:
    mesh = mesh_of(mesh_shape)
    at = mesh.get_coordinate() or ()
    for shape, src, dst in itertools.product(SHAPES, chosen, chosen):
        whole = whole_of(shape, torch.float64)
        local = local_of(whole, src, mesh.shape, at)
        result = redistribute_tensor(local, mesh, src.placements(), dst.placements(), shape=shape)
        assert torch.equal(reduced(result, dst, mesh), shard_of(whole, dst, mesh.shape, at)), (
            shape,
            src,
            dst,
        )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_pair_of_placements_of_one_axis(world: int) -> None:
    run_ranks(moves, world, (world,), ONE_AXIS)


def test_every_pair_of_placements_of_two_axes() -> None:
    run_ranks(moves, 4, (2, 2), TWO_AXES)


SPECS: list[tuple[Any, tuple[int, ...], tuple[tuple[int, ...], tuple[int, ...]]]] = [
    # spec, mesh axes in order that cut dim 0, and dim 1
    ((None, None), (), ((), ())),
    ((), (), ((), ())),
    (("a",), (), ((0,), ())),
    (("a", "b"), (), ((0,), (1,))),
    (("b", "a"), (), ((1,), (0,))),
    ((("a", "b"), None), (), ((0, 1), ())),
    ((("b", "a"), None), (), ((1, 0), ())),
    ((None, ("b", "a")), (), ((), (1, 0))),
    ((0, 1), (), ((0,), (1,))),
    (PartitionSpec("a", partial={"b": "sum"}), (1,), ((0,), ())),
]


def held(
    whole: Tensor, mesh: DeviceMesh, partial: tuple[int, ...], cuts: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Returns this rank's shard, by ``torch.chunk``; the first rank of an axis has all of a partial value."""
    at = mesh.get_coordinate()
    assert at is not None
    for dim, axes in enumerate(cuts):
        for axis in axes:
            chunks = whole.chunk(mesh.shape[axis], dim)
            whole = chunks[at[axis]] if at[axis] < len(chunks) else whole.narrow(dim, 0, 0)
    return whole if all(at[axis] == 0 for axis in partial) else torch.zeros_like(whole)


@on_ranks(4)
def test_every_pair_of_partition_specs(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    whole = whole_of((5, 7), torch.float32)
    for (src, *ends), (dst, *target) in itertools.product(SPECS, SPECS):
        result = redistribute_tensor(held(whole, mesh, *ends), mesh, src, dst, shape=whole.shape)  # type: ignore[arg-type]
        partial, cuts = target
        for axis in partial:
            result = funcol.all_reduce(result, "sum", (mesh, axis))
        assert torch.equal(result, held(whole, mesh, (), cuts)), (src, dst)  # type: ignore[arg-type]


@on_ranks(4)
def test_nothing_moves_along_an_axis_that_varies(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    of_row = 10.0 * (rank // 2)  # another tensor on each rank of the axis a
    whole = whole_of((6, 4), torch.float32) + of_row
    rows, columns = whole.chunk(2)[rank % 2], whole.chunk(2, 1)[rank % 2]
    by_placements = redistribute_tensor(
        rows, mesh, [Varying(), Shard(0)], [Varying(), Shard(1)], shape=whole.shape
    )
    by_specs = redistribute_tensor(
        rows,
        mesh,
        PartitionSpec("b", varying=["a"]),
        PartitionSpec(None, "b", varying=["a"]),
        shape=whole.shape,
    )
    assert torch.equal(by_placements, columns)
    assert torch.equal(by_specs, columns)
    same = redistribute_tensor(rows, mesh, [Varying()] * 2, [Varying()] * 2, shape=rows.shape)
    assert same is rows


@on_ranks(4)
def test_wrong_layouts_are_refused(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    x = torch.ones(2, 4)

    def attempt(src: Any, dst: Any, shape: tuple[int, ...] = (4, 4)) -> None:
        redistribute_tensor(x, mesh, src, dst, shape=shape)

    with pytest.raises(ValueError, match=r"names the mesh axis 'c'\. There are"):
        attempt(("c",), ())
    with pytest.raises(ValueError, match="names the mesh axis 'a' twice"):
        attempt(("a", "a"), ())
    with pytest.raises(ValueError, match="has 3 entries, the tensor 2 dims"):
        attempt((None, None, "a"), ())
    with pytest.raises(ValueError, match="1 placements for the 2 axes"):
        attempt([Shard(0)], ())
    with pytest.raises(ValueError, match="an axis varies in one of them only"):
        attempt([Varying(), Shard(0)], [Replicate(), Shard(0)])
    with pytest.raises(
        ValueError, match=r"the local tensor has shape \[2, 4\], but this rank holds \[4, 4\]"
    ):
        attempt((), ("a",))


def by_dtensor(local: Tensor, mesh: DeviceMesh, src: Any, dst: Any, shape: tuple[int, ...]) -> Tensor:
    stride = torch.empty(shape, device="meta").stride()
    dtensor = DTensor.from_local(local, mesh, src, shape=torch.Size(shape), stride=stride)
    return dtensor.redistribute(placements=dst).to_local()


GRADIENTS = [
    ([Shard(0)], [Replicate()]),
    ([Replicate()], [Shard(1)]),
    ([Shard(0)], [Shard(1)]),
    ([Partial()], [Replicate()]),
    ([Partial()], [Shard(0)]),
    ([Replicate()], [Replicate()]),
]


def derivatives(function: Callable[[Tensor], Tensor], local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``function(local)``, and its first and second gradient."""
    x = local.clone().requires_grad_()
    result = function(x)
    (first,) = torch.autograd.grad((result**3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), x)
    return result.detach(), first.detach(), second


def by_stock(mesh: DeviceMesh, src: Any, dst: Any, shape: tuple[int, ...]) -> Any:
    return lambda x: by_dtensor(x, mesh, src, dst, shape)


@pytest.mark.parametrize(("src", "dst"), GRADIENTS, ids=str)
@on_ranks(2)
def test_gradients_are_those_of_dtensors(rank: int, world: int, src: Any, dst: Any) -> None:
    mesh = mesh_of((world,))
    shape = (5, 4)
    layout = Layout(("R" if src[0].is_replicate() else "Psum" if src[0].is_partial() else f"S{src[0].dim}",))
    local = local_of(whole_of(shape, torch.float64), layout, mesh.shape, (rank,))
    ours = derivatives(lambda x: redistribute_tensor(x, mesh, src, dst, shape=shape), local)
    if _TO_LOCAL_IS_DIFFERENTIABLE_TWICE:
        theirs = derivatives(by_stock(mesh, src, dst, shape), local)
    else:
        with funcol.installed():
            theirs = derivatives(by_stock(mesh, src, dst, shape), local)
    assert list(map(torch.equal, ours, theirs)) == [True] * 3


@on_ranks(2)
def test_gradients_of_a_stated_layout_are_reduced(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    x = torch.ones(2, 3, requires_grad=True)
    whole = redistribute_tensor(
        x, mesh, ("a",), (), shape=(2 * world, 3), grad=PartitionSpec(partial={"a": "sum"})
    )
    (whole * (rank + 1)).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), float(sum(range(1, world + 1)))))  # type: ignore[arg-type]


@on_ranks(4)
def test_a_compiled_region_keeps_symbolic_batches(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    graphs: list[GraphModule] = []

    def keep(graph: GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(x: Tensor) -> Tensor:
        rows = x.shape[0] * 4
        y = redistribute_tensor(x * 2, mesh, (("a", "b"), None), (None, ("a", "b")), shape=(rows, x.shape[1]))
        return y + 1

    compiled = torch.compile(program, backend=keep, fullgraph=True, dynamic=True)
    for batch in (2, 3, 5):
        x = (torch.arange(batch * 8).view(batch, 8) + rank).float()
        results = []
        for function in (program, compiled):
            leaf = x.clone().requires_grad_()
            result = function(leaf)
            (gradient,) = torch.autograd.grad((result**2).sum(), leaf)
            results.append((result.detach(), gradient))
        for eager, other in zip(*results, strict=True):
            assert torch.equal(eager, other)
    assert len(graphs) == 1  # the batch stays a symbol


def compiles_by_inductor(rank: int, world: int) -> None:
    mesh = mesh_of((world,))

    def program(x: Tensor) -> Tensor:
        return redistribute_tensor(x * 2, mesh, [Shard(0)], [Replicate()], shape=(x.shape[0] * 2, 3)) + 1

    compiled = torch.compile(program, fullgraph=True)
    x = torch.full((4, 3), float(rank), requires_grad=True)
    result = compiled(x)
    assert torch.equal(result, program(x))
    result.sum().backward()
    assert torch.equal(x.grad, torch.full((4, 3), 2.0))  # type: ignore[arg-type]


def test_a_region_compiled_by_inductor() -> None:
    require_compiled_kernels()
    run_ranks(compiles_by_inductor, 2, timeout=300)


def traces(rank: int, world: int, mode: str) -> list[str]:
    mesh = mesh_of((world,))

    def program(x: Tensor) -> Tensor:
        return redistribute_tensor(x, mesh, [Shard(0)], [Shard(1)], shape=(x.shape[0] * world, 4))

    graph = make_fx(program, tracing_mode=mode)(torch.ones(2, 4))
    x = torch.arange(24.0, device=device_type()).view(6, 4) + rank
    x = x if mode == "symbolic" else x[:2]
    assert torch.equal(graph(x), program(x))
    return [str(node.target) for node in graph.graph.nodes if str(node.target).startswith(COLLECTIVES)]


# PyTorch, which moves tensors of symbolic sizes, has an operator of its own for devices.
COLLECTIVES = ("_c10d_functional.", "_dtensor.")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_the_collectives(mode: str) -> None:
    assert all(run_ranks(traces, 2, mode))
