"""Features that NCCL lacks: twins of tests on devices leave them out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

BITWISE = {"band", "bor", "bxor"}


WITHOUT_TYPE = {torch.int16, torch.uint16, torch.uint32, torch.uint64}


def nccl_takes(reduce_op: str) -> bool:
    """Returns true if NCCL reduces by ``reduce_op``; ProcessGroupNCCL raises ValueError for others."""
    return reduce_op.lower() not in BITWISE


def nccl_sends(dtype: torch.dtype | None) -> bool:
    """Returns true if ProcessGroupNCCL has a type for tensors of ``dtype``; it raises for others."""
    return dtype not in WITHOUT_TYPE


def has_twin(parameters: Mapping[str, Any]) -> bool:
    """Returns true if a case with these parameters of its test can run over NCCL."""
    return nccl_takes(str(parameters.get("reduce_op", "sum"))) and nccl_sends(parameters.get("dtype"))
