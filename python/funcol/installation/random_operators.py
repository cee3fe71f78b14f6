"""Operators that draw random numbers, on DTensors of CPU and CUDA meshes.

The numbers are those of one tensor, however it is sharded: a call takes one number from the generator, and
each element the number of its position in the full tensor (``torch.ops.funcol.draw``). So replicas are equal,
shards differ, and the values depend neither on the mesh nor on the placements. They are not those that
PyTorch draws for a plain tensor with the same seed.

Operators that draw a number of times that depends on their values, such as ``poisson``, run on replicated
inputs, from the generators that agree: the default generators of the ranks of a mesh are made to agree before
operators on DTensors draw.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor import _api as stock_api
from torch.distributed.tensor import _dispatch as stock_dispatch
from torch.distributed.tensor import _random as stock_random
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .. import _C
from ..redistribution.meshes import simulates_ranks
from ..sharding.propagation import is_pytorch_tracing
from . import operators, patching
from .view_writeback import overloads, writes_to_first

aten = torch.ops.aten

_manual_seed: Any = patching.copy_function(stock_random.manual_seed)
_init_helper: Callable[..., DTensor] = patching.copy_function(stock_api._dtensor_init_helper)


class _RandomSource:
    """The random numbers of one call for the local tensor of ``spec``, or for a full tensor if it is None."""

    def __init__(self, spec: DTensorSpec | None, generator: torch.Generator | None) -> None:
        self.is_traced = is_pytorch_tracing()
        if spec is not None and generator is None and not self.is_traced:
            _synchronize_generators(spec.mesh)
        self._shape = None if spec is None else spec.shape
        self._cuts = [] if spec is None else _C.shard_cuts(spec, len(spec.shape))
        self.generator = generator

    def fill(self, tensor: Tensor, distribution: str, *numbers: float) -> Tensor:
        """Fills ``tensor``, a local tensor, and returns it."""
        shape, filled = self._shape or tensor.shape, tensor
        if tensor.is_complex():
            shape, filled = torch.Size((*shape, 2)), torch.view_as_real(tensor)
            if distribution == "normal":  # both parts share the variance
                numbers = (*numbers[:1], numbers[1] / math.sqrt(2))
        if self.is_traced:
            draw = torch.ops.funcol.draw.default
            filled.copy_(draw(filled, distribution, numbers, shape, self._cuts, generator=self.generator))
        else:
            draw = torch.ops.funcol.draw_.default
            draw(filled, distribution, numbers, shape, self._cuts, generator=self.generator)
        return tensor


# Runs an operator: draw(source, op, arguments by name) -> local results.
_Draw = Callable[[_RandomSource, OpOverload, dict[str, Any]], Any]


def _filling(distribution: str, *names: str) -> _Draw:
    """Returns a function that fills the tensor, or a new one like it, with numbers of ``distribution``, whose
    parameters the operator calls ``names``."""

    def draw(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> Tensor:
        return source.fill(_result_of(op, call), distribution, *(call[name] for name in names))

    return draw


def _result_of(op: OpOverload, call: dict[str, Any]) -> Tensor:
    """Returns the tensor that ``op`` fills, or a new one like it."""
    tensor: Tensor = call["self"]
    return tensor if writes_to_first(op) else torch.empty_like(tensor)


def _random(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> Tensor:
    tensor = _result_of(op, call)
    to = call.get("to")
    last = _highest(tensor.dtype) if to is None else to - 1
    return source.fill(tensor, "integers", call.get("from", 0), last)


def _highest(dtype: torch.dtype) -> int:
    """Returns the highest integer that ``random_`` draws: floats represent all integers up to it."""
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return 1 if dtype is torch.bool else min(torch.iinfo(dtype).max, 2**63 - 1)


_OPTIONS = ("dtype", "layout", "device", "pin_memory", "memory_format")


def _empty_like(call: dict[str, Any]) -> Tensor:
    return torch.empty_like(call["self"], **{name: call[name] for name in _OPTIONS})


def _like(distribution: str, *numbers: float) -> _Draw:
    return lambda source, op, call: source.fill(_empty_like(call), distribution, *numbers)


def _integers_like(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> Tensor:
    return source.fill(_empty_like(call), "integers", call.get("low", 0), call["high"] - 1)


def _dropout(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    tensor, p = call["input"], call["p"]
    if call["train"] is False:
        return tensor.clone(), torch.ones_like(tensor, dtype=torch.bool)
    mask = source.fill(torch.empty_like(tensor, dtype=torch.bool), "bernoulli", 1 - p)
    return tensor.mul(mask).mul_(0 if p == 1 else 1 / (1 - p)), mask


def _bernoulli(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> Tensor:
    """Draws 1 with the probability that a tensor has for each element."""
    tensor: Tensor = call["self"]
    probability: Tensor = call.get("p", tensor)
    dtype = torch.float64 if probability.dtype == torch.float64 else torch.float32
    drawn = source.fill(torch.empty_like(tensor, dtype=dtype), "uniform", 0, 1) < probability
    if writes_to_first(op):
        tensor.copy_(drawn)
        return tensor
    return drawn.to(tensor.dtype)


def _normal(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> Tensor:
    """Draws numbers with a mean and standard deviation of each element."""
    mean, std = call["mean"], call["std"]
    return source.fill(torch.empty_like(mean + std), "normal", 0, 1).mul_(std).add_(mean)


def _replicated(source: _RandomSource, op: OpOverload, call: dict[str, Any]) -> Tensor:
    result: Tensor = op(**call, generator=source.generator)
    return result


_OPERATORS: dict[OpOverload, _Draw] = {
    **dict.fromkeys(overloads(aten.uniform, aten.uniform_), _filling("uniform", "from", "to")),
    aten.normal_.default: _filling("normal", "mean", "std"),
    aten.normal_functional.default: _filling("normal", "mean", "std"),
    **dict.fromkeys(overloads(aten.log_normal, aten.log_normal_), _filling("log_normal", "mean", "std")),
    **dict.fromkeys(overloads(aten.cauchy, aten.cauchy_), _filling("cauchy", "median", "sigma")),
    **dict.fromkeys(overloads(aten.exponential, aten.exponential_), _filling("exponential", "lambd")),
    **dict.fromkeys(overloads(aten.geometric, aten.geometric_), _filling("geometric", "p")),
    **dict.fromkeys([aten.bernoulli_.float, aten.bernoulli.p], _filling("bernoulli", "p")),
    **dict.fromkeys(overloads(aten.random, aten.random_), _random),
    **dict.fromkeys(overloads(aten.rand_like), _like("uniform", 0, 1)),
    **dict.fromkeys(overloads(aten.randn_like), _like("normal", 0, 1)),
    **dict.fromkeys(overloads(aten.randint_like), _integers_like),
    **dict.fromkeys([aten.bernoulli.default, aten.bernoulli.Tensor, aten.bernoulli_.Tensor], _bernoulli),
    **dict.fromkeys([aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor], _normal),
    aten.native_dropout.default: _dropout,
    **dict.fromkeys(overloads(aten.binomial, aten.multinomial, aten.poisson), _replicated),
    **dict.fromkeys(overloads(aten._sample_dirichlet, aten._standard_gamma), _replicated),
}


# Operators with tensors for results or bounds are PyTorch's.
OPERATORS = {
    op: draw
    for op, draw in _OPERATORS.items()
    if not any(
        one.is_out or (one.name == "high" and isinstance(one.type, torch.TensorType))
        for one in op._schema.arguments
    )
}


def dispatch(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Handles operators that draw where PyTorch's C++ would run them without calling Python. funcol's C++
    knows this handler, and runs them itself."""
    return operators.dispatch(op, args, kwargs)


