"""What a decision depends on beyond tensors by position: tensors by keyword, and other arguments.

Tensors by keyword are the mask of attention, what ``out=`` writes to, and others. PyTorch's caches of
decisions tell calls apart by positional tensors, and by those other arguments that an operator's
``RuntimeSchemaInfo`` names: none where it does not know the operator. Its dispatcher redistributes positional
tensors alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

# Of arguments that are no tensors, those on which results of operators depend whose ``RuntimeSchemaInfo``
# does not name them: their dtypes, their sizes, whether partial sums may stay.
_DECISIVE = frozenset(
    {"accumulate", "bins", "dtype", "include_self", "out_dtype", "out_int32", "rounding_mode"}
)


@functools.cache
def _tensors_by_keyword(op: OpOverload) -> frozenset[str]:
    return frozenset(
        argument.name
        for argument in op._schema.arguments
        if argument.kwarg_only and "Tensor" in str(argument.type)
    )


@functools.cache
def _others(op: OpOverload, decisive_alone: bool) -> tuple[int, tuple[str, ...]]:
    """Of arguments that are no tensors, the place of the first by position, 100 if there is none, and the
    names of those by keyword."""
    counted = [
        (place, argument)
        for place, argument in enumerate(op._schema.arguments)
        if "Tensor" not in str(argument.type) and (argument.name in _DECISIVE or not decisive_alone)
    ]
    first = next((place for place, argument in counted if not argument.kwarg_only), 100)
    return first, tuple(argument.name for _, argument in counted if argument.kwarg_only)


def complete_info(op: OpOverload, info: RuntimeSchemaInfo | None, is_known: bool) -> RuntimeSchemaInfo | None:
    """``info``, with what else a decision for ``op`` depends on: tensors by keyword, and arguments that are
    no tensors, all of them where PyTorch does not know the operator (``is_known``)."""
    first, names = _others(op, decisive_alone=is_known)
    wanted = (*names, *sorted(_tensors_by_keyword(op)))
    place = 100 if info is None else info.static_argnum
    named = () if info is None else tuple(info.static_kwargkey or ())
    if first >= place and set(wanted).issubset(named):
        return info
    every = list(dict.fromkeys((*named, *wanted))) or None
    if info is None:
        return RuntimeSchemaInfo(min(first, place), every)
    return dataclasses.replace(info, static_argnum=min(first, place), static_kwargkey=every)


def named(op_schema: OpSchema, is_known: bool) -> OpSchema:
    """``op_schema`` with the :func:`complete_info`, so that two schemas are equal only if decisions for them
    are."""
    info = complete_info(op_schema.op, op_schema.schema_info, is_known)
    if info is op_schema.schema_info:
        return op_schema
    return OpSchema(op_schema.op, op_schema.args_schema, op_schema.kwargs_schema, schema_info=info)


class NamedInDispatcher:
    """Gives DTensor's dispatcher the :func:`complete_info` of operators, until :meth:`undo`.

    A decision is asked for before it is remembered: an operator is entered at its first decision. PyTorch
    remembers that one under the key of before, which no later call has.
    """

    def __init__(self, tables: list[dict[OpOverload, RuntimeSchemaInfo | None]]) -> None:
        self._tables = tables  # the first that has an operator counts
        self._seen: set[OpOverload] = set()
        self._undo: list[Callable[[], None]] = []

    def name(self, op: OpOverload, is_known: bool) -> None:
        """Enters ``op``."""
        if op in self._seen or not self._tables:
            return
        self._seen.add(op)
        table = next((table for table in self._tables if table.get(op) is not None), self._tables[0])
        own = table.get(op)
        had, entered = op in table, complete_info(op, own, is_known)
        if entered is own:
            return

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
