"""Functions on local tensors as solvers see them; the example that chooses placements for a step."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from local_graphs import joint_graph, region_nodes
from local_programs import PROGRAMS, P, R, S
from ranks import on_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy
from torch.fx import Node

import funcol
from funcol.sharding import redistribute_cost_table


def spec_of(mesh: Any, placements: Any, value: Tensor) -> DTensorSpec:
    return DTensorSpec(
        mesh, tuple(placements), tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype)
    )


def options(mesh: Any, node: Node, ways: list[Any]) -> OpStrategy:
    stated = node.meta["custom"]["dtensor_local_map_kwargs"]
    tensors = [arg for arg in node.args[2:] if isinstance(arg, Node)]
    specs = [OpStrategy([OpSpec(spec_of(mesh, way, arg.meta["val"])) for way in ways]) for arg in tensors]
    return funcol.local_map.get_local_map_placement_option(
        mesh, node.target, specs, node.args, node.kwargs, node.meta["val"],
        stated["in_placements"], stated["out_placements"],
    )  # fmt: skip


@on_ranks(2)
def test_a_node_has_one_way_at_the_planners_costs(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    forward, backward = region_nodes(joint_graph(PROGRAMS["columns"], mesh))
    (way,) = options(mesh, forward, [[R], [S(0)]]).strategies
    assert [spec.placements for spec in way.input_specs or ()] == [(R,), (S(1),)]
    assert [spec.placements for spec in way.output_specs] == [(S(1),), (R,)]  # type: ignore[union-attr]
    for costs, operand, wanted in zip(way.redistribute_cost or [], forward.args[2:], [R, S(1)], strict=True):
        value = operand.meta["val"]  # type: ignore[union-attr]
        sources = [spec_of(mesh, [one], value) for one in (R, S(0))]
        table = redistribute_cost_table(sources, [spec_of(mesh, [wanted], value)])
        assert costs == [row[0] for row in table]
    (way,) = options(mesh, backward, [[R], [S(0)]]).strategies
    assert [spec.placements for spec in way.input_specs or ()] == [(R,), (S(1),), (R,), (S(1),)]
    assert [spec.placements for spec in way.output_specs] == [(P,), (S(1),)]  # type: ignore[union-attr]
    assert (way.redistribute_cost or [])[2] == [0.0, 0.0]  # what the forward part left is not moved


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "keywords": ({"user_kwargs": {"x": 1}}, r"has the keyword arguments \['x'\]"),
    "too few specs": ({"specs": []}, r"has 1 arguments, 0 specs and 1 in_placements"),
    "too few results": ({"out_placements": []}, r"has 1 results and 0 out_placements"),
    "no strategy": ({"specs": [None]}, r"operand 0 is a tensor of shape \(4, 2\) without a strategy"),
    "too many axes": ({"in_placements": [[R, R]]}, r"operand 0 has 2 placements for the 1 axes"),
    "a dim it lacks": ({"in_placements": [[S(2)]]}, r"operand 0 has 2 dims, but its placements"),
}


@pytest.mark.parametrize("what", WRONG)
@on_ranks(1)
def test_contradictions_in_what_is_asked_are_named(rank: int, world: int, what: str) -> None:
    mesh = mesh_of((world,))
    x = torch.ones(4, 2)
    changed, message = WRONG[what]
    asked = {
        "mesh": mesh,
        "op": "op",
        "specs": [OpStrategy([OpSpec(spec_of(mesh, [R], x))])],
        "user_args": (x,),
        "user_kwargs": {},
        "output_val": x,
        "in_placements": [[R]],
        "out_placements": [[R]],
    }
    with pytest.raises(ValueError, match=message):
        funcol.local_map.get_local_map_placement_option(**{**asked, **changed})


def example() -> ModuleType:
    path = Path(__file__).parents[3] / "tools" / "examples" / "local_map.py"
    spec = importlib.util.spec_from_file_location("local_map_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@on_ranks(8)
def test_a_step_is_traced_solved_applied_and_computes_what_one_process_does(rank: int, world: int) -> None:
    example().run(rank, world)
