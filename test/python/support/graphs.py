"""Graphs that tracers and compilers make: targets, lines, and checks of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.utils
import torch.testing._internal.distributed.fake_pg
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import Graph, GraphModule
from torch.fx.node import map_arg

import funcol  # noqa: F401  defines the ops


def graph_of(program: Callable[..., Any], *inputs: Tensor) -> GraphModule:
    """Returns the one graph that AOTAutograd makes of ``program``."""
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(program, backend=aot_autograd(fw_compiler=record), fullgraph=True)(*inputs)
    (graph,) = graphs
    return graph


def lines_of(graph: Graph) -> list[str]:
    """Returns the nodes of the graph, a line each, with numbers in place of their names."""
    numbers = {node: f"%{number}" for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        target = "" if node.op == "placeholder" else node.target
        args, kwargs = (map_arg(arguments, numbers.__getitem__) for arguments in (node.args, node.kwargs))
        lines.append(f"{node.op} {target} {args} {kwargs}")
    return lines


def targets_in(graph: GraphModule) -> list[str]:
    return [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]


def check_graph(graph: GraphModule) -> None:
    targets = targets_in(graph)
    assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets), targets
    # Graphs may also compute symbolic sizes.
    arithmetic = ("<built-in function", "<function sym_max")
    strange = [
        target for target in targets if not target.startswith(("_c10d_functional.", "aten.", *arithmetic))
    ]
    assert not strange, strange
