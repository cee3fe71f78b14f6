"""Redistribution of sharded tensors: from one layout on a ``DeviceMesh`` to another.

The steps are those of a least-cost plan (:func:`funcol.plan_redistribution`), which is remembered by value.
Sizes need not divide, shards may be strided, and axes may cut a dim in any order; the shards are exact in
every case.

PyTorch counterpart: ``torch.distributed.tensor._redistribute``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._debug_mode import get_active_debug_mode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _C, _compat
from .cost_models import CostModel
from .meshless_specs import copy_onto, copy_without_mesh, mesh_number
from .planning import mesh_of, model_for

_stock_redistribute_local_tensor: Callable[..., Tensor] = _compat.copied(
    stock_redistribute.redistribute_local_tensor
)


def redistribute_local_tensor(
    local: Tensor,
    src_spec: DTensorSpec,
    dst_spec: DTensorSpec,
    *,
    async_op: bool = False,
    cost_model: CostModel | None = None,
    max_bytes: int | None = None,
) -> Tensor:
    """This rank's tensor under ``dst_spec``, from the one it holds under ``src_spec``.

    All ranks of the mesh call it alike. Returns a contiguous tensor that shares no memory with ``local``, or
    ``local`` itself if there is nothing to do, or if the rank is not part of the mesh. With ``async_op`` the
    result may be pending and waits at its first use.

    ``cost_model`` says what is cheap (default: latency and bandwidth of one host); ``max_bytes`` bounds the
    memory of every step. ``ValueError``, before anything is sent, if ``local`` has not the shape that
    ``src_spec`` gives this rank, if a spec contradicts itself, or if no plan stays within ``max_bytes``;
    ``NotImplementedError`` for two different meshes and for placements of unknown kinds, but not for partials
    with rules of their own, such as PyTorch's of norms: what they say is done first, or last.

    PyTorch counterpart: ``torch.distributed.tensor._redistribute.redistribute_local_tensor``.
    """
    model = None if cost_model is None else model_for(cost_model, mesh_of(src_spec.mesh))
    return _moved(local, src_spec, dst_spec, async_op, model, max_bytes, is_explicit=False)


def redistribute(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    shard_order: Iterable[tuple[int, Sequence[int]]] | None = None,
    async_op: bool = False,
    forward_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    cost_model: CostModel | None = None,
    max_bytes: int | None = None,
) -> DTensor:
    """``dtensor`` with other ``placements``, one for each axis of its mesh. All ranks of the mesh call it
    alike.

    ``shard_order`` lists ``(dim, axes)``: which axes cut the dim, first cut first; by default axes cut in the
    order of the mesh. ``forward_dtype`` is the dtype that is sent and that the result has; ``backward_dtype``
    the one in which the gradient is sent (default: the input's), which then gets the dtype of the input.
    ``async_op``, ``cost_model``, ``max_bytes`` and the errors are those of :func:`redistribute_local_tensor`.

    Differentiable any number of times. The gradient has the placements of ``dtensor``, but replicates where
    ``dtensor`` is partial and its own gradient is not.

    PyTorch counterpart: ``DTensor.redistribute``; that refuses most partial targets, which are exact here:
    reducing them gives the same value.
    """
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"funcol::redistribute: got a {type(dtensor).__name__}, expected a DTensor.")
    if placements is None:
        raise ValueError("funcol::redistribute: no placements. Pass one for each axis of the mesh.")
    how = _How(async_op, cost_model, max_bytes)
    return _redistributed(dtensor, device_mesh, placements, shard_order, forward_dtype, backward_dtype, how)


def _redistributed(
    dtensor: DTensor,
    device_mesh: DeviceMesh | None,
    placements: Sequence[Placement],
    shard_order: Iterable[tuple[int, Sequence[int]]] | None,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    how: _How,
) -> DTensor:
    src = dtensor._spec
    placements = tuple(placements)
    mesh = device_mesh or src.mesh
    # One by one: a loop over them takes as long as the rest.
    is_usual = (
        shard_order is None
        and forward_dtype is None
        and backward_dtype is None
        and how.cost_model is None
        and how.max_bytes is None
    )
    if is_usual and mesh is src.mesh and not torch.compiler.is_compiling():
        moved: DTensor = _C.redistribute_dtensor(dtensor, placements, how.async_op)
        if moved is not NotImplemented:
            return moved
    order = None if shard_order is None else tuple((dim, tuple(axes)) for dim, axes in sorted(shard_order))
    if torch.compiler.is_compiling() or _has_symbols(src):
        dst = _target(src, mesh, placements, order, forward_dtype)
    else:
        dst = _known_target(src, mesh, placements, order, forward_dtype)
    records = torch.is_grad_enabled() and dtensor.requires_grad
    if not records and forward_dtype is None:
        local = how.run(dtensor._local_tensor, src, dst, is_explicit=True)
        return _dtensor(local, dst, requires_grad=False)
    result: DTensor = _Redistribute.apply(dtensor, dst, backward_dtype, how)
    return result


def redistribute_many(
    dtensors: Iterable[DTensor],
    placements: Sequence[Placement] | Sequence[Sequence[Placement]],
    *,
    async_op: bool = False,
    cost_model: CostModel | None = None,
    max_bytes: int | None = None,
) -> list[DTensor]:
    """Each of ``dtensors``, all on one mesh, with other placements: the same for all, or a sequence for each.

    All ranks of the mesh call it alike, with the tensors in the same order. Each tensor goes by the plan that
    :func:`redistribute` has for it. Tensors of one dtype whose plans have the same steps (collective, mesh
    axes, reduction; sizes and dims may differ) share one collective a step, into and out of which they are
    copied. ``max_bytes`` (default: 256 MiB) bounds what the tensors of a collective take together: what is
    more goes into further ones, and a tensor that takes as much goes alone, uncopied.

    Results and gradients are those of :func:`redistribute`, one by one; but where a backend adds up
    floating-point numbers in an order that depends on their place in its buffer, as gloo does among three
    ranks or more, sums may differ in the last bits. Differentiable any number of times; the gradients travel
    together, too. Tensors go one by one in compiled regions, under tracers and other modes, and if one is a
    masked partial.

    ``async_op`` and ``cost_model`` are those of :func:`redistribute`, and so are the errors, raised before
    anything of any tensor is sent; ``NotImplementedError`` if the tensors are on several meshes. No tensors:
    an empty list.

    PyTorch counterpart: ``DTensor.redistribute``, in a loop.
    """
    tensors = list(dtensors)
    targets = _targets_of_many(placements, len(tensors))
    if not tensors:
        return []
    how = _How(async_op, cost_model, max_bytes)
    if torch.compiler.is_compiling():
        return _one_by_one(tensors, targets, how)
    model = how.model(tensors[0].device_mesh) if isinstance(tensors[0], DTensor) else None
    try:
        results = _C.redistribute_many(tensors, targets, async_op, model, max_bytes)
    except NotImplementedError:
        held = (tensor.placements for tensor in tensors)
        if not _own_rules(itertools.chain(*targets, *held)):
            raise
        results = NotImplemented
    if results is None:
        specs = tuple(
            _target(tensor._spec, tensor._spec.mesh, target, None, None)
            for tensor, target in zip(tensors, targets, strict=True)
        )
        return list(_RedistributeMany.apply(specs, how, True, *tensors))
    return _one_by_one(tensors, targets, how) if results is NotImplemented else results


def _targets_of_many(
    placements: Sequence[Placement] | Sequence[Sequence[Placement]], num_tensors: int
) -> list[tuple[Placement, ...]]:
    """The placements for each tensor."""
    given: Sequence[Any] = tuple(placements)
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


def _one_by_one(
    tensors: Sequence[DTensor], targets: Sequence[tuple[Placement, ...]], how: _How
) -> list[DTensor]:
    return [
        redistribute(
            tensor,
            placements=target,
            async_op=how.async_op,
            cost_model=how.cost_model,
            max_bytes=how.max_bytes,
        )
        for tensor, target in zip(tensors, targets, strict=True)
    ]


def _has_symbols(whole: DTensorSpec | TensorMeta) -> bool:
    return any(type(size) is not int for size in whole.shape)


def _target(
    src: DTensorSpec,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    dtype: torch.dtype | None,
) -> DTensorSpec:
    """The spec of what becomes of a tensor of ``src``; another dtype than its own if there is one."""
    meta = src.tensor_meta
    assert meta is not None
    return DTensorSpec(
        mesh,
        tuple(_counted_from_0(placement, len(meta.shape)) for placement in placements),
        tensor_meta=TensorMeta(meta.shape, meta.stride, dtype or meta.dtype),
        shard_order=None if order is None else tuple(ShardOrderEntry(*entry) for entry in order),  # type: ignore[arg-type]
    )


_MOST_TARGETS = 1024
_targets: dict[Any, DTensorSpec] = {}  # without their mesh


def _known_target(
    src: DTensorSpec,
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    order: tuple[tuple[int, tuple[int, ...]], ...] | None,
    dtype: torch.dtype | None,
) -> DTensorSpec:
    """:func:`_target`, remembered, but not with the mesh."""
    key = (mesh_number(mesh), src.tensor_meta, placements, order, dtype)
    known = _targets.get(key)
    if known is None:
        if len(_targets) >= _MOST_TARGETS:
            _targets.clear()
        known = _targets[key] = copy_without_mesh(_target(src, mesh, placements, order, dtype))
    return copy_onto(known, mesh)


@dataclasses.dataclass(frozen=True)
class _How:
    async_op: bool
    cost_model: CostModel | None
    max_bytes: int | None
    lenient: bool = False  # as _moved has it

    def run(self, local: Tensor, src: DTensorSpec, dst: DTensorSpec, is_explicit: bool) -> Tensor:
        """``is_explicit``: it is what the caller of funcol asked for, not its gradient."""
        model = self.model(src.mesh)
        return _moved(local, src, dst, self.async_op, model, self.max_bytes, is_explicit, self.lenient)

    def run_many(
        self,
        locals_: list[Tensor],
        srcs: list[DTensorSpec],
        dsts: list[DTensorSpec],
        is_explicit: bool,
    ) -> list[Tensor]:
        model = self.model(srcs[0].mesh)
        try:
            results = _C.redistribute_local_tensors(locals_, srcs, dsts, self.async_op, model, self.max_bytes)
        except NotImplementedError:
            if not _own_rules(itertools.chain(*(spec.placements for spec in (*srcs, *dsts)))):
                raise
            results = NotImplemented
        if results is NotImplemented:
            return [self.run(*of_tensor, is_explicit) for of_tensor in zip(locals_, srcs, dsts, strict=True)]
        moved: list[Tensor] = results
        return moved

    def model(self, mesh: DeviceMesh) -> _C.AlphaBeta | _C.StepCounts | None:
        return None if self.cost_model is None else model_for(self.cost_model, mesh_of(mesh))


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dtensor: DTensor, dst: DTensorSpec, backward_dtype: torch.dtype | None, how: _How
    ) -> DTensor:
        src, local = dtensor._spec, dtensor._local_tensor
        assert dst.tensor_meta is not None
        ctx.src, ctx.how = src, how
        ctx.backward_dtype = backward_dtype or local.dtype
        ctx.input_dtype = local.dtype
        result = how.run(local.to(dtype=dst.tensor_meta.dtype), src, dst, is_explicit=True)
        return _dtensor(result, dst, dtensor.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        result = _RedistributeGradient.apply(grad, ctx.src, ctx.backward_dtype, ctx.input_dtype, ctx.how)
        return result, None, None, None


class _RedistributeGradient(torch.autograd.Function):
    """The way back, sent as ``sent_dtype``; an operation of its own, so that it is differentiable in turn."""

    @staticmethod
    def forward(
        ctx: Any,
        grad: DTensor,
        target: DTensorSpec,
        sent_dtype: torch.dtype,
        result_dtype: torch.dtype,
        how: _How,
    ) -> DTensor:
        ctx.src, ctx.sent_dtype, ctx.how = grad._spec, sent_dtype, how
        ctx.grad_dtype = grad._local_tensor.dtype
        dst = _gradient_target(grad, target, result_dtype)
        sent = grad._local_tensor.to(sent_dtype)
        result = how.run(sent, grad._spec, dst, is_explicit=False).to(result_dtype)
        return _dtensor(result, dst, grad.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> Any:
        result = _RedistributeGradient.apply(grad, ctx.src, ctx.sent_dtype, ctx.grad_dtype, ctx.how)
        return result, None, None, None, None


class _RedistributeMany(torch.autograd.Function):
    """Each tensor to its spec of ``dsts``; its own gradient, so that it is differentiable again."""

    @staticmethod
    def forward(
        ctx: Any, dsts: tuple[DTensorSpec, ...], how: _How, is_explicit: bool, *dtensors: DTensor
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.srcs, ctx.how = [dtensor._spec for dtensor in dtensors], how
        held = [dtensor._local_tensor for dtensor in dtensors]
        moved = how.run_many(held, ctx.srcs, list(dsts), is_explicit)
        results = tuple(
            _dtensor(local, dst, requires_grad=False) for local, dst in zip(moved, dsts, strict=True)
        )
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, ctx.needs_input_grad[3:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        results: list[DTensor | None] = [None] * len(grads)
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if given:
            dsts = tuple(_gradient_target(grad, ctx.srcs[i], grad.dtype) for i, grad in given)
            moved = _RedistributeMany.apply(dsts, ctx.how, False, *(grad for _, grad in given))
            for (i, _), result in zip(given, moved, strict=True):
                results[i] = result
        return None, None, None, *results


def _gradient_target(grad: DTensor, target: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    """Where the gradient of a tensor of spec ``target`` goes.

    It need not be partial where the tensor is: cheaper for whoever uses it.
    """
    placements = tuple(
        Replicate() if wanted.is_partial() and not held.is_partial() else wanted
        for held, wanted in zip(grad._spec.placements, target.placements, strict=True)
    )
    return dataclasses.replace(target, placements=placements, tensor_meta=_meta_of(grad, dtype))


def _moved(
    local: Tensor,
    src: DTensorSpec,
    dst: DTensorSpec,
    async_op: bool,
    model: _C.AlphaBeta | _C.StepCounts | None,
    max_bytes: int | None,
    is_explicit: bool,
    lenient: bool = False,
) -> Tensor:
    """``local``, of spec ``src``, under ``dst``.

    ``lenient``: PyTorch's own function moves what there is no plan for: placements of kinds that are not
    known here, and a tensor of another shape than ``src`` gives this rank. It moves all whose sizes are
    symbols, since a plan would be for the numbers that they stand for now.
    """

    def by_pytorch() -> Tensor:
        return _stock_redistribute_local_tensor(local, src, dst, async_op=async_op, is_explicit=is_explicit)

    if src.tensor_meta is not None and _has_symbols(src.tensor_meta):
        is_usual = model is None and max_bytes is None
        if lenient or (is_usual and _has_way_of_pytorch(src, dst)):
            return by_pytorch()
    try:
        moved = _C.redistribute_local_tensor(
            local, src, dst, async_op, model, max_bytes, is_explicit, lenient
        )
    except NotImplementedError:
        # Met while the specs are read.
        held, wanted = _own_rules(src.placements), _own_rules(dst.placements)
        if not (held or wanted) or src.mesh != dst.mesh:
            if lenient:
                return by_pytorch()
            raise
    else:
        return by_pytorch() if moved is NotImplemented else moved
    mesh = src.mesh
    if src == dst or mesh.get_coordinate() is None:
        return local
    for spec in (src, dst):
        _check_one_reduction(spec.placements)
    for axis in held:
        local = _settled(src.placements[axis]._reduce_value(local, mesh, axis))  # type: ignore[attr-defined]
    ends = (_replicated(src, held), _replicated(dst, wanted))
    local = _C.redistribute_local_tensor(local, *ends, async_op, model, max_bytes, is_explicit, False)
    for axis in wanted:
        local = _settled(dst.placements[axis]._partition_value(local, mesh, axis))  # type: ignore[attr-defined]
    return local


def _has_way_of_pytorch(src: DTensorSpec, dst: DTensorSpec) -> bool:
    """Whether PyTorch moves what is ``src`` to ``dst``: it makes no partials."""
    return all(
        not wanted.is_partial() or wanted == held
        for held, wanted in zip(src.placements, dst.placements, strict=True)
    )


# What has no rules of its own: plans are for these.
_KINDS = (Replicate, Shard, _StridedShard, _MaskPartial)
_REDUCTIONS = frozenset({"sum", "avg", "min", "max", "product", "band", "bor", "bxor"})


def _are_known(placements: Iterable[Placement]) -> bool:
    return all(
        type(placement) in _KINDS or (type(placement) is Partial and placement.reduce_op in _REDUCTIONS)
        for placement in placements
    )


def _own_rules(placements: Iterable[Placement]) -> list[int]:
    """Which are partials that reduce in a way of their own, such as PyTorch's of norms.

    They are replicated first, and made last, by their own methods.
    """
    return [
        axis
        for axis, placement in enumerate(placements)
        if isinstance(placement, Partial) and type(placement) not in (Partial, _MaskPartial)
    ]


def _check_one_reduction(placements: Sequence[Placement]) -> None:
    partial = {placement for placement in placements if placement.is_partial()}
    if len(partial) > 1:
        raise ValueError(
            f"funcol::redistribute: the placements {tuple(placements)} hold partials whose result depends on "
            "which is reduced first. Reduce one of them before the other is made."
        )


def _replicated(spec: DTensorSpec, axes: Sequence[int]) -> DTensorSpec:
    placements = (Replicate() if axis in axes else one for axis, one in enumerate(spec.placements))
    return dataclasses.replace(spec, placements=tuple(placements))


def _settled(tensor: Tensor) -> Tensor:
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _dtensor(local: Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    # Not by DTensor(...): its __init__ does nothing, but takes two thirds of the time.
    result: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    return result


def _meta_of(tensor: Tensor, dtype: torch.dtype) -> TensorMeta:
    return TensorMeta(tensor.shape, tensor.stride(), dtype)


def _counted_from_0(placement: Placement, num_dims: int) -> Placement:
    if isinstance(placement, _StridedShard) and placement.dim < 0:
        return _StridedShard(placement.dim + num_dims, split_factor=placement.split_factor)
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + num_dims)
    return placement


def _axis_group(mesh: DeviceMesh, axes: int) -> tuple[str, list[int]]:
    """Name of the group along a set of ``axes``, a bit an axis, and the place of each of its ranks.

    Places count up along the last axis first; an empty list if the group's ranks do so themselves.
    """
    listed = [axis for axis in range(mesh.ndim) if axes >> axis & 1]
    if len(listed) != 1:
        return _compat.merged_groups(mesh)[axes], []
    name = _compat.mesh_group_name(mesh, listed[0])
    with _disable_current_modes():
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        along_axis = mesh.mesh
        for axis in reversed(range(mesh.ndim)):
            if axis != listed[0]:
                along_axis = along_axis.select(axis, coordinate[axis])
        ranks = along_axis.tolist()
    members = dist.get_process_group_ranks(_compat.group_named(name))
    return name, [] if members == ranks else [ranks.index(member) for member in members]


def _debug_note(
    local: Tensor,
    src: tuple[Placement, ...],
    dst: tuple[Placement, ...],
    trace: str,
    is_explicit: bool,
) -> contextlib.AbstractContextManager[object]:
    """Under PyTorch's ``DebugMode``, within which of its notes the operators of a redistribution are."""
    mode = get_active_debug_mode()
    if mode is None:
        return contextlib.nullcontext()
    note: contextlib.AbstractContextManager[object] = mode.record_redistribute_calls(
        local, src, dst, trace, is_explicit=is_explicit
    )
    return note


def _apply_mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """What a masked partial reduces: ``tensor`` with zeros where another rank has the row. Ends the mask's
    use."""
    masked = tensor.clone()
    placement.mask_buffer.apply_mask(masked)
    placement.mask_buffer.release_mask()
    return masked


def _mask(placement: Any, tensor: Tensor, mesh: DeviceMesh, axis: int) -> Tensor:
    """The indices of ``tensor`` within this rank's rows; keeps the mask of the others for
    :func:`_apply_mask`."""
    result: Tensor = placement._partition_value(tensor, mesh, axis)
    return result
