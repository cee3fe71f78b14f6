"""DTensor's methods, operators and redistributions, and many weights at once."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from .planner import AlphaBeta, StepCounts
from .propagation import ShardingEngine, UpstreamRules

# These return NotImplemented for calls that PyTorch's own function has to run.
def dtensor_to_local(dtensor: Any, grad_placements: Any, /) -> Any: ...
def dtensor_from_local(
    local: Tensor, device_mesh: Any, placements: Any, shape: Any, stride: Any, grad_placements: Any, /
) -> Any: ...
def redistribute_dtensor(
    dtensor: Any,
    mesh: Any,
    placements: Any,
    shard_order: Any,
    forward_dtype: torch.dtype | None,
    backward_dtype: torch.dtype | None,
    async_op: bool,
    model: AlphaBeta | StepCounts | None,
    max_bytes: int | None,
    /,
) -> Any: ...
def distribute_tensor(
    tensor: Tensor, mesh: Any, placements: Sequence[Any] | None, src_data_rank: int | None, /
) -> Any: ...
def dtensor_full_tensor(dtensor: Any, grad_placements: Any, /) -> Any: ...
def are_on_one_mesh(tensors: Sequence[Any]) -> bool: ...

# DTensor's operators in C++: see installation.native_operators.
def install_native_operators(
    dispatcher: Any,
    propagator: Any,
    logger: Any,
    copies: set[Any],
    decide: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    draw: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any],
    default_handler: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    is_unmodified: Callable[[], bool],
    query_rule: Callable[[Any, tuple[Any, ...], dict[str, Any], int | None], Any],
    forget_upstream_decisions: Callable[[], None],
    engine: ShardingEngine,
    rules: UpstreamRules | None,
) -> None: ...
def remove_native_operators() -> None: ...
def has_native_operators() -> bool: ...
def operator_counts() -> dict[str, dict[str, int]]: ...
def forget_operator_counts() -> None: ...
def forget_call_plans() -> None: ...
def forget_upstream_decisions_later() -> None:
    """Empties PyTorch's table of decisions before the next call that falls back to PyTorch on this thread."""

def table_sizes() -> dict[str, int]:
    """Returns the number of entries of each table about DTensors that lives as long as the process."""

def table_bytes() -> dict[str, int]:
    """Returns an estimate of the bytes that each table takes."""

def table_limits() -> dict[str, int]: ...
def set_table_limit(name: str, bytes: int, /) -> None: ...
def has_active_layers() -> bool:
    """Returns true if a mode, transform or tracer observes the operators that run on this thread."""

def redistribute_local_tensor(
    local: Tensor,
    src_spec: Any,
    dst_spec: Any,
    async_op: bool,
    model: AlphaBeta | StepCounts | None,
    max_bytes: int | None,
    is_explicit: bool,
    lenient: bool,
    /,
) -> Any: ...
def redistribute_local_tensors(
    locals: list[Tensor],
    src_specs: list[Any],
    dst_specs: list[Any],
    async_op: bool,
    model: AlphaBeta | StepCounts | tuple[Any, Any] | None,
    max_bytes: int | None,
    is_explicit: bool,
    /,
) -> Any:
    """Redistributes the local tensors. Between meshes, ``model`` is a pair of models."""

def redistribute_many(
    dtensors: list[Any],
    device_mesh: DeviceMesh | None,
    placements: list[tuple[Any, ...]],
    order: Any,
    async_op: bool,
    model: AlphaBeta | StepCounts | tuple[Any, Any] | None,
    max_bytes: int | None,
    /,
) -> Any:
    """Redistributes DTensors to ``device_mesh``, or on their own mesh if it is ``None``. Returns
    ``NotImplemented``, with nothing done, for masks and symbolic sizes; ``None`` if a gradient is to be
    recorded or something observes operators."""

def clear_tables() -> None: ...

# Full tensors, for every rank, for one rank, or for owners.
EVERY_RANK: int
NO_RANK: int
"""The owners of a full tensor that every rank gets, or none."""

class FullTensorBucket:
    """DTensors on any meshes whose full tensors all ranks get, or one: moved together, taken one by one."""

    def __init__(self) -> None: ...
    def add(self, dtensor: Any, owner: int, dtype: torch.dtype | None, most: int) -> int:
        """Adds ``dtensor`` for ``owner``: the number of a rank in the mesh, the last axis first,
        ``EVERY_RANK`` or ``NO_RANK``. Returns the bytes that the bucket holds for the tensor, or -1, with
        nothing done, if they are more than ``most``."""

    def start(self) -> None: ...
    def next(self) -> Tensor | None:
        """Returns the next full tensor; ``None`` on a rank that does not get it."""

def move_to_owners(
    dtensors: list[Any], owners: list[int], async_op: bool, max_bytes: int | None
) -> list[Tensor | None]:
    """Returns the full tensor of each DTensor that this rank, numbered in the mesh, owns, else ``None``."""

def move_from_owners(
    full_tensors: list[Tensor | None],
    specs: list[Any],
    owners: list[int],
    placements: Sequence[tuple[Placement, ...] | None],
    async_op: bool,
    max_bytes: int | None,
) -> list[Any]:
    """Returns DTensors of ``placements``, by default the specs' own, from full tensors on their owners."""
