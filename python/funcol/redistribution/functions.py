"""Redistribution of sharded tensors: from one layout on a ``DeviceMesh`` to another.

The steps are those of a least-cost plan (:func:`funcol.plan_redistribution`), cached for each mesh. Sizes
need not be divisible, shards may be strided, and axes may cut a dim in any order; the shards are exact in
every case.

PyTorch counterpart: ``torch.distributed.tensor._redistribute``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from . import callbacks as callbacks  # which C++ calls
from .agreement import mesh_value
from .cost_models import CostModel
from .cross_mesh import is_other_mesh, redistribute_between
from .local_redistribute import (
    Redistribute,
    RedistributionOptions,
    axes_with_own_rules,
    make_dtensor,
    move,
    redistribute_with_autograd,
    redistribution_options,
)
from .owner_moves import from_owners, to_owners
from .owners import Owned, OwnedTensor
from .planning import CostModels, mesh_of, model_for
from .specs import target_spec


def redistribute_local_tensor(
    local: Tensor,
    src_spec: DTensorSpec,
    dst_spec: DTensorSpec,
    *,
    async_op: bool = False,
    cost_model: CostModel | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """Redistributes ``local``, this rank's tensor under ``src_spec``, to ``dst_spec``.

    All ranks of the mesh must make the same call. Returns a contiguous tensor that shares no memory with
    ``local``, or ``local`` itself if there is nothing to do, or if the rank is not part of the mesh. With
    ``async_op`` the result may be pending and waits at its first use.

    ``cost_model`` prices the steps (default: latency and bandwidth of one host); ``max_bytes`` bounds the
    memory of every step. Raises ``ValueError``, before anything is sent, if ``local`` does not have the shape
    that ``src_spec`` gives this rank, if a spec contradicts itself, or if no plan stays within ``max_bytes``.
    Raises ``NotImplementedError`` for two different meshes and for placements of unknown kinds. Partials with
    rules of their own, such as PyTorch's partial norms, are supported: their rules run first, or last.

    PyTorch counterpart: ``torch.distributed.tensor._redistribute.redistribute_local_tensor``.
    """
    model = None if cost_model is None else model_for(cost_model, mesh_of(src_spec.mesh))
    return move(local, src_spec, dst_spec, async_op, model, max_bytes, is_explicit=False)


def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    cost_model: CostModels | None = None,
    max_bytes: int | None = None,
) -> DTensor:
    """Redistributes ``dtensor`` to ``placements``, one for each axis of its mesh. All ranks of the mesh must
    make the same call.

    With another ``device_mesh``, of the same ranks or of others, ``placements`` are those on that mesh, and
    all ranks of both meshes must make the same call, eagerly. The plan is that of
    :func:`funcol.redistribution.plan_mesh_change`: partial values are reduced before they leave, and each
    element is sent once to each rank that lacks it, or moved by collectives where they cost less. As in
    PyTorch, a rank outside of a mesh also has DTensors on it, with an empty local tensor: such a ``dtensor``
    is ``DTensor.from_local(torch.empty(0), mesh, placements, run_check=False, shape=shape, stride=stride)``,
    and has to require a gradient if it does on other ranks. ``cost_model`` has the axes of both meshes, or is
    a pair of models, one for each mesh. Gradients flow back if ``device_mesh`` has all ranks of the source;
    otherwise a backward pass that needs one raises ``ValueError``. So do calls with meshes of different
    devices, or without a process group that has the ranks of both.

    ``shard_order`` lists ``(dim, axes)``: the axes that cut the dim, first cut first (default: the order of
    the mesh). ``forward_dtype`` is the dtype that is sent and that the result has. ``backward_dtype`` is the
    dtype in which the gradient is sent (default: the input's); the gradient then gets the dtype of the input.
    ``async_op``, ``cost_model``, ``max_bytes`` and the errors are those of
    :func:`~funcol.redistribution.redistribute_local_tensor`.

    The call is differentiable any number of times. The gradient has the placements of ``dtensor``, but is
    replicated where ``dtensor`` is partial and the gradient of the result is not.

    PyTorch counterpart: ``DTensor.redistribute``, which refuses most partial targets. Here they are exact:
    reducing them gives the same value.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"funcol::redistribute: got a {type(dtensor).__name__}, expected a DTensor.")
    check_is_mesh(device_mesh)
    if placements is None:
        raise ValueError("funcol::redistribute: no placements. Pass one for each axis of the mesh.")
    order = None if shard_order is None else tuple((dim, tuple(axes)) for dim, axes in sorted(shard_order))
    target = tuple(placements)
    if is_other_mesh(dtensor.device_mesh, device_mesh):
        assert device_mesh is not None
        return redistribute_between(
            [dtensor],
            device_mesh,
            [target],
            order,
            forward_dtype=forward_dtype,
            backward_dtype=backward_dtype,
            async_op=async_op,
            cost_model=cost_model,
            max_bytes=max_bytes,
        )[0]
    options = redistribution_options(dtensor.device_mesh, async_op, cost_model, max_bytes)
    if not torch.compiler.is_compiling():
        moved: DTensor = _C.redistribute_dtensor(
            dtensor,
            device_mesh,
            target,
            order,
            forward_dtype,
            backward_dtype,
            async_op,
            options.model,
            max_bytes,
        )
        if moved is not NotImplemented:
            return moved
    return redistribute_in_python(dtensor, device_mesh, target, order, forward_dtype, backward_dtype, options)


