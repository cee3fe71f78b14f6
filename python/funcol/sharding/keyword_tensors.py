"""Tensors that operators take by keyword: the mask of attention, what ``out=`` writes to, and others.

PyTorch's caches of decisions tell calls apart by positional tensors, and by those keywords that an operator's
``RuntimeSchemaInfo`` names. Its dispatcher redistributes positional tensors alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo


@functools.cache
def _tensors_by_keyword(op: OpOverload) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in op._schema.arguments
        if argument.kwarg_only and "Tensor" in str(argument.type)
    )


def named(op_schema: OpSchema) -> OpSchema:
    """``op_schema`` with a ``schema_info`` that names the operator's keyword tensors, so that two schemas are
    equal only if these are."""
    op = op_schema.op
    wanted = _tensors_by_keyword(op)
    info = op_schema.schema_info
    if not wanted or (info is not None and wanted.issubset(info.static_kwargkey or ())):
        return op_schema
    return OpSchema(op, op_schema.args_schema, op_schema.kwargs_schema, schema_info=_with_names(op, info))


def _with_names(op: OpOverload, info: RuntimeSchemaInfo | None) -> RuntimeSchemaInfo:
    """Without an ``info``, names every argument that is no tensor, too."""
    if info is not None:
        others = [name for name in info.static_kwargkey or () if name not in _tensors_by_keyword(op)]
        names = [*others, *sorted(_tensors_by_keyword(op))]
        return dataclasses.replace(info, static_kwargkey=names)
    arguments = op._schema.arguments
    first = next((i for i, one in enumerate(arguments) if "Tensor" not in str(one.type)), len(arguments))
    return RuntimeSchemaInfo(first, [one.name for one in arguments if one.kwarg_only])


class NamedInDispatcher:
    """Names keyword tensors in what DTensor's dispatcher knows of operators, until :meth:`undo`.

    A decision is asked for before it is remembered: an operator is entered at its first decision. PyTorch
    remembers that one under the key of before, which no later call has.
    """

    def __init__(self, tables: list[dict[OpOverload, RuntimeSchemaInfo | None]]) -> None:
        self._tables = tables  # the first that has an operator counts
        self._seen: set[OpOverload] = set()
        self._undo: list[Callable[[], None]] = []

    def name(self, op: OpOverload) -> None:
        """Enters ``op``, if it takes tensors by keyword."""
        if op in self._seen:
            return
        self._seen.add(op)
        wanted = _tensors_by_keyword(op)
        if not wanted or not self._tables:
            return
        table = next((table for table in self._tables if table.get(op) is not None), self._tables[0])
        own = table.get(op)
        if own is not None and wanted.issubset(own.static_kwargkey or ()):
            return
        had, entered = op in table, _with_names(op, own)

        def undo() -> None:
            if table.get(op) is entered:
                if had:
                    table[op] = own
                else:
                    del table[op]

        table[op] = entered
        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._seen.clear()


class MovingSchema(OpSchema):
    """What the arguments of a call have to become, keyword tensors included: ``held_kwargs`` are the
    specs that these came with.
    """

    held_kwargs: dict[str, DTensorSpec]

    @staticmethod
    def of(op_schema: OpSchema, held_kwargs: dict[str, DTensorSpec]) -> MovingSchema:
        schema = MovingSchema(
            op_schema.op, op_schema.args_schema, op_schema.kwargs_schema, schema_info=op_schema.schema_info
        )
        schema.held_kwargs = held_kwargs
        return schema


def moved(schema: Any, kwargs: dict[str, Any], move: Callable[..., Any]) -> dict[str, Any]:
    """The local ``kwargs`` of a call that ``schema`` changes, each by ``move(local, held, wanted)``."""
    held = getattr(schema, "held_kwargs", None)
    if held is None:
        return kwargs
    changed = {
        name: move(kwargs[name], held[name], wanted)
        for name, source in held.items()
        if (wanted := schema.kwargs_schema[name]) != source
    }
    return {**kwargs, **changed}
