"""Functions on local tensors that cannot be traced: errors say why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_graphs import joint_graph, region_nodes
from local_programs import (
    PROGRAMS,
    R,
    S,
    applied,
    whole_tensors,
)
from ranks import on_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor import distribute_tensor
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from funcol.local_map import apply_local_map


def changes(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


def returns_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, x.view(-1)


closed_over = torch.zeros(2)


def changes_what_it_closes_over(x: Tensor) -> Tensor:
    closed_over.add_(1)
    return x + closed_over


ERRORS = {
    "changes": r"changes at .*: changes argument 0 \('x'\) in place|changes argument 0 \('x'\) in place",
    "aliases": r"result 1 of returns_a_view at .* shares memory with argument 0 \('x'\)",
    "changes outside": r"changes the tensor of shape \(2,\) it closes over in place",
    "no mesh": r"is traced with tensors that are not DTensors.* Pass device_mesh, or trace under `with mesh:",
    "no placements": r"is traced with tensors that are not DTensors and has no in_placements",
    "none for a tensor": r"argument 0 is a tensor of shape \(4, 2\), but in_placements has None",
    "too many axes": r"in_placements has \[Shard\(dim=0\), Replicate\(\)\], 2 placements for the 1 axes",
    "a dim the result lacks": r"result 0 has 0 dims, but its placements .* shard dim 0",
    "another mesh": r"changes_nothing at .* is for a cpu mesh \(a=2\), but the operands are on a cpu mesh",
}


def changes_nothing(x: Tensor) -> Tensor:
    return x * x


@pytest.mark.parametrize("name", ["average", "average of averages"])
@on_ranks(2)
def test_traced_averages_have_no_gradient(rank: int, world: int, name: str) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of((world,))
    graph = make_fx(applied(program, mesh), tracing_mode="fake")(*whole_tensors(program))
    assert torch.allclose(graph(*whole_tensors(program)), program.whole(*whole_tensors(program)))
    with pytest.raises(NotImplementedError, match=r"is a partial average and requires a gradient"):
        joint_graph(program, mesh)


@on_ranks(2)
def test_a_graph_needs_the_mesh_of_its_regions(rank: int, world: int) -> None:
    graph = joint_graph(PROGRAMS["batch"], mesh_of((world,)))
    (node, _) = region_nodes(graph)
    name, are_full, _, *rest = node.args[1]  # type: ignore[misc]
    node.update_arg(1, (name, are_full, ("cpu", (7,), ("x",), tuple(range(7))), *rest))
    graph.recompile()
    with pytest.raises(ValueError, match=r"the region is for a cpu mesh \(x=7\), which is not there"):
        graph(*whole_tensors(PROGRAMS["batch"]))


@pytest.mark.parametrize("what", ERRORS)
@on_ranks(2)
def test_errors_say_what_cannot_be_traced(rank: int, world: int, what: str) -> None:
    mesh, other = mesh_of((world,)), mesh_of((world, 1))
    x = torch.ones(4, 2)
    s0: Any = [S(0)]

    def traced(function: Any, *stated: Any) -> Any:
        return make_fx(apply_local_map(function, *stated), tracing_mode="fake")(x)

    def on_another_mesh() -> None:
        graph = traced(changes_nothing, s0, (s0,), None, mesh)
        Interpreter(graph).run(distribute_tensor(x, other, [S(0), R]))

    calls: dict[str, Any] = {
        "changes": lambda: traced(changes, s0, (s0,), None, mesh),
        "aliases": lambda: traced(returns_a_view, (s0, s0), (s0,), None, mesh),
        "changes outside": lambda: traced(changes_what_it_closes_over, s0, (s0,), None, mesh),
        "no mesh": lambda: traced(changes_nothing, s0, (s0,)),
        "no placements": lambda: traced(changes_nothing, s0, None, None, mesh),
        "none for a tensor": lambda: traced(changes_nothing, s0, (None,), None, mesh),
        "too many axes": lambda: traced(changes_nothing, s0, ([S(0), R],), None, mesh),
        "a dim the result lacks": lambda: traced(torch.sum, s0, (s0,), None, mesh),
        "another mesh": on_another_mesh,
    }
    with pytest.raises(ValueError, match=ERRORS[what]):
        calls[what]()


@on_ranks(2)
def test_the_current_mesh_serves_where_none_is_stated(rank: int, world: int) -> None:
    x = torch.ones(4, 2)
    with mesh_of((world,)):
        graph = make_fx(apply_local_map(changes_nothing, [S(0)], ([S(0)],)), tracing_mode="fake")(x)
    assert torch.equal(graph(x), x)
