"""Tensors that wait by themselves for the in-place collectives of ``torch.distributed``.

Run eagerly, a :class:`CommTensor` is a plain tensor made in C++. Only under ``make_fx`` is it a subclass,
which adds the collective, the binding of its result to its ``Work``, and the wait to the graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch._library.utils import handle_dispatch_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree

from .. import _C

_COLLECTIVES = frozenset(
    f"c10d::{name}"
    for name in (
        "_allgather_base_",
        "_reduce_scatter_base_",
        "allgather_",
        "allreduce_",
        "alltoall_",
        "broadcast_",
        "reduce_scatter_",
        "scatter_",
    )
)


class CommTensor(Tensor):
    """``CommTensor(x)``: ``x``, to be passed to in-place collectives and used without waiting for them.

    ::

        c = funcol.collectives.CommTensor(x)
        dist.all_reduce(c, async_op=True)
        y = c + 1  # waits

    Eagerly the result is a plain ``torch.Tensor`` over the storage of ``x``; autograd sees a view of it. It
    and its views wait at their first use for the collectives that write them; ``x`` itself does not. The
    result of an operator on a CommTensor is a CommTensor, too, until a collective is started on it. It may be
    passed to any number of collectives, one after the other. Nothing waits for collectives that only read it.

    Under ``make_fx`` the graph holds, for each collective, the call, ``comm_result`` after it, and
    ``wait_comm`` before the first node that uses an output. Running the graph starts and waits for
    collectives of its own. There, all outputs of a collective must be CommTensors, and for ``all_gather`` the
    input too.

    The collectives are those behind ``dist.all_reduce``, ``broadcast``, ``all_gather``,
    ``all_gather_into_tensor``, ``reduce_scatter``, ``reduce_scatter_tensor``, ``scatter`` and ``all_to_all``,
    with ``async_op=True``, on a group whose backend is written in C++. Calls of backends that override the
    methods of ``ProcessGroup`` in Python are not seen.

    A CommTensor of a CommTensor is the same object. Raises ``TypeError`` for objects that are not tensors
    with strided storage of their own. A failed collective raises at the first use and at each later use.
    PyTorch counterpart: ``torch.distributed._spmd.comm_tensor.CommTensor``.
    """

    _tensor: Tensor  # make_fx tracks this one
    _collectives: _Collectives
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __new__(cls, tensor: Tensor) -> Any:
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"funcol.CommTensor: got a {type(tensor).__name__}, expected a tensor. "
                "Wrap each tensor of a list or dict on its own."
            )
        if isinstance(tensor, CommTensor):
            return tensor
        tracer = _active_tracer()
        if tracer is not None:
            return _traced(tensor, _Collectives())
        if isinstance(tensor, FakeTensor):
            return tensor  # has no data to wait for
        return _C.comm_tensor(tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # The values may be unfinished, and reading them would add nodes to the graph.
        return (
            f"CommTensor(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device}, "
            f"pending={self._collectives.is_pending(self._tensor)})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, CommTensor)]
        for tensor in given:
            tensor._collectives.wait_for(tensor._tensor)
        tracer = _active_tracer()
        if tracer is not None and func._schema.name in _COLLECTIVES:
            return _record_collective(func, args, kwargs, tracer)
        results = func(*_unwrapped(args), **_unwrapped(kwargs))
        if tracer is None:
            return results
        return pytree.tree_map_only(Tensor, partial(_as_comm_tensor, given=given), results)


class _AwaitedSlot(proxy_tensor._ProxyTensor):
    """make_fx's record of a tensor that a collective writes. Reading its proxy waits first.

    The graph therefore has the wait even where ``x`` is used, or returned, instead of ``CommTensor(x)``.
    """

    constant = None

    def __init__(self, output: Tensor, result: Any, work: Any, tracer: Any) -> None:
        self.is_waited = False
        self._output = output
        self._proxy = result
        self._work = work
        self._tracer = tracer

    @property
    def proxy(self) -> Any:  # type: ignore[override]
        self.wait()
        return self._proxy

    def wait(self) -> None:
        if not self.is_waited:
            self.is_waited = True
            self._proxy = self._tracer.create_proxy(
                "call_function", _wait_comm, (self._proxy,), {}, name="wait_comm"
            )
            # Metadata are taken from a copy, and some Works finish with operators.
            with proxy_tensor.disable_proxy_modes_tracing():
                proxy_tensor.set_meta(self._proxy, self._output)
                if self._work is not None:
                    self._work.wait()


class _Collectives:
    """The collectives that were started on one CommTensor and its views while tracing."""

    def __init__(self) -> None:
        self.any_started = False
        self._outputs: list[tuple[Tensor, _AwaitedSlot]] = []

    def add(self, output: Tensor, slot: _AwaitedSlot) -> None:
        self.any_started = True
        self._outputs.append((output, slot))

    def is_pending(self, tensor: Tensor) -> bool:
        return any(not slot.is_waited and _may_overlap(output, tensor) for output, slot in self._outputs)

    def wait_for(self, tensor: Tensor) -> None:
        """Adds waits to the graph for all collectives that write into the memory of ``tensor``."""
        for output, slot in self._outputs:
            if _may_overlap(output, tensor):
                slot.wait()
        self._outputs = [started for started in self._outputs if not started[1].is_waited]


def _active_tracer() -> Any:
    """Returns the tracer of the ``make_fx`` that is tracing on this thread, or None."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is None:
        return None
    if mode.pre_dispatch:
        raise NotImplementedError(
            "funcol.CommTensor: make_fx(pre_dispatch=True) does not show operators to tensor subclasses. "
            "Trace without pre_dispatch."
        )
    return mode.tracer


