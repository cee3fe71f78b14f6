"""Writes that DTensor's dispatcher sends into redistributed copies, written back to the base tensor.

If a rank's shard does not hold a view, such as ``x[0]`` of a tensor that is cut along its rows, DTensor makes
it of a redistributed copy. An in-place operator whose tensor has to move first writes to such a copy, too.
PyTorch loses these writes. Here the copy knows its base: a write into the copy goes back into the base and
into other copies of it, without communication if the copy is a full tensor. Traced graphs hold the same
operators.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import _dispatch as stock_dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._python_dispatch import return_and_correct_aliasing

from .. import _C, _compat
from ..redistribution.functions import redistribute_local_tensor
from ..redistribution.local_redistribute import axes_with_own_rules
from ..sharding.op_schemas import all_specs_of, partial_axes, specs_in, with_replicated, with_specs
from . import patching

_tail: Any = patching.copy_function(_compat.dispatcher_functions()["tail"])

_is_alias_of: Any = torch._C._is_alias_of  # type: ignore[attr-defined]

aten = torch.ops.aten


def overloads(*packets: Any) -> set[OpOverload]:
    """Returns all overloads of the operators ``packets``, such as ``torch.ops.aten.add_``."""
    return {getattr(packet, name) for packet in packets for name in packet.overloads()}


# In-place operators whose results do not depend on the tensor's old values.
_OVERWRITING = overloads(
    aten.bernoulli_,
    aten.cauchy_,
    aten.copy_,
    aten.exponential_,
    aten.fill_,
    aten.geometric_,
    aten.log_normal_,
    aten.normal_,
    aten.random_,
    aten.uniform_,
    aten.zero_,
)


class _WriteCount:
    """Counts the writes to a storage since the first copy of it."""

    def __init__(self) -> None:
        self.num_writes = 0


class _Copy:
    """A redistributed copy and its base, known to the copy's storage."""

    def __init__(self, base: Tensor, base_spec: DTensorSpec, copy: Tensor, spec: DTensorSpec) -> None:
        self.base, self.base_spec, self.spec = base, base_spec, spec
        self._geometry = copy.storage_offset(), copy.size(), copy.stride()
        self._dtype = copy.dtype
        # The storage holds this object: a strong reference would be a cycle that no collector sees.
        self._storage = weakref.ref(copy.untyped_storage())
        self._known = _write_count_of(base)
        self._num_writes = self._known.num_writes

    def write_back(self, written: Tensor, op: OpOverload) -> None:
        """Writes to the base what ``op`` wrote to ``written``, a view of the copy."""
        if self._is_stale() and op not in _OVERWRITING:
            raise RuntimeError(_stale_message(op, self.base_spec))
        copy = self.tensor()
        assert copy is not None  # whose storage `written` has
        mask = self._mask_of_view(written)
        others = [other for other in _live_copies() if other is not self and self._holds_same_elements(other)]
        self._write(mask, copy)
        for other in others:
            held = other.tensor()
            if held is not None:
                held.copy_(torch.where(mask, copy, held))
        write_back(self.base, aten.copy_.default)
        for one in (self, *others):
            one._num_writes = self._known.num_writes

    def tensor(self) -> Tensor | None:
        """Returns the copy; ``None`` if its storage has been freed."""
        storage = self._storage()
        if storage is None:
            return None
        empty = torch.empty(0, dtype=self._dtype, device=storage.device)
        return empty.set_(storage, *self._geometry)

    def _is_stale(self) -> bool:
        return self._num_writes != self._known.num_writes

    def _holds_same_elements(self, other: _Copy) -> bool:
        """Returns true if ``other`` holds the same elements of the same base, and is as new."""
        return (
            not other._is_stale()
            and other.base.data_ptr() == self.base.data_ptr()
            and _have_equal_layouts(self, other)
        )

    def _mask_of_view(self, written: Tensor) -> Tensor:
        """Returns a mask of the elements of the copy that are those of ``written``."""
        offset, size, stride = self._geometry
        if written.dtype != self._dtype:  # its elements are others
            return torch.ones(size, dtype=torch.bool, device=written.device)
        storage = self._storage()
        assert storage is not None
        num_elements = storage.nbytes() // written.element_size()
        mask = torch.zeros(num_elements, dtype=torch.bool, device=written.device)
        mask.as_strided(written.size(), written.stride(), written.storage_offset()).fill_(True)
        return mask.as_strided(size, stride, offset)

    def _write(self, mask: Tensor, copy: Tensor) -> None:
        values = redistribute_local_tensor(copy, self.spec, self.base_spec)
        # Where the base is partial the values are made so, but the mask is that of all ranks.
        where = redistribute_local_tensor(
            mask.to(torch.uint8), _as_a_mask(self.spec), _as_a_mask(self.base_spec)
        )
        self.base.copy_(torch.where(where.bool(), values, self.base))


