"""funcol under PyTorch's FSDP2 (``fully_shard``), while :func:`funcol.install` is in effect.

FSDP2's hooks decide as before what is gathered and reduced when. Taken over is what they do for every
parameter of a group, in C++ for the group at once, and how a group gathers and reduces: see
:mod:`funcol.dropin.fully_shard_calls`.

This module imports FSDP2. A function of PyTorch is taken over if it, and what it would have called, are
known (:data:`funcol._compat.fully_shard.KNOWN`); the rest stays PyTorch's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, NamedTuple

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
from .._compat.fully_shard import is_known, switches
from . import fully_shard_calls as calls
from . import patching

_MODULES: list[Any] = [
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fsdp_common,
    dist,
]


def _places(path: str) -> list[tuple[Any, str]]:
    """Where ``path``, a function's name or ``Class.method``, is looked up: modules import one another's."""
    first, _, method = path.partition(".")
    modules = [module for module in _MODULES if first in vars(module)]
    if not method:
        return [(module, first) for module in modules]
    return [(owner, method) for owner in dict.fromkeys(vars(module)[first] for module in modules)]


def _found(path: str) -> list[Any]:
    """What is there, at each place."""
    nothing = object()
    found = [inspect.getattr_static(owner, name, nothing) for owner, name in _places(path)]
    return [value for value in found if value is not nothing]


def _looked_up(path: str) -> Any:
    found = _found(path)
    return found[0] if found else None


def _function(path: str) -> Any:
    """PyTorch's function, without decorators; None if there is none, and something else if it is not
    PyTorch's own."""
    found = _found(path)
    if not found:
        return None
    is_one = all(value is found[0] for value in found)
    return patching.undecorated(found[0]) if is_one else patching.NOT_PYTORCHS


class _Part(NamedTuple):
    """A function of PyTorch, what stands in for it, and what else it calls for every parameter."""

    theirs: str
    ours: Callable[..., Any]
    passes_by: tuple[str, ...] = ()

    def is_known(self) -> bool:
        paths = (self.theirs, *self.passes_by)
        return _function(self.theirs) is not None and all(is_known(path, _function(path)) for path in paths)


_STORAGE = ("alloc_storage", "free_storage")
_SETTERS = ("FSDPParam._setattr_on_modules", "unsafe_setattr_param")

_TO_GATHER = (
    "_get_param_all_gather_inputs",
    "_get_all_gather_input_metadatas",
    "all_gather_copy_in_cuda",
    "FSDPParam.all_gather_inputs",
    "_to_dtype_if_needed",
)
_TO_COPY_OUT = (
    "FSDPParam.init_all_gather_outputs",
    "FSDPParam.alloc_all_gather_outputs",
    "_copy_all_gather_outputs",
    "split_with_sizes_copy",
    *_STORAGE,
)
_TO_SHARD = ("FSDPParam.to_sharded", "FSDPParam.free_unsharded_param", *_SETTERS, *_STORAGE)
_TO_UNSHARD = ("FSDPParam.to_unsharded", "set_requires_grad_if_needed", *_SETTERS)
_TO_TAKE = (
    "FSDPParamGroup._get_unsharded_grad_to_reduce",
    "FSDPParam.unsharded_grad_data",
    "FSDPParam._get_grad_inner_tensor",
)
_TO_HAND_OUT = (
    "foreach_reduce",  # which has to be the one that calls it
    "FSDPParam.to_sharded_dtensor",
    "_from_local_no_grad",
    "_get_dtensor_spec_with_dtype",
    "_to_dtype_if_needed",
)
# What a group has its collectives done by, passed by as long as nobody has put something in its place.
_COLLECTIVES = (
    "DefaultAllGather.allocate",
    "DefaultAllGather.__call__",
    "DefaultReduceScatter.allocate",
    "DefaultReduceScatter.__call__",
    "all_gather_single",
    "reduce_scatter_single",
)

