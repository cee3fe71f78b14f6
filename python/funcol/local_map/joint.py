"""Records a function on local tensors together with its gradient, once, and partitions the joint graph.

The function runs at this rank's shapes, on fake tensors, outside of its caller's tracer. Tensors that it
closes over become operands of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from .. import _compat
from .partitioning import JointGraph
from .recording import Lift, Recording, alone, is_foreign_to, mode_of
from .traced_functions import Function, PartitionedGraphs, empty, local_fakes

# Without a tracer


def probe(function: Function, operands: Sequence[Any]) -> list[Any]:
    """Results of the right shapes, connected to ``operands`` where gradients flow. Records nothing."""
    mode = mode_of(operands)
    is_foreign = is_foreign_to(mode, is_functional=False)
    with alone(mode):
        lift = Lift(is_foreign, lambda tensor: _leaf(tensor, mode))
        with lift:
            results = function.body(*local_fakes(function, operands, mode))
        flags = [isinstance(result, Tensor) and result.requires_grad for result in results]
        wholes = function.whole_fakes(operands, results)
    return list(_Shapes.apply(wholes, flags, *operands, *lift.foreign))


def _leaf(like: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return empty(like.shape, like.stride(), like).requires_grad_(like.requires_grad)


class _Shapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wholes: list[Any], flags: list[bool], *operands: Any) -> tuple[Any, ...]:
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in operands))
        results = [empty(one.shape, one.stride(), one) if isinstance(one, Tensor) else one for one in wholes]
        ctx.mark_non_differentiable(
            *(one for one, flag in zip(results, flags, strict=True) if not flag and isinstance(one, Tensor))
        )
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = (None if one is None else torch.empty_like(one) for one in ctx.saved_tensors)
        return None, None, *gradients


# With a tracer


def trace(function: Function, operands: Sequence[Any]) -> PartitionedGraphs:
    """Records ``function`` and, if a result requires a gradient, the gradients of the operands."""
    mode = mode_of(operands)
    is_foreign = is_foreign_to(mode, is_functional=True)
    decompositions = _compat.decompositions_of(get_proxy_mode())
    with alone(mode):
        recording = Recording(function, mode, is_foreign)
        primals = local_fakes(function, operands, mode)
        run = dispatch_functionalize(recording.run, FunctionalTensorMode())
        joint = make_fx(run, decomposition_table=decompositions)(*primals)
    return JointGraph(function, [*operands, *recording.foreign], recording, joint).partitioned()
