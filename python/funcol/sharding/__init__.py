"""Sharding propagation: where results of operators live, what has to move first, and what that costs."""

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