@dataclasses.dataclass(eq=False)
class _TracedCopy:
    """A copy in a traced graph, which has no memory of its own and is kept as long as the trace."""

    base: Tensor
    base_spec: DTensorSpec
    copy: Tensor
    spec: DTensorSpec
    is_stale: bool = False

    def holds_same_elements(self, other: _TracedCopy) -> bool:
        return (
            not other.is_stale
            and _is_alias_of(other.base, self.base)
            and bool(other.base.storage_offset() == self.base.storage_offset())
            and _have_equal_layouts(self, other)
        )


class _Trace:
    """The copies in a graph that is being traced."""

    def __init__(self) -> None:
        self._copies: list[_TracedCopy] = []

    def add(self, copy: _TracedCopy) -> None:
        if not _is_alias_of(copy.copy, copy.base):
            self._copies.append(copy)

    def write_back(self, written: Tensor, op: OpOverload) -> None:
        """Writes to the base what ``op`` wrote to ``written``, if that is a view of a copy."""
        for one in self._copies:
            one.is_stale |= _is_alias_of(one.base, written)
        for one in self._copies:
            if _is_alias_of(one.copy, written):
                self._write_back(one, op)

    def _write_back(self, copy: _TracedCopy, op: OpOverload) -> None:
        if copy.is_stale:
            raise RuntimeError(_stale_message(op, copy.base_spec))
        same = [other for other in self._copies if other is not copy and copy.holds_same_elements(other)]
        copy.base.copy_(redistribute_local_tensor(copy.copy, copy.spec, copy.base_spec))
        for other in same:
            other.copy.copy_(copy.copy)
        self.write_back(copy.base, aten.copy_.default)
        for one in (copy, *same):
            one.is_stale = False


_NAME_OF_TRACE = "_funcol_trace"
_TRACING_MODES = (torch._C._TorchDispatchModeKey.FUNCTIONAL, torch._C._TorchDispatchModeKey.PROXY)


def _active_trace() -> _Trace | None:
    """Returns the copies in the graph that is being traced, if there is one."""
    for key in _TRACING_MODES:
        mode = torch._C._get_dispatch_mode(key)
        if mode is not None:
            trace: _Trace | None = getattr(mode, _NAME_OF_TRACE, None)
            if trace is None:
                trace = _Trace()
                setattr(mode, _NAME_OF_TRACE, trace)
            return trace
    return None


def _have_equal_layouts(one: _Copy | _TracedCopy, other: _Copy | _TracedCopy) -> bool:
    """Returns true if both are the same redistribution of tensors of one shape, strides and dtype."""
    return (
        (other.base.size(), other.base.stride(), other.base.dtype)
        == (one.base.size(), one.base.stride(), one.base.dtype)
        and other.spec.placements == one.spec.placements
        and other.base_spec.placements == one.base_spec.placements
    )


def _stale_message(op: OpOverload, spec: DTensorSpec) -> str:
    return (
        f"funcol: {op} writes to a view that was made of a copy of a tensor with placements "
        f"{spec.placements}, which was written to since: the view has old values. Take the view again after "
        "each write to the tensor, or redistribute the tensor first."
    )


_NAME_OF_COPY, _NAME_OF_BASE = "_funcol_copy", "_funcol_base"
# Empty while no write has to be written back. Other modules may read it, and not change it.
open_copies: set[weakref.ref[_Copy]] = set()


