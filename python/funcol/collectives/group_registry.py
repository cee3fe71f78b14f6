"""Watches c10d's registry of process groups, and groups that change, for code that remembers groups."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d

from .. import _C
from . import groups


def watch_group_registry(
    *,
    added: Callable[[str], None],
    removing: Callable[[str], None],
    removing_all: Callable[[], None],
    ending: Callable[[Any, str], None],
    changed: Callable[[], None],
    remember: Callable[[bool], None],
) -> None:
    """Tells of changes that ``torch.distributed`` makes to c10d's registry of groups.

    Calls ``added(name)`` for each group in the registry and for each new one; ``removing(name)`` or
    ``removing_all()`` before groups are removed, as a part of their destruction; ``ending(group, how)``
    before a group or backend is told to ``"abort"`` or to ``"reconfigure"``; ``changed()`` after each change
    of the registry; and ``remember(False)`` while each thread has a registry of its own (simulated ranks in
    threads).
    """

    def watched(
        change: Callable[..., Any], before: Callable[..., None] | None, after: Callable[..., None] | None
    ) -> Callable[..., Any]:
        def change_and_tell(*args: Any, **kwargs: Any) -> Any:
            name = (*args, *kwargs.values())[:1]
            if before is not None:
                before(*name)
            try:
                result = change(*args, **kwargs)
            finally:
                changed()
            if after is not None:
                after(*name)
            return result

        return change_and_tell

    def then_remember(isolate: Callable[[bool], None]) -> Callable[[bool], None]:
        def isolate_and_remember(enable: bool) -> None:
            isolate(enable)
            remember(not enable)

        return isolate_and_remember

    registry: Any = torch._C._distributed_c10d
    for name, before, after in (
        ("_register_process_group", None, added),
        ("_unregister_process_group", removing, None),
        ("_unregister_all_process_groups", removing_all, None),
    ):
        for module in (c10d, registry):
            change = getattr(module, name, None)
            if change is not None:
                setattr(module, name, watched(change, before, after))
    for kind in list(vars(registry).values()):
        if isinstance(kind, type) and issubclass(kind, (registry.ProcessGroup, registry.Backend)):
            for how in _ENDS:
                if how in vars(kind):
                    setattr(kind, how, _told_before(getattr(kind, how), how, ending))
    registry._set_thread_isolation_mode = then_remember(registry._set_thread_isolation_mode)
    for group_name in c10d._world.pg_names.values():
        added(group_name)
    remember(True)


# Methods of groups and backends after which a group is another: what was under way is lost, or ranks change.
_ENDS = ("abort", "reconfigure")


def _told_before(method: Any, how: str, ending: Callable[[Any, str], None]) -> Any:
    @functools.wraps(method)
    def tell_and_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        groups.note_group_changes(how)
        _note_meshes()
        ending(self, how)
        return method(self, *args, **kwargs)

    return tell_and_call


def _note_meshes() -> None:
    """Tells C++ of each ``DeviceMesh``: those that come later are of the group as it will be then."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is not None:
        for found in gc.get_objects():
            if issubclass(type(found), module.DeviceMesh):
                _C.note_mesh(found)