def install() -> Callable[[], None]:
    """Makes PyTorch's dispatcher know all operators that draw. Returns the function that undoes it."""
    known: set[OpOverload] = DTensor._op_dispatcher._random_ops
    ours = {op for op in OPERATORS if op not in known and op not in operators.handlers()}
    # PyTorch's dispatcher counts a number for each element of the first argument.
    added = {op for op in ours if OPERATORS[op] not in (_normal, _replicated)}
    undo = patching.set_entries(
        operators.handlers(), {op: dispatch if op in added else operators.dispatch for op in ours}
    )
    known.update(added)

    def remove() -> None:
        known.difference_update(added)
        undo()

    return remove


def draws(op: OpOverload, spec: DTensorSpec, local: Tensor) -> bool:
    """Returns true if ``op`` draws for ``local``, a local tensor on the mesh of ``spec``, as described
    above."""
    return op in OPERATORS and local.device.type == spec.mesh.device_type and _supports_mesh(spec.mesh)


def _supports_mesh(mesh: DeviceMesh) -> bool:
    """Returns true if funcol has a kernel for the devices of ``mesh``, and no tracker of the program decides
    what they draw."""
    tracker = stock_random._rng_tracker
    is_pytorchs = type(tracker) is stock_random.OffsetBasedRNGTracker and tracker.distribute_region_enabled
    return (
        (mesh.device_type == "cpu" or (mesh.device_type == "cuda" and _C.why_no_cuda_kernels() is None))
        and (tracker is None or is_pytorchs)
        and not simulates_ranks()
    )


