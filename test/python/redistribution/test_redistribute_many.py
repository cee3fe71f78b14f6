"""``redistribute_many``: the results of one call for each tensor, with a collective for many of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from against_full_tensor import Item, dtensors_of, redistribution_errors, targets_of
from ranks import device_type, on_ranks, run_ranks
from sharded import Layout, layouts, mesh_of, ordered, placed, shard_of, whole_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _MaskPartial

import funcol
from funcol import redistribute, redistribute_many

ON_DEVICES = True

SHAPES = [(8, 12), (5, 3), (1, 7), (0, 4)]

ONE_AXIS = layouts("R", "S0", "S1", "_S0/2", "_S1/3", "Psum", "Pavg", "Pmax")

TWO_AXES = layouts("R R", "S0 R", "S0 S0", "S0 S1", "S1 S0", "_S0/2 S0", "Psum R", "Psum Psum", "Pavg Psum")


def items_of(chosen: list[Layout], dtype: torch.dtype) -> list[Item]:
    return [(shape, dtype, src, dst) for shape in SHAPES for src in chosen for dst in chosen]


@pytest.mark.parametrize("mesh_shape", [(1,), (2,), (3,), (4,)], ids=str)
def test_every_pair_of_layouts_of_one_axis_goes_in_one_call(mesh_shape: tuple[int, ...]) -> None:
    items = items_of(ONE_AXIS, torch.float64)
    assert [*itertools.chain(*run_ranks(redistribution_errors, mesh_shape[0], mesh_shape, items))] == []


def test_every_pair_of_layouts_of_two_axes_goes_in_one_call() -> None:
    items = items_of(TWO_AXES, torch.float64)
    assert [*itertools.chain(*run_ranks(redistribution_errors, 4, (2, 2), items))] == []


MOVES = [(Layout((src,)), Layout((dst,))) for src, dst in itertools.permutations(["R", "S0", "S1"], 2)]


def test_tensors_of_several_dtypes_go_in_one_call() -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64]
    # The bools are ones and zeros.
    items: list[Item] = [
        (shape, dtype, src, dst) for shape in SHAPES for dtype in dtypes for src, dst in MOVES
    ]
    assert [*itertools.chain(*run_ranks(redistribution_errors, 2, (2,), items))] == []


def equals_single_calls(rank: int, world: int, chosen: list[Layout]) -> list[str]:
    mesh = mesh_of((2, 2))
    wrong = []
    pairs = list(itertools.product(chosen, chosen))
    sources = [placed(whole_of((5, 6), torch.float32), src, mesh) for src, _ in pairs]
    together = redistribute_many(sources, [dst.placements() for _, dst in pairs])
    for (src, dst), source, result in zip(pairs, sources, together, strict=True):
        alone = redistribute(source, placements=dst.placements())
        if not torch.equal(alone.to_local(), result.to_local()) or alone._spec != result._spec:
            wrong.append(f"rank {rank}, {src} -> {dst}")
    return wrong


def test_results_are_those_of_single_calls() -> None:
    chosen = [*layouts("R R", "S0 S1", "S1 R", "Psum S0"), ordered("S0 S0", (0, (1, 0)))]
    assert [*itertools.chain(*run_ranks(equals_single_calls, 4, chosen))] == []


def count_collectives(call: Callable[[], object]) -> int:
    """Returns how often a backend was called, as PyTorch's profiler sees it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return sum(event.name.startswith("c10d::") for event in profile.events())


def counts(rank: int, world: int, items: list[Item], expected: int, options: dict[str, Any]) -> None:
    mesh = mesh_of((world,)) if len(items[0][2].words) == 1 else mesh_of((2, 2))
    sources, targets = dtensors_of(items, mesh), targets_of(items)
    redistribute_many(sources, targets, **options)
    assert count_collectives(lambda: redistribute_many(sources, targets, **options)) == expected


def alike(src: str, dst: str, dtype: torch.dtype = torch.float32, count: int = 20) -> list[Item]:
    ends = (Layout(tuple(src.split())), Layout(tuple(dst.split())))
    return [((size + 1, size % 5 + 2), dtype, *ends) for size in range(count)]


