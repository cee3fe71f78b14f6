"""The functional collectives.

Eagerly, each starts a collective and returns pending tensors at once: plain ``torch.Tensor`` objects that
wait for their data at first use. Inputs are not modified and may be pending themselves. Under Dynamo,
``make_fx``, ``FakeTensorMode``, functionalization and other dispatch modes the same calls emit PyTorch's
``_c10d_functional`` ops and ``wait_tensor``.

All are differentiable, including ``wait_tensor``. The gradients are those of the sum, over all ranks, of what
each rank differentiates, so that every rank has to run the backward pass. The collectives of the backward
pass are asynchronous too. Min and max send the gradient to the extremum and share it between ranks that tie.

``group`` is one of :data:`~funcol.groups.RankTypes`, the default group if ``None``; ``tag`` tells groups of
the same ranks apart. A reduce op is one of ``"sum"``, ``"avg"``, ``"product"``, ``"min"``, ``"max"``,
``"band"``, ``"bor"``, ``"bxor"``, or a ``torch.distributed.ReduceOp``. Wrong arguments raise ``ValueError``,
``TypeError``, ``IndexError`` or ``NotImplementedError`` before anything is sent.

PyTorch counterpart: ``torch.distributed._functional_collectives``.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as stock
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ReduceOp

from .. import _C, _compat
from . import errors
from .groups import RankTypes, rank_in_group, traceable_group

_core = torch.ops._c10d_functional
_own = torch.ops.funcol


def _traced_reduce_op(reduce_op: str | ReduceOp) -> Any:
    """Returns ``reduce_op`` as stock PyTorch puts it in a graph: by name if it has one."""
    if isinstance(reduce_op, str):
        return reduce_op.lower()
    known: Any = stock.REDUCE_OP_TO_STR
    return known.get(getattr(reduce_op, "op", reduce_op), reduce_op)


def _decomposed(op: Any) -> Any:
    """Returns ``op``, or its parts for a graph recorded before dispatch, which keeps composite operators."""
    if not is_dynamo_compiling() and torch._C._dispatch_tls_is_dispatch_key_included(
        torch._C.DispatchKey.PreDispatch
    ):

        def parts(*args: Any) -> Any:
            # The tracer's torch function would take the call for one of the op itself.
            with torch._C.DisableTorchFunction():
                return op.default.decompose(*args)

        return parts
    return op


def _needs_own_rule(tensors: list[Tensor], rules_of_core: frozenset[str], reduce_op: Any = "") -> bool:
    """Returns true if a gradient is needed, and PyTorch's op has no rule for ``reduce_op``."""
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
        return False
    return reduce_op not in rules_of_core


def _finish(tensor: Tensor) -> Tensor:
    """Makes the result of PyTorch's operator pending, or emits the wait where a tracer records it.

    Under a torch function mode, which sees the operator, the result is pending: its first use waits.
    """
    if not is_dynamo_compiling():
        pending: Tensor = _C.pend(tensor)
        if pending is not NotImplemented:
            return pending
    return _core.wait_tensor(tensor)  # type: ignore[no-any-return]


def _finish_all(tensors: list[Tensor]) -> list[Tensor]:
    """Applies :func:`_finish` to each tensor, with one wait if PyTorch has an operator for it."""
    if not is_dynamo_compiling():
        pending = [_C.pend(tensor) for tensor in tensors]
        if all(tensor is not NotImplemented for tensor in pending):
            return pending
    if _compat.STOCK_WAITS_FOR_LISTS:
        return _core.wait_tensors(tensors)  # type: ignore[no-any-return]
    return [_core.wait_tensor(tensor) for tensor in tensors]


def _wrap_dim(dim: int, tensor: Tensor) -> int:
    return dim + max(tensor.dim(), 1) if dim < 0 else dim


def _call_error(message: str) -> BaseException:
    error = ValueError(message)
    return error if is_dynamo_compiling() else errors.as_raised(error)


