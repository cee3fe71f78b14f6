"""Costs of redistributions between several layouts of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C
from ..redistribution.cost_models import CostModel


def redistribute_cost_table(
    sources: Sequence[DTensorSpec], targets: Sequence[DTensorSpec], *, cost_model: CostModel | None = None
) -> list[list[float]]:
    """Returns the costs of redistributing one tensor from each of ``sources`` to each of ``targets``.

    Entry ``[i][j]`` is the cost from ``sources[i]`` to ``targets[j]``, in microseconds for latency and
    bandwidth models, and infinity where there is no way: that of :func:`funcol.plan_redistribution`, or more
    where its plan exchanges over several axes at once midway. All are specs of the same tensor on the same
    mesh; ``ValueError`` if they are not. All targets of a source share one search.

    PyTorch counterpart: ``torch.distributed.tensor._ops.utils.generate_redistribute_costs``, a plan an entry.
    """
    return _C.redistribute_cost_table(sources, targets, cost_model)