_PARTS = [
    _Part("FSDPState._root_pre_forward", calls.root_pre_forward, ("FSDPState._lazy_init",)),
    _Part("FSDPState._root_post_backward_final_callback", calls.root_post_backward_final_callback),
    _Part(
        "FSDPState._register_pre_backward_hook", calls.register_pre_backward_hook, ("collect_grad_tensors",)
    ),
    _Part(
        "FSDPParamGroup.pre_forward",
        calls.pre_forward,
        ("FSDPParam._restore_spmd_types", "FSDPParamGroup.unshard", "FSDPParamGroup.wait_for_unshard"),
    ),
    _Part(
        "FSDPParamGroup.post_forward",
        calls.post_forward,
        (
            "FSDPParamGroup._record_post_forward",
            "FSDPParamGroup._reshard_after_forward",
            "FSDPParamGroup._to_sharded",
            "FSDPParamGroup._use_post_forward_mesh",
            "FSDPParamGroup.reshard",
            "is_bw",
            *_TO_SHARD,
        ),
    ),
    _Part(
        "FSDPParamGroup.pre_backward",
        calls.pre_backward,
        (
            "FSDPParamGroup._backward_prefetch",
            "FSDPParamGroup._prefetch_unshard",
            "FSDPParamGroup._set_unsharded_grad_dtypes",
            "FSDPParamGroup.unshard",
            "FSDPParamGroup.use_training_state",
            "FSDPParamGroup.wait_for_unshard",
        ),
    ),
    _Part(
        "FSDPParamGroup.unshard",
        calls.unshard,
        (
            "foreach_all_gather",
            "FSDPParamGroup._all_gather_process_group",
            "FSDPParamGroup.is_unsharded",
            "FSDPCommContext.get_all_gather_streams",
            *_COLLECTIVES,
            *_TO_GATHER,
        ),
    ),
    _Part(
        "FSDPParamGroup.wait_for_unshard",
        calls.wait_for_unshard,
        (
            "foreach_all_gather_copy_out",
            "_default_all_gather_output_fn",
            "FSDPCommContext.release_all_gather_state_for_comm_reuse",
            "FSDPCommContext.wait_all_gather_streams_on_event",
            "FSDPParam.init_unsharded_param",
            "FSDPParamGroup._to_unsharded",
            *_TO_COPY_OUT,
            *_TO_UNSHARD,
        ),
    ),
    _Part(
        "FSDPParamGroup.post_backward",
        calls.post_backward,
        (
            "foreach_reduce",
            "foreach_reduce_scatter_copy_in",
            "_cast_and_view_sharded_grads",
            "_default_reduce_scatter_input_fn",
            "FSDPParamGroup._reduce_scatter_process_group",
            "FSDPParamGroup._set_unsharded_grad_dtypes",
            "FSDPParamGroup._take_unsharded_grads_to_reduce",
            "FSDPParamGroup._to_sharded",
            "FSDPParamGroup._validate_unused_param_grad_dtypes",
            "FSDPParamGroup._wait_for_post_backward",
            "FSDPParamGroup.reshard",
            *_COLLECTIVES,
            *_TO_SHARD,
            *_TO_TAKE,
            *_TO_HAND_OUT,
        ),
    ),
    _Part("foreach_all_gather", calls.foreach_all_gather, _TO_GATHER),
    _Part("_default_all_gather_output_fn", calls.all_gather_output_fn, _TO_COPY_OUT),
    _Part("FSDPParamGroup._to_sharded", calls.to_sharded, _TO_SHARD),
    _Part("FSDPParamGroup._to_unsharded", calls.to_unsharded, _TO_UNSHARD),
    _Part("FSDPParamGroup._take_unsharded_grads_to_reduce", calls.take_unsharded_grads_to_reduce, _TO_TAKE),
    _Part("_default_reduce_scatter_input_fn", calls.reduce_scatter_input_fn, ("_get_dim0_padded_size",)),
    _Part("_cast_and_view_sharded_grads", calls.cast_and_view_sharded_grads, _TO_HAND_OUT),
    _Part("foreach_reduce_scatter_copy_in", calls.reduce_scatter_copy_in),
    _Part(
        "FSDPParamGroup._register_post_backward_hook",
        calls.register_post_backward_hook,
        tuple(f"RegisterPostBackwardFunction.{name}" for name in ("forward", "setup_context", "backward")),
    ),
    _Part(
        "FSDPParam.to_sharded_dtensor",
        calls.to_sharded_dtensor,
        ("_from_local_no_grad", "_get_dtensor_spec_with_dtype"),
    ),
    _Part("_spmd_no_typecheck", calls.no_typecheck),
]

