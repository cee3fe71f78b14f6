"""The functional collectives, the tensors that they return, their groups, and the collectives in flight.

PyTorch counterpart: ``torch.distributed._functional_collectives``.
"""

from . import functions
from .async_tensor import (
    AsyncCollectiveTensor,
    is_pending,
    unwaited_collectives,
    wait_tensor,
    wait_tensors,
)
from .comm_tensor import CommTensor
from .functions import *  # noqa: F403
from .groups import RANK_TYPES, RankTypes
from .in_flight import (
    InFlight,
    cancel_dump_pending_on,
    check_agreement,
    dump_pending,
    dump_pending_on,
    name_modules,
    pending,
    record_callers,
)
from .tracing import allow_inflight_collective_as_graph_input_ctx

__all__ = [
    *functions.__all__,
    "RANK_TYPES",
    "AsyncCollectiveTensor",
    "CommTensor",
    "InFlight",
    "RankTypes",
    "allow_inflight_collective_as_graph_input_ctx",
    "cancel_dump_pending_on",
    "check_agreement",
    "dump_pending",
    "dump_pending_on",
    "is_pending",
    "name_modules",
    "pending",
    "record_callers",
    "unwaited_collectives",
    "wait_tensor",
    "wait_tensors",
]
