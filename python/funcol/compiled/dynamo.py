"""How Dynamo traces calls of ``torch.distributed``'s collectives, of redistributions, and of functions on
local tensors (:mod:`funcol.local_map`). It is imported once Dynamo is.

Dynamo wraps each function that it meets in a variable. The variable of a collective calls a form of it that
Dynamo can trace. The variables here take the place of PyTorch's and know more forms.

Dynamo does not look into a function on local tensors: its graph gets one call, which the layers below trace.
Tensors that the function closes over become inputs of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, NoReturn

import torch
import torch._dynamo.variables.builder as builder
from torch import Tensor
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable, UserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Source
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..local_map.application import call_in_compiled_region
from ..local_map.arguments import map_leaves
from ..local_map.eager import LocalMap
from ..local_map.tracing import in_compiled_region
from ..redistribution.functions import redistribute, redistribute_local_tensor, redistribute_many
from ..redistribution.plain_tensors import redistribute_tensor
from .remaps import REDUCE_OP_TO_STR, traceable_collective_remaps, traced_work

_WAITS = (torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional.wait_tensor.default)


def remap_collectives(enabled: bool) -> None:
    """Makes Dynamo trace collectives as :data:`~funcol.remaps.traceable_collective_remaps` has them, or as
    PyTorch does."""
    chosen = RemappedCollective if enabled else TracedRedistribution
    setattr(builder, CollectiveFunctionRewriteVariable.__name__, chosen)


_REDISTRIBUTIONS = (redistribute, redistribute_local_tensor, redistribute_many, redistribute_tensor)
_TRACED = (*_REDISTRIBUTIONS, call_in_compiled_region)


class TracedRedistribution(CollectiveFunctionRewriteVariable):
    """Redistributions and local maps as calls in the graph, which the layers below trace.

    Dynamo cannot follow specs, so all arguments that are not tensors have to be constants of the region, but
    for the sizes of ``shape``, which may be symbols.
    """

    # The functions that are traced here, and those that the region calls in their place.
    forms: ClassVar[Mapping[Any, Any]] = {function: function for function in _TRACED}

    @classmethod
    def can_rewrite(cls, variable: Any) -> bool:
        return (
            inspect.isfunction(variable) and variable in cls.forms
        ) or CollectiveFunctionRewriteVariable.can_rewrite(variable)

    @classmethod
    def create(
        cls, tx: Any, old_fn: Callable[..., Any], source: Any, **options: Any
    ) -> CollectiveFunctionRewriteVariable:
        form = cls.forms.get(old_fn)
        if form is None:
            return CollectiveFunctionRewriteVariable.create(tx, old_fn, source, **options)
        replacement = UserFunctionVariable(form, **options)
        return cls(old_fn, replacement_var=replacement, source=source, **options)

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        if self.fn is call_in_compiled_region:
            return _call_local_map(tx, args, kwargs)
        if self.fn not in _REDISTRIBUTIONS:
            return super().call_function(tx, args, kwargs)
        function: Any = self.fn
        signature = inspect.signature(function)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        first = arguments.pop(next(iter(signature.parameters))).realize()
        moved: Any = (
            first.as_proxy()
            if isinstance(first, TensorVariable)
            else [tensor.as_proxy() for tensor in first.unpack_var_sequence(tx)]
        )
        shape = {"shape": _sizes(arguments.pop("shape"))} if "shape" in arguments else {}
        constants = {name: _constant(name, argument) for name, argument in arguments.items()}

        def redistribute_to_constants(x: Any, **shape: Any) -> Any:
            return function(x, **shape, **constants)

        proxy = tx.output.create_proxy("call_function", redistribute_to_constants, (moved,), shape)
        result: VariableTracker = builder.wrap_fx_proxy(tx=tx, proxy=proxy)
        return result


class RemappedCollective(TracedRedistribution):
    """A function of ``torch.distributed`` whose in-place form a compiled region calls."""

    forms: ClassVar[Mapping[Any, Any]] = ChainMap(
        traceable_collective_remaps, {function: function for function in _TRACED}
    )

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        if self.fn not in traceable_collective_remaps:
            return super().call_function(tx, args, kwargs)
        arguments = dict(inspect.signature(self.fn).bind(*args, **kwargs).arguments)
        async_op = "async_op" in arguments and self._constant("async_op", arguments.pop("async_op"))
        if "op" in arguments:
            name = REDUCE_OP_TO_STR.get(self._constant("op", arguments["op"]))
            if name is None:
                self._refuse("a reduce op without a name", "multiply first, then reduce with a named op")
            arguments["op"] = _constant_variable(tx, name)
        for source in ("src", "group_src"):
            if source in arguments:
                arguments[source] = _constant_variable(tx, self._constant(source, arguments[source]))
        num_nodes = len(tx.output.graph.nodes)
        result = self.replacement_var.call_function(tx, [], arguments).realize()
        if not async_op:
            return _constant_variable(tx, None)
        outputs = result.items if isinstance(result, BaseListVariable) else [result]
        tx.output.add_graph_finalizer(
            _WaitLater(
                list(tx.output.graph.nodes)[num_nodes:], [output.as_proxy().node for output in outputs]
            )
        )
        make_work: Any = traced_work
        return UserFunctionVariable(make_work).call_function(tx, [result], {})

    def _constant(self, name: str, argument: VariableTracker) -> Any:
        argument = argument.realize()
        if isinstance(argument, SymNodeVariable):
            return argument.evaluate_expr()
        if argument.is_python_constant():
            return argument.as_python_constant()
        if not hasattr(argument, "value"):
            self._refuse(f"{name} that is not a constant", f"pass a constant {name}")
        return argument.value

    def _refuse(self, what: str, instead: str) -> NoReturn:
        name = f"torch.distributed.{self.get_name()}"
        _refuse("distributed collective", name, f"{name} with {what}", instead)


def _constant(name: str, argument: VariableTracker) -> Any:
    argument = argument.realize()
    if argument.is_python_constant():
        return argument.as_python_constant()
    if isinstance(argument, BaseListVariable):
        return tuple(_constant(name, item) for item in argument.items)
    if not hasattr(argument, "value"):
        what = f"a redistribution with {name} that is not a constant"
        _refuse("redistribution", name, what, f"pass a constant {name}")
    if isinstance(argument.value, DTensorSpec) and argument.source is not None:
        # Dynamo guards only the attributes that the region reads, here none.
        install_guard(argument.source.make_guard(GuardBuilder.ID_MATCH))
    return argument.value


def _sizes(argument: VariableTracker) -> tuple[Any, ...]:
    """Returns the sizes of a shape: numbers, or the proxies of symbols in the graph."""
    argument = argument.realize()
    items = argument.items if isinstance(argument, BaseListVariable) else None
    if items is None:
        return tuple(_constant("shape", argument))
    return tuple(
        size.as_proxy() if isinstance(size.realize(), SymNodeVariable) else _constant("shape", size)
        for size in items
    )


def _constant_variable(tx: Any, value: Any) -> VariableTracker:
    variable: VariableTracker = VariableTracker.build(tx, value)
    return variable


class _WaitLater:
    """Moves the end of an asynchronous collective to where the region waits for it.

    As traced, a collective waits and copies into its destinations at once. That part of the graph moves down
    to the wait() of its Work, or to the first node that uses memory of a destination, so that no read sees
    unfinished data. A graph without that wait() stays as it is: the wait() of a later collective, for one,
    may show that this one is finished.
    """

    def __init__(self, started: list[Node], destinations: list[Node]) -> None:
        is_wait = [node.target in _WAITS for node in started]
        self._end = started[is_wait.index(True) :] if any(is_wait) else []
        self._destinations = destinations

    def __call__(self, module: GraphModule) -> None:
        if not {*self._end, *self._destinations}.issubset(module.graph.nodes):
            return
        waits = self._waits_of_the_work() if self._end else []
        written = [_storages(node) for node in self._destinations]
        if not waits or None in written:
            return
        untouchable = {storage for storages in written for storage in storages or ()}
        place = self._end[-1].next
        while place is not waits[0] and all(
            node not in self._end and (used := _storages(node)) is not None and used.isdisjoint(untouchable)
            for node in place.all_input_nodes
        ):
            place = place.next
        for node in self._end:
            place.prepend(node)
        for node in waits:
            module.graph.erase_node(node)

    def _waits_of_the_work(self) -> list[Node]:
        waits: dict[Any, Node] = {}
        node = self._end[-1].next
        while node.op != "output":
            if node.target in _WAITS and not node.users and node.args[0] in self._destinations:
                waits.setdefault(node.args[0], node)
            node = node.next
        return list(waits.values())


def _storages(node: Node) -> set[StorageWeakRef] | None:
    """Returns the memory behind the value of ``node``, or None if that is not known."""
    if "example_value" not in node.meta:
        return None
    tensors = [value for value in tree_leaves(node.meta["example_value"]) if isinstance(value, Tensor)]
    if any(tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor) for tensor in tensors):
        return None
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}  # type: ignore[no-untyped-call]


# Functions on local tensors


class _Operand(int):
    """A tensor or size, by its place among the operands of the call."""


def _call_local_map(
    tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """Calls ``funcol.local_map.call_in_compiled_region(*args, **kwargs)`` in the graph of ``tx``."""
    applied: Any = args[0].realize()
    positional, keywords = args[1:]
    local_map = getattr(applied, "value", None)
    if not isinstance(local_map, LocalMap) or not hasattr(local_map, "func"):
        _refuse_local_map("apply_local_map() called in the region", "call the function that it returns")
    if applied.source is not None:
        install_guard(applied.source.make_guard(GuardBuilder.ID_MATCH))
    operands: list[Any] = []
    stated_args = _template(positional, operands)
    stated_kwargs = _template(keywords, operands)
    captured = list(_captured(local_map.func, applied.source and AttrSource(applied.source, "func"), set()))
    num_operands = len(operands)
    for tensor, source in captured:
        if source is None:
            _refuse_local_map(
                "a function that is applied in the region and closes over tensors", "apply it outside"
            )
        operands.append(VariableTracker.build(tx, tensor, source=source).realize().as_proxy())
    result: Any = None

    def call(*given: Any) -> list[Any]:
        nonlocal result
        found: list[Any] = []

        def filled(leaf: Any) -> Any:
            return given[leaf] if isinstance(leaf, _Operand) else leaf

        def emptied(leaf: Any) -> Any:
            if not isinstance(leaf, (Tensor, torch.SymInt)):
                return leaf
            found.append(leaf)
            return _Operand(len(found) - 1)

        replaced = {id(tensor): now for (tensor, _), now in zip(captured, given[num_operands:], strict=True)}
        with in_compiled_region(replaced):
            value = local_map.run(map_leaves(filled, stated_args), map_leaves(filled, stated_kwargs))
        result = map_leaves(emptied, value)
        return found

    call.__name__ = "local_map_" + "".join(c if c.isalnum() else "_" for c in local_map.name)
    proxy = tx.output.create_proxy("call_function", call, tuple(operands), {})
    values: Any = builder.wrap_fx_proxy(tx=tx, proxy=proxy)
    return _variable(tx, result, values.items)


def _template(argument: VariableTracker, operands: list[Any]) -> Any:
    """Returns ``argument`` with an :class:`_Operand` for each tensor and size, appended to ``operands``."""
    argument = argument.realize()
    if isinstance(argument, (TensorVariable, SymNodeVariable)):
        operands.append(argument.as_proxy())
        return _Operand(len(operands) - 1)
    if isinstance(argument, (ListVariable, TupleVariable)):
        return argument.python_type()(_template(item, operands) for item in argument.items)
    if isinstance(argument, ConstDictVariable):
        return {
            key.vt.as_python_constant(): _template(item, operands) for key, item in argument.items.items()
        }
    if argument.is_python_constant():
        return argument.as_python_constant()
    if isinstance(argument, BaseListVariable) or not hasattr(argument, "value"):
        _refuse_local_map(
            f"an argument of kind {type(argument).__name__}", "pass tensors, constants, lists and dicts"
        )
    if argument.source is not None:
        install_guard(argument.source.make_guard(GuardBuilder.ID_MATCH))
    return argument.value


def _variable(tx: Any, template: Any, values: list[VariableTracker]) -> VariableTracker:
    if isinstance(template, _Operand):
        return values[template]
    if type(template) is tuple:
        return TupleVariable([_variable(tx, item, values) for item in template])
    if type(template) is list:
        return ListVariable([_variable(tx, item, values) for item in template])
    if type(template) is dict:
        items: dict[Any, Any] = {
            VariableTracker.build(tx, key): _variable(tx, item, values) for key, item in template.items()
        }
        return ConstDictVariable(items)
    result: VariableTracker = VariableTracker.build(tx, template)
    return result


def _captured(value: Any, source: Source | None, seen: set[int]) -> Iterator[tuple[Tensor, Source | None]]:
    """Yields the tensors that the function ``value`` closes over, and their sources, by which compiled code
    finds them."""
    if id(value) in seen:
        return
    seen.add(id(value))

    def attribute(name: str) -> Any:
        return None if source is None else AttrSource(source, name)

    def items(base: Any, pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[Tensor, Source | None]]:
        for key, item in pairs:
            kind = GetItemSource if isinstance(key, int) else DictGetItemSource
            yield from _captured(item, base and kind(base, key), seen)

    if isinstance(value, Tensor):
        yield value, source
    elif isinstance(value, torch.nn.Module):
        for name, tensor in (*value.named_parameters(), *value.named_buffers()):
            place: Any = source
            for part in name.split("."):
                place = place and AttrSource(place, part)
            yield tensor, place
    elif isinstance(value, (list, tuple)):
        yield from items(source, enumerate(value))
    elif isinstance(value, dict):
        yield from items(source, value.items())
    elif isinstance(value, functools.partial):
        yield from _captured(value.func, attribute("func"), seen)
        yield from items(attribute("args"), enumerate(value.args))
        yield from items(attribute("keywords"), value.keywords.items())
    elif inspect.ismethod(value):
        yield from _captured(value.__self__, attribute("__self__"), seen)
        yield from _captured(value.__func__, attribute("__func__"), seen)
    elif inspect.isfunction(value):
        cells = attribute("__closure__")
        for i, cell in enumerate(value.__closure__ or ()):
            place = cells and AttrSource(GetItemSource(cells, i), "cell_contents")
            with contextlib.suppress(ValueError):  # of a cell that is still empty
                yield from _captured(cell.cell_contents, place, seen)
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        globals_ = ((name, value.__globals__[name]) for name in names)
        kinds = (Tensor, torch.nn.Module, types.FunctionType)
        yield from items(
            attribute("__globals__"), ((name, one) for name, one in globals_ if isinstance(one, kinds))
        )


def _refuse_local_map(what: str, instead: str) -> NoReturn:
    _refuse("function on local tensors", "funcol.local_map.apply_local_map", what, instead)


def _refuse(kind: str, context: str, what: str, instead: str) -> NoReturn:
    unimplemented(
        gb_type=f"{kind} that cannot be traced",
        context=context,
        explanation=f"funcol cannot trace {what}.",
        hints=[f"In the compiled region, {instead}; or call it outside."],
    )
