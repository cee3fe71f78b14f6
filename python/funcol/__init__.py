"""PyTorch's functional layer of distributed in C++: collectives that return tensors which wait by themselves.

``import funcol`` in place of ``import torch.distributed._functional_collectives as funcol``.
"""

import torch
import torch.distributed

from . import _build_info, _version_check

_version_check.check_torch(_build_info.TORCH_VERSION, torch.__version__, torch.distributed.is_available())

from . import _C, _compat, groups, tracing  # noqa: E402
from .async_tensor import AsyncCollectiveTensor, is_pending, wait_tensor, wait_tensors  # noqa: E402
from .collectives import (  # noqa: E402
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_gather_single_coalesced,
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_single,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
)
from .dropin import install, installed, uninstall  # noqa: E402

__version__ = _build_info.VERSION

_C.set_group_resolver(groups.resolve_group)
_compat.watch_group_registry(_C.forget_groups, _C.remember_groups)
_compat.mark_side_effects()
_compat.settle_before_higher_order_ops(_C.settle)
tracing.install()

__all__ = [
    "AsyncCollectiveTensor",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "broadcast",
    "install",
    "installed",
    "is_pending",
    "permute_tensor",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "uninstall",
    "wait_tensor",
    "wait_tensors",
]
