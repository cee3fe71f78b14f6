"""Functions on local tensors and their gradients run under a tracer of their own, and made functional.

A function runs at this rank's shapes, on fake tensors, outside of its caller's tracer. Tensors that it closes
over become operands of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from ..redistribution.specs import dense_strides_like, spec_of
from .regions import Placements, Sizes, checked_placements, full_spec, local_shape, uneven_dims

# Names of the graph's inputs that are found while it is recorded.
CLOSED_OVER = "local_map_closed_over_"
TANGENT = "local_map_tangent_"


class Body(Protocol):
    """A function of tensors and sizes, which knows the placements of its results after a call."""

    @property
    def placements(self) -> Sequence[Placements | None]: ...

    def __call__(self, *operands: Any) -> list[Any]: ...


@dataclasses.dataclass
class Function:
    """A function on local tensors and the placements of its operands.

    ``labels`` name the operands in errors. ``gradients`` are the stated placements of the operands'
    gradients, ``sizes`` the known sizes of full results.
    """

    name: str
    body: Body
    mesh: DeviceMesh
    are_full: bool
    placements: tuple[Placements | None, ...]
    labels: Sequence[str]
    gradients: Sequence[Placements | None] | None = None
    sizes: Sequence[Sizes | None] | None = None

    def operand_specs(self, operands: Sequence[Any]) -> list[DTensorSpec | None]:
        """Returns the specs of operands that are full tensors."""
        return [
            spec_of(self.mesh, checked_placements(placements, operand.dim(), label, self.name), operand)
            if isinstance(operand, Tensor) and placements is not None and self.are_full
            else None
            for operand, placements, label in zip(operands, self.placements, self.labels, strict=True)
        ]

    def result_specs(self, operands: Sequence[Any], results: Sequence[Any]) -> list[DTensorSpec | None]:
        """Returns the specs of full results, from local ones."""
        uneven = uneven_dims(self.operand_specs(operands))
        sizes = self.sizes or [None] * len(results)
        return [
            full_spec(result, self.mesh, placements, sizes[i], uneven, f"result {i}", self.name)
            if isinstance(result, Tensor) and placements is not None and self.are_full
            else None
            for i, (result, placements) in enumerate(zip(results, self.body.placements, strict=True))
        ]

    def full_fakes(self, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns full tensors of local ``results``, made in the active fake mode."""
        return [
            result if spec is None else empty(spec.shape, spec.stride, result)
            for result, spec in zip(results, self.result_specs(operands, results), strict=True)
        ]


def local_fakes(function: Function, operands: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Returns fake leaves of this rank's shapes, which require gradients where ``operands`` do."""
    fakes = []
    with mode:
        for operand, spec, label in zip(
            operands, function.operand_specs(operands), function.labels, strict=True
        ):
            if not isinstance(operand, Tensor):
                fakes.append(operand)
                continue
            shape = operand.shape if spec is None else local_shape(spec, label, function.name)
            strides = operand.stride() if spec is None else dense_strides_like(operand, shape)
            fakes.append(empty(shape, strides, operand).requires_grad_(operand.requires_grad))
    return fakes


def empty(shape: Sequence[Any], strides: Sequence[Any], like: Tensor) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=like.dtype, device=like.device)


