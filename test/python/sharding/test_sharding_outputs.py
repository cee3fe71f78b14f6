"""Metadata of results that funcol computes itself equals that of the operator's own results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sharded import Layout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_map_only

from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

WORLD = 2
pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    pytest.mark.parametrize("mesh", ["2"], indirect=True),
]

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.bool, torch.complex64]

REDUCTIONS = [
    *((op, args, {}) for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default)
      for args in (([1],), ([0, -1],), ([-2], True), ([0, 1, 2], True), ([],))),
    *((op, (), {}) for op in (aten.sum.default, aten.mean.default, aten.any.default, aten.all.default)),
    *((op, args, {}) for op in (aten.any.dim, aten.all.dim) for args in ((1,), (-1, True))),
    *((aten.linalg_vector_norm.default, args, {})
      for args in ((2,), (2.0, [0]), (1, [0, 2], True), (2, None))),
    *((op, args, {"dtype": torch.float64}) for op, args in (
        (aten.sum.default, ()), (aten.mean.dim, ([1],)), (aten.linalg_vector_norm.default, (2,)),
    )),
]  # fmt: skip
SAME_SHAPE = [
    *((op, (dim, False), {}) for op in (aten._softmax.default, aten._log_softmax.default) for dim in (0, -1)),
    *((aten.cumsum.default, (dim,), {}) for dim in (0, -1)),
    (aten.cumsum.default, (1,), {"dtype": torch.float64}),
    *((op, (1,), {}) for op in (aten.tril.default, aten.triu.default)),
]  # fmt: skip


PRODUCTS = [
    (aten.mm.default, [(3, 4), (4, 5)]),
    (aten.mm.default, [(3, 0), (0, 5)]),
    (aten.mm.default, [(3, 4), (3, 5)]),
    (aten.bmm.default, [(2, 3, 4), (2, 4, 5)]),
    (aten.bmm.default, [(2, 3, 4), (1, 4, 5)]),
    (aten.addmm.default, [(3, 5), (3, 4), (4, 5)]),
    (aten.addmm.default, [(5,), (3, 4), (4, 5)]),
    (aten.addmm.default, [(1, 5), (3, 4), (4, 5)]),
    (aten.addmm.default, [(3,), (3, 4), (4, 5)]),
]


def look_of_result(op: Any, args: Any, kwargs: Any) -> TensorMeta | None:
    """Shape, strides and dtype of the result; None where the operator refuses the arguments."""
    try:
        result = op(*args, **kwargs)
    except (RuntimeError, IndexError):
        return None
    return TensorMeta(result.shape, result.stride(), result.dtype)


def decided_look(propagator: ShardingPropagator, mesh: DeviceMesh, op: Any, args: Any, kwargs: Any) -> Any:
    args = tree_map_only(torch.Tensor, lambda tensor: Layout(("R",)).spec(mesh, tensor), args)
    try:
        sharding = propagator.propagate_op_sharding_non_cached(OpSchema(op, args, kwargs))
    except (RuntimeError, IndexError):
        return None
    return sharding.output_spec.tensor_meta  # type: ignore[union-attr]


def ones_of_all_kinds(args: Any) -> Iterator[Any]:
    for shape in [(2, 3, 4), (3, 1), (2, 0, 5), (4,), ()]:
        for dtype in DTYPES:
            yield (torch.ones(shape, dtype=dtype), *args)


def looks_alike_on_meta(op: Any, args: Any, kwargs: Any) -> bool:
    """Returns true if the operator runs, and PyTorch's Meta kernel gives equal metadata."""
    look = look_of_result(op, args, kwargs)
    return look is not None and look == look_of_result(op, (args[0].to("meta"), *args[1:]), kwargs)


ONE_TENSOR = [
    pytest.param(
        op, args, kwargs, id=f"{op.name()}-{args[1:]}-{kwargs}-{tuple(args[0].shape)}-{args[0].dtype}"
    )
    for op, rest, kwargs in REDUCTIONS + SAME_SHAPE
    for args in ones_of_all_kinds(rest)
    if looks_alike_on_meta(op, args, kwargs)
]


@pytest.mark.parametrize(("op", "args", "kwargs"), ONE_TENSOR)
def test_results_of_one_tensor_look_as_the_operators(
    propagator: ShardingPropagator, mesh: DeviceMesh, op: Any, args: Any, kwargs: Any
) -> None:
    assert decided_look(propagator, mesh, op, args, kwargs) == look_of_result(op, args, kwargs)


@pytest.mark.parametrize(("op", "args", "kwargs"), REDUCTIONS + SAME_SHAPE)
def test_results_of_a_transposed_tensor_look_as_the_operators(
    propagator: ShardingPropagator, mesh: DeviceMesh, op: Any, args: Any, kwargs: Any
) -> None:
    args = (torch.ones(2, 3, 4).permute(2, 0, 1), *args)
    assert decided_look(propagator, mesh, op, args, kwargs) == look_of_result(op, args, kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize(("op", "shapes"), PRODUCTS)
def test_products_look_as_the_operators(
    propagator: ShardingPropagator, mesh: DeviceMesh, op: Any, shapes: Any, dtype: torch.dtype
) -> None:
    args = tuple(torch.ones(shape, dtype=dtype) for shape in shapes)
    assert decided_look(propagator, mesh, op, args, {}) == look_of_result(op, args, {})


PROMOTIONS = [
    (aten.div.Tensor, (torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.int32)), {}),
    (aten.div.Tensor_mode, (torch.ones(4, dtype=torch.int32),) * 2, {"rounding_mode": "trunc"}),
    (aten.div.Tensor_mode, (torch.ones(4, dtype=torch.int32),) * 2, {"rounding_mode": None}),
    *((aten.add.Tensor, (torch.ones(4, dtype=dtype), other), {})
      for dtype in (torch.int32, torch.bfloat16) for other in (2, 2.5, True)),
    (aten.mul.Tensor, (torch.ones(4), torch.ones((), dtype=torch.float64)), {}),
    (aten.mul.Tensor, (torch.ones(4), torch.ones(4, dtype=torch.float64)), {}),
    (aten.mul.Tensor, (torch.ones(2, 1, 4), torch.ones(3, 1)), {}),
    (aten.mul.Tensor, (torch.ones(4, 2).t(), torch.ones(4, 2).t()), {}),
    (aten.eq.Tensor, (torch.ones(4), torch.ones(4)), {}),
    (aten.sigmoid.default, (torch.ones(4, dtype=torch.int64),), {}),
]  # fmt: skip


@pytest.mark.parametrize("order", [PROMOTIONS, PROMOTIONS[::-1]], ids=["forwards", "backwards"])
def test_dtypes_of_pointwise_results_follow_kinds_of_numbers_and_the_default_dtype(
    propagator: ShardingPropagator, mesh: DeviceMesh, order: Any
) -> None:
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            for op, args, kwargs in order:
                expected = look_of_result(op, args, kwargs)
                assert expected is not None
                assert decided_look(propagator, mesh, op, args, kwargs) == expected, (op, args, dtype)
    finally:
        torch.set_default_dtype(before)
