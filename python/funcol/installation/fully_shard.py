"""funcol under PyTorch's FSDP2 (``fully_shard``), while :func:`funcol.install` is in effect.

FSDP2's hooks decide, as without funcol, which group of parameters is gathered and reduced when. funcol
replaces the work on every parameter of a group, which C++ does for the whole group in one call, and the
group's gather and reduction: see :mod:`funcol.installation.fully_shard_calls`.

A function of PyTorch is replaced if :data:`funcol.installation.fully_shard_table.FUNCTIONS` has the digests
of its source and of all functions that the replacement bypasses; else PyTorch's runs. This module imports
FSDP2.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.compiler import is_compiling
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)

from .. import _C
from .._compat.fully_shard import switches
from . import fully_shard_calls as calls
from . import patching
from .fully_shard_table import COLLECTIVES, FUNCTIONS, HOOK_WRAPPERS, HOOKS, REPLACED, WITHOUT_GRADIENTS

_MODULES: list[Any] = [
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fsdp_common,
    dist,
]


def _places(name: str) -> list[tuple[Any, str]]:
    """Returns the modules, or classes, that hold the function ``name``, and its name there: FSDP2's modules
    import one another's functions."""
    first, _, method = name.partition(".")
    modules = [module for module in _MODULES if first in vars(module)]
    if not method:
        return [(module, first) for module in modules]
    return [(owner, method) for owner in dict.fromkeys(vars(module)[first] for module in modules)]


def _occurrences(name: str) -> list[Any]:
    """Returns the function ``name`` at each of its places."""
    nothing = object()
    found = [inspect.getattr_static(owner, attribute, nothing) for owner, attribute in _places(name)]
    return [value for value in found if value is not nothing]


def find_decorated(name: str) -> Any:
    """Returns the function ``name`` of FSDP2, a name or ``Class.method``, in its decorators; ``None`` if this
    release has none."""
    found = _occurrences(name)
    return found[0] if found else None


def _function(name: str) -> Any:
    """Returns PyTorch's function ``name`` without its decorators; ``None`` if this release has none,
    ``patching.NOT_FROM_PYTORCH`` if a program has replaced it in some place."""
    found = _occurrences(name)
    if not found:
        return None
    is_one = all(value is found[0] for value in found)
    return patching.own_function_as_written(found[0]) if is_one else patching.NOT_FROM_PYTORCH


def _is_known(name: str) -> bool:
    return FUNCTIONS[name].has_source_of(_function(name))


# PyTorch's streams and events of the CPU do nothing.
_CPU_STREAMS: list[tuple[Any, str]] = [
    *((torch.cpu, name) for name in ("stream", "current_stream", "Stream", "Event")),
    *((torch.cpu.Stream, name) for name in ("wait_stream", "record_event", "wait_event")),
    *((torch.cpu.Event, name) for name in ("record", "wait")),
]

_get_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _is_outside_dynamo() -> bool:
    """Returns true if Dynamo compiles nothing on this thread, and none of its stances is set."""
    if is_compiling() or _get_callback() is not None:
        return False
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is None or frames._stance.stance == "default"


def _wrapped_hooks() -> list[str]:
    """Returns the hooks that have a wrapper of known source around them, and no other wrapper."""
    wrappers = [_function(name) for name in HOOK_WRAPPERS if _is_known(name)]
    codes = [code for wrapper in wrappers if wrapper is not None for code in wrapper.__code__.co_consts]
    return [name for name in HOOKS if getattr(find_decorated(name), "__code__", None) in codes]


def _has_own_record_function() -> bool:
    """Returns true if no program has replaced ``record_function``, or one of its methods."""
    found = {vars(_fsdp_param_group)["record_function"], torch.profiler.record_function}
    ranges = found.pop()
    return not found and all(
        (ranges.__module__, ranges.__qualname__) == ("torch.autograd.profiler", "record_function")
        and patching.is_from_pytorch(vars(ranges)[name].__code__)
        for name in ("__init__", "__enter__", "__exit__")
    )


def _replaceable() -> list[str]:
    """Returns the functions of known source whose replacements bypass only functions of known source. A
    function that is bypassed and has a replacement has to be replaceable itself."""
    may_omit_ranges = _has_own_record_function()
    names = [
        name
        for name in REPLACED
        if _function(name) is not None
        and all(map(_is_known, (name, *FUNCTIONS[name].bypasses)))
        and (may_omit_ranges or not FUNCTIONS[name].omits_ranges)
    ]
    existing = {name for name in REPLACED if _occurrences(name)}
    while True:
        left = existing.difference(names)
        kept = [name for name in names if left.isdisjoint(FUNCTIONS[name].bypasses)]
        if len(kept) == len(names):
            return names
        names = kept


