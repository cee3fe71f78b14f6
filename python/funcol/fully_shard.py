"""What stands under PyTorch's FSDP2 (``fully_shard``) while :func:`funcol.install` is in effect.

FSDP2's hooks decide as before what is gathered and reduced when. Taken over is what they do for every
parameter of a group, in C++ for the group at once, and how a group gathers and reduces: on the same streams,
after the same events. Each function here has the signature and results of the one of PyTorch that it stands
in for, and asks that one for what is uncommon: extensions of the gather, parameters on the CPU beside a GPU,
shards along other dims than 0, several types in one gather, replicas, modes, transforms and profilers that
watch.

This module imports FSDP2. A function of PyTorch is taken over if it, and what it would have called, are
known (:data:`funcol._compat_fully_shard.KNOWN`); the rest stays PyTorch's.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard import (
    _fsdp_collectives,
    _fsdp_common,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
)

from . import _C, _compat, _compat_fully_shard

_MODULES: list[Any] = [
    _fsdp_collectives,
    _fsdp_param,
    _fsdp_param_group,
    _fsdp_state,
    _fsdp_common,
    dist,
]


def _owner_and_name(path: str) -> tuple[Any, str]:
    """Where ``path``, a function's name or ``Class.method``, is looked up."""
    first, _, method = path.partition(".")
    owner = next((module for module in _MODULES if first in vars(module)), None)
    return (vars(owner)[first], method) if owner is not None and method else (owner, first)


def _looked_up(path: str) -> Any:
    owner, name = _owner_and_name(path)
    return None if owner is None else vars(owner).get(name)


def _function(path: str) -> Any:
    """PyTorch's function, without decorators; None if there is none."""
    found = _looked_up(path)
    while hasattr(found, "__wrapped__"):
        found = found.__wrapped__
    return found


class _Part(NamedTuple):
    """A function of PyTorch, what stands in for it, and what else it calls for every parameter."""

    theirs: str
    ours: Callable[..., Any]
    passes_by: tuple[str, ...] = ()

    def is_known(self) -> bool:
        paths = (self.theirs, *self.passes_by)
        return _function(self.theirs) is not None and all(
            _compat_fully_shard.is_known(path, _function(path)) for path in paths
        )


_stock: dict[str, Callable[..., Any]] = {}


def foreach_all_gather(
    fsdp_params: list[Any],
    group: dist.ProcessGroup,
    async_op: bool,
    all_gather_copy_in_stream: Any,
    all_gather_stream: Any,
    device: torch.device,
    all_gather_comm: Any,
) -> Any:
    """Casts to the type of the gather and copies to where it begins are one copy here.

    PyTorch counterpart: ``_fsdp_collectives.foreach_all_gather``.
    """
    found = _C.fsdp_shards(fsdp_params)
    if found is NotImplemented:
        return _stock["foreach_all_gather"](
            fsdp_params,
            group,
            async_op,
            all_gather_copy_in_stream,
            all_gather_stream,
            device,
            all_gather_comm,
        )
    shards, dtype, dtypes, lengths, all_lengths = found
    world_size, rank = group.size(), group.rank()
    device_handle = _get_device_handle(device.type)
    with device_handle.stream(all_gather_copy_in_stream):
        output = all_gather_comm.allocate((sum(all_lengths) * world_size,), dtype=dtype, device=device)
        sent = _C.fsdp_copy_in(shards, output, all_lengths, rank)
    all_gather_stream.wait_stream(all_gather_copy_in_stream)
    with device_handle.stream(all_gather_stream):
        work = all_gather_comm(output_tensor=output, input_tensor=sent, group=group, async_op=async_op)
        event = all_gather_stream.record_event()
        return _fsdp_collectives.AllGatherResult(output, event, work, dtypes, lengths, all_lengths)


def all_gather_output_fn(fsdp_params: list[Any], all_gather_result: Any, world_size: int) -> None:
    """PyTorch counterpart: ``_fsdp_collectives._default_all_gather_output_fn``."""
    done = _C.fsdp_copy_out(
        fsdp_params,
        all_gather_result.all_gather_output,
        all_gather_result.param_all_gather_input_dtypes,
        all_gather_result.param_all_gather_input_numels,
        world_size,
    )
    if done is NotImplemented:
        _stock["_default_all_gather_output_fn"](fsdp_params, all_gather_result, world_size)


