"""The C++ side. The collectives return ``NotImplemented`` where Python has to emit ops that a layer knows."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._dtensor_spec import DTensorSpec

def all_reduce(input: Tensor, reduce_op: Any, group: Any, tag: str, /) -> Any: ...
def all_gather_tensor(
    input: Tensor, gather_dim: int, group: Any, tag: str, split_sizes: list[int] | None, /
) -> Any: ...
def reduce_scatter_tensor(
    input: Tensor,
    reduce_op: Any,
    scatter_dim: int,
    group: Any,
    tag: str,
    split_sizes: list[int] | None,
    /,
) -> Any: ...
def reduce(input: Tensor, reduce_op: Any, dst: int, group: Any, tag: str, /) -> Any: ...
def scatter(
    input: Tensor, src: int, scatter_dim: int, group: Any, tag: str, split_sizes: list[int] | None, /
) -> Any: ...
def gather(
    input: Tensor, dst: int, gather_dim: int, group: Any, tag: str, split_sizes: list[int] | None, /
) -> Any: ...
def all_to_all_single(
    input: Tensor,
    output_split_sizes: list[int] | None,
    input_split_sizes: list[int] | None,
    group: Any,
    tag: str,
    /,
) -> Any: ...
def all_to_all(
    inputs: list[Tensor], output_split_sizes: list[int] | None, group: Any, tag: str, /
) -> Any: ...
def broadcast(input: Tensor, src: int, group: Any, tag: str, /) -> Any: ...
def permute_tensor(input: Tensor, src_dst: list[int], group: Any, tag: str, /) -> Any: ...
def all_reduce_coalesced(inputs: list[Tensor], reduce_op: Any, group: Any, tag: str, /) -> Any: ...
def all_gather_into_tensor_coalesced(inputs: list[Tensor], group: Any, tag: str, /) -> Any: ...
def reduce_scatter_tensor_coalesced(
    inputs: list[Tensor], reduce_op: Any, scatter_dim: list[int], group: Any, tag: str, /
) -> Any: ...
def change_local_type(
    input: Tensor,
    from_type: int,
    from_dim: int,
    to_type: int,
    to_dim: int,
    group: Any,
    keeps_input: bool,
    scatters_dim_first: bool,
    during: Any,
    after: Any,
    gradient_during: Any,
    gradient_after: Any,
    /,
) -> Any:
    """See csrc/ops/local_types.h; the types are numbered as there."""

def all_reduce_into(tensor: Tensor, reduce_op: Any, group: Any, tag: str, /) -> Any: ...
def broadcast_into(tensor: Tensor, src: int, group: Any, tag: str, /) -> Any: ...
def all_gather_into(input: Tensor, out: Tensor, group: Any, tag: str, /) -> Any: ...
def reduce_scatter_into(input: Tensor, out: Tensor, reduce_op: Any, group: Any, tag: str, /) -> Any: ...
def all_gather_into_list(input: Tensor, outs: list[Tensor], group: Any, tag: str, /) -> Any: ...
def reduce_scatter_list_into(
    inputs: list[Tensor], out: Tensor, reduce_op: Any, group: Any, tag: str, /
) -> Any: ...
def isend(tensor: Tensor, dst: int, tag: int, group: Any, group_tag: str, /) -> Any: ...
def irecv(tensor: Tensor, src: int, tag: int, group: Any, group_tag: str, /) -> Any: ...
def wait_tensor(tensor: Tensor, /) -> Any: ...
def settle(tensor: object, /) -> None: ...
def is_pending(tensor: object, /) -> bool: ...
def was_pending(tensor: object, /) -> bool: ...
def pend(tensor: Tensor) -> Tensor: ...  # or NotImplemented
def pending_on_registry(tensor: Tensor) -> Tensor: ...
def make_pending(
    outputs: list[Tensor], on_wait: Callable[[], None], op: str = ..., group: str = ..., is_over: bool = ...
) -> list[Tensor]: ...
def make_pending_in_place(
    written: list[Tensor], on_wait: Callable[[], None], op: str = ..., group: str = ...
) -> None: ...
def comm_tensor(tensor: Tensor) -> Tensor: ...
def exclude_wake_key(exclude: bool, /) -> bool: ...
def has_wake_key() -> bool: ...
def wake_key_name() -> str: ...
def num_orphans() -> int: ...
def unwaited_collectives() -> dict[str, int]: ...
def let_unwaited_finish(patience: float, /) -> None: ...
def async_counters() -> tuple[int, int]: ...

class InFlight:
    """A collective that was started and may still be running; see ``funcol.pending``."""

    @property
    def op(self) -> str:
        """``"all_reduce"``"""
    @property
    def group(self) -> str:
        """The name of its process group."""
    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the results, on this rank."""
    @property
    def dtype(self) -> torch.dtype | None:
        """Of the first result; ``None`` if there are none."""
    @property
    def seconds(self) -> float:
        """Since its start, to some milliseconds."""
    @property
    def caller(self) -> str | None:
        """``"train.py:41 in step"``, if callers are recorded and Python code started it."""
    @property
    def purpose(self) -> str | None:
        """``"layers.0 / redistribute S(0)->R: all_gather(dim 0, tp)"``, if callers are recorded."""

