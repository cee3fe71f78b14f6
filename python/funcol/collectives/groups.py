"""Process groups: from the forms in which users name them, of meshes, and as graphs take them; and notices of
changes of groups and of c10d's registry of them, for code that caches groups."""

from __future__ import annotations

import functools
import gc
import sys
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from .. import _C, _compat

RankTypes: TypeAlias = (
    list[int] | list[list[int]] | dist.ProcessGroup | DeviceMesh | tuple[DeviceMesh, int | str] | str
)
"""The ways to name the ranks of a collective. Functions take ``None``, too: the default group, of all ranks.

- ``ProcessGroup``, or its ``group_name``
- ``DeviceMesh`` with one dim, or ``(DeviceMesh, mesh_dim)``, the mesh dim by number or by name
- ``list[int]``: global ranks of an existing group (deprecated, as in PyTorch)
- ``list[list[int]]``: the ranks of all groups of an MPMD call; this rank's is taken
"""

RANK_TYPES = RankTypes
"""PyTorch's name of :data:`RankTypes`."""


def resolve_group(group: Any, tag: str = "", op: str = "resolve_group") -> Any:
    """Returns the ``ProcessGroup`` or group name of ``group``, a :data:`RankTypes` or ``None``, for ``op``.

    Raises ``ValueError`` or ``TypeError`` if there is none that this rank belongs to. PyTorch counterpart:
    ``torch.distributed._functional_collectives._resolve_group``.
    """
    if isinstance(group, dist.ProcessGroup | str):
        return group
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"funcol::{op}: the group is a DeviceMesh with {group.ndim} dims, expected 1: pass "
                "(mesh, mesh_dim), or mesh[name]."
            )
        return _mesh_group(group, 0, op)
    if isinstance(group, tuple):
        if len(group) != 2 or not isinstance(group[0], DeviceMesh) or not isinstance(group[1], int | str):
            raise ValueError(
                f"funcol::{op}: the group is the tuple {group!r}, expected (DeviceMesh, int or name)."
            )
        mesh, mesh_dim = group
        return _mesh_group(mesh, _number_of_dim(mesh, mesh_dim, op), op)
    if group is None:
        return default_group(op)
    if isinstance(group, list):
        default_group(op)  # raises if there is no group yet
        return _group_of_ranks(group, tag, op)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"funcol::{op}: the group is GroupMember.NON_GROUP_MEMBER: this rank does not belong to the "
            "group that was made. Call the collective on its member ranks only."
        )
    raise TypeError(
        f"funcol::{op}: the group is a {type(group).__name__}, expected a ProcessGroup, a group name, a "
        "DeviceMesh, a (DeviceMesh, int or name) or a list of ranks."
    )


def default_group(op: str) -> dist.ProcessGroup:
    """Returns the group of all ranks, for collective ``op``. Raises ValueError if there is none yet."""
    group = dist.group.WORLD
    if group is None:
        raise ValueError(
            f"funcol::{op}: there is no process group yet: call torch.distributed.init_process_group() first."
        )
    return group


def _number_of_dim(mesh: DeviceMesh, mesh_dim: int | str, op: str) -> int:
    if isinstance(mesh_dim, int):
        return mesh_dim
    names = mesh.mesh_dim_names or ()
    if mesh_dim not in names:
        raise ValueError(
            f"funcol::{op}: the DeviceMesh has no dim named {mesh_dim!r}; "
            f"{'its dims are ' + ', '.join(names) if names else 'its dims have no names'}."
        )
    return names.index(mesh_dim)


def _mesh_group(mesh: DeviceMesh, mesh_dim: int, op: str) -> str:
    if not -mesh.ndim <= mesh_dim < mesh.ndim:
        raise ValueError(
            f"funcol::{op}: mesh dim {mesh_dim} is out of range for a DeviceMesh with {mesh.ndim} dims."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"funcol::{op}: rank {dist.get_rank()} does not belong to {mesh}. Call the collective on its "
            "member ranks only."
        )
    name = mesh_group_name(mesh, mesh_dim)
    if _have_groups_changed:
        _C.check_mesh_group(mesh, name, op)
    return name


