"""The replacements of DTensor's methods and functions while :func:`funcol.install` is in effect.

Each function has the signature, results and gradients of PyTorch's. C++ does the calls that programs make at
every step; tracing, modes, subclasses, symbolic sizes and strided shards go through Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, placement_types
from torch.distributed.tensor import _collective_utils as stock_collectives
from torch.distributed.tensor import _dispatch as stock_dispatch
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor import distribute_tensor as stock_distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpStrategy

from .. import _C, _compat
from ..collectives import errors
from ..redistribution.conversions import to_local_in_order
from ..redistribution.functions import check_is_mesh, redistribute_in_python
from ..redistribution.local_redistribute import (
    RedistributionOptions,
    axes_with_own_rules,
    move,
    plans_support,
    set_pytorch_redistribute,
)
from ..redistribution.meshes import simulates_ranks
from ..redistribution.specs import has_own_order, has_symbols
from ..sharding import keyword_tensors
from ..sharding.op_schemas import partial_axes, specs_in, with_replicated
from . import patching, random_operators, view_writeback

_to_local: Callable[..., Tensor] = patching.copy_function(DTensor.to_local)
_from_local: Callable[..., DTensor] = patching.copy_function(DTensor.from_local)
_redistribute: Callable[..., DTensor] = patching.copy_function(DTensor.redistribute)
_full_tensor: Callable[..., Tensor] = patching.copy_function(DTensor.full_tensor)
_redistribute_local_tensor: Callable[..., Tensor] = patching.copy_function(
    stock_redistribute.redistribute_local_tensor
)
_redistribute_cost: Callable[..., float] = patching.copy_function(stock_collectives.redistribute_cost)
_distribute_tensor: Callable[..., DTensor] = patching.copy_function(stock_distribute_tensor)
_dispatcher = _compat.dispatcher_functions()
_local_results: Callable[..., object] = patching.copy_function(_dispatcher["local_results"])

set_pytorch_redistribute(_redistribute_local_tensor)


# The four methods that programs call at every step. PyTorch's functions get their code (patching.inline), so
# that C++ is one call away: they refer to their parameters alone.


def _to_local_in_python(dtensor: DTensor, grad_placements: Sequence[Placement] | None) -> Tensor:
    if has_own_order(dtensor._spec):
        return to_local_in_order(dtensor, grad_placements)
    return _to_local(dtensor, grad_placements=grad_placements)


def to_local(
    self: DTensor,
    *,
    grad_placements: Sequence[Placement] | None = None,
    _is_compiling: Callable[[], bool] = torch.compiler.is_compiling,
    _in_cpp: Callable[..., Tensor] = _C.dtensor_to_local,
    _in_python: Callable[..., Tensor] = _to_local_in_python,
) -> Tensor:
    """Replaces ``DTensor.to_local``."""
    if not _is_compiling():
        local = _in_cpp(self, grad_placements)
        if local is not NotImplemented:
            return local
    return _in_python(self, grad_placements)


def _from_local_in_python(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    run_check: bool,
    shape: torch.Size | None,
    stride: tuple[int, ...] | None,
    grad_placements: Sequence[Placement] | None,
) -> DTensor:
    options = _compat.from_local_options(grad_placements)
    return _from_local(
        local_tensor, device_mesh, placements, run_check=run_check, shape=shape, stride=stride, **options
    )


def from_local(
    local_tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: torch.Size | None = None,
    stride: tuple[int, ...] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    _is_compiling: Callable[[], bool] = torch.compiler.is_compiling,
    _in_cpp: Callable[..., DTensor] = _C.dtensor_from_local,
    _in_python: Callable[..., DTensor] = _from_local_in_python,
) -> DTensor:
    """Replaces ``DTensor.from_local``."""
    if device_mesh is not None and not run_check and not _is_compiling():
        dtensor = _in_cpp(local_tensor, device_mesh, placements, shape, stride, grad_placements)
        if dtensor is not NotImplemented:
            return dtensor
    return _in_python(local_tensor, device_mesh, placements, run_check, shape, stride, grad_placements)


def _redistribute_in_python(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement] | None,
    async_op: bool,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
) -> DTensor:
    if not torch.compiler.is_compiling():
        _check_target(device_mesh, placements)
    if (
        torch.compiler.is_compiling()
        or placements is None
        or simulates_ranks()
        or has_symbols(dtensor._spec)
        or not all(  # if a placement has neither a plan nor a rule of its own
            plans_support((placement,)) or axes_with_own_rules((placement,))
            for placement in (*dtensor._spec.placements, *placements)
        )
    ):
        return _redistribute(
            dtensor,
            device_mesh,
            placements,
            async_op=async_op,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
        )
    # Same placements move nothing, whatever the order in which the axes cut.
    order = dtensor._spec.shard_order if tuple(placements) == dtensor._spec.placements else None
    options = RedistributionOptions(async_op, lenient=True)
    return redistribute_in_python(
        dtensor, device_mesh, tuple(placements), order, forward_dtype, backward_dtype, options
    )


def _check_target(device_mesh: Any, placements: Any) -> None:
    try:
        check_is_mesh(device_mesh)
        for placement in placements or ():
            if not isinstance(placement, Placement):
                raise TypeError(
                    f"funcol::redistribute: got a {type(placement).__name__} where a placement belongs. Pass "
                    "Replicate(), Shard(dim) or Partial(op) for each mesh axis."
                )
    except TypeError as error:
        raise errors.as_raised(error) from None


def redistribute(
    self: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    _is_compiling: Callable[[], bool] = torch.compiler.is_compiling,
    _in_cpp: Callable[..., DTensor] = _C.redistribute_dtensor,
    _in_python: Callable[..., DTensor] = _redistribute_in_python,
) -> DTensor:
    """Redistributes by funcol's plan, which may take fewer collectives than PyTorch's.

    PyTorch counterpart: ``DTensor.redistribute``.
    """
    if not _is_compiling():
        moved = _in_cpp(
            self, device_mesh, placements, ..., forward_dtype, backward_dtype, async_op, None, None
        )
        if moved is not NotImplemented:
            return moved
    return _in_python(self, device_mesh, placements, async_op, forward_dtype, backward_dtype)


def full_tensor(
    self: DTensor,
    *,
    grad_placements: Sequence[Placement] | None = None,
    _is_compiling: Callable[[], bool] = torch.compiler.is_compiling,
    _in_cpp: Callable[..., Tensor] = _C.dtensor_full_tensor,
    _in_python: Callable[..., Tensor] = _full_tensor,
) -> Tensor:
    """Replaces ``DTensor.full_tensor``."""
    if not _is_compiling():
        full = _in_cpp(self, grad_placements)
        if full is not NotImplemented:
            return full
    return _in_python(self, grad_placements=grad_placements)


def distribute_tensor(
    tensor: Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Scatters shards before it broadcasts replicas, so that replicas receive shards.

    PyTorch counterpart: ``torch.distributed.tensor.distribute_tensor``, which goes by the order of the axes.
    """
    is_plain = (
        device_mesh is not None
        and not torch.compiler.is_compiling()
        and type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.is_leaf
        and not simulates_ranks()
        and _sends_as_torch_distributed()
    )
    if is_plain:
        assert device_mesh is not None
        torch._C._log_api_usage_once("torch.dtensor.distribute_tensor")
        is_elsewhere = not tensor.is_meta and tensor.device.type != device_mesh.device_type
        full = tensor.to(device_mesh.device_type) if is_elsewhere else tensor
        dtensor: DTensor = _C.distribute_tensor(full, device_mesh, placements, src_data_rank)
        if dtensor is not NotImplemented:
            return dtensor
    return _distribute_tensor(tensor, device_mesh, placements, src_data_rank=src_data_rank)