def collectives_in_flight() -> list[InFlight]: ...
def in_flight_text() -> str: ...
def record_callers(enabled: bool, /) -> None: ...
def set_library_folders(folders: list[str], /) -> None: ...
def enter_module(name: str | None, /) -> str | None:
    """Returns the module before."""

def dump_in_flight_on(signal: int, file_descriptor: int, /) -> None: ...
def stop_dumping_in_flight_on(signal: int, /) -> bool: ...
def follow_fork_of_dumps() -> None: ...
def note_group_ended(group_or_backend: Any, end: str, /) -> None:
    """``end``: "abort" or "reconfigure"."""

def note_mesh(device_mesh: Any, /) -> None: ...
def check_mesh_group(device_mesh: Any, group_name: str, op: str, /) -> None:
    """``ValueError`` if the group was aborted or reconfigured after the mesh was made."""

def set_group_resolver(resolver: Callable[[Any, str, str], Any], /) -> None: ...
def check_agreement(begin: bool, /) -> None: ...
def remember_groups(enabled: bool, /) -> None: ...
def forget_groups() -> None: ...
def note_group_added(name: str, /) -> None: ...
def note_group_removed(name: str, /) -> None: ...
def note_all_groups_removed() -> None: ...
def set_ranks_resolver(resolver: Callable[[list[int], str], str | None], /) -> None: ...
def define_missing_legacy_ops() -> None: ...
def put_under_core_ops(left: list[str], /) -> None: ...
def replace_errors(function: Callable[[BaseException], BaseException | None] | None, /) -> None:
    """What the functions here raise becomes what ``function`` makes of it."""

def set_ops_are_replaced(are_replaced: bool, /) -> None: ...
def set_c10d_ops_are_replaced(are_replaced: bool, /) -> None: ...
def take_from_core_ops() -> None: ...
def ops_under_dropin() -> list[str]: ...
def put_pending_instances(cls: type, /) -> None: ...
def take_pending_instances() -> None: ...
def registered_kernels() -> dict[str, list[str]]: ...
def why_no_cuda_kernels() -> str | None:
    """None where there are CUDA kernels, which the call loads."""

class Mesh:
    """Sizes and names of mesh axes; ``merged``: sets of axes that have a group, a bit an axis."""

    def __init__(self, sizes: Sequence[int], names: Sequence[str], merged: Sequence[int]) -> None: ...
    @property
    def sizes(self) -> tuple[int, ...]: ...
    @property
    def names(self) -> tuple[str, ...]: ...
    @property
    def merged(self) -> tuple[int, ...]: ...

class StepCounts:
    """A number a collective, whatever its size: all_reduce 4, all_gather and reduce_scatter 2, others 1."""

class LinkCost:
    def __init__(self, latency_us: float = ..., us_per_byte: float = ...) -> None: ...
    @property
    def latency_us(self) -> float: ...
    @property
    def us_per_byte(self) -> float: ...

