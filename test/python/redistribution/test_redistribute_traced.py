"""Redistribution under tracers and fake tensors: graphs of functional collectives."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks, run_ranks
from sharded import Layout, layouts, local_of, mesh_of, shard_of, whole_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.fx.experimental.proxy_tensor import make_fx

from funcol.redistribution import redistribute, redistribute_local_tensor

CASES = [
    ("S0", "R", "all_gather_into_tensor"),
    ("S1", "R", "all_gather_into_tensor"),
    ("_S0/2", "R", "all_gather_into_tensor"),
    ("Psum", "R", "all_reduce"),
    ("Pmax", "S1", "reduce_scatter_tensor"),
    ("S0", "S1", "all_to_all_single"),
    ("S1", "_S0/2", "all_to_all_single"),
]


def records(rank: int, world: int, src_word: str, dst_word: str, collective: str, mode: str) -> None:
    mesh = mesh_of((world,))
    src, dst = Layout((src_word,)), Layout((dst_word,))
    at = mesh.get_coordinate() or ()
    whole = whole_of((5, 6), torch.float32)
    local = local_of(whole, src, mesh.shape, at)

    def program(tensor: Tensor) -> Tensor:
        return redistribute_local_tensor(tensor, src.spec(mesh, whole), dst.spec(mesh, whole))

    graph = make_fx(program, tracing_mode=mode)(local)
    called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in called if name.startswith("_c10d_functional") and "wait" not in name] == [
        f"_c10d_functional.{collective}.default"
    ]
    assert not any(name.startswith("funcol") for name in called)
    assert torch.equal(graph(local), shard_of(whole, dst, mesh.shape, at))


@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize(("src", "dst", "collective"), CASES)
def test_graphs_hold_functional_collectives(src: str, dst: str, collective: str, mode: str) -> None:
    run_ranks(records, 2, src, dst, collective, mode)


@pytest.mark.parametrize("dst", layouts("R", "S0", "S1", "_S0/2", "Psum"), ids=str)
@pytest.mark.parametrize("src", layouts("R", "S0", "S1", "_S0/2", "Psum", "Pmax"), ids=str)
@on_ranks(3)
def test_fake_tensors_get_the_shape_of_the_shard(rank: int, world: int, src: Layout, dst: Layout) -> None:
    mesh = mesh_of((world,))
    at = mesh.get_coordinate() or ()
    whole = whole_of((5, 6), torch.float32)
    local, expected = local_of(whole, src, mesh.shape, at), shard_of(whole, dst, mesh.shape, at)
    with FakeTensorMode() as mode:
        local = mode.from_tensor(local)
        result = redistribute_local_tensor(local, src.spec(mesh, whole), dst.spec(mesh, whole))
    assert result.shape == expected.shape
    assert result.is_contiguous()


@pytest.mark.parametrize("dst", layouts("R", "S1"), ids=str)
@pytest.mark.parametrize("src", layouts("R", "S0", "Psum"), ids=str)
@on_ranks(2)
def test_a_dtensor_is_redistributed_within_one_compiled_graph(
    rank: int, world: int, src: Layout, dst: Layout
) -> None:
    mesh = mesh_of((world,))
    at = mesh.get_coordinate() or ()
    whole = whole_of((6, 4), torch.float32)
    local = local_of(whole, src, mesh.shape, at)

    def program(dtensor: DTensor) -> Tensor:
        return redistribute(dtensor * 2, placements=dst.placements()).to_local() + 1

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    result = compiled(DTensor.from_local(local, mesh, src.placements()))
    assert torch.equal(result, shard_of(2 * whole + 1, dst, mesh.shape, at))


def differentiates(rank: int, world: int, src_word: str, dst_word: str) -> None:
    mesh = mesh_of((world,))
    src, dst = Layout((src_word,)), Layout((dst_word,))
    at = mesh.get_coordinate() or ()
    whole = whole_of((5, 6), torch.float64)
    local = local_of(whole, src, mesh.shape, at).requires_grad_()
    result = redistribute_local_tensor(local, src.spec(mesh, whole), dst.spec(mesh, whole))
    # The loss is the total over all ranks: each element of a shard counts once, whichever rank gets it.
    result.sum().backward()  # type: ignore[no-untyped-call]
    assert local.grad is not None
    assert torch.equal(local.grad, torch.ones_like(local))


@pytest.mark.parametrize(("src", "dst"), [("S0", "S1"), ("S1", "S0"), ("Psum", "S0"), ("S0", "_S0/2")])
def test_a_local_tensor_that_needs_a_gradient_gets_one(src: str, dst: str) -> None:
    run_ranks(differentiates, 2, src, dst)
