"""What NCCL does not have: twins of tests on devices leave it out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BITWISE = {"band", "bor", "bxor"}


def nccl_takes(reduce_op: str) -> bool:
    """Whether NCCL reduces by ``reduce_op``; ProcessGroupNCCL raises ValueError for others."""
    return reduce_op.lower() not in BITWISE


def has_twin(parameters: Mapping[str, Any]) -> bool:
    """Whether a case with these parameters of its test can run over NCCL."""
    return nccl_takes(str(parameters.get("reduce_op", "sum")))