class AxisCost:
    def __init__(
        self,
        all_gather: LinkCost,
        reduce_scatter: LinkCost,
        all_reduce: LinkCost,
        all_to_all: LinkCost,
        permute: LinkCost,
    ) -> None: ...
    @property
    def all_gather(self) -> LinkCost: ...
    @property
    def reduce_scatter(self) -> LinkCost: ...
    @property
    def all_reduce(self) -> LinkCost: ...
    @property
    def all_to_all(self) -> LinkCost: ...
    @property
    def permute(self) -> LinkCost: ...

class DTensorCosts:
    """What PyTorch's DTensor takes a redistribution to cost."""

    def __init__(self) -> None: ...

class AlphaBeta:
    def __init__(self, axes: Sequence[AxisCost], copy: LinkCost) -> None: ...
    @property
    def axes(self) -> tuple[AxisCost, ...]: ...
    @property
    def copy(self) -> LinkCost: ...

class Step:
    """A step of a :class:`Plan`, the same for every rank."""

    @property
    def kind(self) -> str:
        """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all``, ``permute``; ``split``,
        ``to_partial``, ``embed``, ``apply_mask`` and ``mask`` send nothing."""

    @property
    def axes(self) -> tuple[int, ...]:
        """Mesh axes along which the ranks of a group differ."""

    @property
    def before(self) -> str:
        """The layout that the step starts from, as PyTorch prints placements: ``S(0)R``."""

    @property
    def after(self) -> str:
        """The layout that it makes."""

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """Of the tensor that the first rank's group holds together."""

    @property
    def cost(self) -> float:
        """As the cost model has it: microseconds, with ``AlphaBeta``."""

    @property
    def bytes_sent(self) -> int:
        """By the busiest rank."""

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank holds during the step, the plan's source included."""

class Plan:
    """Steps that turn layout ``src`` of a tensor into ``dst``; a value, the same for every rank."""

    @property
    def mesh(self) -> Mesh: ...
    @property
    def steps(self) -> tuple[Step, ...]: ...
    @property
    def cost(self) -> float:
        """The sum of the steps' costs."""

    @property
    def peak_bytes(self) -> int:
        """The most that a rank holds at any time."""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    @property
    def src(self) -> str:
        """The layout that the plan starts from: ``S(0)R``."""

    @property
    def dst(self) -> str: ...
    def local_indices(
        self, num_steps: int, coordinate: Sequence[int]
    ) -> tuple[tuple[tuple[int, int], ...], ...]:
        """What the rank at ``coordinate`` of the mesh holds after that many steps.

        For each dim the indices that it holds, as pairs (first index, how many). ``ValueError`` if the plan
        has fewer steps or the mesh no such rank.
        """

def mesh_of(mesh: Any) -> Mesh: ...
def default_alpha_beta(mesh: Any) -> AlphaBeta: ...
def plan_redistribution(
    src: Any,
    dst: Any,
    mesh: Any,
    shape: Sequence[int],
    itemsize: int,
    src_order: Any,
    dst_order: Any,
    model: AlphaBeta | StepCounts | None,
    max_bytes: int | None,
) -> Plan: ...
def greedy_redistribution(
    src: Any,
    dst: Any,
    mesh: Any,
    shape: Sequence[int],
    itemsize: int,
    src_order: Any,
    dst_order: Any,
    model: AlphaBeta | StepCounts | None,
) -> Plan: ...

# DTensor's methods: NotImplemented for what PyTorch's own function has to do.
def dtensor_to_local(dtensor: Any, grad_placements: Any) -> Any: ...
def dtensor_from_local(
    local: Tensor, device_mesh: Any, placements: Any, shape: Any, stride: Any, grad_placements: Any
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
    tensor: Tensor, mesh: Any, placements: Sequence[Any] | None, src_data_rank: int | None
) -> Any: ...
def dtensor_full_tensor(dtensor: Any, grad_placements: Any) -> Any: ...
def wrap_dtensors(results: Any, specs: Any) -> Any: ...
def unwrap_args(dispatcher: Any, op: Any, args: Any, kwargs: Any, create_schema: bool) -> Any: ...
def run_changed(dispatcher: Any, op: Any, op_info: Any, first_moved: Callable[..., None]) -> Any: ...

