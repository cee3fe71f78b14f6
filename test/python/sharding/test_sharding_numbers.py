"""Decisions of the propagator give right numbers: PyTorch's operator database on simulated ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operator_samples import INFOS, SAMPLE, calls_of
from sharded import Layout
from simulated import Call, Simulation, WrongResultError, all_layouts, some_layouts
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from funcol import _C, _compat
from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

WORLD = 4

pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    pytest.mark.parametrize("mesh", ["2", "2x2"], indirect=True),
]


def has_rule(propagator: ShardingPropagator, call: Call) -> bool:
    tables = (getattr(propagator, name, ()) for name in _compat.TABLES_OF_RULES)
    return _C.has_rule(call.op.name()) or any(call.op in table for table in tables)


def judged(propagator: ShardingPropagator, mesh: DeviceMesh, calls: list[Call], layouts: Any) -> Counter[str]:
    """Returns how many decisions were right, and how many calls were refused; raises for a wrong one, and for
    one by which the operator does not run."""
    counts: Counter[str] = Counter()
    for call in calls:
        for chosen in layouts(call, mesh.ndim):
            try:
                Simulation(propagator, mesh, call, chosen).check()
                counts["right"] += 1
            except WrongResultError:
                raise
            except (NotImplementedError, ValueError, RuntimeError) as error:
                if "its rule names an argument" in str(error):
                    raise
                counts["refused"] += 1
    return counts


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SAMPLE)
def test_an_operator_gives_the_same_on_shards(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    calls = [call for info in INFOS[name][:1] for call in calls_of(info, 6)]
    counts = judged(propagator, mesh, calls, lambda call, axes: some_layouts(call, axes, 3, seed=0))
    assert counts["right"] > 0


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


def upsampled_backward(op: Any, axes: int, *options: Any) -> Call:
    return Call(op, (numbers(4, 6, *[8] * axes), [8] * axes, [4, 6, *[4] * axes], *options), {})


X, IMAGES, STATISTICS = numbers(4, 6, 4), numbers(4, 6, 2, 2), numbers(4, 3)

SIZES = [4, 6, 4, 3]  # N, C, HxW, groups

WITH_SIZES = [
    *(Call(op, (X, [4, 3, 2, 4]), {}) for op in (
        aten.view.default, aten.view_copy.default, aten._unsafe_view.default, aten.reshape.default,
    )),
    *(Call(op, (numbers(4, 1, 6), [2, 4, 3, 6]), {}) for op in (
        aten.expand.default, aten.expand_copy.default,
    )),
    *(Call(op, (X, [4, 6, 4]), {}) for op in (aten.new_ones.default, aten.new_zeros.default)),
    Call(aten.new_full.default, (X, [4, 6, 4], 2.0), {}),
    Call(aten.select_backward.default, (X, [4, 6, 5, 4], 2, 1), {}),
    Call(aten.slice_backward.default, (X, [4, 6, 9], 2, 1, 9, 2), {}),
    Call(aten.native_group_norm.default, (IMAGES, numbers(6), numbers(6), *SIZES, 1e-5), {}),
    Call(aten.native_group_norm_backward.default, (
        IMAGES, IMAGES, STATISTICS, STATISTICS, numbers(6), *SIZES, [True] * 3,
    ), {}),
    *(Call(packet.default, (numbers(2, 1, 4, 1),), {}) for packet in (aten.squeeze, aten.squeeze_copy)),
    Call(aten.squeeze.dim, (numbers(2, 1, 4), 0), {}),
    Call(aten.squeeze.dims, (numbers(2, 1, 4), [0, 1, 2]), {}),
    upsampled_backward(aten.upsample_nearest1d_backward.default, 1, None),
    upsampled_backward(aten.upsample_nearest2d_backward.default, 2, None, None),
    upsampled_backward(aten.upsample_nearest3d_backward.default, 3, None, None, None),
    upsampled_backward(aten._upsample_nearest_exact1d_backward.default, 1, None),
    upsampled_backward(aten._upsample_nearest_exact2d_backward.default, 2, None, None),
    upsampled_backward(aten._upsample_nearest_exact3d_backward.default, 3, None, None, None),
    upsampled_backward(aten.upsample_linear1d_backward.default, 1, False, None),
    upsampled_backward(aten.upsample_bilinear2d_backward.default, 2, False, None, None),
    upsampled_backward(aten.upsample_bicubic2d_backward.default, 2, False, None, None),
    upsampled_backward(aten.upsample_trilinear3d_backward.default, 3, False, None, None, None),
    upsampled_backward(aten._upsample_bilinear2d_aa_backward.default, 2, False, None, None),
    upsampled_backward(aten._upsample_bicubic2d_aa_backward.default, 2, False, None, None),
]  # fmt: skip


def shards(call: Call, axes: int) -> Iterator[list[Layout]]:
    """Yields the first tensor cut along each of its dims by all axes, the others everywhere."""
    for dim in range(call.tensors()[0].dim()):
        yield [Layout((f"S{dim}",) * axes), *[Layout(("R",) * axes)] * (len(call.tensors()) - 1)]


@pytest.mark.parametrize("call", WITH_SIZES, ids=lambda call: call.op.name())
def test_sizes_among_the_arguments_are_those_of_the_rank(
    propagator: ShardingPropagator, mesh: DeviceMesh, call: Call
) -> None:
    counts = judged(propagator, mesh, [call], shards)
    assert counts["refused"] == 0


# Of each overload of an operator on lists, one call: its arguments by the types in its schema.
LIST_ARGUMENTS: dict[str, Callable[[int], Any]] = {
    "List[Tensor]": lambda place: [numbers(4, 6).abs() + place, numbers(4, 3, 2).abs() + 2 * place],
    "Tensor": lambda place: torch.tensor(-2.0, dtype=torch.float64),
    "List[number]": lambda place: [-2.0, 0.5],
    "number": lambda place: -2.0,
}


def on_lists(name: str) -> list[Call]:
    packet = getattr(aten, name)
    calls = []
    for overload in packet.overloads():
        op = getattr(packet, overload)
        if any(argument.is_out for argument in op._schema.arguments):
            continue
        required = [one for one in op._schema.arguments if not one.has_default_value()]
        given = [LIST_ARGUMENTS[str(one.type)](place) for place, one in enumerate(required)]
        positional = [not one.kwarg_only for one in required]
        args = tuple(value for value, is_positional in zip(given, positional, strict=True) if is_positional)
        kwargs = {one.name: value for one, value in zip(required, given, strict=True) if one.kwarg_only}
        calls.append(Call(op, args, kwargs))
    return calls


# Matrices that are multiplied are not of one shape.
ON_LISTS = sorted(
    name
    for name in dir(aten)
    if name.startswith("_foreach_") and _C.has_rule(f"aten::{name}") and name != "_foreach_mm"
)


def layouts_of_lists(call: Call, axes: int) -> Iterator[list[Layout]]:
    """Both elements of a list alike, so that all of a call is decided or none."""
    words = ["R", "S0", "S1", "Psum", "Pavg", "Pmax", "Pmin"]
    num_lists = sum(isinstance(argument, list) and isinstance(argument[0], Tensor) for argument in call.args)
    num_others = len(call.tensors()) - 2 * num_lists
    for chosen in itertools.product(words, repeat=num_lists):
        of_lists = [Layout((word,) * axes) for word in chosen for _ in range(2)]
        yield [*of_lists, *[Layout(("R",) * axes)] * num_others]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", ON_LISTS)
def test_every_operator_on_lists_gives_the_same_on_shards_and_partials(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    counts = judged(propagator, mesh, on_lists(name), layouts_of_lists)
    assert counts["right"] > 0


def grouped(self: tuple[int, ...], mat2: tuple[int, ...], *ends: int) -> Call:
    offs = torch.tensor(ends, dtype=torch.int32) if ends else None
    # Small integers: no product of single precision is rounded, none of bfloat16 that is made of shards.
    matrices = (numbers(*shape).round().float() for shape in (self, mat2))
    return Call(aten._grouped_mm.default, (*matrices, offs), {})


GROUPED = {
    "rows": grouped((16, 16), (2, 16, 32), 4, 16),
    "columns": grouped((2, 16, 16), (16, 32), 16, 32),
    "sums": grouped((16, 16), (16, 32), 8, 16),
    "batches": grouped((4, 16, 16), (4, 16, 32)),
    "unaligned_pieces": grouped((16, 8), (2, 8, 24), 8, 16),
}


def takes_single_precision() -> bool:
    call = GROUPED["batches"]
    try:
        call.op(*(tensor.to("meta") for tensor in call.tensors()))
    except RuntimeError:
        return False
    return True


def layouts_of_shards(call: Call, axes: int) -> Iterator[list[Layout]]:
    for chosen in all_layouts(call, axes, most=400):
        if not any(word[0] == "P" for layout in chosen for word in layout.words):
            yield chosen


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.skipif(not takes_single_precision(), reason="Meta kernels of this PyTorch take bfloat16 alone")
def test_products_of_groups_are_the_same_on_shards_and_partials(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    counts = judged(propagator, mesh, [GROUPED[name]], lambda call, axes: all_layouts(call, axes, most=60))
    assert counts["refused"] == 0


@pytest.mark.parametrize("name", GROUPED)
def test_products_of_groups_of_bfloat16_are_the_same_on_shards(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    op, (a, b, *rest), kwargs = GROUPED[name]
    counts = judged(
        propagator, mesh, [Call(op, (a.bfloat16(), b.bfloat16(), *rest), kwargs)], layouts_of_shards
    )
    assert counts["refused"] == 0
    assert counts["right"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(INFOS))
def test_every_operator_gives_the_same_on_shards(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str, record_property: Any
) -> None:
    # Leaves out operators that PyTorch decomposes: it tries all combinations of their parts.
    calls = [call for info in INFOS[name] for call in calls_of(info, 12) if has_rule(propagator, call)][:12]
    counts = judged(propagator, mesh, calls, lambda call, axes: all_layouts(call, axes, most=12))
    for outcome, count in counts.items():
        record_property(outcome, count)