def check_is_mesh(device_mesh: Any) -> None:
    """Raises TypeError if ``device_mesh`` is not a mesh, such as placements in its place."""
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        is_list = isinstance(device_mesh, (list, tuple))
        remedy = "; write placements=[...]." if is_list else ", expected a DeviceMesh."
        raise TypeError(f"funcol::redistribute: device_mesh is a {type(device_mesh).__name__}{remedy}")


def redistribute_in_python(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    options: RedistributionOptions,
) -> DTensor:
    """Implements :func:`redistribute` where C++ does not: in compiled regions, under modes, and for symbolic
    sizes, strided shards and masks."""
    src = dtensor._spec
    dst = target_spec(src, device_mesh or src.mesh, placements, order, forward_dtype)
    records = torch.is_grad_enabled() and dtensor.requires_grad
    if not records and forward_dtype is None:
        local = options.run(dtensor._local_tensor, src, dst, is_explicit=True)
        return make_dtensor(local, dst, requires_grad=False)
    return redistribute_with_autograd(dtensor, dst, options, forward_dtype, backward_dtype)


@overload
def redistribute_many(
    dtensors: Iterable[DTensor | OwnedTensor],
    placements: Sequence[Placement] | Sequence[Sequence[Placement]],
    *,
    device_mesh: DeviceMesh | None = ...,
    async_op: bool = ...,
    cost_model: CostModel | None = ...,
    max_bytes: int | None = ...,
) -> list[DTensor]: ...


@overload
def redistribute_many(
    dtensors: Iterable[DTensor],
    placements: Owned | Sequence[Owned],
    *,
    async_op: bool = ...,
    cost_model: CostModel | None = ...,
    max_bytes: int | None = ...,
) -> list[OwnedTensor]: ...