_have_groups_changed = False  # a group has been aborted or reconfigured


def _group_of_ranks(ranks: list[Any], tag: str, op: str) -> Any:
    warnings.warn(
        "naming a process group by its ranks is deprecated: pass a ProcessGroup, a DeviceMesh or a name.",
        FutureWarning,
        stacklevel=4,
    )
    rank = dist.get_rank()
    own: list[int] | None
    if ranks and isinstance(ranks[0], list):
        sizes = {len(members) for members in ranks}
        if len(sizes) != 1:
            raise ValueError(
                f"funcol::{op}: the groups {ranks} have different sizes {sorted(sizes)}, expected one size."
            )
        own = own_ranks(ranks)
    else:
        own = ranks if rank in ranks else None
    if own is None:
        raise ValueError(
            f"funcol::{op}: rank {rank} is not in {ranks}. Call the collective on the ranks in the list only."
        )
    group = c10d._find_pg_by_ranks_and_tag(tag, own)
    if group is None:
        raise ValueError(
            f"funcol::{op}: no process group has the ranks {own} and the tag {tag!r}. Make it with "
            "torch.distributed.new_group on all ranks first, and pass the group it returns."
        )
    return group


def mesh_group_name(mesh: dist.device_mesh.DeviceMesh, mesh_dim: int) -> str:
    """Returns the name of the group of ``mesh`` along ``mesh_dim``, without looking the group up."""
    return cast(str, mesh._dim_group_names[mesh_dim])


def own_ranks(lists: list[list[int]]) -> list[int] | None:
    """Returns the list in ``lists`` that has this rank, or None. Dynamo can trace it."""
    rank = dist.get_rank()
    for ranks in lists:
        if rank in ranks:
            return ranks
    return None


def group_by_name(name: str) -> dist.ProcessGroup:
    """Returns the group of this name."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return cast(dist.ProcessGroup, resolve(name))


def rank_in_group(group: Any) -> int:
    """Returns this process's rank in ``group``, a name or an object."""
    return dist.get_rank(group_by_name(group) if isinstance(group, str) else group)


def rank_of_peer(group_name: str, global_rank: int) -> int:
    """Returns the rank within a group of the process that is ``global_rank`` in the world."""
    return dist.get_group_rank(group_by_name(group_name), global_rank)


# As torch.compiler.assume_constant_result does, which would import Dynamo.
rank_in_group._dynamo_marked_constant = True  # type: ignore[attr-defined]
rank_of_peer._dynamo_marked_constant = True  # type: ignore[attr-defined]


def traced_group(group: Any, tag: str) -> Any:
    """Returns the name of ``group``, or the ``ProcessGroup``, as Dynamo finds it in a traced region."""
    if group is None:
        group = dist.group.WORLD
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[1], str):
        group = (group[0], _number_of_dim(group[0], group[1], "resolve_group"))
    if isinstance(group, list) and group and isinstance(group[0], list):  # stock traces one list
        own = own_ranks(group)
        if own is None:
            raise ValueError(
                f"funcol: rank {dist.get_rank()} is not in {group}. Call the collective on the ranks in the "
                "lists only."
            )
        group = own
    return _compat.group_in_region(group, tag)


def traceable_group(group: Any, tag: str) -> Any:
    """Returns ``group`` as stock PyTorch puts it in a graph: a name, or an object where stock traces one."""
    return _compat.resolved_group_in_graphs(traced_group(group, tag))


# :mod:`funcol` has these under PyTorch's names, with an underscore, for programs that use PyTorch's.


def find_group(group: RankTypes | None, tag: str = "") -> Any:
    """Resolves ``group`` like :func:`resolve_group`; Dynamo can trace it as well."""
    if is_dynamo_compiling():
        return traced_group(group, tag)
    return resolve_group(group, tag)


def find_group_name(group: RankTypes | None, tag: str = "") -> str:
    """Returns the name of the group behind ``group``."""
    resolved = find_group(group, tag)
    return resolved if isinstance(resolved, str) else resolved.group_name


def group_or_group_name(group: dist.ProcessGroup | str) -> Any:
    """Returns ``group`` as a graph takes it: by name, unless PyTorch compiles one graph for all ranks."""
    return group if isinstance(group, str) else _compat.group_in_graphs(group)