def _proxy(value: Any, tracer: Any) -> Any:
    """Returns ``value`` as an argument of a node."""
    if not isinstance(value, (Tensor, torch.ScriptObject)):
        return value
    slot = proxy_tensor.get_proxy_slot(value, tracer, value)
    return slot.proxy if isinstance(slot, proxy_tensor._ProxyTensor) else slot


def _traced(tensor: Tensor, collectives: _Collectives) -> CommTensor:
    if tensor.layout != torch.strided or type(tensor) not in proxy_tensor.HANDLED_TYPES:
        raise TypeError(
            f"funcol.CommTensor: got a {type(tensor).__name__} of layout {tensor.layout}. Collectives write "
            "into plain memory: pass the dense tensor that holds it, such as t.to_local() of a DTensor."
        )
    traced: CommTensor = Tensor._make_wrapper_subclass(
        CommTensor,
        tensor.size(),
        strides=tensor.stride(),
        storage_offset=tensor.storage_offset(),
        dtype=tensor.dtype,
        device=tensor.device,
        requires_grad=tensor.requires_grad,
    )
    traced._tensor = tensor
    traced._collectives = collectives
    return traced


def _unwrapped(tree: Any) -> Any:
    return pytree.tree_map_only(CommTensor, lambda tensor: tensor._tensor, tree)


def _as_comm_tensor(result: Tensor, given: list[CommTensor]) -> Tensor:
    """Returns the result of an operator on ``given``, as a CommTensor if it is to be one."""
    for tensor in given:
        if result is tensor._tensor:
            return tensor
    for tensor in given:
        if _storage(result) == _storage(tensor._tensor):
            return _traced(result, tensor._collectives)
    if any(not tensor._collectives.any_started for tensor in given):
        return _traced(result, _Collectives())
    return result


def _storage(tensor: Tensor) -> int:
    return cast(int, tensor.untyped_storage()._cdata)


def _may_overlap(one: Tensor, other: Tensor) -> bool:
    if _storage(one) != _storage(other):
        return False
    bounds = [*_bounds(one), *_bounds(other)]
    if not all(isinstance(bound, int) for bound in bounds):
        return True  # to compare symbols would add guards
    return bool(bounds[0] < bounds[3] and bounds[2] < bounds[1])


