"""Sharding propagation: placements of results, the redistributions before an operator, and their costs."""

from .costs import redistribute_cost_table
from .propagation import CacheInfo, Row, ShardingPropagator, SingleAxisRule, operators

__all__ = [
    "CacheInfo",
    "Row",
    "ShardingPropagator",
    "SingleAxisRule",
    "operators",
    "redistribute_cost_table",
]
