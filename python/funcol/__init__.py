"""PyTorch's functional layer of distributed in C++: collectives that return tensors which wait by themselves.

``import funcol`` in place of ``import torch.distributed._functional_collectives as funcol``.
"""

import importlib
import sys
from typing import TYPE_CHECKING, Any

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

from . import compiled  # noqa: E402
from .collectives import *  # noqa: E402, F403
from .collectives import dlpack, functions, group_registry, groups, tracing  # noqa: E402
from .collectives.agreement import check_agreement  # noqa: E402
from .collectives.async_tensor import (  # noqa: E402
    AsyncCollectiveTensor,
    is_pending,
    unwaited_collectives,
    wait_tensor,
    wait_tensors,
)
from .collectives.async_tensor import maybe_wrap_tensor as _maybe_wrap_tensor  # noqa: E402, F401
from .collectives.async_tensor import maybe_wrap_tensors as _maybe_wrap_tensors  # noqa: E402, F401
from .collectives.comm_tensor import CommTensor  # noqa: E402
from .collectives.groups import RANK_TYPES  # noqa: E402
from .collectives.groups import expand_group as _expand_group  # noqa: E402, F401
from .collectives.groups import find_group as _resolve_group  # noqa: E402, F401
from .collectives.groups import find_group_name as _resolve_group_name  # noqa: E402, F401
from .collectives.groups import group_or_group_name as _group_or_group_name  # noqa: E402, F401
from .collectives.in_flight import (  # noqa: E402
    InFlight,
    cancel_dump_pending_on,
    dump_pending,
    dump_pending_on,
    name_modules,
    pending,
    record_callers,
)
from .collectives.tracing import allow_inflight_collective_as_graph_input_ctx  # noqa: E402
from .collectives.tracing import are_we_tracing as _are_we_tracing  # noqa: E402, F401
from .compiled import remaps  # noqa: E402
from .compiled.remaps import (  # noqa: E402
    REDUCE_OP_TO_STR,
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
    traceable_collective_remaps,
)
from .dropin import install, installed, uninstall  # noqa: E402
from .redistribution import cost_models, planning  # noqa: E402
from .redistribution.cost_models import AlphaBeta, AxisCost, LinkCost, StepCounts  # noqa: E402
from .redistribution.mesh_changes import MeshChange, plan_mesh_change  # noqa: E402
from .redistribution.owners import Owned, OwnedTensor, assign_owners  # noqa: E402
from .redistribution.planning import (  # noqa: E402
    Plan,
    Step,
    greedy_redistribution,
    plan_redistribution,
)

if TYPE_CHECKING:
    from .local_map import apply_local_map
    from .local_map.options import get_local_map_placement_option
    from .local_map.tracing import local_map_hop
    from .redistribution import (
        redistribute,
        redistribute_local_tensor,
        redistribute_many,
        redistribute_tensor,
        show,
    )
    from .redistribution.partition_specs import PartitionSpec, Varying
    from .weights import (
        full_optimizer_state_dict,
        full_state_dict,
        full_tensors,
        load_full_optimizer_state_dict,
        load_full_state_dict,
    )

__version__ = _build_info.VERSION

_C.set_group_resolver(groups.resolve_group)
group_registry.watch_group_registry(
    added=_C.note_group_added,
    removing=_C.note_group_removed,
    removing_all=_C.note_all_groups_removed,
    ending=_C.note_group_ended,
    changed=_C.forget_groups,
    remember=_C.remember_groups,
)
tracing.install(compiled.remap_collectives)
dlpack.install()

# Modules that programs and the documentation name without the package that they are in.
for _module in (cost_models, groups, planning, remaps, tracing):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
del _module


# DTensor takes ten times as long to import as all of this.
_NEED_DTENSOR = {
    "PartitionSpec": "redistribution.partition_specs",
    "Varying": "redistribution.partition_specs",
    "apply_local_map": "local_map",
    "full_optimizer_state_dict": "weights",
    "full_state_dict": "weights",
    "full_tensors": "weights",
    "get_local_map_placement_option": "local_map.options",
    "load_full_optimizer_state_dict": "weights",
    "load_full_state_dict": "weights",
    "local_map_hop": "local_map.tracing",
    "redistribute": "redistribution",
    "redistribute_local_tensor": "redistribution",
    "redistribute_many": "redistribution",
    "redistribute_tensor": "redistribution",
    "show": "redistribution",
}


def __getattr__(name: str) -> Any:
    if name in _NEED_DTENSOR:
        importlib.import_module("torch.distributed.tensor")  # install() may wait for it
        found = getattr(importlib.import_module(f".{_NEED_DTENSOR[name]}", __name__), name)
        globals()[name] = found  # from now on without this function
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    *functions.__all__,
    "RANK_TYPES",
    "REDUCE_OP_TO_STR",
    "AlphaBeta",
    "AsyncCollectiveTensor",
    "AxisCost",
    "CommTensor",
    "InFlight",
    "LinkCost",
    "MeshChange",
    "Owned",
    "OwnedTensor",
    "PartitionSpec",
    "Plan",
    "Step",
    "StepCounts",
    "Varying",
    "all_gather_inplace",
    "all_gather_tensor_inplace",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "allow_inflight_collective_as_graph_input_ctx",
    "apply_local_map",
    "assign_owners",
    "batch_p2p_ops_inplace",
    "broadcast_inplace",
    "cancel_dump_pending_on",
    "check_agreement",
    "full_optimizer_state_dict",
    "full_state_dict",
    "full_tensors",
    "dump_pending",
    "dump_pending_on",
    "get_local_map_placement_option",
    "greedy_redistribution",
    "install",
    "installed",
    "irecv_inplace",
    "is_pending",
    "isend_inplace",
    "load_full_optimizer_state_dict",
    "load_full_state_dict",
    "local_map_hop",
    "plan_mesh_change",
    "name_modules",
    "pending",
    "plan_redistribution",
    "record_callers",
    "redistribute",
    "redistribute_local_tensor",
    "redistribute_many",
    "redistribute_tensor",
    "reduce_scatter_inplace",
    "reduce_scatter_tensor_inplace",
    "show",
    "traceable_collective_remaps",
    "uninstall",
    "unwaited_collectives",
    "wait_tensor",
    "wait_tensors",
]