def _live_copies() -> list[_Copy]:
    return [copy for copy in (reference() for reference in tuple(open_copies)) if copy is not None]


def _write_count_of(tensor: Tensor) -> _WriteCount:
    storage = tensor.untyped_storage()
    known: _WriteCount | None = getattr(storage, _NAME_OF_BASE, None)
    if known is None:
        known = _WriteCount()
        setattr(storage, _NAME_OF_BASE, known)
    return known


def _as_a_mask(spec: DTensorSpec) -> DTensorSpec:
    """Returns the spec of a mask for a tensor of ``spec``: bytes, and replicated where ``spec`` is
    partial."""
    assert spec.tensor_meta is not None
    meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, torch.uint8)
    mask: DTensorSpec = _C.copy_spec(with_replicated(spec, partial_axes(spec)))
    mask.tensor_meta = meta
    return mask


@functools.cache
def _is_view(op: OpOverload) -> bool:
    return bool(op._schema._is_view_op())


def _written_first(op: OpOverload) -> Any:
    """Returns the first argument of the schema if ``op`` writes to it, else ``None``."""
    first = next(iter(op._schema.arguments), None)
    is_written = first is not None and first.alias_info is not None and first.alias_info.is_write
    return first if is_written else None


@functools.cache
def writes_to_first(op: OpOverload) -> bool:
    """Returns true if ``op`` writes to its first argument, a tensor whose shape it keeps, and returns it."""
    first, returns = _written_first(op), op._schema.returns
    return (
        first is not None
        and isinstance(first.type, torch.TensorType)
        and len(returns) == 1
        and isinstance(returns[0].type, torch.TensorType)
        and torch.Tag.inplace_view not in op.tags
    )


@functools.cache
def writes_to_list(op: OpOverload) -> bool:
    """Returns true if ``op``, such as ``_foreach_add_``, writes to the tensors of a list, its first one."""
    first = _written_first(op)
    return first is not None and isinstance(first.type, torch.ListType)


def is_in_place(op: OpOverload) -> bool:
    """Returns true if ``op`` writes to its first argument, a tensor or a list of tensors."""
    return writes_to_first(op) or writes_to_list(op)


def overwrites(op: OpOverload) -> bool:
    """Returns true if ``op`` writes to all of its first argument, whose old values it does not read."""
    return op in _OVERWRITING


def copies_to_write_to(op_schema: OpSchema) -> Iterator[OpSchema]:
    """Yields ``op_schema`` with the tensors that it writes to replicated along some axes, along as few as
    possible first: in-place operators run on such copies where they cannot run on the tensors.

    Ranks may draw different random numbers, so that for operators that draw them only a sum is replicated,
    which is written back from one rank.
    """
    op = op_schema.op
    first, *others = all_specs_of(op_schema)
    if writes_to_list(op):
        count = len(specs_in(op_schema.args_schema[0]))
        written = [first, *others[: count - 1]]
        replicated = [with_replicated(spec, partial_axes(spec)) for spec in written]
        yield with_specs(op_schema, [*replicated, *others[count - 1 :]])
        return
    axes = [axis for axis, placement in enumerate(first.placements) if _may_be_replicated(op, placement)]
    for count in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, count):
            yield with_specs(op_schema, [with_replicated(first, set(some)), *others])