def of_one_shape(src: str, dst: str) -> list[Item]:
    """Items of one shape: where plans depend on sizes, all have the same plan."""
    return [((7, 5), *item[1:]) for item in alike(src, dst)]


@pytest.mark.parametrize(
    ("world", "items", "expected"),
    [
        (2, alike("S0", "R"), 1),
        (2, alike("S0", "R") + alike("S1", "R"), 1),
        (2, alike("S0", "R") + alike("S0", "R", torch.float64), 2),
        (2, alike("Psum", "R"), 1),
        (2, alike("Psum", "R") + alike("Pmax", "R"), 2),
        (2, alike("Psum", "S0") + alike("Psum", "S1"), 1),
        (2, of_one_shape("S0", "S1") + of_one_shape("S1", "S0"), 1),
        (2, alike("R", "S0") + alike("R", "Psum"), 0),
        (4, of_one_shape("S0 S1", "R R"), 2),
        (4, alike("Psum Psum", "R R"), 1),
    ],
)
def test_tensors_with_the_same_steps_share_a_collective_a_step(
    world: int, items: list[Item], expected: int
) -> None:
    run_ranks(counts, world, items, expected, {})


def test_a_bound_on_memory_splits_collectives() -> None:
    # A rank holds 32 bytes of a tensor, gets 64, and packs them both.
    items: list[Item] = [((4, 4), torch.float32, Layout(("S0",)), Layout(("R",)))] * 6
    peak = funcol.plan_redistribution("S0", "R", {"a": 2}, (4, 4), torch.float32).peak_bytes
    run_ranks(counts, 2, items, 3, {"max_bytes": 2 * peak})


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_results_are_pending_if_and_only_if_the_call_is_asynchronous(
    rank: int, world: int, async_op: bool
) -> None:
    mesh = mesh_of((world,))
    items = alike("S0", "R") + alike("Psum", "S1")
    results = redistribute_many(dtensors_of(items, mesh), targets_of(items), async_op=async_op)
    assert all(funcol.is_pending(result._local_tensor) == async_op for result in results)
    for (shape, dtype, _, dst), result in zip(items, results, strict=True):
        assert torch.equal(result._local_tensor, shard_of(whole_of(shape, dtype), dst, mesh.shape, (rank,)))


