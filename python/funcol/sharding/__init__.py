"""Sharding propagation: placements of results, the redistributions before an operator, and their costs."""

import torch.distributed.tensor  # noqa: F401 (first: install() may wait for it)

from .propagation import (
    CacheInfo,
    Row,
    ShardingPropagator,
    SingleAxisRule,
    operators,
    redistribute_cost_table,
)

__all__ = [
    "CacheInfo",
    "Row",
    "ShardingPropagator",
    "SingleAxisRule",
    "operators",
    "redistribute_cost_table",
]