def draw(op: OpOverload, spec: DTensorSpec | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs ``op`` on local tensors. Its first result, or the tensor that it fills, has ``spec``; without a
    spec it is a full tensor, and gets the numbers of DTensors of its shape."""
    call = operators.arguments_of(op, args, kwargs)
    return OPERATORS[op](_RandomSource(spec, call.pop("generator", None)), op, call)


class FullDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws for plain tensors the numbers that DTensors of their shapes get, while ``is_wanted()``."""

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_wanted = is_wanted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in OPERATORS and self._is_wanted():
            return draw(func, None, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def local_results(dispatcher: stock_dispatch.OpDispatcher, op: OpOverload, op_info: Any) -> Any:
    """Runs an operator of :data:`OPERATORS` as the dispatcher does, with the numbers of :func:`draw`;
    ``NotImplemented`` if PyTorch has to run it.

    PyTorch counterpart: ``OpDispatcher._dispatch_get_local_results_slow_path``.
    """
    sharding = op_info.output_sharding
    spec = sharding.output_spec[0] if isinstance(sharding.output_spec, tuple) else sharding.output_spec
    local = first_tensor(op_info.local_args)
    if spec is None or not draws(op, spec, local) or spec.mesh.get_coordinate() is None:
        return NotImplemented
    if sharding.needs_redistribute:
        dispatcher.redistribute_local_args(
            op_info, sharding.redistribute_schema, sharding.use_val_from_redistribute_schema
        )
    local_args = op_info.local_args
    if op_info.args_tree_spec:
        local_args = pytree.tree_unflatten(local_args, op_info.args_tree_spec)
    return draw(op, spec, tuple(local_args), op_info.local_kwargs)


def first_tensor(args: Sequence[Any]) -> Tensor:
    """Returns the first tensor among the arguments of an operator, which has one."""
    return next(one for one in args if isinstance(one, Tensor))


_FILL_METHODS: dict[Any, Callable[[DTensor], object]] = {
    torch.rand: DTensor.uniform_,
    torch.randn: DTensor.normal_,
}


def init_helper(
    init_op: Callable[..., Tensor],
    size: torch.Size,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    **kwargs: Any,
) -> DTensor:
    """Makes what ``torch.distributed.tensor.rand``, ``zeros`` and others return.

    PyTorch counterpart: ``torch.distributed.tensor._api._dtensor_init_helper``, which draws no random numbers
    on CPU meshes.
    """
    resources: Any = vars(stock_api)["_mesh_resources"]
    mesh = device_mesh or resources.get_current_mesh()
    fill = _FILL_METHODS.get(init_op)
    if fill is None or not _supports_mesh(mesh):
        return _init_helper(init_op, size, mesh, placements, **kwargs)
    dtensor = _init_helper(torch.empty, size, mesh, placements, **kwargs)
    with torch.no_grad():
        fill(dtensor)
    return dtensor


# The default generators of the ranks of a mesh


class _MeshesInAgreement:
    """The meshes, by their devices and ranks, whose ranks have had the same state of the default generator.
    Ranks forget them at the same time: with the default process group, not when a mesh is collected."""

    def __init__(self) -> None:
        self._world: weakref.ref[Any] | None = None
        self._ranks: set[tuple[str, *tuple[int, ...]]] = set()
        self._known: weakref.WeakKeyDictionary[DeviceMesh, Any] = weakref.WeakKeyDictionary()

    def __contains__(self, mesh: DeviceMesh) -> bool:
        world = dist.GroupMember.WORLD
        if self._world is None or self._world() is not world:
            self._world = None if world is None else weakref.ref(world)
            self._ranks.clear()
        return self._ranks_of(mesh) in self._ranks

    def add(self, mesh: DeviceMesh) -> None:
        if mesh not in self:
            self._ranks.add(self._ranks_of(mesh))

    def _ranks_of(self, mesh: DeviceMesh) -> tuple[str, *tuple[int, ...]]:
        ranks = self._known.get(mesh)
        if ranks is None:
            ranks = self._known[mesh] = (mesh.device_type, *mesh.mesh.flatten().tolist())
        return ranks


_meshes_in_agreement = _MeshesInAgreement()


def _synchronize_generators(mesh: DeviceMesh) -> None:
    """Gives the default generator of each rank of ``mesh`` the state that the first rank's has, at the first
    use on these ranks. Warns where the state changes.

    PyTorch counterpart: ``OffsetBasedRNGTracker.__init__``, for CUDA and all ranks of the program.
    """
    if mesh in _meshes_in_agreement or mesh.size() == 1:
        return
    try:
        groups = mesh.get_all_groups()
    except RuntimeError:  # a mesh without groups
        return
    device: Any = torch if mesh.device_type == "cpu" else torch.get_device_module(mesh.device_type)
    before = device.get_rng_state()
    state = before.to(mesh.device_type, copy=True)
    with _disable_current_modes():
        for group in groups:
            dist.broadcast(state, group=group, group_src=0)
    _meshes_in_agreement.add(mesh)
    state = state.cpu()
    if not torch.equal(state, before):
        device.set_rng_state(state)
        warnings.warn(
            f"funcol: rank {dist.get_rank()} draws random numbers for DTensors from another state of the "
            f"default generator than the first rank of {mesh}, and copies that rank's state. Call "
            "torch.manual_seed() with the same seed on all ranks of the mesh.",
            stacklevel=2,
        )


def manual_seed(seed: int, device_mesh: DeviceMesh) -> None:
    """Seeds the default generators of CPU meshes, too. The generators of the mesh then are taken to agree.

    PyTorch counterpart: ``torch.distributed.tensor._random.manual_seed``.
    """
    if device_mesh.device_type != "cpu":
        _manual_seed(seed, device_mesh)
        _meshes_in_agreement.add(device_mesh)
        return
    if device_mesh.get_coordinate() is None:
        raise RuntimeError(
            f"manual_seed: rank {dist.get_rank()} is not in {device_mesh}. Call it on the ranks of the mesh."
        )
    _meshes_in_agreement.add(device_mesh)
    torch.manual_seed(seed)
