"""Meshes, cost models and plans of redistributions."""

from collections.abc import Sequence
from typing import Any

class Mesh:
    """Sizes and names of mesh axes; ``merged``: sets of axes that have a group, a bit an axis."""

    def __init__(self, sizes: Sequence[int], names: Sequence[str], merged: Sequence[int]) -> None: ...
    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks along each axis."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the axes; empty if they have none."""

    @property
    def merged(self) -> tuple[int, ...]:
        """Sets of axes with one group for all of them."""

class StepCounts:
    """A number per collective, whatever its size: all_reduce 4, all_gather and reduce_scatter 2, others 1."""

    def __init__(self) -> None: ...

class LinkCost:
    def __init__(self, latency_us: float = 0.0, us_per_byte: float = 0.0) -> None: ...
    @property
    def latency_us(self) -> float: ...
    @property
    def us_per_byte(self) -> float: ...

class AxisCost:
    def __init__(
        self,
        all_gather: LinkCost,
        reduce_scatter: LinkCost,
        all_reduce: LinkCost,
        all_to_all: LinkCost,
        permute: LinkCost,
    ) -> None: ...
    @property
    def all_gather(self) -> LinkCost: ...
    @property
    def reduce_scatter(self) -> LinkCost: ...
    @property
    def all_reduce(self) -> LinkCost: ...
    @property
    def all_to_all(self) -> LinkCost: ...
    @property
    def permute(self) -> LinkCost: ...

class DTensorCosts:
    """The costs that PyTorch's DTensor assigns to redistributions."""

    def __init__(self) -> None: ...

class AlphaBeta:
    def __init__(self, axes: Sequence[AxisCost], copy: LinkCost) -> None: ...
    @property
    def axes(self) -> tuple[AxisCost, ...]: ...
    @property
    def copy(self) -> LinkCost: ...

class Step:
    """A step of a :class:`Plan`, the same for every rank."""

    @property
    def kind(self) -> str:
        """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``permute``; ``split``,
        ``to_partial``, ``embed``, ``apply_mask`` and ``mask`` send nothing."""

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes along which the ranks of a group differ."""

    @property
    def before(self) -> str:
        """The layout that the step starts from, as PyTorch prints placements: ``S(0)R``."""

    @property
    def after(self) -> str:
        """The layout that it makes."""

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape of the tensor that the first rank's group holds together."""

    @property
    def cost(self) -> float:
        """The cost by the cost model: microseconds with ``AlphaBeta``."""

    @property
    def bytes_sent(self) -> int:
        """The bytes that the busiest rank sends."""

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank holds during the step, the plan's source included."""

class Plan:
    """Steps that turn layout ``src`` of a tensor into ``dst``; a value, the same for every rank."""

    @property
    def mesh(self) -> Mesh:
        """The mesh that the plan is for."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps in order; none if the layouts agree."""

    @property
    def cost(self) -> float:
        """The sum of the steps' costs."""

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank holds at any time."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def hint(self) -> str:
        """A hint which ``_flatten()`` of the mesh would save steps; empty if none. Reading it plans anew."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""

    @property
    def src(self) -> str:
        """The layout that the plan starts from: ``S(0)R``."""

    @property
    def dst(self) -> str:
        """The layout that it ends in."""

    def _repr_html_(self) -> str:
        """Returns a table and a drawing: see :func:`funcol.redistribution.plan_drawing.plan_as_html`."""

    def local_indices(
        self, num_steps: int, coordinate: Sequence[int]
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Returns the indices that the rank at ``coordinate`` of the mesh holds after that many steps.

        Each dim has a tuple of pairs (first index, number of indices). Raises ``ValueError`` if the plan has
        fewer steps, or if ``coordinate`` is outside of the mesh.
        """

def mesh_of(mesh: Any, /) -> Mesh: ...
def default_alpha_beta(mesh: Any, /) -> AlphaBeta: ...
def plan_redistribution(
    src: Any,
    dst: Any,
    mesh: Any,
    shape: Sequence[int],
    itemsize: int,
    src_order: Any,
    dst_order: Any,
    model: AlphaBeta | StepCounts | None,
    max_bytes: int | None,
) -> Plan: ...
def greedy_redistribution(
    src: Any,
    dst: Any,
    mesh: Any,
    shape: Sequence[int],
    itemsize: int,
    src_order: Any,
    dst_order: Any,
    model: AlphaBeta | StepCounts | None,
) -> Plan: ...
