"""The memory of the tables in which decisions, plans and specs are remembered."""

from __future__ import annotations

from collections.abc import Mapping

from .. import _C


def table_limits(limits: Mapping[str, int] | None = None) -> dict[str, int]:
    """Returns how many bytes each table may take, by the table's name; sets ``limits`` first.

    funcol remembers what it decides about operators and redistributions, so that an equal call takes the
    fast path. All tables together take at most 248 MiB by default. A table that is full admits one new entry
    in 16, in place of entries drawn at random, so that programs with more shapes than it holds still find
    most of theirs. A lower limit takes effect at once; 0 turns a table off. Sizes are estimates.

    ``ValueError`` for a table that does not exist, and for a limit below 0; nothing is set then.
    """
    found: dict[str, int] = _C.table_limits()
    for name, limit in (limits or {}).items():
        if name not in found:
            raise ValueError(
                f"funcol.table_limits: there is no table {name!r}. Tables: {', '.join(sorted(found))}."
            )
        if limit < 0:
            raise ValueError(
                f"funcol.table_limits: the limit of {name!r} is {limit} bytes. Expected 0 or more."
            )
    for name, limit in (limits or {}).items():
        _C.set_table_limit(name, limit)
    return found | dict(limits or {})
