"""Graphs of functions on local tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from local_programs import (
    Program,
    applied,
    tensors_of,
    weighted,
    whole_tensors,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from funcol.local_map import local_map_hop


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