# The functions by which PyTorch's distribute_tensor sends: a program that replaces one wants it called.
_SENDERS = [
    (dist, "scatter"),
    (dist, "broadcast"),
    (stock_collectives, "scatter"),
    (stock_collectives, "broadcast"),
    (placement_types, "mesh_scatter"),
    (placement_types, "mesh_broadcast"),
]
_OWN_SENDERS = [vars(module)[name] for module, name in _SENDERS]


def _sends_as_torch_distributed() -> bool:
    return all(vars(module)[name] is own for (module, name), own in zip(_SENDERS, _OWN_SENDERS, strict=True))


def redistribute_local_tensor(
    local_tensor: Tensor,
    current_spec: DTensorSpec,
    target_spec: DTensorSpec,
    *,
    async_op: bool = False,
    use_graph_based_transform: bool | None = None,
    is_explicit: bool = False,
) -> Tensor:
    """Replaces ``torch.distributed.tensor._redistribute.redistribute_local_tensor``.

    ``use_graph_based_transform`` chooses one of PyTorch's planners; there is one here. PyTorch's function
    moves tensors without a plan: those with placements of other kinds, partials with rules of their own, or
    symbolic sizes, and local tensors of another shape than their spec gives this rank.
    """
    placements = (*current_spec.placements, *target_spec.placements)
    is_simulated = simulates_ranks()
    axis = None if is_simulated else _axis_to_reduce(current_spec, target_spec)
    if axis is not None:
        reduced: Tensor = placements[axis]._reduce_value(local_tensor, current_spec.mesh, axis)  # type: ignore[attr-defined]
        return reduced
    if not is_simulated and plans_support(placements):
        return move(local_tensor, current_spec, target_spec, async_op, None, None, is_explicit, lenient=True)
    return _redistribute_local_tensor(
        local_tensor,
        current_spec,
        target_spec,
        async_op=async_op,
        use_graph_based_transform=use_graph_based_transform,
        is_explicit=is_explicit,
    )


_debug_mode: Any = getattr(stock_redistribute, "get_active_debug_mode", None)


