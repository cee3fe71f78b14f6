"""Metadata of results, and meta tensors of symbolic sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import funcol  # noqa: F401  defines the ops


def listed(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def metadata(tensor: Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.is_conj(), tensor.is_neg())


def symbolic_meta_input() -> tuple[Tensor, Any, Any]:
    """Returns a meta tensor of shape (s0, s1), hinted (4, 6)."""
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(4, 6), symbolic_context=context)
    rows, columns = fake.shape
    return torch.empty(rows, columns, device="meta"), rows, columns
