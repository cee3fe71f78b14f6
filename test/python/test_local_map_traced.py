"""Functions on local tensors under tracers: one node a pass, its placements, and what becomes of the graph."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from local_programs import (
    AVG,
    PROGRAMS,
    P,
    Program,
    R,
    S,
    applied,
    check,
    expected,
    sharded_leaves,
    tensors_of,
    weighted,
    whole_tensors,
)
from ranks import run_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

import funcol
from funcol import apply_local_map, local_map_hop

TRACED = [name for name in PROGRAMS if name != "average"]


def region_nodes(graph: GraphModule) -> list[Node]:
    return [node for node in graph.graph.nodes if node.target is local_map_hop]


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def step(*leaves: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        results = tensors_of(function(*leaves))
        loss = weighted([one.full_tensor() if isinstance(one, DTensor) else one for one in results])
        return results, list(torch.autograd.grad(loss, leaves))

    return step


def joint_graph(program: Program, mesh: DeviceMesh, mode: str = "fake") -> GraphModule:
    leaves = [one.requires_grad_() for one in whole_tensors(program)]
    return make_fx(with_gradients(applied(program, mesh)), tracing_mode=mode)(*leaves)


def runs_on_whole_tensors(rank: int, world: int, name: str, mode: str) -> None:
    program = PROGRAMS[name]
    graph = joint_graph(program, mesh_of(program.mesh_shape), mode)
    check(program, *graph(*whole_tensors(program)))


@pytest.mark.parametrize("mode", ["fake", "real"])
@pytest.mark.parametrize("name", TRACED)
def test_a_graph_of_whole_tensors_computes_what_one_process_does(name: str, mode: str) -> None:
    run_ranks(runs_on_whole_tensors, PROGRAMS[name].world(), name, mode)


def runs_on_shards(rank: int, world: int, name: str, is_traced_again: bool) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    graph = joint_graph(program, mesh)
    for node in list(graph.graph.nodes):  # the loss is of whole tensors
        if node.target is torch.ops.aten.mul.Tensor and node.args[0].target.__name__ == "getitem":
            pass
    leaves = [leaf.detach() for leaf in sharded_leaves(program, mesh)]

    def sharded(*local: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        held = [
            DTensor.from_local(
                one, mesh, leaf.placements, run_check=False, shape=leaf.shape, stride=leaf.stride()
            )
            for one, leaf in zip(local, leaves, strict=True)
        ]
        results, gradients = Weighing(graph, mesh).run(*held)
        return (
            [funcol.redistribute(one, placements=[R] * mesh.ndim).to_local() for one in results],
            [funcol.redistribute(one, placements=[R] * mesh.ndim).to_local() for one in gradients],
        )

    local = [leaf.to_local() for leaf in leaves]
    if is_traced_again:
        inlined = make_fx(sharded)(*local)
        assert not region_nodes(inlined)
        check(program, *inlined(*local))
    else:
        check(program, *sharded(*local))


class Weighing(Interpreter):
    """Runs a graph of whole tensors on DTensors: constants in it are replicated."""

    def __init__(self, graph: GraphModule, mesh: DeviceMesh) -> None:
        super().__init__(graph)
        self._mesh = mesh

    def run_node(self, node: Node) -> Any:
        result = super().run_node(node)
        if node.op == "call_function" and type(result) is Tensor and not node.all_input_nodes:
            return DTensor.from_local(result, self._mesh, [R] * self._mesh.ndim, run_check=False)
        return result


@pytest.mark.parametrize("is_traced_again", [False, True])
@pytest.mark.parametrize("name", TRACED)
def test_a_graph_given_shards_is_the_function_itself(name: str, is_traced_again: bool) -> None:
    run_ranks(runs_on_shards, PROGRAMS[name].world(), name, is_traced_again)


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


@pytest.mark.parametrize("name", TRACED)
def test_a_compiled_region_computes_what_one_process_does(name: str) -> None:
    run_ranks(compiles, PROGRAMS[name].world(), name, "aot_eager")