def _axis_to_reduce(current: DTensorSpec, target: DTensorSpec) -> int | None:
    """Returns the axis along which a partial with a rule of its own, such as the norm of a model's gradients,
    is to be reduced; ``None`` if anything else changes, or PyTorch's ``DebugMode`` is active."""
    changed = [
        axis
        for axis, (held, wanted) in enumerate(zip(current.placements, target.placements, strict=True))
        if held != wanted
    ]
    if len(changed) != 1:
        return None
    (axis,) = changed
    partial, mesh = current.placements[axis], current.mesh
    is_alone = (
        axes_with_own_rules(current.placements) == [axis]
        and sum(one.is_partial() for one in current.placements) == 1
        and target.placements[axis].is_replicate()
        and getattr(current, "shard_order", None) == getattr(target, "shard_order", None)
    )
    is_usual = (
        type(partial).__module__.startswith("torch.")
        and mesh == target.mesh
        and mesh.get_coordinate() is not None
        and mesh.size(axis) > 1
        and (_debug_mode is None or _debug_mode() is None)
    )
    return axis if is_alone and is_usual else None


def redistribute_cost(current_spec: DTensorSpec, new_spec: DTensorSpec) -> float:
    """Replaces ``torch.distributed.tensor._collective_utils.redistribute_cost``."""
    return _costs([current_spec], new_spec)[0]


def generate_redistribute_costs(src_strategy: OpStrategy, dst_spec: DTensorSpec) -> list[float]:
    """Replaces ``torch.distributed.tensor._ops.utils.generate_redistribute_costs``."""
    return _costs([strategy.output_spec for strategy in src_strategy.strategies], dst_spec)


def _costs(sources: list[DTensorSpec], target: DTensorSpec) -> list[float]:
    try:
        return [row[0] for row in _C.redistribute_cost_table(sources, [target], _COSTS)]
    except (NotImplementedError, ValueError, TypeError):  # symbolic sizes, placements of unknown kinds
        return [_redistribute_cost(source, target) for source in sources]


_COSTS = _C.DTensorCosts()


def local_results(
    self: stock_dispatch.OpDispatcher, op_call: OpOverload, args: tuple[Any, ...], op_info: Any
) -> object:
    """Runs an operator on local tensors where the decision changes its arguments.

    PyTorch counterpart: ``OpDispatcher._dispatch_get_local_results_slow_path``, which runs all others.
    """
    schema = op_info.output_sharding.redistribute_schema
    if schema is not None and op_info.output_sharding.needs_redistribute:
        if view_writeback.writes_to_list(op_call):
            return _run_writing_list(self, op_call, args, op_info)
        if view_writeback.writes_to_first(op_call):
            return _run_writing_first(self, op_call, args, op_info)
    return _run(self, op_call, args, op_info)


def _run_writing_first(
    self: stock_dispatch.OpDispatcher, op_call: OpOverload, args: tuple[Any, ...], op_info: Any
) -> object:
    """Runs an in-place operator. A tensor that it overwrites without reading is not moved first."""
    held = op_info.flat_args_schema[0]
    wanted = specs_in(op_info.output_sharding.redistribute_schema.args_schema)[0]
    if not isinstance(held, DTensorSpec) or held.placements == wanted.placements:
        return _run(self, op_call, args, op_info)
    if not view_writeback.can_write_back(held):
        view_writeback.check_shares_no_memory(op_call, args[0])
    pending = partial_axes(held)
    is_overwritten = view_writeback.overwrites(op_call)
    if not is_overwritten or with_replicated(held, pending).placements != wanted.placements:
        return _run(self, op_call, args, op_info)
    local = op_info.local_args[0]
    op_info.flat_args_schema[0] = wanted
    results = _run(self, op_call, args, op_info)
    view_writeback.write_back_or_register(op_call, local, held, local, wanted)
    return results


def _run_writing_list(
    self: stock_dispatch.OpDispatcher, op_call: OpOverload, args: tuple[Any, ...], op_info: Any
) -> object:
    """Runs an operator on lists, the first of which it writes to."""
    count = len(args[0])
    held, specs = op_info.local_args[:count], op_info.flat_args_schema[:count]
    wanted = specs_in(op_info.output_sharding.redistribute_schema.args_schema)[:count]
    if specs == wanted:
        return _run(self, op_call, args, op_info)
    results = _local_results(self, op_call, args, op_info)
    view_writeback.write_back_list(held, specs, op_info.local_args[:count], wanted)
    return results


def _run(
    self: stock_dispatch.OpDispatcher, op_call: OpOverload, args: tuple[Any, ...], op_info: Any
) -> object:
    results: object = NotImplemented
    held, spec = _first(op_info.local_args), _first(op_info.flat_args_schema)
    schema = op_info.output_sharding.redistribute_schema
    if op_info.compute_mesh.get_coordinate() is not None:
        op_info.local_kwargs = keyword_tensors.redistribute(
            schema, op_info.local_kwargs, redistribute_local_tensor
        )
    if op_call in random_operators.OPERATORS:
        results = random_operators.local_results(self, op_call, op_info)
    if results is NotImplemented:
        results = _local_results(self, op_call, args, op_info)
    moved = _first(op_info.local_args)
    if moved is not held and isinstance(spec, DTensorSpec):
        view_writeback.write_back_or_register(op_call, held, spec, moved, specs_in(schema.args_schema)[0])
    return results


tail = view_writeback.tail


def _first(sequence: Sequence[Any]) -> Any:
    return sequence[0] if sequence else None
