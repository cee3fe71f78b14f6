"""The replacements of FSDP2's functions (``fully_shard``) while funcol is under it.

Each function here has the signature and results of PyTorch's function that it replaces, and returns
``NotImplemented`` for calls that PyTorch's function has to run: with extensions of the gather, shards along
other dims than 0, partial sums of replicas, and under modes, transforms, logs and profilers. C++ does the
work of a group of parameters in one call, on the streams and after the events of PyTorch's function.

This module imports FSDP2. :mod:`funcol.installation.fully_shard` installs the replacements.
"""

from __future__ import annotations

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
from .._compat.fully_shard import has_cuspy_observer, type_checker

# FSDP2 switches a type checker of spmd_types off around most of its work. Where it has not, PyTorch's
# functions run, except in pre_forward(), which tells the checker what the parameters are.
_spmd_types = type_checker()
_checks_types: Callable[[], bool] = bool if _spmd_types is None else _spmd_types.is_type_checking

_WITHOUT_TENSORS_INSIDE = frozenset({Tensor, type(None), bool, int, float, str})


def foreach_all_gather(
    fsdp_params: list[Any],
    group: dist.ProcessGroup,
    async_op: bool,
    all_gather_copy_in_stream: Any,
    all_gather_stream: Any,
    device: torch.device,
    all_gather_comm: Any,
) -> Any:
    """Casts each shard to the dtype of the gather as it copies the shard into the input of the all_gather.

    PyTorch counterpart: ``_fsdp_collectives.foreach_all_gather``.
    """
    found = _C.fsdp_shards(fsdp_params)
    if found is NotImplemented:
        return NotImplemented
    dtype, dtypes, lengths, all_lengths = found
    world_size, rank = group.size(), group.rank()
    device_handle = _get_device_handle(device.type)
    with device_handle.stream(all_gather_copy_in_stream):
        output = all_gather_comm.allocate((sum(all_lengths) * world_size,), dtype=dtype, device=device)
        sent = _C.fsdp_copy_in(fsdp_params, output, rank)
    all_gather_stream.wait_stream(all_gather_copy_in_stream)
    with device_handle.stream(all_gather_stream):
        work = all_gather_comm(output_tensor=output, input_tensor=sent, group=group, async_op=async_op)
        event = all_gather_stream.record_event()
        return _fsdp_collectives.AllGatherResult(output, event, work, dtypes, lengths, all_lengths)


def all_gather_output_fn(fsdp_params: list[Any], all_gather_result: Any, world_size: int) -> Any:
    """Replaces ``_fsdp_collectives._default_all_gather_output_fn``."""
    return _C.fsdp_copy_out(
        fsdp_params,
        all_gather_result.all_gather_output,
        all_gather_result.param_all_gather_input_dtypes,
        all_gather_result.param_all_gather_input_numels,
        world_size,
    )


def reduce_scatter_input_fn(fsdp_params: list[Any], unsharded_grads: list[Tensor], world_size: int) -> Any:
    """Replaces ``_fsdp_collectives._default_reduce_scatter_input_fn``."""
    return _C.fsdp_padded_sizes(fsdp_params, unsharded_grads, world_size)


def cast_and_view_sharded_grads(
    reduce_output: Tensor,
    fsdp_params: list[Any],
    padded_unsharded_sizes: Sequence[torch.Size],
    world_size: int,
    consumer_stream: Any,
) -> Any:
    """Accumulates the gradients of the parameters, too. The result is empty, so that ``foreach_reduce`` has
    none to accumulate.

    PyTorch counterpart: ``_fsdp_collectives._cast_and_view_sharded_grads``.
    """
    dtype = _C.fsdp_gradient_type(fsdp_params)
    if dtype is NotImplemented:
        return NotImplemented
    output = reduce_output
    if dtype is not None and output.dtype != dtype:
        output = output.to(dtype)
        _fsdp_collectives.record_grad_output_stream(output, consumer_stream)
    _C.fsdp_accumulate(output, fsdp_params, padded_unsharded_sizes, world_size)
    return []


def reduce_scatter_copy_in(
    unsharded_grads: list[Tensor], reduce_scatter_input: Tensor, world_size: int
) -> Any:
    """Replaces ``_fsdp_collectives.foreach_reduce_scatter_copy_in``."""
    return _C.fsdp_reduce_copy_in(unsharded_grads, reduce_scatter_input, world_size)


