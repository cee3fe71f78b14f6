from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from funcol.sharding import ShardingPropagator


@pytest.fixture
def line() -> DeviceMesh:
    return init_device_mesh("cpu", (8,))


@pytest.fixture
def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 4))


@pytest.fixture
def propagator() -> ShardingPropagator:
    """Returns a propagator that no other test has used."""
    return ShardingPropagator()
