"""The Python side of the C++ tests whose rooms work with Python objects: names for their expressions, and
replacements for the functions that the package registers.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from types import SimpleNamespace  # noqa: F401
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard  # noqa: F401
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._utils import compute_global_tensor_info  # noqa: F401
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard  # noqa: F401
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.distributed.fake_pg import FakeStore

aten = torch.ops.aten
dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)


def new_line() -> DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("x",))


def new_grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


line, grid = new_line(), new_grid()


class OwnPartial(Partial):
    """A kind of placement with rules of its own."""


def meta(
    *shape: int, stride: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32
) -> TensorMeta:
    return TensorMeta(torch.Size(shape), stride or torch.empty(shape, device="meta").stride(), dtype)


def spec(mesh: DeviceMesh, placements: list[Placement], *shape: int, **how: Any) -> DTensorSpec:
    order = how.pop("order", None)
    entries = order and tuple(ShardOrderEntry(*entry) for entry in order)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta(*shape, **how), shard_order=entries)


def dtensor(mesh: DeviceMesh, placements: list[Placement], local: torch.Tensor, *shape: int) -> DTensor:
    return DTensor(local, spec(mesh, placements, *shape, dtype=local.dtype), requires_grad=False)


def symbolic(spec: DTensorSpec) -> DTensorSpec:
    size = ShapeEnv().create_unbacked_symint()
    spec.tensor_meta = TensorMeta(torch.Size((size,)), (1,), torch.float32)
    return spec


def fused_sgd(scale: DTensorSpec | None) -> OpSchema:
    """Of one parameter, its gradient and its momentum."""
    lists = [[spec(line, [Shard(0)], 8)] for _ in range(3)]
    numbers = {"weight_decay": 0.0, "momentum": 0.9, "lr": 0.1, "dampening": 0.0}
    flags = {"nesterov": False, "maximize": False, "is_first_step": False}
    return OpSchema(aten._fused_sgd_.default, tuple(lists), {**numbers, **flags, "grad_scale": scale})


class Param:
    """Stub of an FSDPParam with the fields that copies read."""

    def __init__(self, dim: int = 0, **fields: Any) -> None:
        self.fsdp_placement = Shard(dim)
        self.all_gather_outputs: list[torch.Tensor] = []
        vars(self).update(fields)


class GroupOfALayer:
    """The FSDPParamGroup of a linear layer with 8 rows of 2 weights, ready for its forward pass."""

    def __init__(self) -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group

        self.classes, self.states = _fsdp_param, _fsdp_param.ShardedState
        self.module = fully_shard(torch.nn.Linear(2, 8, bias=False), mesh=line)
        state = self.module._get_fsdp_state()  # type: ignore[attr-defined]
        state._lazy_init()
        self.group = state._fsdp_param_group
        self.group_class = _fsdp_param_group.FSDPParamGroup

    def trained(self) -> str:
        return str(self.group._training_state.name)

    def sharded(self) -> str:
        return str(self.group._sharded_state.name)


# Callbacks from C++

CALLBACKS: dict[str, Callable[..., Any]] = {}
num_calls: collections.Counter[str] = collections.Counter()


def handed_over(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any) -> Any:
        num_calls[function.__name__] += 1
        return function(*args)

    CALLBACKS[function.__name__] = counted
    return function


@handed_over
def mesh_axes(mesh: DeviceMesh) -> tuple[list[int], list[str], list[int], int]:
    flattened = mesh._get_root_mesh()._flatten_mapping
    return list(mesh.shape), list(mesh.mesh_dim_names or ()), [3] if flattened else [], 4


@handed_over
def make_spec(
    mesh: DeviceMesh, placements: Any, order: Any, shape: Any, stride: Any, dtype: Any, strided_as_order: Any
) -> DTensorSpec:
    how: dict[str, Any] = {"shard_order": tuple(ShardOrderEntry(*entry) for entry in order)}
    if strided_as_order is not None and hasattr(DTensorSpec, "use_strided_shard_as_shard_order"):
        how = {"shard_order": None} if strided_as_order else how
        how["use_strided_shard_as_shard_order"] = strided_as_order
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype), **how)


@handed_over
def redistribution_target(
    source: DTensorSpec, mesh: DeviceMesh, placements: Any, order: Any, dtype: Any
) -> DTensorSpec:
    return DTensorSpec(mesh, tuple(placements), tensor_meta=source.tensor_meta)


@handed_over
def axis_group(mesh: DeviceMesh, axes: int) -> tuple[str, list[int]]:
    return mesh.get_group(axes.bit_length() - 1).group_name, []


@handed_over
def mesh_pair(src: DeviceMesh, dst: DeviceMesh) -> tuple[list[int], list[int], int, str, list[int]]:
    assert dist.group.WORLD is not None
    ranks = (mesh.mesh.flatten().tolist() for mesh in (src, dst))
    return *ranks, dist.get_rank(), dist.group.WORLD.group_name, list(range(dist.get_world_size()))