def _group_size(op: str, group: Any) -> int:
    """Returns the number of ranks in ``group``, a name or an object."""
    if is_dynamo_compiling():
        return c10d._get_group_size_by_name(group)
    try:
        return c10d._get_group_size_by_name(group)
    except RuntimeError:
        raise _call_error(
            f"funcol::{op}: no process group is registered under the name {group!r}, and the shape of the "
            "result depends on the size of the group. Pass the group_name of a live ProcessGroup that this "
            "rank belongs to."
        ) from None


def _check_divisible(
    op: str, tensor: Tensor, dim: int, group_size: int, remedy: str = "Pad it, or scatter another dim."
) -> None:
    if tensor.size(dim) % group_size != 0:
        raise _call_error(
            f"funcol::{op}: dim {dim} has size {tensor.size(dim)}, not divisible by the {group_size} ranks "
            f"of the group. {remedy}"
        )


def all_reduce(
    self: Tensor, reduceOp: str | ReduceOp, group: RankTypes | None = None, tag: str = ""
) -> Tensor:
    """Reduces ``self`` over the ranks of ``group``; every rank gets the result.

    Returns a contiguous tensor of the shape and dtype of ``self``. Complex tensors take ``sum`` and
    ``avg``; bool tensors every op but ``avg``.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.all_reduce(self, reduceOp, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    reduce_op = _traced_reduce_op(reduceOp)
    if _needs_own_rule([self], _compat.ALL_REDUCE_RULES, reduce_op):
        return _own.all_reduce(self, reduce_op, resolved)  # type: ignore[no-any-return]
    return _finish(_core.all_reduce(self, reduce_op, resolved))


def all_gather_tensor(
    self: Tensor,
    gather_dim: int,
    group: RankTypes | None = None,
    tag: str = "",
    *,
    split_sizes: list[int] | None = None,
) -> Tensor:
    """Concatenates the tensors of all ranks of ``group`` along ``gather_dim``, in rank order.

    All ranks pass the same shape; or, with ``split_sizes``, rank ``r`` has size ``split_sizes[r]`` along
    ``gather_dim``, and all ranks pass the same list. Returns a contiguous tensor whose ``gather_dim`` is the
    sum of the ranks'; a 0-dim ``self`` counts as shape (1). All dtypes are supported.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.all_gather_tensor(self, gather_dim, group, tag, split_sizes)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    if split_sizes is not None:
        return _decomposed(_own.all_gather_along_dim)(self, gather_dim, resolved, split_sizes)  # type: ignore[no-any-return]
    group_size = _group_size("all_gather_tensor", resolved)
    if self.dim() == 0:
        self = self.reshape(1)
    gathered: Tensor = _finish(_core.all_gather_into_tensor(_compat.contiguous(self), group_size, resolved))
    gather_dim = _wrap_dim(gather_dim, self)
    return gathered if gather_dim == 0 else _compat.concatenate_ranks(gathered, group_size, gather_dim)


