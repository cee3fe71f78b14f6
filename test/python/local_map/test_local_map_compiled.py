"""Functions on local tensors in compiled regions: values, gradients, nodes, and what they close over."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from local_graphs import region_nodes
from local_programs import PROGRAMS, P, R, S, applied, check, sharded_leaves, tensors_of, weighted
from ranks import on_ranks, run_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from torch.fx import GraphModule

from funcol.local_map import apply_local_map


def compiles(rank: int, world: int, name: str, backend: str) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    function = applied(program, mesh)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *leaves: function(*leaves), fullgraph=True, backend=backend)
    leaves = sharded_leaves(program, mesh)
    results = tensors_of(compiled(*leaves))
    gradients = torch.autograd.grad(weighted([one.full_tensor() for one in results]), leaves)
    check(program, results, gradients)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "name", ["uneven batch", "columns", "both axes", "two results", "copied and own", "in place", "no tensor"]
)
def test_a_compiled_region_computes_what_one_process_does(name: str) -> None:
    run_ranks(compiles, PROGRAMS[name].world(), name, "aot_eager")


@pytest.mark.parametrize("name", ["batch"])
def test_inductor_compiles_the_body(name: str) -> None:
    run_ranks(compiles, PROGRAMS[name].world(), name, "inductor")


global_weight = torch.nn.Parameter(torch.ones(4))


def scaled_by_global(x: Tensor) -> Tensor:
    return x * global_weight


@pytest.mark.parametrize("how", ["function", "partial"])
@on_ranks(2)
def test_compiled_regions_follow_parameters_that_functions_reach(rank: int, world: int, how: str) -> None:
    mesh = mesh_of((world,))
    module, weights = torch.nn.Linear(4, 4), [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]

    def local(x: Tensor, count: int) -> Tensor:
        return local(x, count - 1) if count else scaled_by_global(module(x) * weights[1] + weights[0])

    function = apply_local_map(
        partial(local) if how == "partial" else local, [S(0)], ([S(0)], None), device_mesh=mesh
    )
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: function(x, 1), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 4)
    for _ in range(2):
        parameters = [global_weight, module.weight, module.bias, *weights]
        for got, want in zip(
            torch.autograd.grad(compiled(x).sin().sum(), parameters),
            torch.autograd.grad(function(x, 1).sin().sum(), parameters),
            strict=True,
        ):
            assert torch.allclose(got, want, atol=1e-6)
        module.weight, weights[0] = torch.nn.Parameter(torch.randn(4, 4)), torch.nn.Parameter(torch.randn(4))


class Recorder:
    """An AOT backend that keeps its graphs."""

    def __init__(self) -> None:
        self.graphs: list[GraphModule] = []

    def __call__(self, graph: GraphModule, inputs: object) -> object:
        from functorch.compile import make_boxed_func

        self.graphs.append(graph)
        return make_boxed_func(graph.forward)


@on_ranks(2)
def test_compiled_regions_have_one_node_a_pass_and_are_compiled_once(rank: int, world: int) -> None:
    from torch._dynamo.backends.common import aot_autograd

    program = PROGRAMS["batch"]
    mesh = mesh_of((world,))
    function = applied(program, mesh)
    recorder = Recorder()
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=recorder)
    compiled = torch.compile(lambda x, w: function(x * 1, w), fullgraph=True, backend=backend)
    for _ in range(2):
        leaves = sharded_leaves(program, mesh)
        result = compiled(*leaves)
        check(program, [result], torch.autograd.grad(weighted([result.full_tensor()]), leaves))
    assert [len(region_nodes(graph)) for graph in recorder.graphs] == [1, 1]


@pytest.mark.parametrize("is_dtensor", [False, True])
@on_ranks(2)
def test_compiled_regions_serve_other_sizes(rank: int, world: int, is_dtensor: bool) -> None:
    program = PROGRAMS["batch"]
    mesh = mesh_of((world,))
    function = applied(program, mesh)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: function(x, w), fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (4, 6, 10):
        x, w = torch.randn(size, 6), torch.randn(6, 3)
        if is_dtensor:
            result = compiled(distribute_tensor(x, mesh, [S(0)]), distribute_tensor(w, mesh, [R]))
            assert torch.allclose(result.full_tensor(), program.whole(x, w), atol=1e-6)
        else:
            assert torch.allclose(compiled(x, w), program.local(x, w), atol=1e-6)


@on_ranks(2)
def test_compiled_regions_take_and_return_nested_values(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    function = apply_local_map(
        lambda x, named, count: {"y": (x * named["w"], [x.sum(), None, count + 1]), "text": "s"},
        ([S(0)], [P], None, None, None),
        ([S(0)], [R], None),
        device_mesh=mesh,
    )
    x, w = torch.arange(8.0).view(4, 2), torch.arange(2.0)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w: function(x, {"w": w}, 4), fullgraph=True, backend="aot_eager")
    result = compiled(distribute_tensor(x, mesh, [S(0)]), distribute_tensor(w, mesh, [R]))
    assert torch.equal(result["y"][0].full_tensor(), x * w)
    assert result["y"][1][0].full_tensor() == x.sum()
    assert (result["y"][1][1:], result["text"]) == ([None, 5], "s")
