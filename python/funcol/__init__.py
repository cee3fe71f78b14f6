"""PyTorch's functional layer of distributed in C++: collectives that return tensors which wait by themselves.

``import funcol`` replaces ``import torch.distributed._functional_collectives as funcol``.

Type checkers read ``__init__.pyi``, which has the names of ``__all__`` and no others.
"""

import importlib
import sys
import warnings
from typing import Any

import torch
import torch.distributed

from . import _version_check

_version_check.add_libraries(__path__, torch.__version__)

from . import _build_info  # noqa: E402

_version_check.check_torch(_build_info.TORCH_VERSION, torch.__version__, torch.distributed.is_available())

try:
    from . import _C
except ImportError as _error:
    _version_check.refuse_build(__path__, _build_info.TORCH_VERSION, torch.__version__, _error)

from . import collectives, compiled, installation, redistribution  # noqa: E402, F401
from .check import check  # noqa: E402
from .collectives import (  # noqa: E402
    AsyncCollectiveTensor,
    all_gather_into_tensor_coalesced,
    all_gather_single,
    all_gather_single_autograd,
    all_gather_single_coalesced,
    all_gather_tensor,
    all_gather_tensor_autograd,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    all_to_all_single_autograd,
    allow_inflight_collective_as_graph_input_ctx,
    async_tensor,
    broadcast,
    check_agreement,
    gather,
    groups,
    is_pending,
    pending,
    permute_tensor,
    reduce,
    reduce_scatter_single,
    reduce_scatter_single_autograd,
    reduce_scatter_single_coalesced,
    reduce_scatter_tensor,
    reduce_scatter_tensor_autograd,
    reduce_scatter_tensor_coalesced,
    scatter,
    tracing,
    unwaited_collectives,
    wait_tensor,
    wait_tensors,
)
from .collectives.async_tensor import maybe_wrap_tensor as _maybe_wrap_tensor  # noqa: E402, F401
from .collectives.async_tensor import maybe_wrap_tensors as _maybe_wrap_tensors  # noqa: E402, F401
from .collectives.groups import expand_group as _expand_group  # noqa: E402, F401
from .collectives.groups import find_group as _resolve_group  # noqa: E402, F401
from .collectives.groups import find_group_name as _resolve_group_name  # noqa: E402, F401
from .collectives.groups import group_or_group_name as _group_or_group_name  # noqa: E402, F401
from .collectives.tracing import are_we_tracing as _are_we_tracing  # noqa: E402, F401
from .compiled import (  # noqa: E402
    all_gather_inplace,
    all_gather_tensor_inplace,
    all_reduce_inplace,
    all_to_all_inplace,
    batch_p2p_ops_inplace,
    broadcast_inplace,
    irecv_inplace,
    isend_inplace,
    reduce_scatter_inplace,
    reduce_scatter_tensor_inplace,
    remaps,
)
from .installation import install, installed, table_limits, uninstall  # noqa: E402
from .redistribution import cost_models, plan_redistribution, planning  # noqa: E402

__version__ = _build_info.VERSION

_C.set_group_resolver(groups.resolve_group)
groups.watch_group_registry()
tracing.install(compiled.remap_collectives)
async_tensor.settle_before_dlpack()

# Modules that programs and the documentation name without the package that they are in.
for _module in (cost_models, groups, planning, remaps, tracing):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
del _module
sys.modules[f"{__name__}.dropin"] = sys.modules[f"{__name__}.installation"]  # its name up to 0.2


# Names that need DTensor, which takes ten times as long to import as the rest.
_NEED_DTENSOR = {
    "WeightSync": "weights",
    "full_optimizer_state_dict": "weights",
    "full_state_dict": "weights",
    "full_tensors": "weights",
    "load_full_optimizer_state_dict": "weights",
    "load_full_state_dict": "weights",
    "redistribute": "redistribution",
    "redistribute_many": "redistribution",
    "show": "redistribution",
}

# Names that this package had up to 0.2, and the packages that have them now.
_MOVED = {
    "AlphaBeta": "redistribution",
    "AxisCost": "redistribution",
    "CommTensor": "collectives",
    "InFlight": "collectives",
    "LinkCost": "redistribution",
    "MeshChange": "redistribution",
    "Owned": "redistribution",
    "OwnedTensor": "redistribution",
    "PartitionSpec": "redistribution",
    "Plan": "redistribution",
    "RANK_TYPES": "collectives",
    "REDUCE_OP_TO_STR": "compiled",
    "Step": "redistribution",
    "StepCounts": "redistribution",
    "Varying": "redistribution",
    "apply_local_map": "local_map",
    "assign_owners": "redistribution",
    "cancel_dump_pending_on": "collectives",
    "dump_pending": "collectives",
    "dump_pending_on": "collectives",
    "get_local_map_placement_option": "local_map",
    "greedy_redistribution": "redistribution",
    "local_map_hop": "local_map",
    "name_modules": "collectives",
    "plan_mesh_change": "redistribution",
    "record_callers": "collectives",
    "redistribute_local_tensor": "redistribution",
    "redistribute_tensor": "redistribution",
    "traceable_collective_remaps": "compiled",
}

_PACKAGES = ("collectives", "compiled", "installation", "local_map", "redistribution", "sharding", "weights")


def __getattr__(name: str) -> Any:
    if name in _NEED_DTENSOR:
        importlib.import_module("torch.distributed.tensor")  # install() may wait for it
        found = getattr(importlib.import_module(f".{_NEED_DTENSOR[name]}", __name__), name)
        globals()[name] = found  # from now on without this function
        return found
    if name in _MOVED:
        package = f"{__name__}.{_MOVED[name]}"
        warnings.warn(
            f"{__name__}.{name} has moved: use {package}.{name}. The old name goes with funcol 0.4.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(package), name)
    if name == "dropin":
        warnings.warn(
            f"{__name__}.dropin is called {__name__}.installation now. The old name goes with funcol 0.4.",
            DeprecationWarning,
            stacklevel=2,
        )
        return sys.modules[f"{__name__}.installation"]
    if name in _PACKAGES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])


__all__ = [
    "AsyncCollectiveTensor",
    "WeightSync",
    "all_gather_inplace",
    "all_gather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "all_gather_tensor",
    "all_gather_tensor_autograd",
    "all_gather_tensor_inplace",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_inplace",
    "all_to_all",
    "all_to_all_inplace",
    "all_to_all_single",
    "all_to_all_single_autograd",
    "allow_inflight_collective_as_graph_input_ctx",
    "batch_p2p_ops_inplace",
    "broadcast",
    "broadcast_inplace",
    "check",
    "check_agreement",
    "full_optimizer_state_dict",
    "full_state_dict",
    "full_tensors",
    "gather",
    "install",
    "installed",
    "irecv_inplace",
    "is_pending",
    "isend_inplace",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "pending",
    "permute_tensor",
    "plan_redistribution",
    "redistribute",
    "redistribute_many",
    "reduce",
    "reduce_scatter_inplace",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_autograd",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_inplace",
    "scatter",
    "show",
    "table_limits",
    "uninstall",
    "unwaited_collectives",
    "wait_tensor",
    "wait_tensors",
]
