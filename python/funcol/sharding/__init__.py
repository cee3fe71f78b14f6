"""Sharding propagation: where results of operators live, what has to move first, and what that costs."""

from .propagation import (
    CacheInfo,
    Row,
    ShardingPropagator,
    SingleAxisRule,
    operators,
    redistribute_cost_table,
)
from .propagation import _make_spec as _make_spec  # where C++ looks for it

__all__ = [
    "CacheInfo",
    "Row",
    "ShardingPropagator",
    "SingleAxisRule",
    "operators",
    "redistribute_cost_table",
]
