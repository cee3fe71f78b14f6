"""In-place forms of the functional collectives, with the arguments of ``torch.distributed``'s functions.

Each writes into the tensors it is given and returns them, finished. ``group`` is one of
:data:`~funcol.groups.RankTypes`, the default group if ``None``. A destination of the wrong size
raises ``ValueError`` before anything is sent.

In a region that ``torch.compile`` traces, also with ``fullgraph=True``, the functions here replace the
functions of ``torch.distributed`` that are keys of :data:`funcol.compiled.traceable_collective_remaps`. The
graph holds ``_c10d_functional`` operators and copies into the destinations, and its results are those of the
eager program.

- ``async_op=False``: the call returns ``None``, as it does eagerly.
- ``async_op=True``: it returns an object with the methods of :class:`TracedWork`. Destinations may be read
  at any time, before ``wait()`` or without it: reads see finished data. The graph waits where the region
  calls ``wait()``, or right before the first use of a destination if that is earlier, or at once if the
  region does not call ``wait()``.
- A ``ReduceOp`` without a name (``premul_sum``), an ``async_op`` that is not a constant, other methods of
  ``Work`` (``get_future``), and functions that are not in the table break the graph, or raise
  ``torch._dynamo.exc.Unsupported`` under ``fullgraph=True``. Dynamo handles point-to-point calls by itself.

PyTorch counterpart: the functions of these names in ``torch.distributed._functional_collectives``, and
``torch.distributed.broadcast``, which PyTorch does not trace.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ReduceOp

from .. import _C, _compat
from ..collectives.async_tensor import wait_tensor
from ..collectives.functions import (
    all_gather_tensor,
    all_reduce,
    all_to_all_single,
    broadcast,
    reduce_scatter_tensor,
)
from ..collectives.groups import (
    RankTypes,
    default_group,
    find_group,
    find_group_name,
    rank_of_peer,
    traceable_group,
)
from ..collectives.tracing import are_we_tracing

__all__ = [
    "REDUCE_OP_TO_STR",
    "all_gather_inplace",
    "all_gather_tensor_inplace",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "batch_p2p_ops_inplace",
    "broadcast_inplace",
    "irecv_inplace",
    "isend_inplace",
    "reduce_scatter_inplace",
    "reduce_scatter_tensor_inplace",
    "traceable_collective_remaps",
]

REDUCE_OP_TO_STR: dict[Any, str] = stock.REDUCE_OP_TO_STR
"""Names of the reduce ops that have one."""


class TracedWork:
    """The ``Work`` of a collective with ``async_op=True`` in a compiled region.

    Once it has left the region, its collective is finished.
    """

    def __init__(self, outputs: list[Tensor]) -> None:
        self._outputs = outputs

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Finishes the collective. ``timeout`` is the group's own."""
        for output in self._outputs:
            torch.ops._c10d_functional.wait_tensor(output)
        return True

    def synchronize(self) -> None:
        """Calls :meth:`wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Returns true: nothing in the region sees the collective unfinished."""
        return True


def traced_work(outputs: Tensor | list[Tensor]) -> TracedWork:
    """Returns the work that writes to ``outputs``. Dynamo traces this call instead of the constructor's."""
    return TracedWork(outputs if isinstance(outputs, list) else [outputs])


