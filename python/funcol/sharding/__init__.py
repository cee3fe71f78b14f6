"""Sharding propagation: where results of operators live, what has to move first, and what that costs."""

from ..redistribution.callbacks import make_spec as _make_spec  # noqa: F401  # where C++ looks for it
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
