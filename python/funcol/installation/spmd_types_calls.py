"""The replacements of functions of ``spmd_types``, see :mod:`funcol.installation.spmd_types`.

Each replacement has the arguments of the package's function, and returns ``NotImplemented`` for a call that
the package's own function has to run: one with a wrong argument or a tensor of another class, one under a
function mode (type checking is one: the package's function calls the replacement again, outside of the mode),
and one in a compiled region. Results are pending, whether or not ``async_op`` is passed. Only with
``async_op`` is the input read after the call.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import torch
import torch.distributed as dist
from torch.compiler import is_dynamo_compiling
from torch.overrides import has_torch_function_unary

from .. import _C

_dist: Any = importlib.import_module("spmd_types._dist")  # a program may replace its module ``dist``
_dtypes: Any = importlib.import_module("spmd_types._dtype_utils")
_mesh: Any = importlib.import_module("spmd_types._mesh")
_types: Any = importlib.import_module("spmd_types.types")

I, P, R, V, Shard = _types.I, _types.P, _types.R, _types.V, _types.Shard  # noqa: E741

# Types as C++ numbers them (csrc/ops/spmd_types.h), and a dim, which matters for _VARYING and _SHARD alone.
_R, _I, _P = (0, 0), (1, 0), (4, 0)
_VARYING, _SHARD = 2, 3

_INPUT_DTYPES = (None, None, None, None)  # the input's own dtype throughout

_FULL_PRECISION = (torch.float32, torch.float64)


def _change_type(
    x: Any,
    axis: Any,
    source: tuple[int, int],
    target: tuple[int, int],
    options: dict[str, Any],
) -> Any:
    """Returns ``x`` of type ``source`` as type ``target``; ``NotImplemented`` if the package has to do it."""
    if is_dynamo_compiling() or _dist.dist is not dist:
        return NotImplemented
    keeps_input, dtypes = False, _INPUT_DTYPES
    if options:
        if has_torch_function_unary(x) or not options.keys() <= _OPTIONS:
            return NotImplemented
        keeps_input = bool(options.get("async_op"))
        if any(value is not None and name != "async_op" for name, value in options.items()):
            dtypes = _resolve_dtypes(x, source, target, options)
            if dtypes is None:
                return NotImplemented
    if dtypes is _INPUT_DTYPES and target is _R and x.dtype not in _FULL_PRECISION and x.requires_grad:
        return NotImplemented  # the package's function requires the dtype in which gradients are reduced
    if not isinstance(axis, dist.ProcessGroup):
        axis = _mesh._pg_for_axis(axis)
    return _C.change_local_type(x, *source, *target, axis, keeps_input, _SCATTERS_DIM_FIRST, *dtypes)


def _resolve_dtypes(x: Any, source: tuple[int, int], target: tuple[int, int], options: dict[str, Any]) -> Any:
    """Returns four dtypes by the package's rules: of the collective and of its result, in the forward and in
    the backward pass; ``None`` if the package has to apply them."""
    full_to_part = source in (_R, _I) and target[0] in (_VARYING, _SHARD)
    resolved = _dtypes._process_dtype_options(
        options.get("op_dtype"),
        options.get("out_dtype"),
        options.get("backward_options"),
        reducing=source is _P or full_to_part,
        backward_has_reduction=target is _R,
        input_dtype=x.dtype,
        requires_grad=x.requires_grad,
    )
    backward = resolved.backward_options
    if "backward_options" in backward:
        return None
    # A gradient that is scattered or reduced keeps its precision until then.
    is_reduced = target is _R or (target is _I and source[0] in (_VARYING, _SHARD))
    during, after = _dtypes._resolve_dtypes(
        backward.get("op_dtype"), backward["out_dtype"], is_reduced, resolved.out_dtype
    )
    return resolved.op_dtype, resolved.out_dtype, during, after


def _dim(shard: Any, x: Any) -> int:
    """Returns the dim of a shard, counted from 0."""
    return int(shard.dim) if shard.dim >= 0 else int(shard.dim) + int(x.ndim)


def _matches(stated: int | None, dim: int) -> bool:
    return stated is None or stated == dim


def _replicated_type(target: Any) -> tuple[int, int] | None:
    return _R if target is R else _I if target is I else None


def all_reduce(x: Any, axis: Any, *, src: Any = P, dst: Any, inplace: bool = False, **options: Any) -> Any:
    """Replaces ``spmd_types.all_reduce``."""
    target = _replicated_type(dst)
    if (src is P or src is V) and target is not None and not inplace:
        return _change_type(x, axis, _P, target, options)
    return NotImplemented


def all_gather(
    x: Any,
    axis: Any,
    *,
    src: Any = V,
    dst: Any,
    gather_dim: int | None = None,
    split_sizes: list[int] | None = None,
    **options: Any,
) -> Any:
    """Replaces ``spmd_types.all_gather``."""
    target = _replicated_type(dst)
    if target is not None and isinstance(src, Shard):
        dim = _dim(src, x)
        if _matches(gather_dim, dim):
            if split_sizes is None:
                return _change_type(x, axis, (_SHARD, dim), target, options)
            if target is _R:
                return _all_gather_uneven(x, axis, dim, split_sizes, options)
    elif target is not None and src is V and split_sizes is None:
        return _change_type(x, axis, (_VARYING, gather_dim or 0), target, options)
    return NotImplemented


def reduce_scatter(
    x: Any,
    axis: Any,
    *,
    src: Any = P,
    dst: Any = V,
    scatter_dim: int | None = None,
    split_sizes: list[int] | None = None,
    **options: Any,
) -> Any:
    """Replaces ``spmd_types.reduce_scatter``."""
    if not (src is P or src is V):
        return NotImplemented
    if isinstance(dst, Shard):
        dim = _dim(dst, x)
        if _matches(scatter_dim, dim):
            if split_sizes is None:
                return _change_type(x, axis, _P, (_SHARD, dim), options)
            return _reduce_scatter_uneven(x, axis, dim, split_sizes, options)
    elif dst is V and split_sizes is None:
        return _change_type(x, axis, _P, (_VARYING, scatter_dim or 0), options)
    return NotImplemented


def all_to_all(
    x: Any,
    axis: Any,
    *,
    src: Any = V,
    dst: Any = V,
    split_dim: int | None = None,
    concat_dim: int | None = None,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    **options: Any,
) -> Any:
    """Replaces ``spmd_types.all_to_all`` by one exchange, where the package exchanges a list of tensors."""
    if src is V and dst is V:
        kind, source, target = _VARYING, split_dim or 0, concat_dim or 0
    elif isinstance(src, Shard) and isinstance(dst, Shard):
        kind, source, target = _SHARD, _dim(src, x), _dim(dst, x)
        if not _matches(split_dim, target) or not _matches(concat_dim, source):
            return NotImplemented
    else:
        return NotImplemented
    if output_split_sizes is None and input_split_sizes is None:
        return _change_type(x, axis, (kind, source), (kind, target), options)
    if source == target == 0:
        return _all_to_all_uneven(x, axis, output_split_sizes, input_split_sizes, options)
    return NotImplemented


def convert(x: Any, axis: Any, *, src: Any, dst: Any, expert_mode: bool = False, **options: Any) -> Any:
    """Replaces ``spmd_types.convert`` of invariant tensors, whose gradient may be a collective."""
    if src is I:
        if dst is R:
            return _change_type(x, axis, _I, _R, options)
        if dst is V:
            return _change_type(x, axis, _I, (_VARYING, 0), options)
        if isinstance(dst, Shard):
            return _change_type(x, axis, _I, (_SHARD, _dim(dst, x)), options)
    return NotImplemented


def invariant_to_replicate(x: Any, axis: Any, **options: Any) -> Any:
    """Replaces ``spmd_types.invariant_to_replicate``."""
    # The package looks up an axis that is a name only in the backward pass.
    return _change_type(x, axis, _I, _R, options) if isinstance(axis, dist.ProcessGroup) else NotImplemented


# Parts of different sizes


def _group_of_uneven(x: Any, axis: Any, options: dict[str, Any], dim: int) -> dist.ProcessGroup | None:
    """Returns the group along ``axis``; ``None`` unless a functional collective on ``x`` along ``dim`` does
    what ``options`` ask for."""
    is_supported = (
        not (is_dynamo_compiling() or has_torch_function_unary(x))
        and _dist.dist is dist
        and {name for name, value in options.items() if value is not None} <= _OPTIONS & {"async_op"}
        and x.dtype in _FULL_PRECISION
        and not _C.has_active_layers()
        and 0 <= dim < x.dim()
    )
    return _mesh._pg_for_axis(axis) if is_supported else None


def _sizes(sizes: Any, group: dist.ProcessGroup) -> list[int] | None:
    """Returns ``sizes`` as a list; ``None`` unless there is a size for each rank."""
    found = list(sizes)
    is_right = len(found) == group.size() and all(isinstance(size, int) and size >= 0 for size in found)
    return found if is_right else None


def _all_gather_uneven(x: Any, axis: Any, dim: int, split_sizes: Any, options: dict[str, Any]) -> Any:
    group = _group_of_uneven(x, axis, options, dim)
    sizes = None if group is None else _sizes(split_sizes, group)
    if group is None or sizes is None or sizes[group.rank()] != x.size(dim):
        return NotImplemented
    return _C.all_gather_tensor(_copy_unless_async(x, options), dim, group, "", sizes)


def _reduce_scatter_uneven(x: Any, axis: Any, dim: int, split_sizes: Any, options: dict[str, Any]) -> Any:
    group = _group_of_uneven(x, axis, options, dim)
    sizes = None if group is None else _sizes(split_sizes, group)
    if sizes is None or sum(sizes) != x.size(dim):
        return NotImplemented
    return _C.reduce_scatter_tensor(_copy_unless_async(x, options), "sum", dim, group, "", sizes)


def _all_to_all_uneven(
    x: Any, axis: Any, output_split_sizes: Any, input_split_sizes: Any, options: dict[str, Any]
) -> Any:
    group = _group_of_uneven(x, axis, options, 0)
    if group is None:
        return NotImplemented
    equal = [x.size(0) // group.size()] * group.size()
    given = equal if input_split_sizes is None else _sizes(input_split_sizes, group)
    received = equal if output_split_sizes is None else _sizes(output_split_sizes, group)
    if given is None or received is None or sum(given) != x.size(0):
        return NotImplemented
    return _C.all_to_all_single(_copy_unless_async(x, options), received, given, group, "")


def _copy_unless_async(x: Any, options: dict[str, Any]) -> Any:
    """Returns ``x``, or a copy of it unless ``async_op`` lets the collective read ``x`` after the call."""
    return x if options.get("async_op") else x.clone()


REPLACED = (
    ("spmd_types._collectives", "all_reduce", all_reduce),
    ("spmd_types._collectives", "all_gather", all_gather),
    ("spmd_types._collectives", "reduce_scatter", reduce_scatter),
    ("spmd_types._collectives", "all_to_all", all_to_all),
    ("spmd_types._local", "convert", convert),
    ("spmd_types._local", "invariant_to_replicate", invariant_to_replicate),
)

_PARAMETERS = inspect.signature(importlib.import_module("spmd_types._collectives").all_reduce).parameters
_OPTIONS = {"op_dtype", "out_dtype", "async_op", "backward_options"} & _PARAMETERS.keys()
# Before 0.3.1, the result of a reduce_scatter along another dim than 0 has that dim first in memory.
_SCATTERS_DIM_FIRST = "async_op" not in _OPTIONS