def all_reduce_inplace(
    tensor: Tensor,
    op: str | ReduceOp = "sum",
    group: RankTypes | None = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Reduces ``tensor`` over ``group`` into itself, and returns it."""
    ranks = _ranks_of("all_reduce_inplace", async_op, group, tag)
    if is_dynamo_compiling() or _C.all_reduce_into(tensor, op, ranks, tag) is NotImplemented:
        tensor.copy_(all_reduce(tensor, op, ranks))
    return tensor


def broadcast_inplace(
    tensor: Tensor,
    src: int | None = None,
    group: RankTypes | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    tag: str = "",
) -> Tensor:
    """Copies the source's ``tensor`` into the ``tensor`` of every rank of ``group``, and returns it.

    The source is ``src``, a global rank, or ``group_src``, a rank within ``group``.
    """
    ranks = _ranks_of("broadcast_inplace", async_op, group, tag)
    source = _peer("broadcast_inplace", "src", src, group_src, ranks)
    if is_dynamo_compiling() or _C.broadcast_into(tensor, source, ranks, tag) is NotImplemented:
        tensor.copy_(broadcast(tensor, source, ranks))
    return tensor


def all_gather_tensor_inplace(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: RankTypes | None = None,
    async_op: bool = False,
    tag: str = "",
    gather_dim: int = 0,
) -> Tensor:
    """Concatenates the ``input_tensor`` of all ranks along ``gather_dim`` into ``output_tensor``.

    Along dim 0, ``output_tensor`` may have any shape of the right number of elements, such as
    (number of ranks, \\*shape of the input): ranks follow one another in memory.
    """
    ranks = _ranks_of("all_gather_tensor_inplace", async_op, group, tag)
    _check_numel("all_gather_tensor_inplace", output_tensor, input_tensor.numel() * _size_of(ranks))
    if (
        is_dynamo_compiling()
        or gather_dim != 0
        or _C.all_gather_into(input_tensor, output_tensor, ranks, tag) is NotImplemented
    ):
        gathered = all_gather_tensor(input_tensor, gather_dim, ranks)
        return _copy_into(output_tensor, gathered, gather_dim == 0)
    return output_tensor


def reduce_scatter_tensor_inplace(
    output: Tensor,
    input: Tensor,  # noqa: A002
    op: str | ReduceOp = "sum",
    group: RankTypes | None = None,
    async_op: bool = False,
    scatter_dim: int = 0,
    tag: str = "",
) -> Tensor:
    """Reduces ``input`` over ``group`` and writes this rank's part along ``scatter_dim`` into ``output``.

    Along dim 0, ``input`` and ``output`` may have any shapes of the right numbers of elements: the parts of
    the ranks follow one another in memory.
    """
    ranks = _ranks_of("reduce_scatter_tensor_inplace", async_op, group, tag)
    group_size = _size_of(ranks)
    if output.numel() * group_size != input.numel():
        raise ValueError(
            f"funcol::reduce_scatter_tensor_inplace: output of shape {tuple(output.shape)} and input of "
            f"shape {tuple(input.shape)}. Expected an output of 1/{group_size} of the input's elements."
        )
    if (
        is_dynamo_compiling()
        or scatter_dim != 0
        or _C.reduce_scatter_into(input, output, op, ranks, tag) is NotImplemented
    ):
        if scatter_dim == 0 and (input.dim() == 0 or input.shape[0] % group_size != 0):
            input = input.reshape(-1)  # noqa: A001
        return _copy_into(output, reduce_scatter_tensor(input, op, scatter_dim, ranks), scatter_dim == 0)
    return output


def all_to_all_inplace(
    output: Tensor,
    input: Tensor,  # noqa: A002
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: RankTypes | None = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Sends ``input_split_sizes[r]`` rows of ``input`` to rank ``r``, and receives ``output_split_sizes[r]``
    rows of ``output`` from it.

    ``None`` or no sizes mean equal shares of dim 0.
    """
    ranks = _ranks_of("all_to_all_inplace", async_op, group, tag)
    group_size = _size_of(ranks)
    if output_split_sizes or input_split_sizes:
        output_split_sizes = output_split_sizes or _equal_shares("output", output, group_size)
        input_split_sizes = input_split_sizes or _equal_shares("input", input, group_size)
        expected = (sum(output_split_sizes), *input.shape[1:])
        if tuple(output.shape) != expected:
            raise ValueError(
                f"funcol::all_to_all_inplace: the output has shape {tuple(output.shape)}, expected "
                f"{expected} for output_split_sizes {output_split_sizes}."
            )
    else:
        output_split_sizes = input_split_sizes = None
        _check_numel("all_to_all_inplace", output, input.numel())
    result = all_to_all_single(input, output_split_sizes, input_split_sizes, ranks)
    return _copy_into(output, result, True)


def all_gather_inplace(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: RankTypes | None = None,
    async_op: bool = False,
    tag: str = "",
) -> list[Tensor]:
    """Copies the ``tensor`` of rank ``r`` into ``tensor_list[r]``, on all ranks. All tensors have one
    shape."""
    ranks = _ranks_of("all_gather_inplace", async_op, group, tag)
    _check_list("all_gather_inplace", tensor_list, tensor, ranks)
    if is_dynamo_compiling() or _C.all_gather_into_list(tensor, tensor_list, ranks, tag) is NotImplemented:
        parts = _sliced(all_gather_tensor(tensor, 0, ranks), tensor, len(tensor_list))
        for destination, part in zip(tensor_list, parts, strict=True):
            destination.copy_(part)
    return tensor_list


def _sliced(gathered: Tensor, like: Tensor, count: int) -> list[Tensor]:
    # By slices: other views would make a symbolic number of rows a constant of the graph.
    if like.dim() == 0:
        return [gathered[rank] for rank in range(count)]
    rows = like.shape[0]
    return [gathered[rank * rows : (rank + 1) * rows] for rank in range(count)]


def reduce_scatter_inplace(
    output: Tensor,
    input_list: list[Tensor],
    op: str | ReduceOp = "sum",
    group: RankTypes | None = None,
    async_op: bool = False,
    tag: str = "",
) -> Tensor:
    """Reduces ``input_list[r]`` over ``group`` into the ``output`` of rank ``r``. All tensors have one
    shape."""
    ranks = _ranks_of("reduce_scatter_inplace", async_op, group, tag)
    _check_list("reduce_scatter_inplace", input_list, output, ranks)
    if (
        is_dynamo_compiling()
        or _C.reduce_scatter_list_into(input_list, output, op, ranks, tag) is NotImplemented
    ):
        joined = torch.stack(input_list) if output.dim() == 0 else torch.cat(input_list)
        return _copy_into(output, reduce_scatter_tensor(joined, op, 0, ranks), True)
    return output


def isend_inplace(
    tensor: Tensor,
    dst: int | None = None,
    tag: int = 0,
    group: RankTypes | None = None,
    group_dst: int = -1,
) -> Tensor:
    """Sends ``tensor`` to ``dst``, a global rank, or ``group_dst``, a rank within ``group``.

    Returns an empty pending tensor: once it is waited for, ``tensor`` may be written to. In a graph, returns
    the result of PyTorch's ``isend``, which nothing waits for.
    """
    ranks = _resolved_or_world("isend_inplace", group)
    peer = _peer("isend_inplace", "dst", dst, None if group_dst == -1 else group_dst, ranks)
    if not is_dynamo_compiling():
        sent: Tensor = _C.isend(tensor, peer, tag, ranks, "")
        if sent is not NotImplemented:
            return sent
    return _point_to_point().isend(tensor, peer, tag, find_group_name(ranks))  # type: ignore[no-any-return]


def irecv_inplace(
    tensor: Tensor,
    src: int | None = None,
    tag: int = 0,
    group: RankTypes | None = None,
    group_src: int = -1,
) -> Tensor:
    """Receives from ``src``, a global rank, or ``group_src``, a rank within ``group``, into ``tensor``.

    Returns a pending alias of ``tensor``: read ``tensor`` itself only after waiting for it.
    """
    ranks = _resolved_or_world("irecv_inplace", group)
    peer = _peer("irecv_inplace", "src", src, None if group_src == -1 else group_src, ranks)
    if not is_dynamo_compiling():
        received: Tensor = _C.irecv(tensor, peer, tag, ranks, "")
        if received is not NotImplemented:
            return received
    received = _point_to_point().irecv(tensor, peer, tag, find_group_name(ranks))
    return wait_tensor(received) if are_we_tracing() else received


def batch_p2p_ops_inplace(
    op_list: list[str],
    peer_list: list[int],
    tag_list: list[int],
    tensors: list[Tensor],
    group_name: RankTypes | None,
) -> list[Tensor]:
    """Starts several ``"isend"`` and ``"irecv"`` at once; peers are ranks within the group.

    Returns for each the result of :func:`isend_inplace` or :func:`irecv_inplace`. In a graph, returns the
    results of PyTorch's ``batch_p2p_ops``, which nothing waits for.
    """
    name = find_group_name(_resolved_or_world("batch_p2p_ops_inplace", group_name or None))
    return _point_to_point().batch_p2p_ops(op_list, peer_list, tag_list, tensors, name)  # type: ignore[no-any-return]


_FORMS: dict[str, Callable[..., Any]] = {
    "all_gather": all_gather_inplace,
    "all_gather_into_tensor": all_gather_tensor_inplace,
    "all_gather_single": all_gather_tensor_inplace,
    "_all_gather_base": all_gather_tensor_inplace,
    "all_reduce": all_reduce_inplace,
    "all_to_all_single": all_to_all_inplace,
    "broadcast": broadcast_inplace,
    "reduce_scatter": reduce_scatter_inplace,
    "reduce_scatter_single": reduce_scatter_tensor_inplace,
    "reduce_scatter_tensor": reduce_scatter_tensor_inplace,
    "_reduce_scatter_base": reduce_scatter_tensor_inplace,
}

traceable_collective_remaps: dict[Callable[..., Any], Callable[..., Any]] = _compat.by_function(c10d, _FORMS)
"""Collectives of ``torch.distributed``, and the functions of the same arguments that a compiled region calls
in their place."""


def _point_to_point() -> Any:
    # Without Dynamo and dispatch modes nothing is traced, which are_we_tracing() takes longer to find out.
    may_trace = is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
    return torch.ops._c10d_functional if may_trace and are_we_tracing() else torch.ops.funcol


def _resolved_or_world(op: str, group: RankTypes | None, tag: str = "") -> Any:
    return default_group(op) if group is None else find_group(group, tag)


def _size_of(group: Any) -> int:
    if not is_dynamo_compiling() and isinstance(group, dist.ProcessGroup):
        return group.size()
    return c10d._get_group_size_by_name(traceable_group(group, ""))


def _ranks_of(op: str, async_op: bool, group: RankTypes | None, tag: str) -> Any:
    if async_op:
        raise ValueError(
            f"funcol::{op}: async_op is True, but this form returns finished tensors. Call "
            "torch.distributed's own function, or the functional collective, whose result waits by itself."
        )
    return _resolved_or_world(op, group, tag)


def _check_numel(op: str, output: Tensor, expected: int) -> None:
    if output.numel() != expected:
        raise ValueError(
            f"funcol::{op}: the output of shape {tuple(output.shape)} has {output.numel()} elements, "
            f"expected {expected}. Pass an output for the data of all ranks."
        )


def _check_list(op: str, tensors: list[Tensor], like: Tensor, group: Any) -> None:
    group_size = _size_of(group)
    if len(tensors) != group_size:
        raise ValueError(
            f"funcol::{op}: a list of {len(tensors)} tensors for {group_size} ranks. Pass one tensor per "
            "rank."
        )
    for tensor in tensors:
        if tensor.shape != like.shape:
            raise ValueError(
                f"funcol::{op}: a tensor of shape {tuple(tensor.shape)} in the list, expected "
                f"{tuple(like.shape)}. All ranks pass one shape: pad, or use all_to_all with split sizes."
            )


def _equal_shares(what: str, tensor: Tensor, group_size: int) -> list[int]:
    rows = tensor.shape[0] if tensor.dim() > 0 else 1
    if rows % group_size != 0:
        raise ValueError(
            f"funcol::all_to_all_inplace: dim 0 of the {what} has size {rows}, not divisible by the "
            f"{group_size} ranks of the group. Pass {what}_split_sizes."
        )
    return [rows // group_size] * group_size


def _peer(op: str, name: str, rank: int | None, group_rank: int | None, ranks: Any) -> int:
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"funcol::{op}: {name} is {rank} and group_{name} is {group_rank}. Pass {name}, a global rank, "
            f"or group_{name}, a rank within the group, and not both."
        )
    if group_rank is not None:
        return group_rank
    assert rank is not None
    if not is_dynamo_compiling() and ranks is dist.group.WORLD:
        return rank
    return rank_of_peer(find_group_name(ranks), rank)


def _copy_into(output: Tensor, result: Tensor, any_shape: bool) -> Tensor:
    if any_shape and output.shape != result.shape:
        result = result.view(output.shape)
    return output.copy_(result)