def _may_be_replicated(op: OpOverload, placement: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in op.tags:
        return type(placement) is Partial and placement.reduce_op == "sum"
    return not placement.is_replicate()


def can_write_back(spec: DTensorSpec) -> bool:
    """Returns true if values can be written back to a tensor of ``spec``: to all but partial norms."""
    return not axes_with_own_rules(spec.placements)


def check_shares_no_memory(op: OpOverload, written: DTensor) -> None:
    """Raises an error if ``written``, whose values become replicated in place, shares its memory."""
    storage = written._local_tensor.untyped_storage()
    # One reference is the local tensor's, one that of the object here.
    if written._is_view() or torch._C._storage_Use_Count(storage._cdata) > 2:
        raise RuntimeError(
            f"funcol: {op} writes to a tensor with placements {written.placements}, which it has to reduce "
            "first, and whose memory another tensor shares. Redistribute it first, x = x.redistribute("
            "placements=[Replicate()] * x.device_mesh.ndim), or use the operator that returns a new tensor."
        )


def write_back_list(
    bases: Sequence[Any], base_specs: Sequence[Any], copies: Sequence[Any], specs: Sequence[Any]
) -> None:
    """Brings back what an operator wrote to ``copies`` of the tensors of the list that it writes to."""
    for base, base_spec, moved, spec in zip(bases, base_specs, copies, specs, strict=True):
        if moved is not base:
            base.copy_(redistribute_local_tensor(moved, spec, base_spec))


def write_back_or_register(op: OpOverload, base: Tensor, base_spec: Any, copy: Tensor, spec: Any) -> None:
    """Brings back what ``op`` wrote to its first argument, ``copy``, which is the redistributed ``base``; if
    ``op`` is a view, registers the copy."""
    if writes_to_first(op):
        values = redistribute_local_tensor(copy, spec, base_spec) if can_write_back(base_spec) else copy
        base.copy_(values)
    elif not _is_view(op):
        return
    elif (trace := _active_trace()) is not None:
        trace.add(_TracedCopy(base, base_spec, copy, spec))
    elif copy.numel() and not isinstance(copy, FakeTensor) and not _is_alias_of(copy, base):
        known = _Copy(base, base_spec, copy, spec)
        setattr(copy.untyped_storage(), _NAME_OF_COPY, known)
        open_copies.add(weakref.ref(known, open_copies.discard))


def write_back(written: Tensor, op: OpOverload) -> None:
    """Writes to the base what ``op`` wrote to ``written``, if that is a view of a copy."""
    if (trace := _active_trace()) is not None:
        trace.write_back(written, op)
        return
    storage = written.untyped_storage()
    copy: _Copy | None = getattr(storage, _NAME_OF_COPY, None)
    base: _WriteCount | None = getattr(storage, _NAME_OF_BASE, None)
    if base is not None:
        base.num_writes += 1
    if copy is not None:
        copy.write_back(written, op)


def tail(
    self: stock_dispatch.OpDispatcher,
    op_call: OpOverload,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    compute_mesh: Any,
    output_sharding: Any,
    local_results: object,
    participating: bool,
    is_inplace_op: bool,
    is_out_variant_op: bool,
) -> object:
    """Runs the last step of an operator; writes back what was written by in-place operators.

    PyTorch counterpart: ``OpDispatcher._dispatch_fast_path_python_tail``.
    """
    if (
        participating
        and (is_inplace_op or is_out_variant_op)
        and (open_copies or _active_trace() is not None)
    ):
        out = [kwargs.get(one.name) for one in op_call._schema.arguments if one.is_out]
        written = out if is_out_variant_op else args[0] if isinstance(args[0], (list, tuple)) else args[:1]
        for tensor in written:
            if isinstance(tensor, DTensor):
                write_back(tensor._local_tensor, op_call)
    if is_inplace_op and isinstance(args[0], Tensor) and not isinstance(args[0], DTensor):
        return args[0]  # which counts as replicated; PyTorch raises an AssertionError after the write
    given = (self, op_call, args, kwargs, compute_mesh, output_sharding, local_results)
    result = _tail(*given, participating, is_inplace_op, is_out_variant_op)
    if is_inplace_op and torch.Tag.inplace_view in op_call.tags:
        _reshape(op_call, args, kwargs, output_sharding.output_spec)
    return result


def _reshape(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], spec: object) -> None:
    """Gives the DTensor that ``op``, such as ``squeeze_``, has reshaped the spec of its new shape. PyTorch
    keeps the old spec where the placements stay."""
    held = args[0]
    if isinstance(held, DTensor) and isinstance(spec, DTensorSpec) and held._spec != spec:
        held._spec = spec
        return_and_correct_aliasing(op, args, kwargs, held)  # type: ignore[no-untyped-call]