def _bounds(tensor: Tensor) -> tuple[Any, Any]:
    """Returns the first byte and the one past the last; an empty tensor counts as one byte."""
    begin = tensor.storage_offset() * tensor.itemsize
    if any(isinstance(size, int) and size == 0 for size in tensor.shape):
        return begin, begin + 1
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def _record_collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tracer: Any) -> Any:
    """Runs the collective, and adds it and its ``comm_result`` to the graph."""
    written = args[0]
    for output in pytree.tree_leaves(written):
        if not isinstance(output, CommTensor):
            raise TypeError(
                f"funcol.CommTensor: an output of {func} is a {type(output).__name__}, another argument is "
                "a CommTensor. While make_fx traces, wrap every output of the collective in CommTensor."
            )
    args, kwargs = _unwrapped(args), _unwrapped(kwargs)
    proxies = pytree.tree_map(partial(_proxy, tracer=tracer), (args, kwargs))
    call = tracer.create_proxy("call_function", func, *proxies, name=func.overloadpacket.__name__)
    result = tracer.create_proxy("call_function", _wrap_comm_result, (call,), {}, name="comm_result")
    with proxy_tensor.disable_proxy_modes_tracing():
        _, work = func(*args, **kwargs)
    for output, proxy in _with_items(written, result[0]):
        slot = _AwaitedSlot(output._tensor, proxy, work, tracer)
        proxy_tensor.set_proxy_slot(output._tensor, tracer, slot)
        output._collectives.add(output._tensor, slot)
    return written, work


def _with_items(tree: Any, proxy: Any) -> Iterator[tuple[CommTensor, Any]]:
    """Yields the tensors of nested lists, each with its item of ``proxy``."""
    if isinstance(tree, CommTensor):
        yield tree, proxy
    else:
        for index, branch in enumerate(tree):
            yield from _with_items(branch, proxy[index])


class _CommResult:
    """In a running graph: a tensor that a collective writes, and the Work to wait for before it is read."""

    def __init__(self, work: Any, tensor: Tensor) -> None:
        self.tensor = tensor
        self.work = work


def _wrap_comm_result(result: tuple[Any, Any]) -> tuple[Any, Any]:
    """Binds each tensor that a collective returned to the collective's Work, as node ``comm_result``."""
    outputs, work = result
    return pytree.tree_map_only(Tensor, partial(_CommResult, work), outputs), work


def _wait_comm(result: _CommResult) -> Tensor:
    """Waits for the data of a tensor and returns the tensor, as node ``wait_comm``."""
    if result.work is not None:
        result.work.wait()
    return result.tensor


def _install() -> None:
    """Makes the collectives and the waits stay in graphs, and CommTensors known to make_fx."""
    has_side_effect(_wait_comm)
    for name in _COLLECTIVES:
        collective = getattr(torch.ops.c10d, name.partition("::")[2]).default
        has_side_effect(collective)
        collective.py_impl(proxy_tensor.ProxyTorchDispatchMode)(partial(_trace_collective, collective))

    create_arg = proxy_tensor.PythonKeyTracer.create_arg

    def create_arg_of_inner(tracer: Any, value: Any) -> Any:
        # A CommTensor that the traced function returns; it would become a constant.
        if isinstance(value, CommTensor):
            value._collectives.wait_for(value._tensor)
            value = _proxy(value._tensor, tracer)
        return create_arg(tracer, value)

    proxy_tensor.PythonKeyTracer.create_arg = create_arg_of_inner  # type: ignore[method-assign,assignment]


def _trace_collective(collective: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    """Runs a collective in symbolic tracing, which dispatches ops with script objects by the mode alone."""
    if any(isinstance(leaf, CommTensor) for leaf in pytree.tree_leaves((args, kwargs))):
        with mode:
            return CommTensor.__torch_dispatch__(collective, (CommTensor,), args, kwargs)
    return handle_dispatch_mode(mode, collective, *args, **kwargs)  # type: ignore[no-untyped-call]


_install()
