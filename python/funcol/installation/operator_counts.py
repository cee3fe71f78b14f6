"""How many operators on DTensors C++ served, and why the others were left to PyTorch."""

from __future__ import annotations

from .. import _C


def operator_counts() -> dict[str, dict[str, int]]:
    """How often each operator on DTensors was served in C++ since :func:`funcol.install`, and how often and
    why PyTorch served it: ``{"aten.mm.default": {"served": 96, "argument": 1}}``.

    The reasons are

    - ``"argument"``: an argument of another kind, such as a subclass of DTensor or a plain tensor with dims;
    - ``"decision"``: a decision that moves what is written to or viewed, rewrites the operator, or fails;
    - ``"full"``: a call that is not remembered, while the table of calls is full: see
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
    counts: dict[str, dict[str, int]] = _C.operator_counts()
    return counts


def forget_operator_counts() -> None:
    """Starts the counts of :func:`operator_counts` anew."""
    _C.forget_operator_counts()