# These leave out ranges that nobody sees.
_WITHOUT_RANGES = (
    calls.root_pre_forward,
    calls.root_post_backward_final_callback,
    calls.pre_forward,
    calls.post_forward,
    calls.pre_backward,
    calls.post_backward,
    calls.unshard,
    calls.wait_for_unshard,
)

# These run without gradients, which in the backward pass nobody records anyway.
_WITHOUT_GRADIENTS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")

# Hooks that keep Dynamo away, by a function that they make anew in every call.
_HOOKS = (
    "FSDPState._pre_forward",
    "FSDPState._post_forward",
    "FSDPState._pre_backward",
    "FSDPState._root_post_backward_final_callback",
    "FSDPParamGroup.pre_backward",
    "FSDPParamGroup.post_backward",
)

_WRAPPERS = ("_dynamo_disable", "disable_if_config_true")

# Which do nothing.
_CPU_STREAMS: list[tuple[Any, str]] = [
    *((torch.cpu, name) for name in ("stream", "current_stream", "Stream", "Event")),
    *((torch.cpu.Stream, name) for name in ("wait_stream", "record_event", "wait_event")),
    *((torch.cpu.Event, name) for name in ("record", "wait")),
]

_get_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def _is_outside_dynamo() -> bool:
    """Nothing is compiled on this thread, and nothing says how to."""
    if is_compiling() or _get_callback() is not None:
        return False
    frames = sys.modules.get("torch._dynamo.eval_frame")
    return frames is None or frames._stance.stance == "default"


def _wrapped_hooks() -> list[str]:
    """Those that have no more than a known wrapper around them."""
    wrappers = [_function(path) for path in _WRAPPERS if is_known(path, _function(path))]
    codes = [code for wrapper in wrappers if wrapper is not None for code in wrapper.__code__.co_consts]
    return [path for path in _HOOKS if getattr(_looked_up(path), "__code__", None) in codes]


def _makes_pytorchs_ranges() -> bool:
    found = {vars(_fsdp_param_group)["record_function"], torch.profiler.record_function}
    ranges = found.pop()
    return not found and all(
        (ranges.__module__, ranges.__qualname__) == ("torch.autograd.profiler", "record_function")
        and patching.is_pytorchs(vars(ranges)[name].__code__)
        for name in ("__init__", "__enter__", "__exit__")
    )


def _known_parts() -> list[_Part]:
    """Those that are PyTorch's own, and pass by only what is, themselves and by what they pass by."""
    not_then = () if _makes_pytorchs_ranges() else _WITHOUT_RANGES
    parts = [part for part in _PARTS if part.is_known() and part.ours not in not_then]
    while True:
        names = {part.theirs for part in parts}
        missing = {part.theirs for part in _PARTS if _found(part.theirs)} - names
        kept = [part for part in parts if missing.isdisjoint(part.passes_by)]
        if len(kept) == len(parts):
            return parts
        parts = kept


def _names(parts: Iterable[_Part], hooks: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*(part.theirs for part in parts), *hooks]))


