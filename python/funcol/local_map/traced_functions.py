"""Functions on local tensors that tracers record, and the graphs that they become."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import GraphModule

from ..redistribution.specs import dense_strides_like, spec_of, spec_of_shape
from .regions import (
    Placements,
    Region,
    Sizes,
    checked_placements,
    local_shape,
    uneven_dims,
    whole_spec,
)


class Body(Protocol):
    """A function of tensors and sizes, which knows the placements of its results after a call."""

    @property
    def placements(self) -> Sequence[Placements | None]: ...

    def __call__(self, *operands: Any) -> list[Any]: ...


@dataclasses.dataclass
class Function:
    """A function on local tensors and the placements of its operands.

    ``labels`` name the operands in errors. ``gradients`` are the stated placements of the operands'
    gradients, ``sizes`` the known sizes of whole results.
    """

    name: str
    body: Body
    mesh: DeviceMesh
    are_whole: bool
    placements: tuple[Placements | None, ...]
    labels: Sequence[str]
    gradients: Sequence[Placements | None] | None = None
    sizes: Sequence[Sizes | None] | None = None

    def operand_specs(self, operands: Sequence[Any]) -> list[DTensorSpec | None]:
        """The specs of operands that are whole tensors."""
        return [
            spec_of(self.mesh, checked_placements(placements, operand.dim(), label, self.name), operand)
            if isinstance(operand, Tensor) and placements is not None and self.are_whole
            else None
            for operand, placements, label in zip(operands, self.placements, self.labels, strict=True)
        ]

    def result_specs(self, operands: Sequence[Any], results: Sequence[Any]) -> list[DTensorSpec | None]:
        """The specs of whole results, from local ones."""
        uneven = uneven_dims(self.operand_specs(operands))
        specs: list[DTensorSpec | None] = []
        for i, (result, placements) in enumerate(zip(results, self.body.placements, strict=True)):
            if not isinstance(result, Tensor) or placements is None or not self.are_whole:
                specs.append(None)
            elif self.sizes is not None and self.sizes[i] is not None:
                sizes = self.sizes[i] or ()
                specs.append(spec_of_shape(self.mesh, placements, sizes, result))
            else:
                specs.append(whole_spec(result, self.mesh, placements, uneven, f"result {i}", self.name))
        return specs

    def whole_fakes(self, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """Returns full tensors of local ``results``, made in the active fake mode."""
        return [
            result if spec is None else empty(spec.shape, spec.stride, result)
            for result, spec in zip(results, self.result_specs(operands, results), strict=True)
        ]


class RegionGraph(NamedTuple):
    """The contents of a node of :data:`funcol.local_map.local_map_hop`."""

    body: GraphModule
    region: Region


@dataclasses.dataclass
class GradientGraphs:
    """The gradient of a function, for the operands ``with_gradients`` and the results ``differentiable``.

    ``backward`` takes the operands ``saved_operands``, the activations of the forward graph, and gradients of
    the results. ``from_operands`` computes the same from all operands and these gradients, and so can be
    differentiated in turn.
    """

    backward: RegionGraph
    from_operands: RegionGraph
    saved_operands: Sequence[int]
    differentiable: Sequence[int]
    with_gradients: Sequence[int]


@dataclasses.dataclass
class PartitionedGraphs:
    """A recorded function as a forward graph and, if a result requires a gradient, graphs of the gradient.

    ``operands`` are those of the call, and after them the tensors that the function closed over. The results
    of ``forward`` are the function's ``num_results`` and then the activations that the backward graph takes.
    """

    operands: list[Any]
    forward: RegionGraph
    num_results: int
    gradients: GradientGraphs | None = None


def local_fakes(function: Function, operands: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake leaves of this rank's shapes, which require gradients where ``operands`` do."""
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


def as_contiguous_as_traced(body: Any, operands: Sequence[Any]) -> list[Any]:
    """``operands``, contiguous where ``body`` was recorded with contiguous tensors: it may hold views."""
    if not isinstance(body, GraphModule):
        return list(operands)
    traced = [node.meta.get("val") for node in body.graph.nodes if node.op == "placeholder"]
    return [
        operand.contiguous()
        if isinstance(operand, Tensor) and isinstance(like, Tensor) and like.is_contiguous()
        else operand
        for operand, like in zip(operands, traced, strict=True)
    ]
