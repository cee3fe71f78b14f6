"""Redistribution in compiled regions: one graph, the values and gradients of eager."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, local_of, mesh_of, whole_of
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import GraphModule

import funcol
from funcol import redistribute
from funcol.redistribution import redistribute_local_tensor

CASES = [
    ((2,), "S0", "R", {"all_gather_into_tensor"}),
    ((2,), "S0", "S1", {"all_to_all_single"}),
    ((2,), "Psum", "S0", {"reduce_scatter_tensor"}),
    ((2,), "R", "Psum", set()),
    ((2, 2), "S0 S0", "R S1", {"all_gather_into_tensor"}),
]


class Recorder:
    """An AOT backend that keeps the functional collectives of every graph."""

    def __init__(self) -> None:
        self.collectives: list[set[str]] = []

    def __call__(self, graph: GraphModule, inputs: object) -> object:
        from functorch.compile import make_boxed_func

        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        assert not any(name.startswith("funcol") for name in names)
        self.collectives.append(
            {
                name.split(".")[1]
                for name in names
                if name.startswith("_c10d_functional") and "wait" not in name
            }
        )
        return make_boxed_func(graph.forward)


def equals_eager(
    rank: int, world: int, shape: tuple[int, ...], src: str, dst: str, collectives: set[str], remaps: bool
) -> None:
    from torch._dynamo.backends.common import aot_autograd

    mesh = mesh_of(shape)
    at = mesh.get_coordinate() or ()
    whole = whole_of((5, 6), torch.float32)
    layout, target = Layout(tuple(src.split())), Layout(tuple(dst.split())).placements()
    local = local_of(whole, layout, mesh.shape, at)

    def program(dtensor: DTensor) -> torch.Tensor:
        return (redistribute(dtensor * 2, mesh, target) * 3).to_local()

    def run(function: object) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = DTensor.from_local(
            local, mesh, layout.placements(), run_check=False, shape=whole.shape, stride=whole.stride()
        ).requires_grad_()
        result = function(leaf)  # type: ignore[operator]
        result.sum().backward()
        assert leaf.grad is not None
        return result.detach(), leaf.grad.full_tensor()

    recorder = Recorder()
    torch._dynamo.reset()
    funcol.tracing.remap_collectives(remaps)
    try:
        compiled = torch.compile(program, fullgraph=True, backend=aot_autograd(fw_compiler=recorder))
        for got, want in zip(run(compiled), run(program), strict=True):
            assert torch.equal(got, want)
    finally:
        funcol.tracing.remap_collectives(True)
    assert recorder.collectives[0] == collectives


@pytest.mark.parametrize("remaps", [True, False])
@pytest.mark.parametrize(("shape", "src", "dst", "collectives"), CASES)
def test_compiled_redistribution_equals_eager(
    shape: tuple[int, ...], src: str, dst: str, collectives: set[str], remaps: bool
) -> None:
    run_ranks(equals_eager, 2 if shape == (2,) else 4, shape, src, dst, collectives, remaps)


def compiles_local_tensors(rank: int, world: int, src: str, dsts: list[str]) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((5, 6), torch.float32)
    layout = Layout((src,))
    local = local_of(whole, layout, mesh.shape, (rank,))
    specs = [Layout((dst,)).spec(mesh, whole) for dst in dsts]

    held = layout.spec(mesh, whole)

    def program(tensor: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
        return redistribute_local_tensor(tensor * 2, held, spec) + 1

    torch._dynamo.reset()
    compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
    for spec in [*specs, *specs]:
        assert torch.equal(compiled(local, spec), program(local, spec))


@pytest.mark.parametrize("src", ["S0", "S1", "Psum"])
def test_local_tensors_are_redistributed_in_one_graph_for_each_pair_of_specs(src: str) -> None:
    run_ranks(compiles_local_tensors, 2, src, ["R", "S1", "S0"])
