"""Operators on sharded tensors, all ranks of a mesh simulated in one process, against the operator on the
whole.

A call of an operator is taken with the placements of its tensors; the propagator decides; every rank gets its
part of what the decision asks for, and runs the operator. What the ranks then hold has to be the result of
the operator on the whole tensors, held as the decision says.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from sharded import Layout, local_of, reduction_of, shard_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Coordinate = tuple[int, ...]

MESHES: dict[str, Any] = {
    "2": [0, 1],
    "2x2": [[0, 1], [2, 3]],
    "2x2x2": [[[0, 1], [2, 3]], [[4, 5], [6, 7]]],
}


class Call(NamedTuple):
    """An operator with its arguments, tensors whole."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]


class Recorder(TorchDispatchMode):
    """Keeps the calls of operators that are made inside, with copies of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        copied = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs or {}))
        self.calls.append(Call(func, *copied))
        return func(*args, **(kwargs or {}))


def layouts_of(tensor: Tensor, axes: int, partials: Sequence[str]) -> list[Layout]:
    """Returns every layout of ``tensor`` by plain placements, in the default order."""
    words = ["R", *(f"S{dim}" for dim in range(tensor.dim())), *partials]
    chosen = itertools.product(words, repeat=axes)
    return [Layout(choice) for choice in chosen if len(_partials(choice)) <= 1]


def partials_of(tensor: Tensor) -> list[str]:
    return ["Psum", "Pavg", "Pmax"] if tensor.dtype.is_floating_point else []


def some_layouts(call: Call, axes: int, count: int, seed: int) -> Iterator[list[Layout]]:
    """Yields ``count`` choices of layouts for the tensors of ``call``, the same each time."""
    choose = random.Random(f"{call.op}{seed}")
    of_each = [layouts_of(tensor, axes, partials_of(tensor)) for tensor in call.tensors()]
    for _ in range(count):
        yield [choose.choice(layouts) for layouts in of_each]


def all_layouts(call: Call, axes: int, most: int) -> Iterator[list[Layout]]:
    """Yields every choice of layouts for the tensors of ``call``, or ``most`` of them."""
    of_each = [layouts_of(tensor, axes, partials_of(tensor)) for tensor in call.tensors()]
    if math.prod(map(len, of_each)) > most:
        yield from some_layouts(call, axes, most, seed=1)
    else:
        yield from map(list, itertools.product(*of_each))


def _partials(words: Sequence[str]) -> set[str]:
    """Returns the kinds of partials in a layout. With several, the result depends on their order."""
    return {word for word in words if word[0] == "P"}


class WrongResultError(AssertionError):
    """The ranks do not hold the result."""


class Simulation:
    """A call on ``mesh`` with its tensors in ``layouts``, in the order of :meth:`Call.tensors`."""

    def __init__(self, propagator: Any, mesh: DeviceMesh, call: Call, layouts: Sequence[Layout]) -> None:
        self._propagator, self._mesh, self._call, self._layouts = propagator, mesh, call, layouts
        self._shape = tuple(mesh.shape)

    def __str__(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in self._call.tensors()]
        return f"{self._call.op} of {shapes} as {[str(layout) for layout in self._layouts]}"

    def schema(self) -> OpSchema:
        layouts = iter(self._layouts)

        def to_spec(tensor: Tensor) -> DTensorSpec:
            return next(layouts).spec(self._mesh, tensor)

        args, kwargs = tree_map_only(Tensor, to_spec, (self._call.args, self._call.kwargs))
        return OpSchema(
            self._call.op, args, kwargs, schema_info=_schema_info(self._propagator, self._call.op)
        )

    def check(self) -> OutputSharding:
        """Returns the decision. Raises :class:`WrongResultError` if the ranks do not hold the result."""
        coordinates = list(itertools.product(*(range(size) for size in self._shape)))
        expected, mutated = self._run_whole()
        held: dict[Coordinate, list[Any]] = {}
        written: dict[Coordinate, list[Tensor]] = {}
        own = self._mesh._coordinate_on_dim
        try:
            for at in coordinates:
                self._mesh._coordinate_on_dim = type(own)(at)  # type: ignore[misc,arg-type]
                decision = self._propagator.propagate_op_sharding_non_cached(self.schema())
                held[at], written[at] = self._run_rank(decision, at)
        finally:
            self._mesh._coordinate_on_dim = own
        specs = decision.output_spec
        specs = [specs] if isinstance(specs, DTensorSpec) else list(specs or ())
        for number, (spec, whole) in enumerate(zip(specs, expected, strict=False)):
            if isinstance(spec, DTensorSpec) and isinstance(whole, Tensor):
                locals_ = {at: held[at][number] for at in coordinates}
                self._compare(f"output {number}", locals_, layout_of(spec), whole)
        for number, (before, after) in enumerate(zip(self._call.tensors(), mutated, strict=True)):
            if not torch.equal(before.nan_to_num(), after.nan_to_num()):
                locals_ = {at: written[at][number] for at in coordinates}
                self._compare(f"tensor {number}, written", locals_, self._layouts[number], after)
        return decision

    def _run_whole(self) -> tuple[list[Any], list[Tensor]]:
        args, kwargs = _copied((self._call.args, self._call.kwargs))
        result = self._call.op(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return _listed(result), tensors

    def _run_rank(self, decision: OutputSharding, at: Coordinate) -> tuple[list[Any], list[Tensor]]:
        schema = self.schema()
        suggested = decision.redistribute_schema if decision.needs_redistribute else None
        specs = tree_leaves((schema.args_schema, schema.kwargs_schema), is_leaf=_is_spec)
        if suggested is not None:
            wanted = tree_leaves((suggested.args_schema, suggested.kwargs_schema), is_leaf=_is_spec)
            wanted = [spec for spec in wanted if _is_spec(spec)]
        else:
            wanted = [spec for spec in specs if _is_spec(spec)]
        locals_ = [
            self._masked(local_of(whole, layout_of(spec), self._shape, at).clone(), spec)
            for whole, spec in zip(self._call.tensors(), wanted, strict=True)
        ]
        rest = iter(locals_)
        source = schema
        if suggested is not None and decision.use_val_from_redistribute_schema:
            source = suggested
        args, kwargs = tree_map_only(
            DTensorSpec, lambda _: next(rest), (source.args_schema, source.kwargs_schema), is_leaf=_is_spec
        )
        try:
            results = _listed(source.op(*args, **kwargs))
        except Exception as error:
            raise WrongResultError(f"{self} does not run on rank {at}: {error}") from error
        outputs = decision.output_spec
        for result, spec in zip(results, _listed(outputs), strict=False):
            if isinstance(spec, DTensorSpec):
                _apply_masks(result, spec)
        return results, locals_

    def _masked(self, indices: Tensor, spec: DTensorSpec) -> Tensor:
        """Returns ``indices`` counted within this rank's part; PyTorch's masks keep those outside of it."""
        for axis, placement in enumerate(spec.placements):
            if isinstance(placement, _MaskPartial):
                indices = placement._partition_value(indices, self._mesh, axis)
        return indices

    def _compare(self, what: str, locals_: dict[Coordinate, Any], layout: Layout, whole: Tensor) -> None:
        for at, local in reduction_of(locals_, layout, self._shape).items():
            right = shard_of(whole, layout, self._shape, at)
            if local.shape != right.shape or not torch.allclose(
                local.to(right.dtype), right, rtol=1e-5, atol=_rounding(right.dtype), equal_nan=True
            ):
                raise WrongResultError(
                    f"{self}: {what} as {layout} on rank {at} is\n{local}\nexpected\n{right}"
                )


def specs_of(schema: OpSchema) -> list[DTensorSpec]:
    leaves = tree_leaves(
        (schema.args_schema, schema.kwargs_schema), is_leaf=lambda leaf: isinstance(leaf, DTensorSpec)
    )
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def decided(propagator: Any, schema: OpSchema) -> OutputSharding | None:
    """Returns the decision for ``schema``; None where the operator cannot run on tensors in these layouts."""
    try:
        sharding: OutputSharding = propagator.propagate_op_sharding_non_cached(schema)
    except (NotImplementedError, ValueError, RuntimeError, AssertionError, KeyError):
        return None
    return sharding


def _apply_masks(result: Tensor, spec: DTensorSpec) -> None:
    for placement in spec.placements:
        if isinstance(placement, _MaskPartial):
            placement.mask_buffer.apply_mask(result)
            placement.mask_buffer.release_mask()


def layout_of(spec: DTensorSpec) -> Layout:
    words = []
    for placement in spec.placements:
        if isinstance(placement, _NormPartial):
            words.append(f"N{placement.norm_type}")
        elif isinstance(placement, _MaskPartial):
            words.append("M")
        elif placement.is_partial() and type(placement) is not Partial:
            raise NotImplementedError(f"{placement} is reduced by rules of its own")
        elif hasattr(placement, "split_factor"):
            words.append(f"_S{placement.dim}/{placement.split_factor}")
        elif placement.is_shard():
            words.append(f"S{placement.dim}")  # type: ignore[attr-defined]
        elif placement.is_partial():
            words.append(f"P{placement.reduce_op}")  # type: ignore[attr-defined]
        else:
            words.append("R")
    order = None
    if spec.shard_order is not None:
        order = tuple((entry.tensor_dim, tuple(entry.mesh_dims)) for entry in spec.shard_order)
    return Layout(tuple(words), order)


def _rounding(dtype: torch.dtype) -> float:
    """Returns the tolerance for sums whose parts are a few hundred each."""
    return 3000 * torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _schema_info(propagator: Any, op: Any) -> Any:
    info = propagator.op_to_schema_info.get(op)
    return info or getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(op)


def _is_spec(leaf: Any) -> bool:
    return isinstance(leaf, DTensorSpec)


def _copied(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.clone(), tree)


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]
