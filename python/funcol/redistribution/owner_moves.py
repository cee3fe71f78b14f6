"""Moves of tensors to their owners and back, and their gradients, which are moves the other way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from .owners import OwnedTensor
from .specs import gradient_spec


def to_owners(
    dtensors: Sequence[DTensor], owners: Sequence[int], async_op: bool, max_bytes: int | None
) -> list[OwnedTensor]:
    """Moves each tensor to its owner, in full."""
    token: Tensor | None = None
    if torch.is_grad_enabled() and any(dtensor.requires_grad for dtensor in dtensors):
        token, *full_tensors = ToOwners.apply(tuple(owners), async_op, max_bytes, *dtensors)
    else:
        full_tensors = _C.move_to_owners(list(dtensors), list(owners), async_op, max_bytes)
    return [
        OwnedTensor(owner, full, dtensor._spec, token if dtensor.requires_grad else None)
        for dtensor, owner, full in zip(dtensors, owners, full_tensors, strict=True)
    ]


def from_owners(
    owned: Sequence[OwnedTensor], placements: Sequence[Any], async_op: bool, max_bytes: int | None
) -> list[DTensor]:
    """Moves each tensor from its owner to ``placements``."""
    specs, owners = tuple(one.spec for one in owned), tuple(one.owner for one in owned)
    targets = tuple(tuple(target) for target in placements)
    if torch.is_grad_enabled():
        for index, one in enumerate(owned):
            if one.token is None and one.whole is not None and one.whole.requires_grad:
                raise NotImplementedError(
                    f"funcol::redistribute_many: the whole of tensor {index} requires a gradient, which "
                    "other ranks do not know. Move a DTensor that requires it to the owner, or detach it."
                )
        if any(one.token is not None for one in owned):
            given = [part for one in owned for part in (one.token, one.whole)]
            return list(FromOwners.apply(specs, owners, targets, async_op, max_bytes, *given))
    full_tensors = [one.whole for one in owned]
    return _C.move_from_owners(full_tensors, list(specs), list(owners), list(targets), async_op, max_bytes)


class ToOwners(torch.autograd.Function):
    """A token, and the full tensors of ``dtensors`` on their owners. The token is an empty tensor by which
    all ranks, owners or not, take part in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, owners: tuple[int, ...], async_op: bool, max_bytes: int | None, *dtensors: DTensor
    ) -> tuple[Tensor | None, ...]:
        full_tensors = _C.move_to_owners(list(dtensors), list(owners), async_op, max_bytes)
        # Gradients are replicated where tensors are partial, as in redistribute().
        ctx.specs = tuple(gradient_spec(one._spec) for one in dtensors)
        ctx.owners, ctx.max_bytes, ctx.owned = owners, max_bytes, [full is not None for full in full_tensors]
        needed = ctx.needs_input_grad[3:]
        ctx.mark_non_differentiable(
            *(
                one
                for one, is_needed in zip(full_tensors, needed, strict=True)
                if one is not None and not is_needed
            )
        )
        return dtensors[0]._local_tensor.new_zeros(0, dtype=torch.float32), *full_tensors

    @staticmethod
    def backward(ctx: Any, token: Tensor, *full_tensors: Tensor | None) -> Any:
        given = [
            part
            for full, owned in zip(full_tensors, ctx.owned, strict=True)
            for part in (token, full if owned else None)
        ]
        moved = FromOwners.apply(
            ctx.specs, ctx.owners, (None,) * len(full_tensors), False, ctx.max_bytes, *given
        )
        return None, None, None, *moved


class FromOwners(torch.autograd.Function):
    """Tensors with ``placements`` (``None``: those of the spec) from ``given``, the token and the full tensor
    of each. Its gradient is :class:`ToOwners`, and vice versa."""

    @staticmethod
    def forward(
        ctx: Any,
        specs: tuple[DTensorSpec, ...],
        owners: tuple[int, ...],
        placements: tuple[Any, ...],
        async_op: bool,
        max_bytes: int | None,
        *given: Tensor | None,
    ) -> tuple[DTensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.owners, ctx.max_bytes = owners, max_bytes
        tokens, full_tensors = given[::2], given[1::2]
        moved = _C.move_from_owners(
            list(full_tensors), list(specs), list(owners), list(placements), async_op, max_bytes
        )
        ctx.mark_non_differentiable(*(one for one, token in zip(moved, tokens, strict=True) if token is None))
        return tuple(moved)

    @staticmethod
    def backward(ctx: Any, *grads: DTensor | None) -> Any:
        results: list[Tensor | None] = [None] * (2 * len(grads))
        indices = [index for index, grad in enumerate(grads) if grad is not None]
        if indices:
            owners = tuple(ctx.owners[index] for index in indices)
            token, *full_tensors = ToOwners.apply(owners, False, ctx.max_bytes, *(grads[i] for i in indices))
            for index, full in zip(indices, full_tensors, strict=True):
                results[2 * index : 2 * index + 2] = token, full
        return None, None, None, None, None, *results
