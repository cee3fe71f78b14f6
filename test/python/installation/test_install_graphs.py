"""Compiled graphs of DTensor programs under funcol.install() hold PyTorch's collectives, not funcol's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.fx import GraphModule

import funcol

WORLD = 4

pytestmark = [pytest.mark.usefixtures("fake_world", "_fresh_compiler")]


def held(mesh: DeviceMesh, placement: Any) -> DTensor:
    """This rank's part of an 8 x 8 tensor."""
    shape = [8, 8]
    if placement.is_shard():
        shape[placement.dim] //= WORLD
    return DTensor.from_local(torch.randn(shape), mesh, [placement])


gathered = funcol.local_map.apply_local_map(
    lambda x: funcol.all_gather_tensor(x, 1, dist.group.WORLD) * 2, out_placements=[Replicate()]
)

# Programs that need each kind of redistribution, forward and backward.
PROGRAMS: dict[str, tuple[list[Any], Callable[..., torch.Tensor]]] = {
    "gather along dim 1": ([Shard(0), Shard(1)], lambda x, y: x @ y),
    "gather for a softmax": ([Shard(1)], lambda x: torch.softmax(x, 1)),
    "gather for a norm": ([Shard(1)], lambda x: torch.nn.functional.layer_norm(x, x.shape[1:])),
    "all_to_all": ([Shard(0), Shard(1)], lambda x, y: x * y),
    "all_reduce": ([Partial()], lambda x: x.relu()),
    "reduce_scatter along dim 1": ([Partial(), Shard(1)], lambda x, y: x * y),
    "a function on local tensors": ([Shard(1)], lambda x: gathered(x)),
    "a redistribution": ([Shard(1)], lambda x: x.redistribute(placements=[Shard(0)])),
    "the whole": ([Shard(1)], lambda x: x.full_tensor()),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_graphs_hold_pytorch_s_collectives(program: str) -> None:
    mesh = DeviceMesh("cpu", list(range(WORLD)))
    placements, function = PROGRAMS[program]
    targets: list[str] = []

    def note(graph: GraphModule, _inputs: Any) -> Any:
        nodes = (
            node for part in graph.modules() if isinstance(part, GraphModule) for node in part.graph.nodes
        )
        targets.extend(str(node.target) for node in nodes if node.op == "call_function")
        return graph.forward

    with funcol.installed():
        arguments = [held(mesh, one).requires_grad_() for one in placements]
        compiled = torch.compile(
            lambda *args: function(*args),
            backend=aot_autograd(fw_compiler=note, bw_compiler=note),
            fullgraph=True,
        )
        result = compiled(*arguments)
        (result.to_local() if isinstance(result, DTensor) else result).sum().backward()
    assert not [target for target in targets if target.startswith("funcol.")]
    assert any(target.startswith("_c10d_functional.") for target in targets)
    assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets)
