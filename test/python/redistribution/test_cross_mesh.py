"""Redistribution from one mesh to another: of the same ranks, of some of them, of others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from against_full_tensor import Ends, Item, cross_mesh_errors, differences, mesh_of_ranks
from plans import axis_cost, model
from ranks import device_type, on_ranks, run_ranks
from sharded import Layout, layouts, ordered, placed, shard_of, whole_of
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial

import funcol
from funcol.redistribution import StepCounts

ON_DEVICES = True

ALL_4 = (0, 1, 2, 3)
SAME = Ends((2, 2), ALL_4, (4,), ALL_4)
TO_AXES = Ends((4,), ALL_4, (2, 2), ALL_4)
SUBSET = Ends((2, 2), ALL_4, (2,), (1, 3))
SUPERSET = Ends((2,), (0, 1), (2, 2), ALL_4)
DISJOINT = Ends((2,), (0, 1), (2,), (2, 3))
TURNED = Ends((3, 2), (0, 1, 2, 3, 4, 5), (2, 3), (0, 1, 2, 3, 4, 5))
# The smallest group of all has a rank of neither mesh.
IN_PAIRS = Ends((2,), (0, 1), (2,), (1, 2))

SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3", "Psum", "Pavg", "Pmin", "Pmax")
TWO_AXES = [
    *layouts("R R", "S0 R", "R S1", "S0 S0", "S0 S1", "S1 S0", "_S0/2 S0", "S0 _S0/3", "_S1/2 R"),
    *layouts("Psum R", "S0 Pmax", "Psum Psum", "Pavg Psum", "Pmin Pmin"),
    ordered("S0 S0", (0, (1, 0))),
    ordered("S1 S1", (1, (1, 0))),
]


def pairs(ends: Ends) -> list[tuple[Layout, Layout]]:
    sides = [ONE_AXIS if len(shape) == 1 else TWO_AXES for shape in (ends.src, ends.dst)]
    # A target in an order of its own is for one tensor alone: redistribute() takes it.
    return [(src, dst) for src, dst in itertools.product(*sides) if dst.order is None]


@pytest.mark.parametrize("ends", [SAME, TO_AXES, SUBSET, SUPERSET, DISJOINT, TURNED, IN_PAIRS], ids=str)
def test_every_pair_of_layouts_goes_in_one_call(ends: Ends) -> None:
    items: list[Item] = [(shape, torch.float64, *pair) for shape in SHAPES for pair in pairs(ends)]
    world = 6 if ends is TURNED else 4
    assert [*itertools.chain(*run_ranks(cross_mesh_errors, world, ends, items))] == []


WORDS = ["R", "S0", "S1", "_S0/2", "_S1/3", "Psum", "Pavg", "Pmin", "Pmax", "Pproduct"]
LINEAR = {"Psum", "Pavg"}


def all_layouts(num_axes: int) -> list[Layout]:
    found = []
    for words in itertools.product(WORDS, repeat=num_axes):
        partial = {word for word in words if word[0] == "P"}
        if len(partial) <= 1 or partial <= LINEAR:
            found.append(Layout(words))
    return found


@pytest.mark.long
@pytest.mark.parametrize("ends", [SAME, TO_AXES, SUBSET, SUPERSET, DISJOINT, TURNED, IN_PAIRS], ids=str)
def test_every_pair_of_all_layouts_goes_in_one_call(ends: Ends) -> None:
    sides = [all_layouts(len(shape)) for shape in (ends.src, ends.dst)]
    items: list[Item] = [((6, 4), torch.float64, *pair) for pair in itertools.product(*sides)]
    world = 6 if ends is TURNED else 4
    assert [*itertools.chain(*run_ranks(cross_mesh_errors, world, ends, items, timeout=600))] == []


def test_tensors_of_several_dtypes_and_dims_go_in_one_call() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
    shapes = [(), (7,), (2, 3, 5), (4, 1, 3, 2)]
    items: list[Item] = []
    for shape, dtype in itertools.product(shapes, dtypes):
        src = "S0" if shape else "R"
        items.append((shape, dtype, Layout((src,)), Layout((f"S{len(shape) - 1}" if shape else "R",))))
    assert [*itertools.chain(*run_ranks(cross_mesh_errors, 4, DISJOINT, items))] == []


@pytest.mark.cpu_only  # NCCL has no reductions of bits
@pytest.mark.parametrize("word", ["Pband", "Pbor", "Pbxor", "Pproduct"])
def test_partials_of_integers_are_reduced_before_they_leave(word: str) -> None:
    items: list[Item] = [
        ((6, 4), torch.int64, Layout((word,)), Layout((target,))) for target in ("R", "S0", word)
    ]
    assert [*itertools.chain(*run_ranks(cross_mesh_errors, 4, DISJOINT, items))] == []


def from_several_meshes(rank: int, world: int, async_op: bool) -> list[str]:
    """1-D and 2-D parameters, one of them on the target mesh already."""
    meshes = {
        "1": mesh_of_ranks((2,), (0, 1)),
        "2": mesh_of_ranks((2, 2), ALL_4),
        "to": mesh_of_ranks((3,), (1, 2, 3)),
    }
    items = [
        ("2", "S0 S1", "S1"),
        ("1", "S0", "S0"),
        ("to", "S0", "S1"),
        ("2", "R S0", "R"),
        ("1", "Psum", "S1"),
    ]
    whole = whole_of((6, 5), torch.float64)
    sources = [
        placed(whole, Layout(tuple(src.split())), meshes[on], requires_grad=on == "2") for on, src, _ in items
    ]
    targets = [Layout((dst,)) for *_, dst in items]
    results = funcol.redistribute_many(
        sources, [target.placements() for target in targets], device_mesh=meshes["to"], async_op=async_op
    )
    assert [result.requires_grad for result in results] == [on == "2" for on, *_ in items]
    wrong = [
        differences(result.detach(), target, meshes["to"], whole)
        for result, target in zip(results, targets, strict=True)
    ]
    return [text for text in wrong if text]


@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_of_several_meshes_go_in_one_call(async_op: bool) -> None:
    assert run_ranks(from_several_meshes, 4, async_op) == [[]] * 4


def one_by_one(rank: int, world: int, ends: Ends, async_op: bool) -> list[str]:
    src_mesh, dst_mesh = ends.meshes()
    whole = whole_of((5, 8), torch.float32)
    wrong = []
    for src, dst in [("S0", "S1"), ("Psum", "S0"), ("R", "R"), ("S1", "Pmax")]:
        source = placed(whole, Layout((src,)), src_mesh)
        target = Layout((dst,))
        result = funcol.redistribute(source, dst_mesh, target.placements(), async_op=async_op)
        wrong.append(differences(result, target, dst_mesh, whole))
    return [text for text in wrong if text]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("ends", [DISJOINT, IN_PAIRS], ids=str)
def test_one_tensor_goes_by_redistribute(ends: Ends, async_op: bool) -> None:
    assert run_ranks(one_by_one, 4, ends, async_op) == [[]] * 4


def to_an_order(rank: int, world: int) -> str:
    src_mesh, dst_mesh = SUPERSET.meshes()
    whole = whole_of((7, 4), torch.float32)
    target = ordered("S0 S0", (0, (1, 0)))
    result = funcol.redistribute(
        placed(whole, Layout(("S1",)), src_mesh), dst_mesh, target.placements(), shard_order=[(0, (1, 0))]
    )
    return differences(result, target, dst_mesh, whole)


def test_the_target_may_have_a_shard_order() -> None:
    assert run_ranks(to_an_order, 4) == [""] * 4


def by_a_model(rank: int, world: int) -> list[str]:
    src_mesh, dst_mesh = SUPERSET.meshes()
    whole, target = whole_of((8, 4), torch.float32), Layout(("R", "S0"))
    models: list[Any] = [StepCounts(), (model(a=axis_cost(2)), model(a=axis_cost(2), b=axis_cost(2)))]
    results = [
        funcol.redistribute_many(
            [placed(whole, Layout(("Psum",)), src_mesh)],
            target.placements(),
            device_mesh=dst_mesh,
            cost_model=cost_model,
        )
        for cost_model in models
    ]
    return [differences(result, target, dst_mesh, whole) for [result] in results]


def test_a_cost_model_is_for_both_meshes_or_one_for_each() -> None:
    assert run_ranks(by_a_model, 4) == [["", ""]] * 4


@on_ranks(4)
def test_a_result_may_be_pending_and_the_source_written_to(rank: int, world: int) -> None:
    src_mesh, dst_mesh = DISJOINT.meshes()
    whole = whole_of((512, 64), torch.float32)
    source = placed(whole, Layout(("S0",)), src_mesh)
    result = funcol.redistribute(source, dst_mesh, [Shard(1)], async_op=True)
    if rank < 2:
        source._local_tensor.zero_()  # it was packed already
    else:
        at = dst_mesh.get_coordinate()
        assert at is not None
        assert torch.equal(result.to_local() + 0, shard_of(whole, Layout(("S1",)), (2,), at))


def without_the_others(rank: int, world: int) -> str:
    src_mesh, dst_mesh = IN_PAIRS.meshes()
    if rank == 3:
        return ""  # has no part in it, and does not call
    whole = whole_of((6, 6), torch.float32)
    source = placed(whole, Layout(("S0",)), src_mesh)
    result = funcol.redistribute(source, dst_mesh, [Shard(1)])
    return differences(result, Layout(("S1",)), dst_mesh, whole)


def test_ranks_of_neither_mesh_need_not_call() -> None:
    assert run_ranks(without_the_others, 4) == [""] * 4


@on_ranks(4)
def test_a_rank_of_neither_mesh_gets_an_empty_tensor(rank: int, world: int) -> None:
    src_mesh, dst_mesh = IN_PAIRS.meshes()
    result = funcol.redistribute(placed(torch.ones(4), Layout(("S0",)), src_mesh), dst_mesh, [Shard(0)])
    assert result.device_mesh == dst_mesh
    if rank == 3:
        assert result._local_tensor.shape == (0,)


@on_ranks(4)
def test_a_partial_with_rules_of_its_own_is_reduced_before(rank: int, world: int) -> None:
    src_mesh, dst_mesh = DISJOINT.meshes()
    local = torch.full((3,), 3.0 + rank) if rank < 2 else torch.empty(0)
    source = DTensor.from_local(
        local, src_mesh, [_NormPartial(2)], run_check=False, shape=torch.Size([3]), stride=(1,)
    )
    result = funcol.redistribute(source, dst_mesh, [Replicate()])
    if rank >= 2:
        assert result.to_local().tolist() == [5.0] * 3


@on_ranks(4)
def test_the_dtypes_that_are_sent_are_the_callers(rank: int, world: int) -> None:
    src_mesh, dst_mesh = SAME.meshes()
    source = placed(whole_of((8, 4), torch.float32), Layout(("S0", "S1")), src_mesh, requires_grad=True)
    result = funcol.redistribute(
        source, dst_mesh, [Shard(1)], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
    )
    assert result.dtype == result.to_local().dtype == torch.bfloat16
    result.to_local().sum().backward()
    assert source.grad is not None
    assert source.grad.dtype == torch.float32
    assert source.grad.to_local().tolist() == torch.ones(4, 2).tolist()


def gradients(rank: int, world: int, ends: Ends, src: str, dst: str) -> None:
    src_mesh, dst_mesh = ends.meshes()
    whole = whole_of((4, 6), torch.float64)
    weight = torch.arange(24.0, dtype=torch.float64).view(4, 6)
    source = placed(whole, Layout(tuple(src.split())), src_mesh, requires_grad=True)
    target = Layout(tuple(dst.split()))
    result = funcol.redistribute(source, dst_mesh, target.placements())
    on_target = placed(weight, target, dst_mesh)
    [gradient] = torch.autograd.grad(result, source, on_target, create_graph=True)
    assert gradient.device_mesh == src_mesh
    at = src_mesh.get_coordinate()
    if at is None:
        assert gradient._local_tensor.shape == (0,)
        return
    held = tuple("R" if word[0] == "P" else word for word in src.split())
    expected = shard_of(weight, Layout(held), src_mesh.shape, at)
    assert torch.equal(gradient.to_local(), expected)


@pytest.mark.parametrize(
    ("ends", "src", "dst"),
    [
        (SAME, "S0 S1", "S0"),
        (SAME, "Psum R", "S1"),
        (TO_AXES, "S0", "R S1"),
        (SUPERSET, "S0", "S1 R"),
        (SUPERSET, "R", "S0 S1"),
        (TURNED, "S0 R", "R S1"),
    ],
    ids=str,
)
def test_gradients_come_back(ends: Ends, src: str, dst: str) -> None:
    run_ranks(gradients, 6 if ends is TURNED else 4, ends, src, dst)


@on_ranks(4)
def test_gradients_have_gradients(rank: int, world: int) -> None:
    src_mesh, dst_mesh = SAME.meshes()
    source = placed(whole_of((4, 2), torch.float64), Layout(("S0", "R")), src_mesh, requires_grad=True)
    [moved] = funcol.redistribute_many([source], [Shard(1)], device_mesh=dst_mesh)
    squares = (moved * moved).to_local().sum()
    [first] = torch.autograd.grad(squares, source, create_graph=True)
    [second] = torch.autograd.grad(first.to_local().sum(), source)
    assert torch.equal(second.to_local(), torch.full((2, 2), 2.0, dtype=torch.float64))


@on_ranks(4)
def test_a_gradient_that_cannot_come_back_is_an_error_when_it_is_asked_for(rank: int, world: int) -> None:
    src_mesh, dst_mesh = DISJOINT.meshes()
    source = placed(torch.ones(4), Layout(("S0",)), src_mesh, requires_grad=True)
    result = funcol.redistribute(source, dst_mesh, [Shard(0)])
    if rank >= 2:
        with pytest.raises(ValueError, match=r"ranks \[0, 1\] of the first mesh are not in the second"):
            result.to_local().sum().backward()


@on_ranks(4)
def test_all_ranks_refuse_before_anything_is_sent(rank: int, world: int) -> None:
    src_mesh, dst_mesh = DISJOINT.meshes()
    source = placed(torch.ones(4, 2), Layout(("S0",)), src_mesh)
    with pytest.raises(ValueError, match="does not have"):
        funcol.redistribute(source, dst_mesh, [Shard(2)])
    with pytest.raises(ValueError, match="2 placements"):
        funcol.redistribute(source, dst_mesh, [Shard(0), Replicate()])
    with pytest.raises(ValueError, match="stays within 3 bytes"):
        funcol.redistribute(source, dst_mesh, [Replicate()], max_bytes=3)
    with pytest.raises(NotImplementedError, match="only eagerly"), torch._subclasses.FakeTensorMode():
        funcol.redistribute(source, dst_mesh, [Replicate()])
    with pytest.raises(TypeError, match="expected a DTensor"):
        funcol.redistribute_many([source, torch.ones(2)], [Shard(1)], device_mesh=dst_mesh)  # type: ignore[list-item]
    # No rank is left hanging: the ranks are still in step.
    result = funcol.redistribute(source, dst_mesh, [Shard(1)])
    assert differences(result, Layout(("S1",)), dst_mesh, torch.ones(4, 2)) == ""


@on_ranks(2)
def test_meshes_of_different_devices_are_refused(rank: int, world: int) -> None:
    src_mesh = mesh_of_ranks((2,), (0, 1))
    dst_mesh = DeviceMesh("meta", [0, 1], _init_backend=False, _rank=rank)
    with pytest.raises(ValueError, match="Both meshes have to be of one kind of device"):
        funcol.redistribute(placed(torch.ones(4), Layout(("S0",)), src_mesh), dst_mesh, [Shard(0)])


@on_ranks(4)
def test_a_local_tensor_of_another_shape_is_refused(rank: int, world: int) -> None:
    src_mesh, dst_mesh = SAME.meshes()
    spec = Layout(("S0", "R")).spec(src_mesh, torch.ones(4, 2))
    source = DTensor(torch.ones(3, 2), spec, requires_grad=False)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"shape \[3, 2\], but this rank holds \[2, 2\]"):
        funcol.redistribute(source, dst_mesh, [Shard(0)])


@on_ranks(4)
def test_the_target_may_be_partial(rank: int, world: int) -> None:
    src_mesh, dst_mesh = DISJOINT.meshes()
    source = placed(whole_of((4, 2), torch.float32), Layout(("S0",)), src_mesh)
    result = funcol.redistribute(source, dst_mesh, [Partial("sum")])
    assert differences(result, Layout(("Psum",)), dst_mesh, whole_of((4, 2), torch.float32)) == ""
    assert device_type() == result.device.type
