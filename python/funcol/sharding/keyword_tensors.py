"""Arguments, other than positional tensors, on which sharding decisions depend: keyword tensors and numbers.

Keyword tensors are the mask of attention, the tensors of ``out=``, and others. PyTorch's caches of decisions
tell calls apart by positional tensors, and by the arguments that the operator's ``RuntimeSchemaInfo`` names;
operators that PyTorch does not know have no such info. PyTorch's dispatcher redistributes positional tensors
alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, RuntimeSchemaInfo

# Arguments other than tensors that determine dtypes or sizes of results, or partial sums. They count
# for every operator, whether or not its ``RuntimeSchemaInfo`` names them.
_DECISIVE = frozenset(
    {"accumulate", "bins", "dtype", "include_self", "out_dtype", "out_int32", "rounding_mode"}
)
_NO_PLACE = 100  # as in RuntimeSchemaInfo: no argument by position counts


# By operator, and whether PyTorch knows it: the info that it last had, and that completed.
_completed: dict[tuple[OpOverload, bool], tuple[RuntimeSchemaInfo | None, RuntimeSchemaInfo | None]] = {}


def complete_info(op: OpOverload, info: RuntimeSchemaInfo | None, is_known: bool) -> RuntimeSchemaInfo | None:
    """Returns ``info`` with all arguments on which decisions for ``op`` depend: keyword tensors, and the
    decisive arguments that are not tensors, or all of these unless PyTorch knows ``op``."""
    known = _completed.get((op, is_known))
    if known is None or known[0] is not info:
        known = _completed[op, is_known] = info, _complete(op, info, is_known)
    return known[1]


def _complete(op: OpOverload, info: RuntimeSchemaInfo | None, is_known: bool) -> RuntimeSchemaInfo | None:
    first, keywords, tensors = _NO_PLACE, [], []
    for i, argument in enumerate(op._schema.arguments):
        if "Tensor" in str(argument.type):
            if argument.kwarg_only:
                tensors.append(argument.name)
        elif argument.name in _DECISIVE or not is_known:
            if argument.kwarg_only:
                keywords.append(argument.name)
            else:
                first = min(first, i)
    wanted = (*keywords, *sorted(tensors))
    place, listed = (_NO_PLACE, []) if info is None else (info.static_argnum, info.static_kwargkey or [])
    if first >= place and set(wanted).issubset(listed):
        return info
    return dataclasses.replace(
        info or RuntimeSchemaInfo(),
        static_argnum=min(first, place),
        static_kwargkey=list(dict.fromkeys((*listed, *wanted))) or None,
    )


def with_complete_info(op_schema: OpSchema, is_known: bool) -> OpSchema:
    """Returns ``op_schema`` with its :func:`complete_info`: schemas are equal only if their decisions are."""
    info = complete_info(op_schema.op, op_schema.schema_info, is_known)
    if info is op_schema.schema_info:
        return op_schema
    return OpSchema(op_schema.op, op_schema.args_schema, op_schema.kwargs_schema, schema_info=info)


class DispatcherInfoTables:
    """Gives DTensor's dispatcher the :func:`complete_info` of operators, until :meth:`undo`.

    An operator is entered at its first decision. PyTorch remembers that decision under a key without the
    info, which no later call has.
    """

    def __init__(self, tables: list[dict[OpOverload, RuntimeSchemaInfo | None]]) -> None:
        self._tables = tables  # the first one with an operator counts
        self._seen: set[OpOverload] = set()
        self._undo = ExitStack()

    def complete(self, op: OpOverload, is_known: bool) -> None:
        """Enters the info of ``op``, once."""
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
        self._undo.callback(undo)

    def undo(self) -> None:
        self._undo.close()
        self._seen.clear()


class RedistributingSchema(OpSchema):
    """A schema to which the arguments of a call are redistributed, keyword tensors included. ``held_kwargs``
    are the specs of the call's keyword tensors.
    """

    held_kwargs: dict[str, DTensorSpec]

    @staticmethod
    def of(op_schema: OpSchema, held_kwargs: dict[str, DTensorSpec]) -> RedistributingSchema:
        schema = RedistributingSchema(
            op_schema.op, op_schema.args_schema, op_schema.kwargs_schema, schema_info=op_schema.schema_info
        )
        schema.held_kwargs = held_kwargs
        return schema


def redistribute(schema: Any, kwargs: dict[str, Any], move: Callable[..., Any]) -> dict[str, Any]:
    """Redistributes the local ``kwargs`` of a call to ``schema`` by ``move(local, held, wanted)``."""
    held = getattr(schema, "held_kwargs", None)
    if held is None:
        return kwargs
    changed = {
        name: move(kwargs[name], held[name], wanted)
        for name, source in held.items()
        if (wanted := schema.kwargs_schema[name]) != source
    }
    return {**kwargs, **changed}
