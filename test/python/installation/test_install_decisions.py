"""With funcol under DTensor, operators leave their results where PyTorch's propagator leaves them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from simulated import Call, Recorder, Simulation, WrongResultError, decided, some_layouts, specs_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.nn import functional
from versions import needs_decisions_in_cpp

from funcol.installation.dtensor import redistribute_cost
from funcol.installation.propagation import InstalledPropagator

WORLD = 4

pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    needs_decisions_in_cpp,
]


def weight(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def attention() -> Tensor:
    x = weight(4, 8, 16)
    q, k, v = (functional.linear(x, weight(16, 16)).view(4, 8, 4, 4).transpose(1, 2) for _ in range(3))
    scores = torch.softmax(q @ k.transpose(-1, -2) / 2, dim=-1)
    return functional.linear((scores @ v).transpose(1, 2).flatten(2), weight(16, 16))


def optimizer() -> Tensor:
    weights = [weight(8, 16), weight(8, 8)]
    for one in weights:
        one.grad = torch.randn_like(one)
    nn.utils.clip_grad_norm_(weights, 1.0)
    torch.optim.AdamW(weights, foreach=True).step()
    return weight(4)


def small() -> Tensor:
    x = weight(2, 4, 8)
    y = functional.layer_norm(x, (8,), weight(8), weight(8)).transpose(0, 1)
    return functional.gelu(functional.linear(y, weight(2, 8))).sum(0) + weight(2, 1)


def lookups() -> Tensor:
    table = weight(8, 16)
    rows = functional.embedding(torch.arange(16).view(4, 4) % 8, table)
    tops = functional.embedding(torch.arange(8), table).gather(1, torch.arange(8).view(8, 1))
    return rows.sum((1, 2)) * table.gather(0, torch.arange(4).view(1, 4)).sum() + tops.sum()


def norms_of_vectors() -> Tensor:
    x = weight(4, 8, 16)
    norms = [torch.linalg.vector_norm(x, order, dim=(0, 2)) for order in (2, 1, math.inf, 0)]
    return torch.stack(norms).sum(0) * torch.linalg.vector_norm(x)


PROGRAMS: dict[str, Callable[[], Tensor]] = {
    "mlp": lambda: functional.linear(
        functional.gelu(functional.linear(weight(4, 8, 16), weight(32, 16), weight(32))), weight(16, 32)
    ),
    "swiglu": lambda: functional.silu(weight(8, 16) @ weight(16, 8)) * (weight(8, 16) @ weight(16, 8)),
    "attention": attention,
    "norms": lambda: functional.rms_norm(
        functional.layer_norm(weight(4, 8, 16), (16,), weight(16), weight(16)), (16,), weight(16)
    ),
    "loss": lambda: functional.cross_entropy(
        functional.embedding(torch.arange(8), weight(8, 16)) @ weight(16, 8),
        torch.tensor([-100, *range(1, 8)]),  # one is ignored: no mean of shards' means is the mean
    ),
    "optimizer": optimizer,
    "lookups": lookups,
    "norms_of_vectors": norms_of_vectors,
    "small": small,
    "shapes": lambda: torch.cat([weight(8, 16).t(), weight(16, 8)], 1)[:8].unsqueeze(0).expand(4, 8, 16) * 2,
}


def calls_of(program: Callable[[], Tensor]) -> Iterator[Call]:
    """Yields each operator of the program, forward and backward, on each shape once."""
    torch.manual_seed(0)
    with Recorder() as recorder:
        program().sum().backward()
    seen = set()
    for call in recorder.calls:
        key = (call.op, tuple(tuple(tensor.shape) for tensor in call.tensors()))
        if call.tensors() and key not in seen:
            seen.add(key)
            yield call


def placements_of(specs: Any) -> list[Any]:
    listed = list(specs) if isinstance(specs, (list, tuple)) else [specs]
    return [None if spec is None else spec.placements for spec in listed]


def cost_of(schema: OpSchema, sharding: OutputSharding) -> float:
    wanted = sharding.redistribute_schema or schema
    return sum(map(redistribute_cost, specs_of(schema), specs_of(wanted)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mesh", ["2", "2x2"], indirect=True)
@pytest.mark.parametrize("program", PROGRAMS)
def test_results_are_where_pytorch_leaves_them(mesh: DeviceMesh, program: str) -> None:
    stock = DTensor._op_dispatcher.sharding_propagator
    ours = InstalledPropagator(stock)
    num_compared = 0
    for call in calls_of(PROGRAMS[program]):
        for layouts in some_layouts(call, mesh.ndim, 12, seed=0):
            simulation = Simulation(stock, mesh, call, layouts)
            schema = simulation.schema()
            theirs = decided(stock, schema)
            if theirs is None:
                continue
            num_compared += 1
            try:
                mine = ours.propagate_op_sharding_non_cached(schema)
            except ValueError:
                with pytest.raises((WrongResultError, RuntimeError)):
                    simulation.check()
                continue
            if placements_of(mine.output_spec) == placements_of(theirs.output_spec):
                continue
            # Theirs gives wrong numbers, is one of several of the same cost, or has no way to it.
            if cost_of(schema, theirs) not in (math.inf, pytest.approx(cost_of(schema, mine))):
                with pytest.raises((WrongResultError, RuntimeError)):
                    simulation.check()
    assert num_compared > 0
