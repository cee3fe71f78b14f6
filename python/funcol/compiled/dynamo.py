"""How Dynamo traces calls of ``torch.distributed``'s collectives. Imported once Dynamo is.

Dynamo wraps each function that it meets in a variable. The variable of a collective calls a form of it that
Dynamo can trace. The variables here take the place of PyTorch's and know more forms.
"""

from __future__ import annotations

import inspect
from collections import ChainMap
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn

import torch
import torch._dynamo.variables.builder as builder
from torch import Tensor
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.functions import CollectiveFunctionRewriteVariable, UserFunctionVariable
from torch._dynamo.variables.lists import BaseListVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from ..local_map.application import call_in_compiled_region
from ..redistribution.functions import redistribute, redistribute_local_tensor, redistribute_many
from ..redistribution.plain_tensors import redistribute_tensor
from .dynamo_local_map import call_local_map
from .remaps import REDUCE_OP_TO_STR, traceable_collective_remaps, traced_work

_WAITS = (torch.ops._c10d_functional.wait_tensor, torch.ops._c10d_functional.wait_tensor.default)


def remap_collectives(enabled: bool) -> None:
    """Makes Dynamo trace collectives as :data:`~funcol.remaps.traceable_collective_remaps` has them, or as
    PyTorch."""
    chosen = RemappedCollective if enabled else TracedRedistribution
    setattr(builder, CollectiveFunctionRewriteVariable.__name__, chosen)


_REDISTRIBUTIONS = (redistribute, redistribute_local_tensor, redistribute_many, redistribute_tensor)
_TRACED = (*_REDISTRIBUTIONS, call_in_compiled_region)


class TracedRedistribution(CollectiveFunctionRewriteVariable):
    """Redistributions and local maps as calls in the graph, which the layers below trace.

    Dynamo cannot follow specs, so all arguments that are no tensors have to be constants of the region, but
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
            return call_local_map(tx, args, kwargs)
        if self.fn not in _REDISTRIBUTIONS:
            return super().call_function(tx, args, kwargs)
        function: Any = self.fn
        signature = inspect.signature(function)
        arguments = dict(signature.bind(*args, **kwargs).arguments)
        first = arguments.pop(next(iter(signature.parameters))).realize()
        moved: Any = first.as_proxy() if isinstance(first, TensorVariable) else _proxies(tx, first)
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
        unimplemented(
            gb_type="distributed collective that cannot be traced",
            context=name,
            explanation=f"funcol cannot trace {name} with {what}.",
            hints=[f"In the compiled region, {instead}; or call it outside."],
        )


def _proxies(tx: Any, tensors: VariableTracker) -> list[Any]:
    return [tensor.as_proxy() for tensor in tensors.unpack_var_sequence(tx)]


def _constant(name: str, argument: VariableTracker) -> Any:
    argument = argument.realize()
    if argument.is_python_constant():
        return argument.as_python_constant()
    if isinstance(argument, BaseListVariable):
        return tuple(_constant(name, item) for item in argument.items)
    if not hasattr(argument, "value"):
        unimplemented(
            gb_type="redistribution that cannot be traced",
            context=name,
            explanation=f"funcol cannot trace a redistribution with {name} that is not a constant.",
            hints=[f"Pass a constant {name}, or call it outside of the compiled region."],
        )
    if isinstance(argument.value, DTensorSpec) and argument.source is not None:
        # Dynamo guards only the attributes that the region reads, here none.
        install_guard(argument.source.make_guard(GuardBuilder.ID_MATCH))
    return argument.value


def _sizes(argument: VariableTracker) -> tuple[Any, ...]:
    """The sizes of a shape: numbers, or what stands for symbols in the graph."""
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
    """The memory behind the value of ``node``, or None if that cannot be told."""
    if "example_value" not in node.meta:
        return None
    tensors = [value for value in tree_leaves(node.meta["example_value"]) if isinstance(value, Tensor)]
    if any(tensor.layout != torch.strided or is_traceable_wrapper_subclass(tensor) for tensor in tensors):
        return None
    return {StorageWeakRef(tensor.untyped_storage()) for tensor in tensors}  # type: ignore[no-untyped-call]
