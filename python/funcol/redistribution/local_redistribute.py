"""Moves of local tensors by funcol's plan, a placement's own rules or PyTorch's function, and redistributions
that autograd records, whose gradients are redistributions back."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

from .. import _C
from . import callbacks as callbacks  # which C++ calls
from .planning import CostModels, mesh_of, model_for
from .specs import gradient_target_spec, has_symbols, meta_of

_pytorch_redistribute: Callable[..., Tensor] = stock_redistribute.redistribute_local_tensor


def set_pytorch_redistribute(function: Callable[..., Tensor]) -> None:
    """Makes ``function`` move the tensors that have no plan: a copy of PyTorch's function, since PyTorch's
    may itself call funcol's."""
    global _pytorch_redistribute
    _pytorch_redistribute = function


@dataclasses.dataclass(frozen=True)
class RedistributionOptions:
    """The options of a redistribution, and how tensors and their gradients move."""

    async_op: bool = False
    model: Any = None  # a cost model of C++; None: the default one of the mesh
    max_bytes: int | None = None
    lenient: bool = False  # as in move()

    def run(self, local: Tensor, src: DTensorSpec, dst: DTensorSpec, is_explicit: bool) -> Tensor:
        """Moves ``local`` from ``src`` to ``dst``. ``is_explicit``: a program requested it, not autograd."""
        return move(local, src, dst, self.async_op, self.model, self.max_bytes, is_explicit, self.lenient)

    def move(
        self,
        locals_: list[Tensor],
        srcs: Sequence[DTensorSpec],
        dsts: Sequence[DTensorSpec],
        is_explicit: bool,
    ) -> list[Tensor]:
        """Moves each tensor as :meth:`run` does; several tensors travel together if C++ supports them."""
        if len(locals_) > 1 and not any(map(_is_symbolic, locals_, map(meta_of, srcs))):
            try:
                results = _C.redistribute_local_tensors(
                    locals_, list(srcs), list(dsts), self.async_op, self.model, self.max_bytes, is_explicit
                )
            except NotImplementedError:
                if not axes_with_own_rules(itertools.chain(*(spec.placements for spec in (*srcs, *dsts)))):
                    raise
                results = NotImplemented
            if results is not NotImplemented:
                return results  # type: ignore[no-any-return]
        return [self.run(*of_tensor, is_explicit) for of_tensor in zip(locals_, srcs, dsts, strict=True)]

    def back(self, src: DTensorSpec, dst: DTensorSpec) -> RedistributionOptions:
        """Returns the options by which gradients of tensors of ``dst`` move to ``src``. Raises ValueError if
        they cannot."""
        return self

    def target_of_gradient(
        self, gradient: DTensor, src: DTensorSpec, dtype: torch.dtype
    ) -> tuple[DTensor, DTensorSpec]:
        """Returns ``gradient`` in a form that can move, and the spec to which it moves, given ``src``."""
        return gradient, gradient_target_spec(gradient, src, dtype)


def redistribution_options(
    mesh: DeviceMesh | None, async_op: bool, cost_model: CostModels | None, max_bytes: int | None
) -> RedistributionOptions:
    """Returns the options of a redistribution on ``mesh``. Raises TypeError for a pair of cost models."""
    if isinstance(cost_model, tuple):
        raise TypeError("funcol::redistribute: a cost model for each of two meshes, but one mesh. Pass one.")
    model = None if cost_model is None or mesh is None else model_for(cost_model, mesh_of(mesh))
    return RedistributionOptions(async_op, model, max_bytes)


def move(
    local: Tensor,
    src: DTensorSpec,
    dst: DTensorSpec,
    async_op: bool,
    model: _C.AlphaBeta | _C.StepCounts | None,
    max_bytes: int | None,
    is_explicit: bool,
    lenient: bool = False,
) -> Tensor:
    """Moves ``local`` from spec ``src`` to spec ``dst``.

    ``lenient``: PyTorch's function moves the tensors that have no plan: those with placements of unknown
    kinds or another shape than ``src`` gives this rank. It also moves tensors with symbolic sizes, in the
    spec or only in the local tensor, since a plan holds for the current values of the symbols.
    """

    def by_pytorch() -> Tensor:
        return _pytorch_redistribute(local, src, dst, async_op=async_op, is_explicit=is_explicit)

    if src.tensor_meta is not None and _is_symbolic(local, src.tensor_meta):
        is_usual = model is None and max_bytes is None
        if lenient or (is_usual and _pytorch_supports(src, dst)):
            return by_pytorch()
    try:
        moved = _C.redistribute_local_tensor(
            local, src, dst, async_op, model, max_bytes, is_explicit, lenient
        )
    except NotImplementedError:
        # C++ has not moved anything: it met the placement when it read the specs.
        held, wanted = axes_with_own_rules(src.placements), axes_with_own_rules(dst.placements)
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
        local = settled(src.placements[axis]._reduce_value(local, mesh, axis))  # type: ignore[attr-defined]
    ends = (_replicated(src, held), _replicated(dst, wanted))
    local = _C.redistribute_local_tensor(local, *ends, async_op, model, max_bytes, is_explicit, False)
    for axis in wanted:
        local = settled(dst.placements[axis]._partition_value(local, mesh, axis))  # type: ignore[attr-defined]
    return local


def _is_symbolic(local: object, full: TensorMeta) -> bool:
    return has_symbols(full) or (isinstance(local, Tensor) and has_symbols(local))