@on_ranks(2)
def test_placements_may_be_given_once_for_all_tensors(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    items = alike("S0", "R", count=3)
    for result, (shape, dtype, *_) in zip(
        redistribute_many(iter(dtensors_of(items, mesh)), [Replicate()]), items, strict=True
    ):
        assert torch.equal(result.to_local(), whole_of(shape, dtype))
    assert redistribute_many(dtensors_of(items, mesh), [Shard(-1)])[0].placements == (Shard(1),)


@on_ranks(2)
def test_strided_and_pending_tensors_are_redistributed_like_any_other(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((6, 4), torch.float32)
    shard = shard_of(whole, Layout(("S0",)), mesh.shape, (rank,)).t().contiguous().t()
    sources = [DTensor.from_local(shard, mesh, [Shard(0)], run_check=False) for _ in range(3)]
    pending = redistribute_many(sources, [Replicate()], async_op=True)
    for result in redistribute_many(pending, [Shard(1)]):
        assert torch.equal(result.to_local(), whole.chunk(world, 1)[rank])


def gradient_layout(layout: Layout) -> Layout:
    return layout._replace(words=tuple("R" if word[0] == "P" else word for word in layout.words))


def sends_gradients_back(rank: int, world: int, mesh_shape: tuple[int, ...], items: list[Item]) -> None:
    mesh = mesh_of(mesh_shape)
    at = mesh.get_coordinate() or ()
    leaves = [leaf.requires_grad_() for leaf in dtensors_of(items, mesh)]
    results = redistribute_many(leaves, targets_of(items))
    weights = [whole_of(shape, dtype).flip(0) for shape, dtype, *_ in items]
    given = [
        placed(weight, gradient_layout(dst), mesh).requires_grad_()
        for weight, (*_, dst) in zip(weights, items, strict=True)
    ]
    grads = torch.autograd.grad(results, leaves, given, create_graph=True)
    for grad, weight, (*_, src, _dst) in zip(grads, weights, items, strict=True):
        assert isinstance(grad, DTensor)
        assert grad.placements == gradient_layout(src).placements()
        assert torch.equal(grad.to_local(), shard_of(weight, gradient_layout(src), mesh.shape, at))
    seconds = torch.autograd.grad(
        grads,
        given,
        [placed(w, gradient_layout(i[2]), mesh) for w, i in zip(weights, items, strict=True)],
    )
    for second, weight, (*_, dst) in zip(seconds, weights, items, strict=True):
        assert torch.equal(second.to_local(), shard_of(weight, gradient_layout(dst), mesh.shape, at))


@pytest.mark.parametrize(
    ("mesh_shape", "chosen"),
    [((2,), layouts("R", "S0", "S1", "Psum")), ((2, 2), layouts("R R", "S0 S1", "Psum S0", "S0 S0"))],
    ids=["one axis", "two axes"],
)
def test_gradients_of_any_order_have_the_layouts_of_the_inputs(
    mesh_shape: tuple[int, ...], chosen: list[Layout]
) -> None:
    items: list[Item] = [((5, 6), torch.float64, *pair) for pair in itertools.product(chosen, chosen)]
    run_ranks(sends_gradients_back, math.prod(mesh_shape), mesh_shape, items)


@on_ranks(2)
def test_only_tensors_that_need_a_gradient_and_are_used_get_one(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    items = [*alike("S0", "R", count=3), *alike("S0", "R", torch.int64, count=1)]
    sources = dtensors_of(items, mesh)
    sources[0].requires_grad_()
    sources[1].requires_grad_()
    results = redistribute_many(sources, [Replicate()])
    assert [result.requires_grad for result in results] == [True, True, False, False]
    results[1].to_local().sum().backward()
    assert sources[0].grad is None
    assert isinstance(sources[1].grad, DTensor)
    # The loss is the total over all ranks.
    assert torch.equal(sources[1].grad.to_local(), torch.ones_like(sources[1].to_local()))


@on_ranks(2)
def test_gradients_share_collectives_too(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    leaves = [leaf.requires_grad_() for leaf in dtensors_of(alike("S0", "R"), mesh)]
    results = redistribute_many(leaves, [Replicate()])
    ones = [torch.ones_like(result) for result in results]
    # The gradients come replicated: nothing is sent for them, but in one piece if they come partial.
    partial = [DTensor.from_local(one.to_local(), mesh, Layout(("Psum",)).placements()) for one in ones]
    assert count_collectives(lambda: torch.autograd.grad(results, leaves, partial)) == 1


@on_ranks(2)
def test_a_compiled_region_takes_it_in_one_graph(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    items = alike("S0", "R", count=2) + alike("Psum", "S1", count=2)
    sources, targets = dtensors_of(items, mesh), targets_of(items)

    def program(dtensors: list[DTensor]) -> list[Tensor]:
        return [out.to_local() + 1 for out in redistribute_many([d * 2 for d in dtensors], targets)]

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for got, want in zip(compiled(sources), program(sources), strict=True):
        assert torch.equal(got, want)


@on_ranks(2)
def test_modes_see_the_one_collective_of_all_tensors(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    items = alike("S0", "R", count=4)
    with CommDebugMode() as mode:
        results = redistribute_many(dtensors_of(items, mesh), [Replicate()])
    assert mode.get_total_counts() == 1
    for result, (shape, dtype, *_) in zip(results, items, strict=True):
        assert torch.equal(result.to_local(), whole_of(shape, dtype))


@on_ranks(2)
def test_masked_partials_may_be_among_the_tensors(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    table, indices = whole_of((5, 3), torch.float32), torch.tensor([[4, 0, 2], [1, 3, 3]])
    masked = _MaskPartial("sum", offset_shape=table.shape, offset_dim=0)

    def spec(placement: Any, tensor: Tensor) -> DTensorSpec:
        meta = TensorMeta(tensor.shape, tensor.stride(), tensor.dtype)
        return DTensorSpec(mesh, (placement,), tensor_meta=meta)

    own = funcol.redistribution.redistribute_local_tensor(
        indices, spec(Replicate(), indices), spec(masked, indices)
    )
    rows = torch.nn.functional.embedding(own, shard_of(table, Layout(("S0",)), mesh.shape, (rank,)))
    expected = torch.nn.functional.embedding(indices, table)
    masked_rows = DTensor(rows, spec(masked, expected), requires_grad=False)  # type: ignore[call-arg]
    plain = placed(table, Layout(("S0",)), mesh)
    first, second = redistribute_many([masked_rows, plain], [Replicate()])
    assert torch.equal(first.to_local(), expected)
    assert torch.equal(second.to_local(), table)


@on_ranks(3)
def test_a_rank_outside_of_the_mesh_keeps_its_tensors(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), [0, 1])
    local = torch.full((2, 2), float(rank)) if rank < 2 else torch.empty(0)
    spec = Layout(("S0",)).spec(mesh, torch.empty(4, 2))
    source = DTensor(local, spec, requires_grad=False)  # type: ignore[call-arg]
    (result,) = redistribute_many([source], [Replicate()])
    assert result.placements == (Replicate(),)
    assert result._local_tensor is local if rank == 2 else result._local_tensor[:, 0].tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("case", "error", "words"),
    [
        ("tensor", TypeError, "got a Tensor, expected DTensors"),
        ("mesh", NotImplementedError, "tensor 2 is on .* one DeviceMesh"),
        ("number", ValueError, "1 sequences of placements for 2 tensors"),
        ("none", ValueError, "no placements"),
        ("shape", ValueError, r"shape \[3, 3\].* holds"),
        ("dim", ValueError, "dim"),
        ("bytes", ValueError, "max_bytes"),
        ("op", TypeError, "avg"),
        ("with gradients", ValueError, r"shape \[3, 3\].* holds"),
    ],
)
@on_ranks(2)
def test_what_cannot_be_redistributed_is_refused_before_anything_is_sent(
    rank: int, world: int, case: str, error: type[Exception], words: str
) -> None:
    mesh = mesh_of((world,))
    good = dtensors_of(alike("S0", "R", count=2), mesh)
    elsewhere = dtensors_of(alike("S0", "R", count=1), DeviceMesh(device_type(), [1, 0]))
    misfit = DTensor(torch.ones(3, 3), good[0]._spec, requires_grad=False)  # type: ignore[call-arg]
    bits = DTensor(  # type: ignore[call-arg]
        torch.ones(2, 2) > 0, Layout(("Pavg",)).spec(mesh, torch.ones(2, 2) > 0), requires_grad=False
    )
    one, several = [Replicate()], [[Replicate()], [Replicate()], [Shard(5)]]
    calls: dict[str, Callable[[], object]] = {
        "tensor": lambda: redistribute_many([*good, torch.ones(2)], one),  # type: ignore[list-item]
        "mesh": lambda: redistribute_many([*good, *elsewhere], one),
        "number": lambda: redistribute_many(good, [one]),
        "none": lambda: redistribute_many(good, []),
        "shape": lambda: redistribute_many([*good, misfit], one),
        "dim": lambda: redistribute_many([*good, good[0]], several),
        "bytes": lambda: redistribute_many(good, one, max_bytes=3),
        "op": lambda: redistribute_many([*good, bits], one),
        "with gradients": lambda: redistribute_many([good[0].requires_grad_(), misfit], one),
    }
    before = funcol._C.async_counters()
    with pytest.raises(error, match=words):
        calls[case]()
    assert funcol._C.async_counters() == before


def test_no_tensors_give_no_tensors() -> None:
    assert redistribute_many([], [Replicate()]) == []
    assert redistribute_many([], []) == []