def expand_group(group: RankTypes | None, tag: str = "") -> tuple[str, list[int], int]:
    """Returns the tag, the global ranks and the size of ``group``. Dynamo can trace it.

    For a list of groups, returns the ranks of all of them, one after the other, and the size of each.
    """
    if isinstance(group, list):
        if len(group) == 0 or not isinstance(group[0], list):
            return tag, group, len(group)  # type: ignore[return-value]
        ranks = [rank for members in group for rank in members]
        sizes = [len(members) for members in group]
        for size in sizes:
            if size != sizes[0]:
                raise ValueError(
                    f"funcol::_expand_group: the groups {group} have sizes {sizes}, not one size."
                )
        return tag, ranks, sizes[0]
    resolved = _group_object(group)
    ranks = dist.get_process_group_ranks(resolved)
    return tag or c10d._get_group_tag(resolved), ranks, len(ranks)


def _group_object(group: Any) -> dist.ProcessGroup:
    if group is None:
        return default_group("_expand_group")
    if isinstance(group, DeviceMesh) and group.ndim == 1:
        return group.get_group()
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        return group[0].get_group(group[1])
    resolved = group if isinstance(group, dist.ProcessGroup) else resolve_group(group, "", "_expand_group")
    return group_by_name(resolved) if isinstance(resolved, str) else resolved


# The registry of groups


def watch_group_registry() -> None:
    """Notifies C++, which caches groups, of changes that ``torch.distributed`` makes to c10d's registry of
    groups.

    C++ is notified of each group in the registry and of each new one; of removals, before groups are removed
    as a part of their destruction; of groups and backends, before they ``"abort"`` or ``"reconfigure"``; and
    of each change of the registry, after it. C++ caches no groups while each thread has a registry of its own
    (simulated ranks in threads).
    """

    def notifying(
        change: Callable[..., Any], before: Callable[..., None] | None, after: Callable[..., None] | None
    ) -> Callable[..., Any]:
        def change_and_notify(*args: Any, **kwargs: Any) -> Any:
            name = (*args, *kwargs.values())[:1]
            if before is not None:
                before(*name)
            try:
                result = change(*args, **kwargs)
            finally:
                _C.forget_groups()
            if after is not None:
                after(*name)
            return result

        return change_and_notify

    registry: Any = torch._C._distributed_c10d
    isolate = registry._set_thread_isolation_mode

    def isolate_and_remember(enable: bool) -> None:
        isolate(enable)
        _C.remember_groups(not enable)

    for name, before, after in (
        ("_register_process_group", None, _C.note_group_added),
        ("_unregister_process_group", _C.note_group_removed, None),
        ("_unregister_all_process_groups", _C.note_all_groups_removed, None),
    ):
        for module in (c10d, registry):
            change = getattr(module, name, None)
            if change is not None:
                setattr(module, name, notifying(change, before, after))
    for kind in list(vars(registry).values()):
        if isinstance(kind, type) and issubclass(kind, (registry.ProcessGroup, registry.Backend)):
            for how in _CHANGING_METHODS:
                if how in vars(kind):
                    setattr(kind, how, _notifying_before(getattr(kind, how), how))
    registry._set_thread_isolation_mode = isolate_and_remember
    for group_name in c10d._world.pg_names.values():
        _C.note_group_added(group_name)
    _C.remember_groups(True)


# Methods of groups and backends that change a group: collectives in flight are lost, or ranks change.
_CHANGING_METHODS = ("abort", "reconfigure")


def _notifying_before(method: Any, how: str) -> Any:
    @functools.wraps(method)
    def notify_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _have_groups_changed
        _have_groups_changed = True  # before the group does: meshes are checked from then on
        _note_meshes()
        _C.note_group_ended(self, how)
        return method(self, *args, **kwargs)

    return notify_and_call


def _note_meshes() -> None:
    """Notes each ``DeviceMesh`` in C++: those that are made later have the group as it is by then."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is not None:
        for found in gc.get_objects():
            if issubclass(type(found), module.DeviceMesh):
                _C.note_mesh(found)