# DTensor's operators in C++: see dropin.native_operators.
def put_native_operators(
    dispatcher: Any,
    propagator: Any,
    logger: Any,
    copies: set[Any],
    decide: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any],
    draw: Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any],
    is_own: Callable[[], bool],
) -> None: ...
def take_native_operators() -> None: ...
def serves_operators() -> bool: ...
def operator_counts() -> dict[str, dict[str, int]]: ...
def forget_operator_counts() -> None: ...
def forget_served_calls() -> None: ...
def is_watched() -> bool:
    """Whether a mode, transform or tracer sees the operators that run on this thread."""

# FSDP2's work on a group of parameters: NotImplemented where PyTorch's own function has to run.
def know_fully_shard(
    classes: tuple[type, type],
    states: Any,
    storage_functions: Any,
    setter: Any,
    passed_by: Any,
    collectives: Any,
    streams: Any,
    methods: dict[str, tuple[list[str], list[str]]],
) -> None: ...
def fsdp_shards(params: list[Any]) -> Any: ...
def fsdp_copy_in(shards: list[Tensor], output: Tensor, lengths: list[int], rank: int) -> Tensor: ...
def fsdp_copy_out(
    params: list[Any], buffer: Tensor, dtypes: list[list[Any]], lengths: list[list[int]], num_ranks: int
) -> Any: ...
def fsdp_to_sharded(group: Any) -> Any: ...
def fsdp_to_unsharded(group: Any) -> Any: ...
def fsdp_take_gradients(group: Any) -> Any: ...
def fsdp_padded_sizes(params: list[Any], gradients: list[Tensor], num_ranks: int) -> Any: ...
def fsdp_gradient_type(params: list[Any]) -> Any: ...
def fsdp_reduce_copy_in(gradients: list[Tensor], buffer: Tensor, num_ranks: int) -> Any: ...
def fsdp_accumulate(buffer: Tensor, params: list[Any], padded_sizes: Any, num_ranks: int) -> None: ...
def fsdp_pre_forward(group: Any) -> Any: ...
def fsdp_post_forward(group: Any) -> Any: ...
def fsdp_pre_backward(group: Any, prefetches: bool) -> Any: ...
def fsdp_unshard(group: Any, async_op: bool) -> Any: ...
def fsdp_wait_for_unshard(group: Any) -> Any: ...
def fsdp_post_backward(group: Any) -> Any: ...
def fsdp_sharded_dtensor(param: Any, local: Tensor) -> Any: ...
def is_recorded() -> bool:
    """Whether ranges of ``record_function`` have somebody who sees them."""

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
    model: AlphaBeta | StepCounts | None,
    max_bytes: int | None,
    /,
) -> Any: ...
def redistribute_many(
    dtensors: list[Any],
    placements: list[tuple[Any, ...]],
    async_op: bool,
    model: AlphaBeta | StepCounts | None,
    max_bytes: int | None,
    /,
) -> Any: ...
def forget_redistributions() -> None: ...
@overload
def hand_over(name: Literal["make_spec"], function: Callable[..., DTensorSpec]) -> None:
    """Gives C++ a function of Python that it calls, under one of these names.

    ``make_spec(mesh, placements, order, shape, stride, dtype, strided_as_order)``: a spec of its parts.
    """

@overload
def hand_over(
    name: Literal["mesh_axes"],
    function: Callable[[DeviceMesh], tuple[list[int], list[str], list[int], int]],
) -> None:
    """(mesh): sizes and names of its axes, the sets of axes that have a group, devices a host."""

@overload
def hand_over(
    name: Literal["redistribution_target"],
    function: Callable[[DTensorSpec, DeviceMesh, tuple[Placement, ...], Any, Any], DTensorSpec],
) -> None:
    """(source, mesh, placements, shard order or None, dtype or None): where a tensor of ``source`` gets."""

@overload
def hand_over(
    name: Literal["axis_group"], function: Callable[[DeviceMesh, int], tuple[str, list[int]]]
) -> None:
    """(mesh, set of axes): name of the group along them, and the places of its ranks."""