def _pytorch_supports(src: DTensorSpec, dst: DTensorSpec) -> bool:
    """Returns true if PyTorch can move a tensor from ``src`` to ``dst``. PyTorch makes no partials."""
    return all(
        not wanted.is_partial() or wanted == held
        for held, wanted in zip(src.placements, dst.placements, strict=True)
    )


# The kinds of placements and the reductions that plans support.
_KINDS = (Replicate, Shard, _StridedShard, _MaskPartial)
_REDUCTIONS = frozenset({"sum", "avg", "min", "max", "product", "band", "bor", "bxor"})


def plans_support(placements: Iterable[Placement]) -> bool:
    """Returns true if plans support all of these kinds of placements."""
    return all(
        type(placement) in _KINDS or (type(placement) is Partial and placement.reduce_op in _REDUCTIONS)
        for placement in placements
    )


def axes_with_own_rules(placements: Iterable[Placement]) -> list[int]:
    """Returns the axes whose partials have rules of their own, such as PyTorch's partial norms. Their own
    methods reduce them first, and make them last."""
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


def settled(tensor: Tensor) -> Tensor:
    """Returns ``tensor``, after waiting for it if it is a pending tensor of PyTorch's."""
    return tensor.wait() if isinstance(tensor, AsyncCollectiveTensor) else tensor


def make_dtensor(local: Tensor, spec: DTensorSpec, requires_grad: bool) -> DTensor:
    """Returns the DTensor of ``spec`` whose local tensor on this rank is ``local``."""
    # DTensor(...) also calls __init__, which does nothing but takes two thirds of the time.
    result: DTensor = DTensor.__new__(DTensor, local, spec, requires_grad=requires_grad)
    return result


# Recorded by autograd


class Redistribute(torch.autograd.Function):
    """A redistribution of each of ``dtensors`` to its spec in ``dsts``, sent as its dtype in ``sent_dtypes``
    (default: its own); gradients are sent as ``backward_dtypes`` (default: those of the tensors). The
    backward pass applies it again, so it is differentiable any number of times."""

    @staticmethod
    def forward(
        ctx: Any,
        dsts: tuple[DTensorSpec, ...],
        options: RedistributionOptions,
        sent_dtypes: tuple[torch.dtype | None, ...],
        backward_dtypes: tuple[torch.dtype | None, ...],
        is_explicit: bool,
        *dtensors: DTensor,
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        held = [dtensor._local_tensor for dtensor in dtensors]
        ctx.srcs, ctx.dsts, ctx.options = [dtensor._spec for dtensor in dtensors], dsts, options
        ctx.dtypes = [local.dtype for local in held]
        ctx.backward_dtypes = [one or own for one, own in zip(backward_dtypes, ctx.dtypes, strict=True)]
        sent = [_as_dtype(local, dtype) for local, dtype in zip(held, sent_dtypes, strict=True)]
        moved = options.move(sent, ctx.srcs, dsts, is_explicit)
        results = tuple(
            make_dtensor(_as_dtype(local, dtype and meta_of(dst).dtype), dst, requires_grad=False)
            for local, dst, dtype in zip(moved, dsts, sent_dtypes, strict=True)
        )
        ctx.mark_non_differentiable(
            *(result for result, needed in zip(results, ctx.needs_input_grad[5:], strict=True) if not needed)
        )
        return results

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        results: list[DTensor | None] = [None] * len(grads)
        given = [(i, grad) for i, grad in enumerate(grads) if grad is not None]
        if given:
            options = ctx.options.back(ctx.srcs[0], ctx.dsts[0])
            targets = [options.target_of_gradient(grad, ctx.srcs[i], ctx.dtypes[i]) for i, grad in given]
            dsts = tuple(dst for _, dst in targets)
            sent_dtypes = tuple(ctx.backward_dtypes[i] for i, _ in given)
            moved = Redistribute.apply(
                dsts, options, sent_dtypes, sent_dtypes, False, *(grad for grad, _ in targets)
            )
            for (i, _), result in zip(given, moved, strict=True):
                results[i] = result
        return None, None, None, None, None, *results


def _as_dtype(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None else tensor.to(dtype=dtype)


def redistribute_with_autograd(
    dtensor: DTensor,
    dst: DTensorSpec,
    options: RedistributionOptions,
    sent_dtype: torch.dtype | None = None,
    backward_dtype: torch.dtype | None = None,
    is_explicit: bool = True,
) -> DTensor:
    """Redistributes ``dtensor`` to ``dst`` by :class:`Redistribute`."""
    [result] = Redistribute.apply((dst,), options, (sent_dtype,), (backward_dtype,), is_explicit, dtensor)
    return result  # type: ignore[no-any-return]


def gradient_of_redistribute(
    gradient: DTensor,
    spec: DTensorSpec,
    sent_dtype: torch.dtype,
    result_dtype: torch.dtype,
    async_op: bool,
    model: _C.AlphaBeta | _C.StepCounts | None,
    max_bytes: int | None,
) -> DTensor:
    """Redistributes ``gradient``, of a tensor of ``spec``, to that spec. It is sent as ``sent_dtype``."""
    options = RedistributionOptions(async_op, model, max_bytes, lenient=True)
    gradient, dst = options.target_of_gradient(gradient, spec, result_dtype)
    return redistribute_with_autograd(gradient, dst, options, sent_dtype, sent_dtype, is_explicit=False)


_C.register_callback("gradient_of_redistribute", gradient_of_redistribute)
