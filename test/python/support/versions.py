"""The version of PyTorch under which the tests run, and what they leave out by it."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from funcol import _compat

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

HAS_RULES_OF_AN_AXIS = _compat.has_rules_of_an_axis(DTensor._op_dispatcher.sharding_propagator)

needs_decisions_in_cpp = pytest.mark.skipif(
    not HAS_RULES_OF_AN_AXIS, reason="under install(), the sharding propagator of this PyTorch decides"
)