def _bypassed_by(names: Iterable[str]) -> Iterable[str]:
    """Returns the functions that the replacements of the functions ``names`` bypass."""
    return dict.fromkeys(bypassed for name in names for bypassed in FUNCTIONS[name].bypasses)


def replaced_and_unsupported() -> tuple[list[str], list[str]]:
    """Returns the names of functions that funcol replaces in this release, and of those only in others."""
    replaced = list(_replaced_now) or list(dict.fromkeys([*_replaceable(), *_wrapped_hooks()]))
    return replaced, [name for name in dict.fromkeys([*REPLACED, *HOOKS]) if name not in replaced]


def patched_by_programs() -> list[str]:
    """Returns the names of the functions that programs replaced or wrapped before funcol was installed."""
    if _replaced_now:
        return list(_patched_before_install)
    names = dict.fromkeys([*REPLACED, *_bypassed_by(REPLACED)])
    found = [name for name in names if _function(name) is patching.NOT_FROM_PYTORCH]
    return [*found, *([] if _has_own_record_function() else ["record_function"])]


# Both are set while funcol is under FSDP2: replaced functions cannot be recognized by their sources.
_replaced_now: list[str] = []
_patched_before_install: list[str] = []


def install() -> Callable[[], None]:
    """Installs funcol under FSDP2. Returns the function that undoes it."""
    names, hooks = _replaceable(), _wrapped_hooks()
    with ExitStack() as undo:
        _register_with_cpp(names)
        _patched_before_install[:] = patched_by_programs()
        _replaced_now[:] = dict.fromkeys([*names, *hooks])
        undo.callback(_replaced_now.clear)
        for name in names:
            ours = FUNCTIONS[name].replacement
            assert ours is not None
            undo.callback(patching.replace(_function(name), ours))
        for name in hooks:
            undo.callback(patching.call_directly(find_decorated(name), _is_outside_dynamo))
        for function in filter(patching.is_in_context, map(find_decorated, WITHOUT_GRADIENTS)):
            undo.callback(patching.enter_context_if(function, torch.is_grad_enabled))
        namespace = vars(_fsdp_param_group)
        if namespace["record_function"] is torch.profiler.record_function:
            undo.callback(patching.set_entries(namespace, {"record_function": calls.record_function}))
        return undo.pop_all().close


def _register_with_cpp(replaced: Iterable[str]) -> None:
    """Registers FSDP2's classes with C++, and the functions that C++ bypasses unless a program replaces
    one."""

    def values(names: Iterable[str]) -> list[tuple[Any, str, Any]]:
        return [
            (owner, attribute, inspect.getattr_static(owner, attribute))
            for name in names
            if _function(name) is not None
            for owner, attribute in _places(name)
        ]

    ranges = [(_fsdp_param_group, calls.record_function), (torch.profiler, torch.profiler.record_function)]
    states = _fsdp_param.ShardedState
    group, param = _fsdp_param_group.FSDPParamGroup, _fsdp_param.FSDPParam
    _C.register_fully_shard(
        (group, param),
        (states.SHARDED, states.SHARDED_POST_FORWARD, states.UNSHARDED),
        (_fsdp_param.alloc_storage, _fsdp_param.free_storage),
        nn.Module.__setattr__,
        [
            *values(name for name in _bypassed_by(replaced) if name not in COLLECTIVES),
            *switches(),
            *((owner, "record_function", value) for owner, value in ranges if _has_own_record_function()),
        ],
        values(COLLECTIVES),
        [(owner, name, _own_stream(owner, name)) for owner, name in _CPU_STREAMS],
        {
            name: (_methods(group, FUNCTIONS[name].bypasses), _methods(param, FUNCTIONS[name].bypasses))
            for name in replaced
        },
    )


def _methods(owner: type, names: Iterable[str]) -> list[str]:
    """Returns the methods of ``owner`` among the functions ``names`` in whose place an object may have its
    own."""
    found = [
        method for first, _, method in (name.partition(".") for name in names) if first == owner.__name__
    ]
    return [name for name in found if not inspect.isdatadescriptor(inspect.getattr_static(owner, name, None))]


def _own_stream(owner: Any, name: str) -> Any:
    """Returns PyTorch's stream class, event class or method ``name`` of ``owner``; ``NOT_PYTORCHS``, which
    equals none of them, if a program has replaced it."""
    found = vars(owner)[name]
    is_own = (
        found.__module__ == torch.cpu.__name__
        if isinstance(found, type)
        else isinstance(found, FunctionType)
        and patching.is_from_pytorch(found.__code__)
        and not hasattr(found, "__wrapped__")
    )
    return found if is_own else patching.NOT_FROM_PYTORCH
