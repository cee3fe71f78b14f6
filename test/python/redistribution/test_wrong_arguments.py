"""Placements in the place of the mesh, and other things that are no mesh, are refused with the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import funcol


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ([Replicate(), Replicate()], r"device_mesh is a list; write placements=\[\.\.\.\]"),
        ((Replicate(), Replicate()), r"device_mesh is a tuple; write placements=\[\.\.\.\]"),
        ("cpu", r"device_mesh is a str, expected a DeviceMesh"),
    ],
    ids=["list", "tuple", "text"],
)
@pytest.mark.parametrize("placements", [None, [Replicate(), Replicate()]], ids=["", "placements"])
def test_what_is_no_mesh_is_refused(mesh_2x2: DeviceMesh, given: Any, says: str, placements: Any) -> None:
    dtensor = DTensor.from_local(torch.ones(2, 2), mesh_2x2, [Shard(0), Shard(1)])
    with pytest.raises(TypeError, match=f"funcol::redistribute: {says}"):
        funcol.redistribute(dtensor, given, placements)
