"""What stands in for functions of PyTorch's FSDP2 (``fully_shard``) while funcol is under it.

Each function here has the signature and results of the one of PyTorch that it stands in for, and asks that
one for what is uncommon: extensions of the gather, parameters on the CPU beside a GPU, shards along other
dims than 0, several types in one gather, replicas, modes, transforms, logs and profilers that watch. What is
done for a group of parameters is one call of C++, on the same streams and after the same events.

This module imports FSDP2. :mod:`funcol.dropin.fully_shard` puts the functions in place.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_common, _fsdp_param_group

from .. import _C

# Whether a package checks types on this thread, to which FSDP2 then has something to say.
checks_types: Callable[[], bool] = bool
if getattr(dist, "_is_spmd_types_available", bool)():
    checks_types = importlib.import_module("spmd_types").is_type_checking  # FSDP2 has imported it

# PyTorch's functions as they were, by their names.
stock: dict[str, Callable[..., Any]] = {}


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
        return stock["foreach_all_gather"](
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
        stock["_default_all_gather_output_fn"](fsdp_params, all_gather_result, world_size)


def to_sharded(self: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup._to_sharded``."""
    if _C.fsdp_to_sharded(self) is NotImplemented:
        stock["FSDPParamGroup._to_sharded"](self)


def to_unsharded(self: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup._to_unsharded``."""
    if _C.fsdp_to_unsharded(self) is NotImplemented:
        stock["FSDPParamGroup._to_unsharded"](self)


def take_unsharded_grads_to_reduce(self: Any) -> tuple[list[Any], list[Tensor]]:
    """PyTorch counterpart: ``FSDPParamGroup._take_unsharded_grads_to_reduce``."""
    taken = _C.fsdp_take_gradients(self)
    if taken is NotImplemented:
        taken = stock["FSDPParamGroup._take_unsharded_grads_to_reduce"](self)
    return taken  # type: ignore[no-any-return]


def reduce_scatter_input_fn(
    fsdp_params: list[Any], unsharded_grads: list[Tensor], world_size: int
) -> tuple[torch.Size, ...]:
    """PyTorch counterpart: ``_fsdp_collectives._default_reduce_scatter_input_fn``."""
    sizes = _C.fsdp_padded_sizes(fsdp_params, unsharded_grads, world_size)
    if sizes is NotImplemented:
        sizes = stock["_default_reduce_scatter_input_fn"](fsdp_params, unsharded_grads, world_size)
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
        return stock["_cast_and_view_sharded_grads"](  # type: ignore[no-any-return]
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
        stock["foreach_reduce_scatter_copy_in"](unsharded_grads, reduce_scatter_input, world_size)


def register_post_backward_hook(
    self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """PyTorch counterpart: ``FSDPParamGroup._register_post_backward_hook``."""
    only = args[0] if len(args) == 1 and not kwargs else None
    if type(only) is not Tensor or _C.is_watched() or forward_ad._current_level >= 0 or checks_types():
        return stock["FSDPParamGroup._register_post_backward_hook"](  # type: ignore[no-any-return]
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
    return stock["FSDPParam.to_sharded_dtensor"](self, tensor) if dtensor is NotImplemented else dtensor


def unshard(self: Any, async_op: bool = False) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.unshard``."""
    if checks_types() or _C.fsdp_unshard(self, async_op) is NotImplemented:
        stock["FSDPParamGroup.unshard"](self, async_op)


def wait_for_unshard(self: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.wait_for_unshard``."""
    if checks_types() or _C.fsdp_wait_for_unshard(self) is NotImplemented:
        stock["FSDPParamGroup.wait_for_unshard"](self)


def _is_logged() -> bool:
    return _fsdp_param_group.logger.isEnabledFor(logging.DEBUG)


def _is_followed() -> bool:
    return _is_logged() or checks_types()


def root_pre_forward(
    self: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """PyTorch counterpart: ``FSDPState._root_pre_forward``, which nothing but a root has to do."""
    context = self._state_ctx
    if self._is_root is not None and context.iter_forward_root is not None:
        return args, kwargs
    is_usual = (
        self._is_root is not None
        and self._device.type == "cpu"  # where inputs are not moved
        and context.post_optim_event is None
        and not _is_logged()
        and not _C.is_recorded()
    )
    if not is_usual:
        return stock["FSDPState._root_pre_forward"](self, module, args, kwargs)  # type: ignore[no-any-return]
    context.iter_forward_root = self
    current = self._device_handle.current_stream()
    self._comm_ctx.all_gather_copy_in_stream.wait_stream(current)
    self._comm_ctx.all_gather_stream.wait_stream(current)
    return args, kwargs


def root_post_backward_final_callback(self: Any) -> None:
    """PyTorch counterpart: ``FSDPState._root_post_backward_final_callback``."""
    context = self._state_ctx
    is_manual = context.manual_backward_finalization_active
    if is_manual is None or _is_logged() or _C.is_recorded():
        stock["FSDPState._root_post_backward_final_callback"](self)
        return
    states = _fsdp_common.TrainingState
    context.iter_forward_root = None
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        for group in reversed(state._fsdp_param_groups):
            if group._training_state != states.POST_BACKWARD:
                if is_manual and group.reduce_grads:
                    group._post_backward_pending = True
                else:
                    group.post_backward()
            group._training_state = states.IDLE
        state._training_state = states.IDLE
    if context.is_last_backward and not is_manual:
        self.wait_for_gradient_reduction()
    else:
        self._comm_ctx.release_all_gather_state_on_current_stream()
    context.post_backward_final_callback_queued = False


def register_pre_backward_hook(self: Any, output: Any) -> Any:
    """PyTorch counterpart: ``FSDPState._register_pre_backward_hook``."""
    if type(output) is not Tensor or output._base is not None or _C.is_watched():
        return stock["FSDPState._register_pre_backward_hook"](self, output)
    if output.requires_grad and torch.is_grad_enabled():
        output.register_hook(self._pre_backward)  # type: ignore[no-untyped-call]
    return output


def pre_forward(
    self: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """PyTorch counterpart: ``FSDPParamGroup.pre_forward``."""
    is_first = NotImplemented if _is_followed() else _C.fsdp_pre_forward(self)
    if is_first is NotImplemented:
        return stock["FSDPParamGroup.pre_forward"](self, module, args, kwargs)  # type: ignore[no-any-return]
    if is_first:
        args, kwargs = self._register_post_backward_hook(args, kwargs)
    return args, kwargs


def post_forward(self: Any, module: nn.Module, input: Any, output: Any) -> Any:  # noqa: A002
    """PyTorch counterpart: ``FSDPParamGroup.post_forward``."""
    if _is_followed() or _C.fsdp_post_forward(self) is NotImplemented:
        return stock["FSDPParamGroup.post_forward"](self, module, input, output)
    return output


def pre_backward(self: Any, default_prefetch: bool, *unused: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.pre_backward``."""
    if _is_followed() or _C.fsdp_pre_backward(self, default_prefetch) is NotImplemented:
        stock["FSDPParamGroup.pre_backward"](self, default_prefetch, *unused)


def post_backward(self: Any, *unused: Any) -> None:
    """PyTorch counterpart: ``FSDPParamGroup.post_backward``."""
    if _is_followed() or _C.fsdp_post_backward(self) is NotImplemented:
        stock["FSDPParamGroup.post_backward"](self, *unused)


_NOTHING = nullcontext()


def no_typecheck() -> AbstractContextManager[None]:
    """What keeps types from being checked, while they are.

    PyTorch counterpart: ``torch.distributed._spmd_no_typecheck``.
    """
    return stock["_spmd_no_typecheck"]() if checks_types() else _NOTHING


def record_function(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    """A range for profilers where one is active."""
    if (
        _C.is_recorded()
        or getattr(torch.autograd.profiler, "_active_cuspy_profiler_observer", None) is not None
    ):
        return torch.profiler.record_function(name, args)
    return _NOTHING
