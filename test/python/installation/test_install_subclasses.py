"""Tensor subclasses that answer collectives in ``__torch_dispatch__``, as float8 tensors do, answer them
under install(), too: each operator as often as without, with the same results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as stock
from differential import world_group
from programs import mesh_of
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._pytree import tree_map_only

import funcol

ON_DEVICES = True

c10d = torch.ops._c10d_functional
aten = torch.ops.aten
called: Counter[str] = Counter()


class Scaled(Tensor):
    """Integers and one scale for all, as float8 tensors are; collectives send the integers."""

    data_: Tensor
    scale: float

    @staticmethod
    def __new__(cls, data: Tensor, scale: float) -> Scaled:
        result: Scaled = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, data.shape, strides=data.stride(), dtype=torch.float32, device=data.device
        )
        result.data_, result.scale = data, scale
        return result

    def whole(self) -> Tensor:
        return self.data_.float() * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["data_"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], scale: float, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["data_"], scale)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "_c10d_functional" and func not in _WAITS:
            called[func.name()] += 1
        if func in _ON_DATA | _WAITS:
            first, *rest = args
            result = func(first.data_, *rest, **(kwargs or {}))
            if isinstance(result, (list, tuple)):
                return [Scaled(one, first.scale) for one in result]
            return Scaled(result, first.scale)
        if func is aten.cat.default:
            (tensors, *rest) = args
            return Scaled(torch.cat([one.data_ for one in tensors], *rest), tensors[0].scale)
        args, kwargs = tree_map_only(Scaled, Scaled.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


_ON_DATA = {
    c10d.all_gather_into_tensor.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
    aten._to_copy.default,
}
# How PyTorch's results come to wait depends on the release.
_WAITS = {
    getattr(c10d, name).default for name in ("wait_tensor", "_wrap_tensor_autograd") if hasattr(c10d, name)
}


def scaled(size: int = 2) -> Scaled:
    rank = torch.distributed.get_rank()
    return Scaled(torch.arange(size * 3, dtype=torch.int8).reshape(size, 3) + rank, 0.5)


def on(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(scaled(), mesh, [Shard(0)])


USES: dict[str, Callable[[DeviceMesh], Any]] = {
    "from_local": lambda mesh: on(mesh).to_local(),
    "redistribute": lambda mesh: on(mesh).redistribute(placements=[Replicate()]).to_local(),
    "redistribute, later": lambda mesh: (
        on(mesh).redistribute(placements=[Replicate()], async_op=True).to_local()
    ),
    "full_tensor": lambda mesh: on(mesh).full_tensor(),
    "replicated to a shard": lambda mesh: (
        DTensor.from_local(scaled(4), mesh, [Replicate()], run_check=False)
        .redistribute(placements=[Shard(0)])
        .to_local()
    ),
    "distribute_tensor": lambda mesh: distribute_tensor(
        scaled(4), mesh, [Shard(0)], src_data_rank=None
    ).to_local(),
    "all_gather_tensor": lambda mesh: stock.all_gather_tensor(scaled(), 0, world_group()),
}


def values(result: Any) -> list[Tensor]:
    if isinstance(result, stock.AsyncCollectiveTensor) and type(result) is not Tensor:
        result = result.wait()
    return [result.whole() if isinstance(result, Scaled) else result + 0]


def outcome(use: str) -> tuple[list[Tensor], dict[str, int], str]:
    called.clear()
    try:
        found = values(USES[use](mesh_of(2)))
    except Exception as error:
        return [], dict(called), type(error).__name__
    return found, dict(called), ""


@pytest.mark.parametrize("use", USES)
@on_ranks(2)
def test_it_answers_as_without_funcol(rank: int, world: int, use: str) -> None:
    expected = outcome(use)
    with funcol.installed():
        during = outcome(use)
    assert during[1:] == expected[1:]
    for result, other in zip(during[0], expected[0], strict=True):
        assert torch.equal(result, other)
