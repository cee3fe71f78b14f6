"""Plans and cost models with defaults for what a test does not care about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import funcol
from funcol.redistribution import AlphaBeta, AxisCost, LinkCost, Plan

MESH = "dp=2,tp=4"


def plan(src: Any, dst: Any, mesh: Any = MESH, shape: Sequence[int] = (16, 16), **options: Any) -> Plan:
    return funcol.plan_redistribution(src, dst, mesh, shape, torch.float32, **options)


def axis_cost(size: int, latency_us: float = 5.0, gigabytes_per_s: float = 100.0) -> AxisCost:
    return AxisCost(size, *[LinkCost(latency_us, gigabytes_per_s)] * 5)


def model(**axes: AxisCost) -> AlphaBeta:
    return AlphaBeta(axes or {"dp": axis_cost(2), "tp": axis_cost(4, 3.0)}, LinkCost(1.0, 200.0))
