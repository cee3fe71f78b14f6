"""How many sharding decisions C++ made while funcol is under DTensor, and why others were left to PyTorch."""

from __future__ import annotations

from .. import _C


def decision_counts() -> dict[str, dict[str, int]]:
    """How many sharding decisions for each operator C++ made under :func:`funcol.install`, and how many were
    left to PyTorch's propagator and why: ``{"aten.add_.Tensor": {"C++": 3, "refused": 1}}``. A decision that
    is remembered counts once.

    The reasons are

    - ``"axes"``: more than 8 mesh axes, and a tensor that they cut in another order than the mesh's;
    - ``"metas"``: sizes of results depend on data, or the operator raises an error;
    - ``"minor"``: this minor of PyTorch has rules of the whole mesh (2.11 to 2.13);
    - ``"refused"``: PyTorch raises an error; where the rule in C++ knows a way, that way is taken;
    - ``"rule"``: PyTorch derives the rule from the operator's decomposition, or the program registered one of
      the whole mesh;
    - ``"value"``: symbolic sizes, placements of a program's own, arguments of unknown types;
    - ``"write"``: every decision would move a tensor that is written to.
    """
    return _C.decision_counts()


def forget_decision_counts() -> None:
    """Starts the counts of :func:`decision_counts` anew."""
    _C.forget_decision_counts()