class ReplaceTensors(TorchFunctionMode):
    """Calls functions with :meth:`replace` of each tensor in its place."""

    def replace(self, tensor: Tensor) -> Tensor:
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self.replace, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Lift(ReplaceTensors):
    """Replaces tensors from outside of the recording by operands of it."""

    def __init__(self, is_foreign: Callable[[Tensor], bool], make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._is_foreign, self._make = is_foreign, make
        self._ours: dict[int, Tensor] = {}
        self.foreign: list[Tensor] = []
        self.ours: list[Tensor] = []

    def replace(self, tensor: Tensor) -> Tensor:
        ours = self._ours.get(id(tensor))
        if ours is None:
            if not self._is_foreign(tensor):
                return tensor
            ours = self._ours[id(tensor)] = self._make(tensor)
            self.foreign.append(tensor)
            self.ours.append(ours)
        return ours


def is_foreign_to(*, is_functional: bool) -> Callable[[Tensor], bool]:
    """Returns a predicate for tensors from outside: the outer tracer knows them, or they are not fake."""
    outer = get_proxy_mode()
    known = None if outer is None else outer.tracer.tensor_tracker

    def is_foreign(tensor: Tensor) -> bool:
        if isinstance(tensor, FunctionalTensor):
            if not is_functional:
                return True
            tensor = torch._from_functional_tensor(tensor.elem)
        if known is not None and tensor in known:
            return True
        return not isinstance(tensor, FakeTensor) and not torch._is_functional_tensor(tensor)

    return is_foreign


@contextlib.contextmanager
def only_mode(mode: FakeTensorMode) -> Iterator[None]:
    """Leaves all modes but ``mode``, and the hooks by which an outer checkpoint saves tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    with _disable_current_modes(), mode, hooks if has_hooks else contextlib.nullcontext():
        yield


def mode_of(operands: Sequence[Any]) -> FakeTensorMode:
    return detect_fake_mode(list(operands)) or FakeTensorMode()


# Without a tracer


def probe(function: Function, operands: Sequence[Any]) -> list[Any]:
    """Returns unrecorded results of the right shapes, connected to ``operands`` where gradients flow."""
    mode = mode_of(operands)
    is_foreign = is_foreign_to(is_functional=False)
    with only_mode(mode):
        lift = _Lift(is_foreign, lambda tensor: _leaf(tensor, mode))
        with lift:
            results = function.body(*local_fakes(function, operands, mode))
        flags = [isinstance(result, Tensor) and result.requires_grad for result in results]
        fakes = function.full_fakes(operands, results)
    return list(_Shapes.apply(fakes, flags, *operands, *lift.foreign))


def _leaf(like: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return empty(like.shape, like.stride(), like).requires_grad_(like.requires_grad)


class _Shapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fakes: list[Any], flags: list[bool], *operands: Any) -> tuple[Any, ...]:
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in operands))
        results = [empty(one.shape, one.stride(), one) if isinstance(one, Tensor) else one for one in fakes]
        ctx.mark_non_differentiable(
            *(one for one, flag in zip(results, flags, strict=True) if not flag and isinstance(one, Tensor))
        )
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = (None if one is None else torch.empty_like(one) for one in ctx.saved_tensors)
        return None, None, *gradients


# With a tracer


class Recording:
    """A run of a function and its gradient."""

    def __init__(
        self, function: Function, mode: FakeTensorMode, is_foreign: Callable[[Tensor], bool]
    ) -> None:
        self._function, self._mode, self._is_foreign = function, mode, is_foreign
        self.num_tangents = 0

    def run(self, *primals: Any) -> tuple[Any, ...]:
        function = self._function
        lift = _Lift(self._is_foreign, lambda tensor: self._lifted(tensor, len(lift.ours)))
        with lift:
            results = function.body(*primals)
        self.foreign = lift.foreign
        inputs = [*primals, *lift.ours]
        closed_over = (f"the tensor of shape {tuple(one.shape)} it closes over" for one in lift.ours)
        self._check_functional(inputs, [*function.labels, *closed_over], results)
        self.differentiable = [
            i for i, one in enumerate(results) if isinstance(one, Tensor) and one.requires_grad
        ]
        self.num_results = len(results)
        self.requires_gradient = [
            i for i, one in enumerate(inputs) if isinstance(one, Tensor) and one.requires_grad
        ]
        if not self.differentiable:
            return tuple(results)
        self.num_tangents = len(self.differentiable)
        tangents = [self._tangent(results[i], k) for k, i in enumerate(self.differentiable)]
        gradients = torch.autograd.grad(
            [results[i] for i in self.differentiable],
            [inputs[i] for i in self.requires_gradient],
            tangents,
            allow_unused=True,
        )
        return *results, *gradients

    def _tangent(self, result: Tensor, k: int) -> Tensor:
        with only_mode(self._mode):
            fake = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        return self._input(fake, f"{TANGENT}{k}")

    def _lifted(self, tensor: Tensor, k: int) -> Tensor:
        with only_mode(self._mode):
            fake = empty(tensor.shape, tensor.stride(), tensor)
        return self._input(fake, f"{CLOSED_OVER}{k}").requires_grad_(tensor.requires_grad)

    def _input(self, fake: Tensor, name: str) -> Tensor:
        """Adds an input to the graph that is being recorded."""
        recorder: Any = get_proxy_mode()
        proxy = recorder.tracer.create_proxy("placeholder", name, (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=recorder.tracer)
        result: Tensor = FunctionalTensor.to_functional(fake)
        return result

    def _check_functional(self, inputs: list[Any], labels: list[str], results: list[Any]) -> None:
        by_storage = {}
        for one, label in zip(inputs, labels, strict=True):
            if not isinstance(one, Tensor):
                continue
            if torch._functionalize_has_data_mutation(one.elem):  # type: ignore[attr-defined]
                raise ValueError(
                    f"funcol.apply_local_map: {self._function.name} changes {label} in place, which a traced "
                    "region cannot do. Change a clone of it, and return that."
                )
            by_storage[_storage_of(one)] = label
        for i, result in enumerate(results):
            if isinstance(result, Tensor):
                label = by_storage.get(_storage_of(result), "")
                if label:
                    raise ValueError(
                        f"funcol.apply_local_map: result {i} of {self._function.name} shares memory with "
                        f"{label}, which the results of a traced region cannot do. Return a clone of it."
                    )


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
