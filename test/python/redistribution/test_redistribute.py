"""Redistribution on real ranks: every shard is the one cut from the full tensor, bit for bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from against_full_tensor import local_differences
from ranks import device_type, on_ranks, run_ranks
from sharded import Layout, layouts, local_of, mesh_of, ordered, shard_of, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import redistribute_local_tensor as stock_redistribute

import funcol
from funcol.cost_models import StepCounts
from funcol.redistribution import redistribute_local_tensor

ON_DEVICES = True


def redistributes(
    rank: int,
    world: int,
    mesh_shape: tuple[int, ...],
    flattened: tuple[tuple[str, ...], ...],
    pairs: list[tuple[Layout, Layout]],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
) -> list[str]:
    mesh = mesh_of(mesh_shape, *flattened)
    wrong = []
    if device_type() == "cuda":  # NCCL has no bitwise reductions
        pairs = [
            pair for pair in pairs if not any(word[:2] == "Pb" for layout in pair for word in layout.words)
        ]
    for shape, (src, dst) in itertools.product(shapes, pairs):
        found = local_differences(mesh, src, dst, whole_of(shape, dtype))
        if found:
            wrong.append(f"rank {rank}, {shape} {src} -> {dst}: {found}")
    return wrong


SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3", "_S0/5", "Psum", "Pavg", "Pmax", "Pmin", "Pproduct")

ONE_AXIS_OF_BITS = layouts("R", "S0", "Psum", "Pmin", "Pproduct", "Pband", "Pbor", "Pbxor")

TWO_AXES = [
    *layouts("R R", "S0 R", "R S0", "S0 S0", "S0 S1", "S1 S0", "S1 S1", "_S0/2 S0", "_S0/3 S1", "S0 _S0/2"),
    *layouts("Psum R", "Psum Psum", "Pavg Psum", "S0 Psum", "Pmax S1"),
    ordered("S0 S0", (0, (1, 0))),
    ordered("S1 S1", (1, (1, 0))),
]

THREE_AXES = [
    *layouts("R R R", "S0 S0 S0", "S0 S1 S0", "S1 R S0", "Psum S0 Psum", "R S0 S0", "_S0/2 S0 S1"),
    ordered("S0 S0 S0", (0, (2, 0, 1))),
]


def pairs_of(chosen: list[Layout]) -> list[tuple[Layout, Layout]]:
    return list(itertools.product(chosen, chosen))


def is_right(
    mesh_shape: tuple[int, ...],
    pairs: list[tuple[Layout, Layout]],
    shapes: list[tuple[int, ...]],
    dtype: torch.dtype,
    *flattened: tuple[str, ...],
) -> None:
    args = (mesh_shape, flattened, pairs, shapes, dtype)
    wrong = [*itertools.chain(*run_ranks(redistributes, math.prod(mesh_shape), *args))]
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_every_pair_of_layouts_of_one_axis_gives_the_shards_of_the_full_tensor(world: int) -> None:
    is_right((world,), pairs_of(ONE_AXIS), SHAPES, torch.float64)


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_of_integers_are_exact(world: int) -> None:
    is_right((world,), pairs_of(ONE_AXIS_OF_BITS), SHAPES, torch.int64)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("flattened", [[], [("a", "b")]], ids=["separate", "flattened"])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2)])
def test_every_pair_of_layouts_of_two_axes_gives_the_shards_of_the_full_tensor(
    mesh_shape: tuple[int, ...], flattened: list[tuple[str, ...]]
) -> None:
    is_right(mesh_shape, pairs_of(TWO_AXES), SHAPES[1:] if flattened else SHAPES, torch.float64, *flattened)


def test_every_pair_of_layouts_of_three_axes_gives_the_shards_of_the_full_tensor() -> None:
    is_right((2, 2, 2), pairs_of(THREE_AXES), [(9, 5)], torch.int64, ("a", "c"))


@pytest.mark.parametrize("shape", [(4, 3, 5), (2, 6, 4), (3, 1, 2)], ids=str)
def test_any_of_three_dims_is_cut(shape: tuple[int, ...]) -> None:
    is_right((3,), pairs_of(layouts("R", "S0", "S1", "S2", "_S1/2", "Psum")), [shape], torch.float64)


def test_a_tensor_without_dims_is_reduced() -> None:
    is_right((3,), pairs_of(layouts("R", "Psum", "Pmax", "Pavg")), [()], torch.float64)


@pytest.mark.parametrize("mesh_shape", [(1, 3), (3, 1), (1, 1)], ids=str)
def test_axes_of_one_rank_change_nothing(mesh_shape: tuple[int, ...]) -> None:
    chosen = layouts("R R", "S0 S0", "S1 S0", "Psum S1", "_S0/2 R")
    is_right(mesh_shape, pairs_of([*chosen, ordered("S0 S0", (0, (1, 0)))]), [(5, 3)], torch.float64)


@pytest.mark.parametrize("axis", ["a", "b"])
@on_ranks(4)
def test_a_slice_of_a_mesh_is_a_mesh(rank: int, world: int, axis: str) -> None:
    mesh = mesh_of((2, 2))[axis]
    for src, dst in itertools.product(layouts("R", "S0", "S1", "Psum"), repeat=2):
        assert local_differences(mesh, src, dst, whole_of((5, 3), torch.float64)) == "", (src, dst)


def redistributes_by_counts(rank: int, world: int, pairs: list[tuple[Layout, Layout]]) -> list[str]:
    mesh = mesh_of((2, 2))
    found = [
        (pair, local_differences(mesh, *pair, whole_of((5, 3), torch.float64), cost_model=StepCounts()))
        for pair in pairs
    ]
    return [f"rank {rank}, {src} -> {dst}: {text}" for (src, dst), text in found if text]


def test_the_shards_are_the_same_whatever_plan_is_the_cheapest() -> None:
    assert [*itertools.chain(*run_ranks(redistributes_by_counts, 4, pairs_of(TWO_AXES)))] == []


def redistributed(
    mesh: DeviceMesh, local: Tensor, src: str, dst: str, whole: Tensor, **options: Any
) -> Tensor:
    return redistribute_local_tensor(
        local,
        Layout(tuple(src.split())).spec(mesh, whole),
        Layout(tuple(dst.split())).spec(mesh, whole),
        **options,
    )


@on_ranks(4)
def test_uneven_nested_shards_lose_no_rows_in_a_gather_over_merged_axes(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2), ("a", "b"))
    whole = whole_of((5, 3), torch.float32)
    local = local_of(whole, Layout(("S0", "S0")), mesh.shape, mesh.get_coordinate() or ())
    assert torch.equal(redistributed(mesh, local, "S0 S0", "R R", whole), whole)


@pytest.mark.parametrize("flattened", [(), (("a", "b"),)], ids=["separate", "flattened"])
@on_ranks(4)
def test_replicated_results_have_the_same_bits_on_all_ranks(
    rank: int, world: int, flattened: tuple[tuple[str, ...], ...]
) -> None:
    mesh = mesh_of((2, 2), *flattened)
    # Sums of these depend on their order.
    local = torch.randn(301, generator=torch.Generator(device_type()).manual_seed(rank)) * 10.0 ** (3 * rank)
    result = redistributed(mesh, local, "Psum Psum", "R R", local)
    everywhere = [torch.empty_like(result) for _ in range(world)]
    dist.all_gather(everywhere, result)
    assert all(torch.equal(other, result) for other in everywhere)


def agrees_with_stock(rank: int, world: int, pairs: list[tuple[Layout, Layout]]) -> list[str]:
    mesh = mesh_of((2, 2))
    whole = whole_of((8, 12), torch.float64)
    wrong = []
    for src, dst in pairs:
        local = local_of(whole, src, mesh.shape, mesh.get_coordinate() or ())
        specs = (src.spec(mesh, whole), dst.spec(mesh, whole))
        ours, stock = redistribute_local_tensor(local, *specs), stock_redistribute(local, *specs)
        if not (torch.equal(ours, stock) and ours.dtype == stock.dtype):
            wrong.append(f"rank {rank}, {src} -> {dst}")
    return wrong


def test_results_are_those_of_stock_where_it_is_right() -> None:
    chosen = layouts("R R", "S0 R", "R S1", "S0 S0", "S0 S1", "S1 S0", "S1 S1", "Psum S0", "Psum Psum")
    pairs = [(src, dst) for src, dst in pairs_of(chosen) if not any(word[0] == "P" for word in dst.words)]
    assert [*itertools.chain(*run_ranks(agrees_with_stock, 4, pairs))] == []


def moves_dtype(rank: int, world: int, dtype: torch.dtype) -> list[str]:
    mesh = mesh_of((world,))
    whole = whole_of((5, 6), dtype)
    pairs = [
        *pairs_of(layouts("R", "S0", "S1", "_S0/2")),
        (Layout(("Psum",)), Layout(("R",))),
        (Layout(("S0",)), Layout(("Psum",))),
    ]
    return [
        f"{src} -> {dst}: {text}" for src, dst in pairs if (text := local_differences(mesh, src, dst, whole))
    ]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int32, torch.int64, torch.complex64, torch.complex128]
)
def test_every_dtype_is_redistributed(dtype: torch.dtype) -> None:
    assert [*itertools.chain(*run_ranks(moves_dtype, 2, dtype))] == []


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16]
)
@on_ranks(2)
def test_small_dtypes_are_moved(rank: int, world: int, dtype: torch.dtype) -> None:
    if device_type() == "cuda" and dtype == torch.int16:
        return  # NCCL has no such numbers
    mesh = mesh_of((world,))
    whole = torch.arange(30).view(5, 6).fmod(3).to(dtype)
    for src, dst in itertools.permutations(layouts("R", "S0", "S1", "_S0/2"), 2):
        at = mesh.get_coordinate() or ()
        result = redistributed(mesh, shard_of(whole, src, mesh.shape, at), *map(str, (src, dst)), whole)
        assert torch.equal(result, shard_of(whole, dst, mesh.shape, at)), (src, dst)


@pytest.mark.parametrize("dst", ["R", "S1", "_S0/3"])
@on_ranks(2)
def test_strides_of_the_input_do_not_matter(rank: int, world: int, dst: str) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((6, 4), torch.float32)
    at = mesh.get_coordinate() or ()
    local = shard_of(whole, Layout(("S0",)), mesh.shape, at).t().contiguous().t()
    result = redistributed(mesh, local, "S0", dst, whole)
    assert torch.equal(result, shard_of(whole, Layout((dst,)), mesh.shape, at))
    assert result.is_contiguous()


@pytest.mark.parametrize("dst", ["R", "S1"])
@on_ranks(3)
def test_ranks_of_a_mesh_may_stand_in_any_order(rank: int, world: int, dst: str) -> None:
    mesh = DeviceMesh(device_type(), [2, 0, 1])
    whole = whole_of((7, 5), torch.float32)
    at = mesh.get_coordinate() or ()
    local = shard_of(whole, Layout(("S0",)), mesh.shape, at)
    assert torch.equal(
        redistributed(mesh, local, "S0", dst, whole), shard_of(whole, Layout((dst,)), mesh.shape, at)
    )


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_keeps_its_tensor(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), [0, 1])
    whole = whole_of((4, 2), torch.float32)
    local = whole[2 * rank : 2 * rank + 2].clone() if rank < 2 else torch.empty(0)
    result = redistributed(mesh, local, "S0", "R", whole)
    if rank == 2:
        assert result is local
    else:
        assert torch.equal(result, whole)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize(
    ("src", "dst"), [("S0", "R"), ("S1", "R"), ("Psum", "R"), ("Psum", "S1"), ("S0", "S1"), ("S1", "S0")]
)
@on_ranks(2)
def test_the_result_is_pending_if_and_only_if_the_call_is_asynchronous(
    rank: int, world: int, src: str, dst: str, async_op: bool
) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((4, 6), torch.float32)
    at = mesh.get_coordinate() or ()
    local = local_of(whole, Layout((src,)), mesh.shape, at)
    result = redistributed(mesh, local, src, dst, whole, async_op=async_op)
    assert funcol.is_pending(result) == async_op
    assert torch.equal(result, shard_of(whole, Layout((dst,)), mesh.shape, at))


@on_ranks(2)
def test_a_pending_tensor_is_redistributed_like_any_other(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((4, 6), torch.float32)
    shard = whole[2 * rank : 2 * rank + 2].clone()
    pending = redistributed(mesh, shard, "S0", "R", whole, async_op=True)
    assert torch.equal(redistributed(mesh, pending, "R", "S1", whole), whole.chunk(2, 1)[rank])


@on_ranks(2)
def test_the_same_layout_gives_the_tensor_itself(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    local = torch.ones(2, 2)
    assert redistributed(mesh, local, "S0", "S0", torch.ones(4, 2)) is local


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("shape", ValueError, r"shape \[3, 6\].* holds \[2, 6\]"),
        ("dims", ValueError, r"shape \[12\].* holds \[2, 6\]"),
        ("mesh", NotImplementedError, "one DeviceMesh"),
        ("meta", ValueError, "tensor_meta"),
        ("tensor", TypeError, "list where a tensor"),
        ("bytes", ValueError, "max_bytes"),
        ("dim", ValueError, "dim"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_redistributed_is_refused_before_anything_is_sent(
    rank: int, world: int, case: str, error: type[Exception], words: str
) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((4, 6), torch.float32)
    replicate, shard = Layout(("R",)).spec(mesh, whole), Layout(("S0",)).spec(mesh, whole)
    local = torch.ones(2, 6)
    calls: dict[str, Callable[[], Tensor]] = {
        "shape": lambda: redistribute_local_tensor(torch.ones(3, 6), shard, replicate),
        "dims": lambda: redistribute_local_tensor(torch.ones(12), shard, replicate),
        "mesh": lambda: redistribute_local_tensor(
            local, shard, Layout(("R",)).spec(DeviceMesh(device_type(), [1, 0]), whole)
        ),
        "meta": lambda: redistribute_local_tensor(local, DTensorSpec(mesh, (Shard(0),)), replicate),
        "tensor": lambda: redistribute_local_tensor([1.0], shard, replicate),  # type: ignore[arg-type]
        "bytes": lambda: redistribute_local_tensor(local, shard, replicate, max_bytes=10),
        "dim": lambda: redistribute_local_tensor(local, shard, Layout(("S5",)).spec(mesh, whole)),
    }
    with pytest.raises(error, match=words):
        calls[case]()