@overload
def hand_over(
    name: Literal["note_redistribution"],
    function: Callable[[Tensor, Any, Any, str, bool], AbstractContextManager[object]],
) -> None:
    """(local, source placements, target placements, trace, is_explicit)"""

@overload
def hand_over(
    name: Literal["apply_mask", "fill_mask"], function: Callable[[Any, Tensor, DeviceMesh, int], Tensor]
) -> None:
    """(mask partial, local, mesh, axis): what the partial makes of a local tensor."""

@overload
def hand_over(
    name: Literal["redistribute_local_tensor"],
    function: Callable[[Tensor, DTensorSpec, DTensorSpec], Tensor],
) -> None:
    """(local, source, target)"""

@overload
def hand_over(
    name: Literal["gradient_of_to_local"],
    function: Callable[[Tensor, DTensorSpec, tuple[Placement, ...] | None], DTensor],
) -> None:
    """(gradient, spec of the input, placements of its gradient)"""

@overload
def hand_over(
    name: Literal["gradient_of_from_local"],
    function: Callable[[DTensor, tuple[Placement, ...]], Tensor],
) -> None:
    """(gradient, placements of it)"""

@overload
def hand_over(
    name: Literal["gradient_of_redistribute"],
    function: Callable[
        [
            DTensor,
            DTensorSpec,
            torch.dtype,
            torch.dtype,
            bool,
            AlphaBeta | StepCounts | None,
            int | None,
        ],
        DTensor,
    ],
) -> None:
    """(gradient, spec of the input, dtypes that are sent and returned, async_op, model, max_bytes)"""

class NoRuleError(NotImplementedError): ...

class PropagationEngine:
    """See csrc/dtensor/decisions.h. Functions that it is given: ``rows_of(op_schema)`` gives rows or None;
    ``whole(op_schema, remember)`` decides where C++ cannot; ``assemble(op_schema, elements)`` makes of the
    elements' ``(outputs, inputs, costs, moves)`` what is returned and remembered. Keyword tensors stay where
    they are unless ``moves_keywords``.
    """

    def __init__(self, model: Any, capacity: int, moves_keywords: bool = False) -> None: ...
    def propagate(
        self,
        op_schema: Any,
        rows_of: Callable[[Any], Any],
        whole: Callable[[Any, bool], Any],
        assemble: Callable[[Any, list[Any]], Any],
        remember: bool,
    ) -> Any: ...
    def strategies(
        self, op_schema: Any, rows_of: Callable[[Any], Any]
    ) -> list[list[tuple[list[Any], list[Any], list[float], bool]]] | None: ...
    def time_decision(self, op_schema: Any, count: int) -> float: ...
    def leave(self, op: str) -> None: ...
    def clear(self) -> None: ...
    def info(self) -> tuple[int, int, int, int]: ...

def ops_with_rules() -> list[str]: ...
def spec_methods(
    type: type, equals: Callable[[Any, object], bool], hash: Callable[[Any], int]
) -> tuple[Any, Any]:
    """``__eq__`` and ``__hash__`` of DTensorSpec in C++; ``equals`` and ``hash`` do what is left."""

def copy_spec(spec: Any) -> Any:
    """A DTensorSpec that equals this one."""

def canonical_spec(spec: Any) -> Any:
    """What stands for all DTensorSpecs that equal this one, and is no tensor's own."""

def has_rule(op: str) -> bool: ...
def redistribute_cost_table(
    sources: Sequence[Any], targets: Sequence[Any], model: Any
) -> list[list[float]]: ...
def similar_ops(op: str) -> list[str]: ...
def is_per_element(op: str) -> bool: ...

class LocalSizeArgs:
    """Positions of arguments; see csrc/propagation/rule.h."""

    @property
    def shape(self) -> int | None: ...
    @property
    def stride(self) -> int | None: ...
    @property
    def batch_channels_pixels(self) -> list[int]: ...
    @property
    def squeezed_dims(self) -> bool: ...

def local_size_args(op: Any) -> LocalSizeArgs | None: ...
def local_shape_of(spec: Any, shape: Sequence[int]) -> tuple[int, ...]: ...
def uneven_axes(spec: Any, shape: Sequence[int]) -> set[int]: ...
