"""Counts of the decisions and operators that C++ handled and of those left to PyTorch, and the memory that
remembering them may take."""

from __future__ import annotations

from collections.abc import Mapping

from .. import _C


def decision_counts() -> dict[str, dict[str, int]]:
    """Returns how many sharding decisions for each operator C++ made under :func:`funcol.install`, and how
    many were left to PyTorch's propagator and why: ``{"aten.add_.Tensor": {"C++": 3, "refused": 1}}``. A
    decision that is remembered counts once.

    The reasons are

    - ``"axes"``: more than 8 mesh axes, and a tensor that they cut in another order than the mesh's;
    - ``"metas"``: sizes of results depend on data, or the operator raises an error;
    - ``"minor"``: this PyTorch release has rules of the full mesh (2.11 to 2.13);
    - ``"refused"``: PyTorch raises an error, and no rule in C++ knows a way;
    - ``"rule"``: PyTorch derives the rule from the operator's decomposition, or the program registered one of
      the full mesh;
    - ``"value"``: symbolic sizes, placements of a program's own, arguments of unknown types;
    - ``"write"``: every decision would move a tensor that is written to.
    """
    return _C.decision_counts()


def forget_decision_counts() -> None:
    """Starts the counts of :func:`decision_counts` anew."""
    _C.forget_decision_counts()


def operator_counts() -> dict[str, dict[str, int]]:
    """Returns how often C++ handled each operator on DTensors since :func:`funcol.install`, and how often and
    why PyTorch did: ``{"aten.mm.default": {"served": 96, "argument": 1}}``.

    The reasons are

    - ``"argument"``: an argument of another kind, such as a subclass of DTensor or a plain tensor with dims;
    - ``"decision"``: a decision that moves what is written to or viewed, rewrites the operator, or fails;
    - ``"ended group"``: a process group that was aborted or reconfigured after the mesh was made;
    - ``"full"``: handled in C++, but decided anew, since the table of calls is full: see
      :func:`funcol.table_limits`;
    - ``"handler"``: a handler of PyTorch's or of the program for the operator;
    - ``"kind"``: an operator that changes the shape of its argument in place, compares tensors of all ranks,
      or has results of other kinds;
    - ``"local shape"``: a local tensor that has to move and has another shape than its DTensor says;
    - ``"spec"``: symbolic sizes, masks, or placements of unknown kinds;
    - ``"watched"``: an active ``ExplicitRedistributionContext``, or a handler of the dispatcher's log;
    - ``"write"``: a write while views of redistributed copies live, which it has to reach.

    Calls under modes and transforms are not counted.
    """
    return _C.operator_counts()


def forget_operator_counts() -> None:
    """Starts the counts of :func:`operator_counts` anew."""
    _C.forget_operator_counts()


def table_limits(limits: Mapping[str, int] | None = None) -> dict[str, int]:
    """Returns how many bytes each table may take, by the table's name; sets ``limits`` first.

    funcol remembers what it decides about operators and redistributions, so that an equal call takes the
    fast path. All tables together take at most 248 MiB by default. A table that is full admits one new entry
    in 16, in place of entries drawn at random, so that programs with more shapes than it holds still find
    most of theirs. A lower limit takes effect at once; 0 turns a table off. Sizes are estimates.

    Raises ``ValueError`` for a table that does not exist, and for a limit below 0; nothing is set then.
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