def taken_over() -> tuple[list[str], list[str]]:
    """Names of PyTorch's functions that funcol stands in for, and of those that it does in other minors."""
    taken = list(_names_put) or _names(_known_parts(), _wrapped_hooks())
    everything = _names(_PARTS, _HOOKS)
    return taken, [name for name in everything if name not in taken]


def not_pytorchs() -> list[str]:
    """Names of what somebody has put something in the place of, or around, before funcol came."""
    if _names_put:
        return list(_not_pytorchs_then)
    paths = dict.fromkeys([*_names(_PARTS, ()), *(path for part in _PARTS for path in part.passes_by)])
    found = [path for path in paths if _function(path) is patching.NOT_PYTORCHS]
    return [*found, *([] if _makes_pytorchs_ranges() else ["record_function"])]


# While funcol is under FSDP2, whose functions then look different.
_names_put: list[str] = []
_not_pytorchs_then: list[str] = []


class UnderFullyShard:
    """funcol put under FSDP2, until :meth:`undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        parts = _known_parts()
        hooks = _wrapped_hooks()
        try:
            _know(parts)
            _not_pytorchs_then[:] = not_pytorchs()
            _names_put[:] = _names(parts, hooks)
            self._undo.append(_names_put.clear)
            for part in parts:
                theirs = _function(part.theirs)
                calls.stock[part.theirs] = patching.copied(theirs)
                self._undo.append(patching.redirected(theirs, part.ours))
            for path in hooks:
                self._undo.append(patching.called_directly(_looked_up(path), _is_outside_dynamo))
            for function in filter(patching.is_in_context, map(_looked_up, _WITHOUT_GRADIENTS)):
                self._undo.append(patching.entered_if(function, torch.is_grad_enabled))
            self._put_record_function()
        except BaseException:
            self.undo()
            raise

    def _put_record_function(self) -> None:
        namespace = vars(_fsdp_param_group)
        theirs = namespace["record_function"]
        if theirs is not torch.profiler.record_function:
            return
        namespace["record_function"] = calls.record_function

        def undo() -> None:
            if namespace["record_function"] is calls.record_function:
                namespace["record_function"] = theirs

        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _know(parts: list[_Part]) -> None:
    """Tells C++ what FSDP2 consists of: it sees when somebody has replaced a piece that it passes by."""

    def found(paths: Iterable[str]) -> list[tuple[Any, str, Any]]:
        return [
            (owner, name, inspect.getattr_static(owner, name))
            for path in paths
            if _function(path) is not None
            for owner, name in _places(path)
        ]

    ranges = [(_fsdp_param_group, calls.record_function), (torch.profiler, torch.profiler.record_function)]
    passed_by = dict.fromkeys(path for part in parts for path in part.passes_by)
    states = _fsdp_param.ShardedState
    _C.know_fully_shard(
        _fsdp_param.FSDPParam,
        _fsdp_param_group.FSDPParamGroup,
        (states.SHARDED, states.SHARDED_POST_FORWARD, states.UNSHARDED),
        (_fsdp_param.alloc_storage, _fsdp_param.free_storage),
        nn.Module.__setattr__,
        [
            *found(path for path in passed_by if path not in _COLLECTIVES),
            *switches(),
            *((owner, "record_function", value) for owner, value in ranges if _makes_pytorchs_ranges()),
        ],
        found(_COLLECTIVES),
        [(owner, name, _pytorchs_stream(owner, name)) for owner, name in _CPU_STREAMS],
    )


def _pytorchs_stream(owner: Any, name: str) -> Any:
    """What PyTorch has there; something that is never there if that is not what is."""
    found = vars(owner)[name]
    is_own = (
        found.__module__ == torch.cpu.__name__
        if isinstance(found, type)
        else isinstance(found, FunctionType)
        and patching.is_pytorchs(found.__code__)
        and not hasattr(found, "__wrapped__")
    )
    return found if is_own else patching.NOT_PYTORCHS
