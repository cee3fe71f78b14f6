"""Watches c10d's registry of process groups, for code that remembers groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d


def watch_group_registry(
    *,
    added: Callable[[str], None],
    removing: Callable[[str], None],
    removing_all: Callable[[], None],
    changed: Callable[[], None],
    remember: Callable[[bool], None],
) -> None:
    """Tells of changes that ``torch.distributed`` makes to c10d's registry of groups.

    Calls ``added(name)`` for each group in the registry and for each new one; ``removing(name)`` or
    ``removing_all()`` before groups are removed, as a part of their destruction; ``changed()`` after each
    change; and ``remember(False)`` while each thread has a registry of its own (simulated ranks in threads).
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
    registry._set_thread_isolation_mode = then_remember(registry._set_thread_isolation_mode)
    for group_name in c10d._world.pg_names.values():
        added(group_name)
    remember(True)