def redistribute_many(
    dtensors: Iterable[DTensor | OwnedTensor],
    placements: Sequence[Placement] | Sequence[Sequence[Placement]] | Owned | Sequence[Owned],
    *,
    device_mesh: DeviceMesh | None = None,
    async_op: bool = False,
    cost_model: CostModels | None = None,
    max_bytes: int | None = None,
) -> list[DTensor] | list[OwnedTensor]:
    """Redistributes ``dtensors``, on one mesh, to ``placements``: shared by all, or a sequence for each.

    All ranks of the mesh must make the same call, with the tensors in the same order. Each tensor follows the
    plan that :func:`redistribute` has for it. Tensors of one dtype whose plans have the same steps
    (collective, mesh axes, reduction; sizes and dims may differ) are copied into and out of one collective
    for each step. ``max_bytes`` (default: 256 MiB) bounds the sum of the tensors in one collective; the rest
    goes into further collectives, and a tensor of that size goes alone, without a copy.

    Results and gradients are those of :func:`redistribute` for each tensor. But if a backend adds
    floating-point numbers in an order that depends on their place in its buffer, as gloo does among three
    ranks or more, sums may differ in the last bits. The call is differentiable any number of times; the
    gradients travel together, too. Tensors go one by one if any is a masked partial or has symbolic sizes.

    :class:`funcol.redistribution.Owned` in the place of a tensor's placements, or of all placements, moves
    the full tensor to one rank: the result is a :class:`funcol.redistribution.OwnedTensor`. Owned tensors
    move to placements in the same way. Each way is one all_to_all for all tensors of a dtype (unless
    ``max_bytes`` bounds it), whatever their owners, by steps that are cached. Partials are reduced first; the
    owner sends to all replicas. Gradients flow back in a backward pass of all ranks if what is computed from
    the full tensors moves on to placements; the backward pass of a loss on an owner alone would wait for the
    other ranks. Raises ``NotImplementedError`` if a full tensor requires a gradient but does not come from a
    DTensor that does, and under modes and tracers.

    ``async_op``, ``cost_model`` and the errors are those of :func:`redistribute`; errors are raised before
    any tensor of a mesh is sent. Raises ``NotImplementedError`` if the tensors are on several meshes and no
    ``device_mesh`` is given. Returns an empty list if there are no tensors.

    With another ``device_mesh``, as in :func:`redistribute`, tensors may be on several meshes, as 1-D and 2-D
    parameters are, and on ``device_mesh`` itself. Tensors of one mesh and dtype travel in one all_to_all
    among the ranks of both meshes or, if no process group has exactly these ranks, in sends and receives
    between pairs of them, in which other ranks take no part. Before that, the ranks of both meshes agree by
    one small all_reduce. All of them raise ``ValueError``, before any of these tensors is sent, if they
    differ in the number, order, dtypes, shapes or placements of the tensors of a mesh, in ``device_mesh`` or
    in an option. They wait for a rank that makes no call or passes no tensors. The next batch of
    ``max_bytes`` is sent while one arrives, so two are in memory beside the tensors; all with ``async_op``.

    PyTorch counterpart: ``DTensor.redistribute``, in a loop.
    """
    tensors: list[Any] = list(dtensors)
    if isinstance(placements, Owned):
        placements = [placements] * len(tensors)
    given: Sequence[Any] = tuple(placements)
    owned = [one for one in (*given, *tensors) if isinstance(one, (Owned, OwnedTensor))]
    if device_mesh is not None and owned:
        raise ValueError(
            f"funcol::redistribute_many: got {owned[0]} and a device_mesh. Owners are ranks of the tensors' "
            "own mesh: redistribute between meshes before or after."
        )
    if any(isinstance(target, Owned) for target in given):
        _check_owners(tensors, given)
        return to_owners(tensors, [target.rank for target in given], async_op, max_bytes)
    targets = _targets_of_many(given, len(tensors))
    if not tensors:
        return []
    if device_mesh is not None and any(
        isinstance(tensor, DTensor) and is_other_mesh(tensor.device_mesh, device_mesh) for tensor in tensors
    ):
        _check_all(tensors, DTensor, "a DTensor")
        return _from_each_mesh(
            tensors, device_mesh, targets, async_op=async_op, cost_model=cost_model, max_bytes=max_bytes
        )
    if any(isinstance(tensor, OwnedTensor) for tensor in tensors):
        _check_all(tensors, OwnedTensor, "an OwnedTensor like the others")
        return from_owners(tensors, targets, async_op, max_bytes)

    mesh = tensors[0].device_mesh if isinstance(tensors[0], DTensor) else None
    options = redistribution_options(mesh, async_op, cost_model, max_bytes)
    try:
        results = _C.redistribute_many(tensors, None, targets, None, async_op, options.model, max_bytes)
    except NotImplementedError:
        held = (tensor.placements for tensor in tensors)
        if not axes_with_own_rules(itertools.chain(*targets, *held)):
            raise
        results = NotImplemented
    if results is None:
        specs = tuple(
            target_spec(tensor._spec, tensor._spec.mesh, target)
            for tensor, target in zip(tensors, targets, strict=True)
        )
        as_they_are = (None,) * len(tensors)
        return list(Redistribute.apply(specs, options, as_they_are, as_they_are, True, *tensors))
    if results is NotImplemented:
        return [
            redistribute(
                tensor, placements=target, async_op=async_op, cost_model=cost_model, max_bytes=max_bytes
            )
            for tensor, target in zip(tensors, targets, strict=True)
        ]
    return results  # type: ignore[no-any-return]