def to_sharded(self: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup._to_sharded``."""
    if _C.fsdp_to_sharded(self) is NotImplemented:
        _stock["FSDPParamGroup._to_sharded"](self)


def to_unsharded(self: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup._to_unsharded``."""
    if _C.fsdp_to_unsharded(self) is NotImplemented:
        _stock["FSDPParamGroup._to_unsharded"](self)


def take_unsharded_grads_to_reduce(self: Any) -> tuple[list[Any], list[Tensor]]:
    """PyTorch counterpart: ``FSDPParamGroup._take_unsharded_grads_to_reduce``."""
    taken = _C.fsdp_take_gradients(self)
    if taken is NotImplemented:
        taken = _stock["FSDPParamGroup._take_unsharded_grads_to_reduce"](self)
    return taken  # type: ignore[no-any-return]


def reduce_scatter_input_fn(
    fsdp_params: list[Any], unsharded_grads: list[Tensor], world_size: int
) -> tuple[torch.Size, ...]:
    """PyTorch counterpart: ``_fsdp_collectives._default_reduce_scatter_input_fn``."""
    sizes = _C.fsdp_padded_sizes(fsdp_params, unsharded_grads, world_size)
    if sizes is NotImplemented:
        sizes = _stock["_default_reduce_scatter_input_fn"](fsdp_params, unsharded_grads, world_size)
    return sizes  # type: ignore[no-any-return]


def cast_and_view_sharded_grads(
    reduce_output: Tensor,
    fsdp_params: list[Any],
    padded_unsharded_sizes: Sequence[torch.Size],
    world_size: int,
    consumer_stream: Any,
) -> list[Tensor]:
    """Gives the parameters their gradients, too, which leaves ``foreach_reduce`` none to do that with.

    PyTorch counterpart: ``_fsdp_collectives._cast_and_view_sharded_grads``.
    """
    dtype = _C.fsdp_gradient_type(fsdp_params)
    if dtype is NotImplemented:
        return _stock["_cast_and_view_sharded_grads"](  # type: ignore[no-any-return]
            reduce_output, fsdp_params, padded_unsharded_sizes, world_size, consumer_stream
        )
    output = reduce_output
    if dtype is not None and output.dtype != dtype:
        output = output.to(dtype)
        _fsdp_collectives.record_grad_output_stream(output, consumer_stream)
    _C.fsdp_accumulate(output, fsdp_params, padded_unsharded_sizes, world_size)
    return []


def reduce_scatter_copy_in(
    unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int
) -> None:
    """PyTorch counterpart: ``_fsdp_collectives.foreach_reduce_scatter_copy_in``."""
    if _C.fsdp_reduce_copy_in(unsharded_grads, reduce_scatter_input, world_size) is NotImplemented:
        _stock["foreach_reduce_scatter_copy_in"](unsharded_grads, reduce_scatter_input, world_size)


def register_post_backward_hook(
    self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """PyTorch counterpart: ``FSDPParamGroup._register_post_backward_hook``."""
    only = args[0] if len(args) == 1 and not kwargs else None
    if type(only) is not Tensor or _C.is_watched() or forward_ad._current_level >= 0:
        return _stock["FSDPParamGroup._register_post_backward_hook"](  # type: ignore[no-any-return]
            self, args, kwargs
        )
    if not (torch.is_grad_enabled() and only.requires_grad):
        return args, kwargs
    return (RegisterPostBackwardFunction.apply(self, only),), kwargs


class RegisterPostBackwardFunction(torch.autograd.Function):
    """PyTorch's own, for one tensor; with a ``setup_context`` every call would look for default arguments."""

    @staticmethod
    def forward(ctx: Any, param_group: Any, only: Tensor) -> Tensor:
        ctx.param_group = param_group
        return only

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _fsdp_param_group.RegisterPostBackwardFunction.backward(ctx, *gradients)


def to_sharded_dtensor(self: Any, tensor: Tensor) -> Any:
    """PyTorch counterpart: ``FSDPParam.to_sharded_dtensor``."""
    dtensor = _C.fsdp_sharded_dtensor(self, tensor)
    return _stock["FSDPParam.to_sharded_dtensor"](self, tensor) if dtensor is NotImplemented else dtensor


def unshard(self: Any, async_op: bool = False) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.unshard``."""
    if _C.fsdp_unshard(self, async_op) is NotImplemented:
        _stock["FSDPParamGroup.unshard"](self, async_op)


def wait_for_unshard(self: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.wait_for_unshard``."""
    if _C.fsdp_wait_for_unshard(self) is NotImplemented:
        _stock["FSDPParamGroup.wait_for_unshard"](self)


def post_backward(self: Any, *unused: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.post_backward``."""
    if _fsdp_param_group.logger.isEnabledFor(logging.DEBUG) or _C.fsdp_post_backward(self) is NotImplemented:
        _stock["FSDPParamGroup.post_backward"](self, *unused)


_NOTHING = nullcontext()


def no_typecheck() -> AbstractContextManager[None]:
    """Where there is no package whose types could be checked."""
    return _NOTHING


def record_function(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    """A range for profilers where one is active."""
    if (
        _C.is_recorded()
        or getattr(torch.autograd.profiler, "_active_cuspy_profiler_observer", None) is not None
    ):
        return torch.profiler.record_function(name, args)
    return _NOTHING


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
# What a group has its collectives done by, which is passed by as long as nobody has put something in its place.
_COLLECTIVES = (
    "DefaultAllocMixin.allocate",
    "DefaultAllGather.__call__",
    "DefaultReduceScatter.__call__",
    "all_gather_single",
    "reduce_scatter_single",
)

_PARTS = [
    _Part(
        "FSDPParamGroup.unshard",
        unshard,
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
        wait_for_unshard,
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
        post_backward,
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
    _Part("foreach_all_gather", foreach_all_gather, _TO_GATHER),
    _Part("_default_all_gather_output_fn", all_gather_output_fn, _TO_COPY_OUT),
    _Part("FSDPParamGroup._to_sharded", to_sharded, _TO_SHARD),
    _Part("FSDPParamGroup._to_unsharded", to_unsharded, _TO_UNSHARD),
    _Part("FSDPParamGroup._take_unsharded_grads_to_reduce", take_unsharded_grads_to_reduce, _TO_TAKE),
    _Part("_default_reduce_scatter_input_fn", reduce_scatter_input_fn, ("_get_dim0_padded_size",)),
    _Part("_cast_and_view_sharded_grads", cast_and_view_sharded_grads, _TO_HAND_OUT),
    _Part("foreach_reduce_scatter_copy_in", reduce_scatter_copy_in),
    _Part(
        "FSDPParamGroup._register_post_backward_hook",
        register_post_backward_hook,
        tuple(f"RegisterPostBackwardFunction.{name}" for name in ("forward", "setup_context", "backward")),
    ),
    _Part(
        "FSDPParam.to_sharded_dtensor",
        to_sharded_dtensor,
        ("_from_local_no_grad", "_get_dtensor_spec_with_dtype"),
    ),
    _Part("_spmd_no_typecheck", no_typecheck),
]

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
    wrappers = [_function(path) for path in _WRAPPERS if _compat_fully_shard.is_known(path, _function(path))]
    codes = [code for wrapper in wrappers if wrapper is not None for code in wrapper.__code__.co_consts]
    return [path for path in _HOOKS if getattr(_looked_up(path), "__code__", None) in codes]


def _known_parts() -> list[_Part]:
    checks_types = getattr(dist, "_is_spmd_types_available", bool)()
    return [part for part in _PARTS if part.is_known() and not (checks_types and part.ours is no_typecheck)]


def taken_over() -> tuple[list[str], list[str]]:
    """Names of PyTorch's functions that funcol stands in for, and of those that it does in other minors."""
    taken = list(_names_put) or [part.theirs for part in _known_parts()] + _wrapped_hooks()
    everything = [part.theirs for part in _PARTS] + list(_HOOKS)
    return taken, [name for name in everything if name not in taken]


_names_put: list[str] = []  # while funcol is under FSDP2, whose functions then look different


class UnderFullyShard:
    """funcol put under FSDP2, until :meth:`undo`."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        parts = _known_parts()
        hooks = _wrapped_hooks()
        _know(parts)
        _names_put[:] = [part.theirs for part in parts] + hooks
        self._undo.append(_names_put.clear)
        try:
            for part in parts:
                theirs = _function(part.theirs)
                _stock[part.theirs] = _compat.copied(theirs)
                self._undo.append(_compat.redirected(theirs, part.ours))
            for path in hooks:
                self._undo.append(_compat.called_directly(_looked_up(path), _is_outside_dynamo))
            for function in filter(_compat.is_in_context, map(_looked_up, _WITHOUT_GRADIENTS)):
                self._undo.append(_compat.entered_if(function, torch.is_grad_enabled))
            self._put_record_function()
        except BaseException:
            self.undo()
            raise

    def _put_record_function(self) -> None:
        namespace = vars(_fsdp_param_group)
        theirs = namespace["record_function"]
        if theirs is not torch.profiler.record_function:
            return
        namespace["record_function"] = record_function

        def undo() -> None:
            if namespace["record_function"] is record_function:
                namespace["record_function"] = theirs

        self._undo.append(undo)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _know(parts: list[_Part]) -> None:
    """Tells C++ what FSDP2 consists of: it sees when somebody has replaced a piece that it passes by."""

    def found(paths: Iterable[str]) -> list[tuple[Any, str, Any]]:
        places = [_owner_and_name(path) for path in paths if _function(path) is not None]
        return [(owner, name, vars(owner)[name]) for owner, name in places]

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
            *_compat_fully_shard.switches(),
        ],
        found(_COLLECTIVES),
        [(owner, name, vars(owner)[name]) for owner, name in _CPU_STREAMS],
    )
