"""The default generators of the ranks of a mesh, made to agree before operators on DTensors draw."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _random as stock_random
from torch.utils._python_dispatch import _disable_current_modes

from . import patching

_manual_seed: Any = patching.copied(stock_random.manual_seed)


class _Agreed:
    """The meshes, by their devices and ranks, whose ranks have had the same state of the default generator.
    Ranks forget them at the same time: with the default process group, not when a mesh is collected."""

    def __init__(self) -> None:
        self._world: weakref.ref[Any] | None = None
        self._ranks: set[tuple[str, *tuple[int, ...]]] = set()
        self._known: weakref.WeakKeyDictionary[DeviceMesh, Any] = weakref.WeakKeyDictionary()

    def __contains__(self, mesh: DeviceMesh) -> bool:
        world = dist.GroupMember.WORLD
        if self._world is None or self._world() is not world:
            self._world = None if world is None else weakref.ref(world)
            self._ranks.clear()
        return self._ranks_of(mesh) in self._ranks

    def add(self, mesh: DeviceMesh) -> None:
        if mesh not in self:
            self._ranks.add(self._ranks_of(mesh))

    def _ranks_of(self, mesh: DeviceMesh) -> tuple[str, *tuple[int, ...]]:
        ranks = self._known.get(mesh)
        if ranks is None:
            ranks = self._known[mesh] = (mesh.device_type, *mesh.mesh.flatten().tolist())
        return ranks


_agreed = _Agreed()


def agree(mesh: DeviceMesh) -> None:
    """Gives the default generator of each rank of ``mesh`` the state that the first rank's has, at the first
    use on these ranks. Warns where the state changes.

    PyTorch counterpart: ``OffsetBasedRNGTracker.__init__``, for CUDA and all ranks of the program.
    """
    if mesh in _agreed or mesh.size() == 1:
        return
    try:
        groups = mesh.get_all_groups()
    except RuntimeError:  # a mesh without groups
        return
    device: Any = torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
    before = device.get_rng_state()
    state = before.to(mesh.device_type, copy=True)
    with _disable_current_modes():
        for group in groups:
            dist.broadcast(state, group=group, group_src=0)
    _agreed.add(mesh)
    state = state.cpu()
    if not torch.equal(state, before):
        device.set_rng_state(state)
        warnings.warn(
            f"funcol: rank {dist.get_rank()} draws random numbers for DTensors from another state of the "
            f"default generator than the first rank of {mesh}, and takes over that rank's state. Call "
            "torch.manual_seed() with the same seed on all ranks of the mesh.",
            stacklevel=2,
        )


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seeds the default generators of CPU meshes, too. The generators of the mesh then are taken to agree.

    PyTorch counterpart: ``torch.distributed.tensor._random.manual_seed``.
    """
    if device_mesh.device_type != "cpu":
        _manual_seed(seed, device_mesh)
        _agreed.add(device_mesh)
        return
    if device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"manual_seed: rank {dist.get_rank()} is not in {device_mesh}. Call it on the ranks of the mesh."
        )
    _agreed.add(device_mesh)
    torch.manual_seed(seed)