def register_post_backward_hook(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Registers the hook for arguments that are not containers, at most one of which needs a gradient.

    PyTorch counterpart: ``FSDPParamGroup._register_post_backward_hook``.
    """
    if (
        not {*map(type, args), *map(type, kwargs.values())} <= _WITHOUT_TENSORS_INSIDE
        or _C.has_active_layers()
    ):
        return NotImplemented
    if not torch.is_grad_enabled():
        return args, kwargs
    needing = [one for one in (*args, *kwargs.values()) if type(one) is Tensor and one.requires_grad]
    if len(needing) != 1 or forward_ad._current_level >= 0:
        return NotImplemented if needing else (args, kwargs)
    only = needing[0]
    if not _checks_types():
        same = RegisterPostBackwardFunction.apply(self, only)
    else:
        with _spmd_types.no_typecheck():
            same = RegisterPostBackwardFunction.apply(self, only)
        _spmd_types.assert_type_like(same, only)
    return (
        tuple(same if one is only else one for one in args),
        {name: same if one is only else one for name, one in kwargs.items()},
    )


class RegisterPostBackwardFunction(torch.autograd.Function):
    """PyTorch's class of this name, for one tensor. It has no ``setup_context``, with which every call would
    look for default arguments."""

    @staticmethod
    def forward(ctx: Any, param_group: Any, only: Tensor) -> Tensor:
        ctx.param_group = param_group
        return only

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _fsdp_param_group.RegisterPostBackwardFunction.backward(ctx, *gradients)


def to_sharded_dtensor(self: Any, tensor: Tensor) -> Any:
    """Replaces ``FSDPParam.to_sharded_dtensor``."""
    return _C.fsdp_sharded_dtensor(self, tensor)


def unshard(self: Any, async_op: bool = False) -> Any:
    """Replaces ``FSDPParamGroup.unshard``."""
    return NotImplemented if _checks_types() else _C.fsdp_unshard(self, async_op)


def wait_for_unshard(self: Any) -> Any:
    """Replaces ``FSDPParamGroup.wait_for_unshard``."""
    return NotImplemented if _checks_types() else _C.fsdp_wait_for_unshard(self)


def _is_logged() -> bool:
    return _fsdp_param_group.logger.isEnabledFor(logging.DEBUG)


def root_pre_forward(self: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Does nothing for a module that is not the root.

    PyTorch counterpart: ``FSDPState._root_pre_forward``.
    """
    context = self._state_ctx
    if self._is_root is not None and context.iter_forward_root is not None:
        return args, kwargs
    is_usual = (
        self._is_root is not None
        and self._device.type == "cpu"  # where inputs are not moved
        and context.post_optim_event is None
        and not _is_logged()
        and not _C.is_profiled()
    )
    if not is_usual:
        return NotImplemented
    context.iter_forward_root = self
    current = self._device_handle.current_stream()
    self._comm_ctx.all_gather_copy_in_stream.wait_stream(current)
    self._comm_ctx.all_gather_stream.wait_stream(current)
    return args, kwargs


def root_post_backward_final_callback(self: Any) -> Any:
    """Replaces ``FSDPState._root_post_backward_final_callback``."""
    context = self._state_ctx
    is_manual = context.manual_backward_finalization_active
    if is_manual is None or _is_logged() or _C.is_profiled():
        return NotImplemented
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
    return None


def cast_forward_inputs(self: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces ``FSDPState._cast_forward_inputs`` for arguments that are not containers."""
    dtype = self._mp_policy.param_dtype
    if not (self._mp_policy.cast_forward_inputs and dtype):
        return args, kwargs
    kinds = {*map(type, args), *map(type, kwargs.values())}
    if not kinds <= _WITHOUT_TENSORS_INSIDE or _C.is_profiled():
        return NotImplemented
    cast = _fsdp_common._cast_fp_tensor
    return tuple(cast(dtype, one) for one in args), {name: cast(dtype, one) for name, one in kwargs.items()}


def cast_output_dtype(self: Any, output: Any) -> Any:
    """Replaces ``FSDPState._cast_output_dtype`` for a tensor."""
    dtype = self._mp_policy.output_dtype
    if dtype is None:
        return output
    if type(output) is not Tensor or _C.is_profiled():
        return NotImplemented
    return _fsdp_common._cast_fp_tensor(dtype, output)


def register_pre_backward_hook(self: Any, output: Any) -> Any:
    """Replaces ``FSDPState._register_pre_backward_hook``."""
    if type(output) is not Tensor or output._base is not None or _C.has_active_layers():
        return NotImplemented
    if output.requires_grad and torch.is_grad_enabled():
        output.register_hook(self._pre_backward)  # type: ignore[no-untyped-call]
    return output


def _is_followed() -> bool:
    return _is_logged() or _checks_types()


def pre_forward(self: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replaces ``FSDPParamGroup.pre_forward``."""
    if _is_logged():
        return NotImplemented
    if not _checks_types():
        is_first = _C.fsdp_pre_forward(self)
    else:
        with _spmd_types.no_typecheck():
            is_first = _C.fsdp_pre_forward(self)
        for fsdp_param in self.fsdp_params if is_first is not NotImplemented else ():
            fsdp_param._restore_spmd_types(fsdp_param.unsharded_param)
    if is_first is NotImplemented:
        return NotImplemented
    return self._register_post_backward_hook(args, kwargs) if is_first else (args, kwargs)


def post_forward(self: Any, module: nn.Module, input: Any, output: Any) -> Any:  # noqa: A002
    """Replaces ``FSDPParamGroup.post_forward``."""
    if _is_followed() or _C.fsdp_post_forward(self) is NotImplemented:
        return NotImplemented
    return output


def pre_backward(self: Any, default_prefetch: bool, *unused: Any) -> Any:
    """Replaces ``FSDPParamGroup.pre_backward``."""
    return NotImplemented if _is_followed() else _C.fsdp_pre_backward(self, default_prefetch)


def post_backward(self: Any, *unused: Any) -> Any:
    """Replaces ``FSDPParamGroup.post_backward``."""
    return NotImplemented if _is_followed() else _C.fsdp_post_backward(self)


_NO_CONTEXT = nullcontext()


def no_typecheck() -> Any:
    """Returns a context that does nothing, unless a type checker is active.

    PyTorch counterpart: ``torch.distributed._spmd_no_typecheck``.
    """
    return NotImplemented if _checks_types() else _NO_CONTEXT


def record_function(name: str, args: str | None = None) -> AbstractContextManager[Any]:
    """Returns a range for profilers; one that does nothing if no profiler is active.

    PyTorch counterpart: ``torch.profiler.record_function``.
    """
    if _C.is_profiled() or has_cuspy_observer():
        return torch.profiler.record_function(name, args)
    return _NO_CONTEXT
