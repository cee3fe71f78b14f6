"""Functions on local tensors under tracers: a node a pass, its placements, what becomes of the graph."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from local_graphs import joint_graph, region_nodes, with_gradients
from local_programs import (
    PROGRAMS,
    P,
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
from ranks import on_ranks, run_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta

import funcol
from funcol.local_map import apply_local_map, local_map_hop

TRACED = [name for name in PROGRAMS if "average" not in name]


def runs_on_whole_tensors(rank: int, world: int, name: str, mode: str) -> None:
    program = PROGRAMS[name]
    graph = joint_graph(program, mesh_of(program.mesh_shape), mode)
    check(program, *graph(*whole_tensors(program)))


@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "fake") for name in TRACED), ("uneven batch", "real"), ("both axes", "real")]
)
def test_a_graph_of_whole_tensors_computes_what_one_process_does(name: str, mode: str) -> None:
    run_ranks(runs_on_whole_tensors, PROGRAMS[name].world(), name, mode)


def runs_on_shards(rank: int, world: int, name: str, is_traced_again: bool) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    graph = joint_graph(program, mesh)
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


@pytest.mark.parametrize(
    ("name", "is_traced_again"), [*((name, True) for name in TRACED), ("uneven batch", False)]
)
def test_a_graph_given_shards_is_the_function_itself(name: str, is_traced_again: bool) -> None:
    run_ranks(runs_on_shards, PROGRAMS[name].world(), name, is_traced_again)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["fake", "real", "symbolic"])
@on_ranks()
def test_the_function_is_recorded_once_and_is_one_named_node_a_pass(rank: int, world: int, mode: str) -> None:
    calls = []
    mesh = mesh_of((world,))

    def attention(x: Tensor, w: Tensor) -> Tensor:
        calls.append(x.shape)
        return (x @ w).sin()

    program = PROGRAMS["batch"]._replace(local=attention)
    nodes = region_nodes(joint_graph(program, mesh, mode))
    line = attention.__code__.co_firstlineno
    assert [node.name for node in nodes] == [
        f"attention_test_local_map_traced_py_L{line}",
        f"attention_test_local_map_traced_py_L{line}_backward",
    ]
    assert calls == [(4 // world, 6)]


def renamed(graph: GraphModule) -> GraphModule:
    for i, node in enumerate(graph.graph.nodes):
        node.name = f"n{i}"
        node.meta.clear()
    graph.recompile()
    return graph


COPIES: dict[str, Callable[[GraphModule], GraphModule]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda graph: pickle.loads(pickle.dumps(graph)),
    "renamed": renamed,
}


@pytest.mark.parametrize("how", COPIES)
@on_ranks(2)
def test_placements_stay_on_the_nodes(rank: int, world: int, how: str) -> None:
    program = PROGRAMS["rows"]
    graph = COPIES[how](joint_graph(program, mesh_of((world,))))
    regions = [node.args[1] for node in region_nodes(graph)]
    assert [(region[3], region[4]) for region in regions] == [  # type: ignore[index]
        (("S(1)", "S(0)"), ("P(sum)",)),
        (("S(1)", "S(0)", "R"), ("S(1)", "S(0)")),
    ]
    check(program, *graph(*whole_tensors(program)))


@on_ranks(2)
def test_solvers_find_placements_in_the_notes_of_nodes(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    forward, backward = (
        node.meta["custom"]["dtensor_local_map_kwargs"]
        for node in region_nodes(joint_graph(PROGRAMS["columns"], mesh))
    )
    assert forward["in_placements"] == ((R,), (S(1),))
    assert forward["out_placements"] == ((S(1),), None)  # and what sin() leaves for its gradient
    assert backward["in_placements"] == ((R,), (S(1),), None, (S(1),))
    assert backward["out_placements"] == ((P,), (S(1),))
    assert forward["device_mesh"] is mesh


@on_ranks(2)
def test_stated_placements_of_gradients_are_on_the_backward_node(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    program = PROGRAMS["columns"]
    function = apply_local_map(program.local, [S(1)], program.inputs, ([R], [S(-1)]), mesh)
    leaves = [one.requires_grad_() for one in whole_tensors(program)]
    (_, backward) = region_nodes(make_fx(with_gradients(function), tracing_mode="fake")(*leaves))
    assert backward.args[1][4] == ("R", "S(1)")  # type: ignore[index]


@on_ranks(2)
def test_exported_joint_graphs_have_a_node_a_pass(rank: int, world: int) -> None:
    from torch._functorch.aot_autograd import aot_export_module

    program = PROGRAMS["batch"]
    mesh = mesh_of((world,))
    function = applied(program, mesh)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(whole_tensors(program)[1])

        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (weighted([function(x, self.w)]),)

    x = whole_tensors(program)[0]
    graph, _ = aot_export_module(Model(), (x,), trace_joint=True, output_loss_index=0)
    forward, backward = region_nodes(graph)
    assert forward.args[1][3] == ("S(0)", "R")  # type: ignore[index]
    assert backward.args[1][4][0] == "P(sum)"  # type: ignore[index]
    _, gradient = graph(whole_tensors(program)[1], x)
    assert torch.allclose(gradient, expected(program)[1][1])


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(2)
def test_parameters_that_the_function_closes_over_get_gradients(
    rank: int, world: int, is_compiled: bool
) -> None:
    mesh = mesh_of((world,))
    x, w = whole_tensors(PROGRAMS["batch"])

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(w)
            self.register_buffer("shift", torch.tensor(2.0, dtype=torch.float64))
            self.apply = apply_local_map(self.local, [S(0)], ([S(0)],), device_mesh=mesh)  # type: ignore[assignment]

        def local(self, x: Tensor) -> Tensor:
            return (x @ self.w + self.shift).sin()

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.apply(x)  # type: ignore[assignment, arg-type]
            return result

    model = Model()
    want = torch.autograd.grad(weighted([model.local(x)]), model.w)
    if is_compiled:
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got = torch.autograd.grad(weighted([compiled(x)]), model.w)
    else:

        def step(x: Tensor, w: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
            state = {"w": w, "shift": shift}
            return torch.autograd.grad(weighted([torch.func.functional_call(model, state, (x,))]), w)

        graph = make_fx(step, tracing_mode="fake")(x, model.w, model.shift)
        assert region_nodes(graph)[0].args[1][3] == ("S(0)", "R", "R")  # type: ignore[index]
        got = graph(x, w, model.shift)
    assert torch.allclose(got[0], want[0])


@on_ranks(2)
def test_graphs_with_symbolic_sizes_serve_other_sizes(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    function = apply_local_map(
        lambda x, pair, scale: {
            "y": (x.view(-1, 2, x.shape[1] // 2) * pair[0]).flatten(1) * scale,
            "n": (None,),
        },
        ([S(0)], None),
        ([S(0)], [R], None, None),
        device_mesh=mesh,
    )

    def step(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        result = function(x, (w, x.shape[0]), 3.0)
        assert result["n"] == (None,)
        return (result["y"], *torch.autograd.grad(weighted([result["y"]]), (x, w)))

    def leaves(size: int) -> list[Tensor]:
        return [torch.randn(size, 4).requires_grad_(), torch.randn(2).requires_grad_()]

    graph = make_fx(step, tracing_mode="symbolic")(*leaves(6))
    for size in (4, 10):
        x, w = leaves(size)
        y = (x.view(-1, 2, 2) * w).flatten(1) * 3.0
        want = (y, *torch.autograd.grad(weighted([y]), (x, w)))
        for one, other in zip(graph(x, w), want, strict=True):
            assert torch.allclose(one, other)


@pytest.mark.parametrize(
    ("where", "num_forward", "num_activations"),
    [("around", 2, 1), ("selective around", 1, 1), ("inside", 1, 0), ("selective inside", 1, 1)],
)
@on_ranks(2)
def test_checkpoints_around_and_inside_decide_what_is_kept(
    rank: int, world: int, where: str, num_forward: int, num_activations: int
) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    program = PROGRAMS["batch"]
    mesh = mesh_of((world,))

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        saved = op is local_map_hop or op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.MUST_RECOMPUTE

    selective = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    options = selective if "selective" in where else {}
    recomputed: Any = partial(checkpoint, use_reentrant=False, **options)
    if "inside" in where:
        local = program.local
        function = applied(program._replace(local=lambda x, w: recomputed(local, x, w)), mesh)
    else:
        function = partial(recomputed, applied(program, mesh))
    leaves = [one.requires_grad_() for one in whole_tensors(program)]
    with preserve_node_meta():  # selective checkpoints leave notes for all nodes that come after them
        graph = make_fx(with_gradients(function), tracing_mode="fake")(*leaves)
    nodes = region_nodes(graph)
    assert len(nodes) == num_forward + 1
    assert nodes[0].args[1][4].count(None) == num_activations  # type: ignore[index]
    check(program, *graph(*whole_tensors(program)))


@on_ranks(2)
def test_an_applied_function_within_another_is_a_part_of_it(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    inner = apply_local_map(torch.sin, [S(0)], ([S(0)],), device_mesh=mesh)
    outer = apply_local_map(lambda x: inner(x) * 2, [S(0)], ([S(0)],), device_mesh=mesh)
    x = torch.arange(4.0)
    graph = make_fx(outer, tracing_mode="fake")(x)
    assert len(region_nodes(graph)) == 1
    assert torch.equal(graph(x), x.sin() * 2)


@on_ranks(2)
def test_a_node_is_inlined_on_request(rank: int, world: int) -> None:
    program = PROGRAMS["batch"]
    graph = joint_graph(program, mesh_of((world,)))
    (node, _) = region_nodes(graph)
    body = getattr(graph, node.args[0].target)  # type: ignore[union-attr]
    x, w = whole_tensors(program)

    def inlined(x: Tensor, w: Tensor) -> Any:
        return local_map_hop(body, node.args[1], x, w, _inline=True)[0]

    local = x.chunk(world)[rank]
    second = make_fx(inlined)(local, w)
    assert not region_nodes(second)
    assert torch.allclose(second(local, w), program.whole(local, w))


def differentiates_twice(rank: int, world: int, name: str) -> None:
    program = PROGRAMS[name]
    function = applied(program, mesh_of(program.mesh_shape))

    def seconds(function: Callable[..., Any], *leaves: Tensor) -> list[Tensor]:
        firsts = torch.autograd.grad(weighted(tensors_of(function(*leaves))), leaves, create_graph=True)
        loss = weighted([first * leaf for first, leaf in zip(firsts, leaves, strict=True)])
        return list(torch.autograd.grad(loss, leaves))

    leaves = [one.requires_grad_() for one in whole_tensors(program)]
    graph = make_fx(lambda *leaves: seconds(function, *leaves), tracing_mode="fake")(*leaves)
    for one, other in zip(graph(*whole_tensors(program)), seconds(program.whole, *leaves), strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["batch", "uneven batch", "columns", "both axes", "rows and batch"])
def test_traced_second_derivatives_are_those_of_one_process(name: str) -> None:
    run_ranks(differentiates_twice, PROGRAMS[name].world(), name)