def _from_each_mesh(
    tensors: list[DTensor], mesh: DeviceMesh, targets: list[tuple[Placement, ...]], **options: Any
) -> list[DTensor]:
    """Redistributes ``tensors`` to ``targets`` on ``mesh``, those of each source mesh together. Meshes are
    sorted by value, so that all ranks go through them in the same order, however they list the tensors."""
    by_mesh: dict[DeviceMesh, list[int]] = {}
    for index, tensor in enumerate(tensors):
        by_mesh.setdefault(tensor.device_mesh, []).append(index)
    results: dict[int, DTensor] = {}
    for src_mesh in sorted(by_mesh, key=lambda one: (mesh_value(one), one.mesh_dim_names or ())):
        indices = by_mesh[src_mesh]
        of_mesh = [tensors[index] for index in indices]
        wanted = [targets[index] for index in indices]
        if is_other_mesh(src_mesh, mesh):
            moved = redistribute_between(of_mesh, mesh, wanted, agrees=True, **options)
        else:
            moved = redistribute_many(of_mesh, wanted, **options)
        results |= dict(zip(indices, moved, strict=True))
    return [results[index] for index in range(len(tensors))]


def _check_owners(tensors: list[Any], owners: Sequence[Any]) -> None:
    _check_all(tensors, DTensor, "a DTensor")
    if len(owners) != len(tensors):
        raise ValueError(
            f"funcol::redistribute_many: {len(owners)} owners for {len(tensors)} tensors. Pass one for each "
            "tensor, or one for all."
        )
    for index, owner in enumerate(owners):
        if not isinstance(owner, Owned):
            raise TypeError(
                f"funcol::redistribute_many: target {index} is {owner!r}, others are Owned. Move tensors to "
                "owners and to placements by calls of their own."
            )


def _check_all(tensors: list[Any], kind: type, expected: str) -> None:
    for index, tensor in enumerate(tensors):
        if not isinstance(tensor, kind):
            raise TypeError(
                f"funcol::redistribute_many: tensor {index} is a {type(tensor).__name__}, "
                f"expected {expected}."
            )


def _targets_of_many(given: Sequence[Any], num_tensors: int) -> list[tuple[Placement, ...]]:
    """Returns the placements of each tensor, from those ``given`` for all of them or for each."""
    if all(isinstance(placement, Placement) for placement in given):
        if not given and num_tensors:
            raise ValueError("funcol::redistribute_many: no placements. Pass one for each axis of the mesh.")
        return [tuple(given)] * num_tensors
    if len(given) != num_tensors:
        raise ValueError(
            f"funcol::redistribute_many: {len(given)} sequences of placements for {num_tensors} tensors. "
            "Pass one for each tensor, or one for all."
        )
    return [tuple(target) for target in given]
