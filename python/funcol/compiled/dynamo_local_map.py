"""How Dynamo traces calls of functions on local tensors (:mod:`funcol.local_map`). Imported once Dynamo is.

Dynamo does not look into the function: its graph gets one call, which the layers below trace. Tensors that
the function closes over become inputs of the graph.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch._dynamo.variables.builder as builder
from torch import Tensor
from torch._dynamo.exc import unimplemented
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.source import AttrSource, DictGetItemSource, GetItemSource
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.dicts import ConstDictVariable
from torch._dynamo.variables.lists import BaseListVariable, ListVariable, TupleVariable
from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
from torch._guards import Source

from ..local_map.eager import LocalMap
from ..local_map.nesting import mapped
from ..local_map.tracing import in_compiled_region


class _Operand(int):
    """A tensor or size, by its place among the operands of the call."""


def call_local_map(
    tx: Any, args: list[VariableTracker], kwargs: dict[str, VariableTracker]
) -> VariableTracker:
    """The call ``funcol.local_map.call_in_compiled_region(*args, **kwargs)`` in the graph of ``tx``."""
    applied: Any = args[0].realize()
    positional, keywords = args[1:]
    local_map = getattr(applied, "value", None)
    if not isinstance(local_map, LocalMap) or not hasattr(local_map, "func"):
        _refuse("apply_local_map() called in the region", "call the function that it returns")
    if applied.source is not None:
        install_guard(applied.source.make_guard(GuardBuilder.ID_MATCH))
    operands: list[Any] = []
    stated_args = _template(positional, operands)
    stated_kwargs = _template(keywords, operands)
    captured = list(_captured(local_map.func, applied.source and AttrSource(applied.source, "func"), set()))
    num_operands = len(operands)
    for tensor, source in captured:
        if source is None:
            _refuse("a function that is applied in the region and closes over tensors", "apply it outside")
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
            value = local_map.run(mapped(filled, stated_args), mapped(filled, stated_kwargs))
        result = mapped(emptied, value)
        return found

    call.__name__ = "local_map_" + "".join(c if c.isalnum() else "_" for c in local_map.name)
    proxy = tx.output.create_proxy("call_function", call, tuple(operands), {})
    values: Any = builder.wrap_fx_proxy(tx=tx, proxy=proxy)
    return _variable(tx, result, values.items)


def _template(argument: VariableTracker, operands: list[Any]) -> Any:
    """``argument`` with an :class:`_Operand` for each tensor and size; these are appended to ``operands``."""
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
        _refuse(f"an argument of kind {type(argument).__name__}", "pass tensors, constants, lists and dicts")
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
    """The tensors that the function ``value`` closes over, and their sources, by which compiled code finds
    them."""
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


def _refuse(what: str, instead: str) -> NoReturn:
    unimplemented(
        gb_type="function on local tensors that cannot be traced",
        context="funcol.local_map.apply_local_map",
        explanation=f"funcol cannot trace {what}.",
        hints=[f"In the compiled region, {instead}; or call it outside."],
    )
