"""``funcol.check``: finds the module that makes a parallel program wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .report import Report

__all__ = ["check"]


def check(
    program: Callable[[Any], Any],
    *,
    mesh_shape: Sequence[int],
    mesh_dim_names: Sequence[str] = (),
    device: str = "cpu",
    dtype: str = "float64",
    seed: int = 0,
    timeout_s: float = 300.0,
    max_bytes: int = 1 << 30,
    layouts: Mapping[str, Sequence[str]] | None = None,
) -> Report:
    """Compares a parallel program with its reference, module by module, and says where a fault begins.

    ``program(mesh)`` builds a model, runs it forward and backward, and returns ``model, loss`` or ``model,
    loss, optimizer``; the optimizer is stepped afterwards. It is called with None for the reference, and
    with a ``DeviceMesh`` of ``mesh_shape`` and ``mesh_dim_names`` on each rank. It is a function at the top
    of a module. Ranks are processes of this machine; where ``torch.distributed`` is initialized or torchrun
    started the process, all ranks call this function, and all get the report. Under torchrun the first call
    makes the default group, which later ones use.

    Both runs start from equal seeds and the reference's weights, which replace those of the model at the
    first call of a module. ``dtype``: in ``"float64"`` both compute in double precision, whatever dtypes
    the program names; with ``"bfloat16"``, ``"float16"`` or ``"float32"`` they run as they are, within
    bounds from a reference that is perturbed by errors of that dtype. ``layouts`` declares, by the name of
    a module (its outputs) or a parameter, an op for each mesh axis: ``"R"``, ``"S0"``, ``"P(sum)"``,
    ``"P(avg)"``; other layouts are found from the values. A rank keeps ``max_bytes`` of recorded values in
    memory and the others in temporary files. Ranks that are not done after ``timeout_s`` seconds are
    stopped, and the report says where each was.

    Raises ``ValueError`` if there is no valid program, the mesh does not fit the ranks, the reference fails,
    or the models of the two runs have different parameters.
    """
    from .ranks import check_on_ranks
    from .runs import Check

    axes = tuple(mesh_dim_names) or tuple(f"axis{i}" for i in range(len(mesh_shape)))
    return check_on_ranks(
        Check(program, tuple(mesh_shape), axes, device, dtype, seed, timeout_s, max_bytes, layouts or {})
    )
