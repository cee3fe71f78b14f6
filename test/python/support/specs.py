"""DTensor specs from words for their placements."""

from __future__ import annotations

from typing import Any

import torch
from sharded import Layout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec


def spec(
    mesh: DeviceMesh, shape: tuple[int, ...], words: str, dtype: torch.dtype = torch.float32
) -> DTensorSpec:
    return Layout(tuple(words.split())).spec(mesh, torch.empty(shape, dtype=dtype))


def placements(sharding: Any) -> tuple[Any, ...]:
    return sharding.output_spec.placements
