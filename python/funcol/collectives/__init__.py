"""The functional collectives, the tensors that they return, their groups, and the collectives in flight.

PyTorch counterpart: ``torch.distributed._functional_collectives``.
"""

from . import async_tensor, functions, in_flight
from .async_tensor import *  # noqa: F403
from .comm_tensor import CommTensor
from .functions import *  # noqa: F403
from .groups import RANK_TYPES, RankTypes
from .in_flight import *  # noqa: F403
from .tracing import allow_inflight_collective_as_graph_input_ctx

__all__ = [
    *async_tensor.__all__,
    *functions.__all__,
    *in_flight.__all__,
    "RANK_TYPES",
    "CommTensor",
    "RankTypes",
    "allow_inflight_collective_as_graph_input_ctx",
]