def reduce_scatter_tensor(
    self: Tensor,
    reduceOp: str | ReduceOp,
    scatter_dim: int,
    group: RankTypes | None = None,
    tag: str = "",
    *,
    split_sizes: list[int] | None = None,
) -> Tensor:
    """Reduces ``self`` over the ranks of ``group``; each gets its part of the result along ``scatter_dim``.

    The size of ``scatter_dim`` must be a multiple of the number of ranks; or, with ``split_sizes``, rank
    ``r`` gets ``split_sizes[r]`` of it, and all ranks pass the same list. Returns a contiguous tensor.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.reduce_scatter_tensor(self, reduceOp, scatter_dim, group, tag, split_sizes)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    reduce_op = _traced_reduce_op(reduceOp)
    op = _own.reduce_scatter_along_dim
    if _needs_own_rule([self], _compat.REDUCE_SCATTER_RULES, reduce_op):
        return op(self, reduce_op, scatter_dim, resolved, split_sizes)  # type: ignore[no-any-return]
    if split_sizes is not None:
        return _decomposed(op)(self, reduce_op, scatter_dim, resolved, split_sizes)  # type: ignore[no-any-return]
    group_size = _group_size("reduce_scatter_tensor", resolved)
    _check_divisible("reduce_scatter_tensor", self, scatter_dim, group_size)
    scatter_dim = _wrap_dim(scatter_dim, self)
    if scatter_dim != 0:
        self = _compat.split_ranks(self, group_size, scatter_dim)
    return _finish(_core.reduce_scatter_tensor(_compat.contiguous(self), reduce_op, group_size, resolved))


def all_to_all_single(
    self: Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: RankTypes | None = None,
    tag: str = "",
) -> Tensor:
    """Sends ``input_split_sizes[r]`` rows of dim 0 to rank ``r``, receives ``output_split_sizes[r]`` from it.

    If both are ``None``, shares are equal. Returns the received rows, concatenated in rank order, contiguous.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.all_to_all_single(self, output_split_sizes, input_split_sizes, group, tag)
        if result is not NotImplemented:
            return result
    if self.is_complex():  # moved as pairs of reals, since not every backend knows complex numbers
        pairs = all_to_all_single(
            torch.view_as_real(self.resolve_conj()), output_split_sizes, input_split_sizes, group, tag
        )
        return torch.view_as_complex(pairs)
    resolved = traceable_group(group, tag)
    if output_split_sizes is None or input_split_sizes is None:
        if output_split_sizes is not None or input_split_sizes is not None:
            raise _call_error(
                "funcol::all_to_all_single: pass both output_split_sizes and input_split_sizes, or neither."
            )
        group_size = _group_size("all_to_all_single", resolved)
        remedy = "Pass output_split_sizes and input_split_sizes."
        _check_divisible("all_to_all_single", self, 0, group_size, remedy)
        output_split_sizes = input_split_sizes = [self.shape[0] // group_size] * group_size
    return _finish(
        _core.all_to_all_single(_compat.contiguous(self), output_split_sizes, input_split_sizes, resolved)
    )


def all_to_all(
    self: list[Tensor], output_split_sizes: list[int] | None, group: RankTypes | None = None, tag: str = ""
) -> list[Tensor]:
    """Sends ``self[r]`` to rank ``r`` of ``group``; returns the received tensors, in rank order.

    The tensors have one dtype and device, and the same shape but for dim 0. ``output_split_sizes[r]`` rows
    come from rank ``r``; if it is ``None``, all tensors of all ranks have the same number of rows. The
    results are contiguous parts of one tensor. PyTorch counterpart: ``torch.distributed.all_to_all``, which
    writes into a list.
    """
    if not is_dynamo_compiling():
        result: list[Tensor] = _C.all_to_all(self, output_split_sizes, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    return _decomposed(_own.all_to_all)(self, output_split_sizes or [], resolved)  # type: ignore[no-any-return]


def broadcast(self: Tensor, src: int, group: RankTypes | None = None, tag: str = "") -> Tensor:
    """Sends the tensor of rank ``src``, a rank within ``group``, to every rank of it.

    All ranks pass the same shape and dtype. Returns a contiguous tensor.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.broadcast(self, src, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    if _needs_own_rule([self], _compat.BROADCAST_RULES):
        return _own.broadcast(self, src, resolved)  # type: ignore[no-any-return]
    return _finish(_core.broadcast(self, src, resolved))


def reduce(
    self: Tensor, reduceOp: str | ReduceOp, dst: int, group: RankTypes | None = None, tag: str = ""
) -> Tensor:
    """Reduces ``self`` over the ranks of ``group``; rank ``dst`` within it gets the result, the others zeros.

    Returns a contiguous tensor of the shape and dtype of ``self`` on every rank. Reduce ops, dtypes and the
    bytes that move are those of :func:`all_reduce`. With the gradients of :func:`broadcast` this is its
    transpose.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.reduce(self, reduceOp, dst, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    reduce_op = _traced_reduce_op(reduceOp)
    if _needs_own_rule([self], _compat.ALL_REDUCE_RULES, reduce_op):
        return _own.reduce(self, reduce_op, dst, resolved)  # type: ignore[no-any-return]
    return _decomposed(_own.reduce)(self, reduce_op, dst, resolved)  # type: ignore[no-any-return]


def scatter(
    self: Tensor,
    src: int,
    scatter_dim: int,
    group: RankTypes | None = None,
    tag: str = "",
    *,
    split_sizes: list[int] | None = None,
) -> Tensor:
    """Cuts the tensor of rank ``src`` within ``group`` along ``scatter_dim``; each rank gets its part.

    Parts are equal, or ``split_sizes[r]`` for rank ``r``. All ranks pass a tensor of the same shape, dtype
    and device; only that of ``src`` is read, so that ``x.new_empty(()).expand(shape)`` will do on the others.
    Returns a contiguous tensor.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.scatter(self, src, scatter_dim, group, tag, split_sizes)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    return _decomposed(_own.scatter)(self, src, scatter_dim, resolved, split_sizes)  # type: ignore[no-any-return]


def gather(
    self: Tensor,
    dst: int,
    gather_dim: int,
    group: RankTypes | None = None,
    tag: str = "",
    *,
    split_sizes: list[int] | None = None,
) -> Tensor:
    """Concatenates the tensors of all ranks along ``gather_dim`` on rank ``dst`` within ``group``.

    All ranks pass the same shape; or, with ``split_sizes``, rank ``r`` has size ``split_sizes[r]`` along
    ``gather_dim``. Returns a contiguous tensor on ``dst``; on the others one with size 0 along
    ``gather_dim``, which has to take part in their backward pass if gradients are to flow.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.gather(self, dst, gather_dim, group, tag, split_sizes)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    return _decomposed(_own.gather)(self, dst, gather_dim, resolved, split_sizes)  # type: ignore[no-any-return]


def permute_tensor(self: Tensor, src_dst: list[int], group: RankTypes | None = None, tag: str = "") -> Tensor:
    """Sends the tensor of rank ``m`` to rank ``src_dst[m]``; ranks past the end of ``src_dst`` send nothing.

    Shapes are equal on all ranks. Returns the received tensor; if several or none were sent to this rank,
    their concatenation along dim 0.
    """
    if not is_dynamo_compiling():
        result: Tensor = _C.permute_tensor(self, src_dst, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    group_size = _group_size("permute_tensor", resolved)
    if len(src_dst) > group_size or any(not 0 <= dst < group_size for dst in src_dst):
        raise ValueError(
            f"funcol::permute_tensor: src_dst is {src_dst}, but the group has ranks 0 to {group_size - 1}. "
            "Pass the destination of each rank that sends."
        )
    rank = rank_in_group(resolved)
    sent = self if self.dim() == 1 else self.reshape(-1)
    if rank >= len(src_dst):
        sent = sent[:0]
    sizes = [0] * group_size, [0] * group_size
    for src, dst in enumerate(src_dst):
        if dst == rank:
            sizes[0][src] = self.numel()
        if src == rank:
            sizes[1][dst] = self.numel()
    received = all_to_all_single(sent, *sizes, resolved)
    if self.dim() == 1:
        return received
    num_received = src_dst.count(rank)
    if num_received == 1:
        return received.view(self.shape)
    return received.view([num_received, *self.shape]).flatten(0, min(1, self.dim()))


def all_reduce_coalesced(
    self: list[Tensor], reduceOp: str | ReduceOp, group: RankTypes | None = None, tag: str = ""
) -> list[Tensor]:
    """Reduces several tensors of one device and dtype as :func:`all_reduce` does, in one collective."""
    if not is_dynamo_compiling():
        result: list[Tensor] = _C.all_reduce_coalesced(self, reduceOp, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    reduce_op = _traced_reduce_op(reduceOp)
    if _needs_own_rule(self, _compat.ALL_REDUCE_RULES, reduce_op):
        return _own.all_reduce_coalesced(self, reduce_op, resolved)  # type: ignore[no-any-return]
    return _finish_all(_core.all_reduce_coalesced(self, reduce_op, resolved))


def all_gather_into_tensor_coalesced(
    self: list[Tensor], group: RankTypes | None = None, tag: str = ""
) -> list[Tensor]:
    """Gathers several tensors of one device and dtype along dim 0, in one collective."""
    if not is_dynamo_compiling():
        result: list[Tensor] = _C.all_gather_into_tensor_coalesced(self, group, tag)
        if result is not NotImplemented:
            return result
    self = [tensor if tensor.dim() else tensor.reshape(1) for tensor in self]
    if len(self) > 0 and self[0].is_complex():
        pairs = all_gather_into_tensor_coalesced(
            [torch.view_as_real(tensor.resolve_conj()) for tensor in self], group, tag
        )
        return [torch.view_as_complex(pair) for pair in pairs]
    resolved = traceable_group(group, tag)
    group_size = _group_size("all_gather_into_tensor_coalesced", resolved)
    inputs = [_compat.contiguous(tensor) for tensor in self]
    return _finish_all(_core.all_gather_into_tensor_coalesced(inputs, group_size, resolved))


def reduce_scatter_tensor_coalesced(
    inputs: list[Tensor],
    reduceOp: str | ReduceOp,
    scatter_dim: list[int],
    group: RankTypes | None = None,
    tag: str = "",
) -> list[Tensor]:
    """Reduces and scatters several tensors of one device and dtype, in one collective.

    ``scatter_dim`` has one dim per tensor. The list ``inputs`` is left as it is.
    """
    if not is_dynamo_compiling():
        result: list[Tensor] = _C.reduce_scatter_tensor_coalesced(inputs, reduceOp, scatter_dim, group, tag)
        if result is not NotImplemented:
            return result
    resolved = traceable_group(group, tag)
    group_size = _group_size("reduce_scatter_tensor_coalesced", resolved)
    if len(scatter_dim) != len(inputs):
        raise _call_error(
            f"funcol::reduce_scatter_tensor_coalesced: {len(scatter_dim)} scatter dims for {len(inputs)} "
            "tensors. Pass one dim per tensor."
        )
    reduce_op = _traced_reduce_op(reduceOp)
    if _needs_own_rule(inputs, _compat.REDUCE_SCATTER_RULES, reduce_op):
        return _own.reduce_scatter_along_dims_coalesced(  # type: ignore[no-any-return]
            inputs, reduce_op, scatter_dim, resolved
        )
    rank_major = []
    for tensor, dim in zip(inputs, scatter_dim, strict=True):
        _check_divisible("reduce_scatter_tensor_coalesced", tensor, dim, group_size)
        dim = _wrap_dim(dim, tensor)
        rank_major.append(
            _compat.contiguous(tensor) if dim == 0 else torch.cat(torch.chunk(tensor, group_size, dim=dim))
        )
    return _finish_all(_core.reduce_scatter_tensor_coalesced(rank_major, reduce_op, group_size, resolved))


# Names of the same functions in newer PyTorch releases.
all_gather_single = all_gather_tensor
reduce_scatter_single = reduce_scatter_tensor
all_gather_single_coalesced = all_gather_into_tensor_coalesced
reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

# Every collective is differentiable.
all_gather_tensor_autograd = all_gather_single_autograd = all_gather_tensor
reduce_scatter_tensor_autograd = reduce_scatter_single_autograd = reduce_scatter_tensor
all_to_all_single_autograd = all_to_all_single

__all__ = [
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "broadcast",
    "gather",
    "permute_tensor",
    "reduce",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "scatter",
]
