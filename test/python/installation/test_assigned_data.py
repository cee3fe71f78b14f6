"""With funcol under DTensor, ``dtensor.data = other`` assigns the local tensor and the spec."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks
from sharded import mesh_of
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import funcol


def parameter(world: int) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.arange(7.0), mesh_of((world,)), [Shard(0)]))


def full(tensor: DTensor) -> list[float]:
    return tensor.full_tensor().tolist()  # type: ignore[no-any-return]


def takes_values(world: int) -> None:
    p = parameter(world)
    p.data = p.data * 3
    assert full(p) == [3.0 * i for i in range(7)]
    assert isinstance(p, nn.Parameter)
    assert p.requires_grad
    assert p.is_leaf


def takes_shape_placements_and_dtype(world: int) -> None:
    p = parameter(world)
    p.data = distribute_tensor(torch.ones(2, 3, dtype=torch.float64), mesh_of((world,)), [Replicate()])
    assert p.placements == (Replicate(),)
    assert p.shape == p.to_local().shape == (2, 3)
    assert p.dtype == p.to_local().dtype == torch.float64


def shares_memory(world: int) -> None:
    p, q = parameter(world), parameter(world).detach()
    p.data = q
    q.add_(1)
    assert full(p) == full(q) == [i + 1.0 for i in range(7)]


def of_a_view_leaves_the_base(world: int) -> None:
    p = parameter(world).detach()
    view = p.view(7)
    view.data = view.data + 1
    assert full(p) == [float(i) for i in range(7)]
    assert full(view) == [i + 1.0 for i in range(7)]


def gets_gradients_of_the_new_values(world: int) -> None:
    p = parameter(world)
    p.data = p.data * 2
    (p * p).sum().backward()
    assert p.grad is not None
    assert full(p.grad) == [4.0 * i for i in range(7)]


def happens_in_a_compiled_region(world: int) -> None:
    p = parameter(world)

    @torch.compile(backend="eager")
    def step(p: torch.Tensor) -> torch.Tensor:
        p.data = p.data * 3
        return p + 1

    after = step(p)
    assert full(p) == [3.0 * i for i in range(7)]
    assert full(after) == [3.0 * i + 1 for i in range(7)]


def refuses_a_plain_tensor(world: int) -> None:
    p = parameter(world)
    with pytest.raises(TypeError, match="the value is a Tensor, expected a DTensor"):
        p.data = torch.ones(7)
    assert full(p) == [float(i) for i in range(7)]


def reaches_the_weights_that_fully_shard_gathers(world: int) -> None:
    module = nn.Linear(3, 3, bias=False)  # uneven: fully_shard pads it
    fully_shard(module, mesh=mesh_of((world,)))
    module(torch.ones(1, 3)).sum().backward()
    module.weight.data = module.weight.data * 0 + 2
    assert module(torch.ones(1, 3)).tolist() == [[6.0] * 3]


def of_fully_shard_keeps_its_placements(world: int) -> None:
    module = nn.Linear(3, 3, bias=False)
    fully_shard(module, mesh=mesh_of((world,)))
    with pytest.raises(ValueError, match="fully_shard manages this parameter"):
        module.weight.data = module.weight.data.redistribute(placements=[Replicate()])


def leaves_other_ways(world: int) -> None:
    p, q = parameter(world), parameter(world).detach()
    torch.utils.swap_tensors(p, nn.Parameter(q * 2))
    assert full(p) == [2.0 * i for i in range(7)]
    module = nn.Module()
    module.register_parameter("p", p)
    assert module.double().p.to_local().dtype == torch.float64


CASES: list[Callable[[int], None]] = [
    takes_values,
    takes_shape_placements_and_dtype,
    shares_memory,
    of_a_view_leaves_the_base,
    gets_gradients_of_the_new_values,
    happens_in_a_compiled_region,
    refuses_a_plain_tensor,
    reaches_the_weights_that_fully_shard_gathers,
    of_fully_shard_keeps_its_placements,
    leaves_other_ways,
]


@pytest.mark.parametrize("name", [case.__name__ for case in CASES])
@on_ranks(2)
def test_assignment(rank: int, world: int, name: str) -> None:
    with funcol.installed():
        next(case for case in CASES if case.__name__ == name)(world)


def test_uninstall_restores_the_attribute() -> None:
    before = DTensor.data
    with funcol.installed():
        assert DTensor.data is not before
    assert DTensor.data is before
