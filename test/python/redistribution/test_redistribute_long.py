"""Every ordered pair of layouts on every small mesh: minutes, so only with ``--long``."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence

import pytest
import torch
from against_full_tensor import local_differences, redistribution_errors
from ranks import run_ranks
from sharded import Layout, Order, mesh_of, whole_of

pytestmark = pytest.mark.long

Pair = tuple[Layout, Layout]

PAIRS_A_CHUNK = 400
CHUNK_TIMEOUT_S = 300

PLAIN = ["R", "S0", "S1", "Psum", "Pavg", "Pmax"]
STRIDED = ["_S0/2", "_S0/3", "_S1/2"]
OF_ONE_AXIS = ["_S0/5", "_S1/3", "Pmin", "Pproduct"]

# Even, uneven, smaller than the mesh, and without elements.
SHAPES = [(24, 12), (7, 5), (1, 3), (0, 4)]


def with_orders(words: Sequence[str]) -> Iterable[Layout]:
    """Yields the layout of these words in every order in which its axes can cut the dims."""
    cuts = {
        dim: [axis for axis, word in enumerate(words) if word == f"S{dim}"]
        for dim in sorted({int(word[1:]) for word in words if word[0] == "S"})
    }
    yield Layout(tuple(words))
    if any(word[0] == "_" for word in words):
        return
    for orders in itertools.product(*map(itertools.permutations, cuts.values())):
        order: Order = tuple(zip(cuts, orders, strict=True))
        if any(list(axes) != cuts[dim] for dim, axes in order):
            yield Layout(tuple(words), order)


def every_layout(num_axes: int, words: Sequence[str]) -> list[Layout]:
    return [layout for chosen in itertools.product(words, repeat=num_axes) for layout in with_orders(chosen)]


def is_contradictory(layout: Layout) -> bool:
    """Returns true if the result depends on the order in which the partials are reduced."""
    ops = {word[1:] for word in layout.words if word[0] == "P"}
    return len(ops) > 1 and ops != {"sum", "avg"}


def judges(
    rank: int, world: int, mesh_shape: tuple[int, ...], shape: tuple[int, ...], pairs: list[Pair]
) -> tuple[Counter[str], list[str]]:
    """Returns the numbers of right and of refused pairs, and the errors of the wrong ones."""
    mesh = mesh_of(mesh_shape)
    whole = whole_of(shape, torch.float64)
    counts: Counter[str] = Counter()
    wrong = []
    for src, dst in pairs:
        try:
            found = local_differences(mesh, src, dst, whole)
        except (ValueError, NotImplementedError):
            counts["refused"] += 1
            if not (is_contradictory(src) or is_contradictory(dst)):
                wrong.append(f"rank {rank}, {src} -> {dst}: refused")
            continue
        counts["right"] += not found
        if found:
            wrong.append(f"rank {rank}, {src} -> {dst}: {found}")
    return counts, wrong


def judge(mesh_shape: tuple[int, ...], shape: tuple[int, ...], pairs: list[Pair]) -> None:
    world = math.prod(mesh_shape)
    totals: Counter[str] = Counter()
    for begin in range(0, len(pairs), PAIRS_A_CHUNK):
        chunk = pairs[begin : begin + PAIRS_A_CHUNK]
        of_ranks = run_ranks(judges, world, mesh_shape, shape, chunk, timeout=CHUNK_TIMEOUT_S)
        wrong = [*itertools.chain(*(of_rank for _, of_rank in of_ranks))]
        assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:40])
        assert all(counts == of_ranks[0][0] for counts, _ in of_ranks)
        totals += of_ranks[0][0]
    contradictory = sum(is_contradictory(src) or is_contradictory(dst) for src, dst in pairs)
    assert totals["refused"] == contradictory
    assert totals["right"] == len(pairs) - contradictory
    print(f"\n{mesh_shape} {shape}: {totals['right']} right, {totals['refused']} refused, 0 wrong")


@functools.cache
def all_pairs(num_axes: int, *words: str) -> list[Pair]:
    return list(itertools.product(every_layout(num_axes, words), repeat=2))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("world", [2, 4])
def test_every_pair_of_layouts_of_one_axis(world: int, shape: tuple[int, ...]) -> None:
    judge((world,), shape, all_pairs(1, *PLAIN, *STRIDED, *OF_ONE_AXIS))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", [(2, 2), (3, 2)], ids=str)
def test_every_pair_of_layouts_of_two_axes(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    judge(mesh_shape, shape, all_pairs(2, *PLAIN, *STRIDED))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_pair_of_layouts_of_three_axes_without_strided_shards(shape: tuple[int, ...]) -> None:
    judge((2, 2, 2), shape, all_pairs(3, "R", "S0", "S1", "Psum"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sample_of_the_pairs_of_three_axes_with_strided_shards(shape: tuple[int, ...]) -> None:
    chosen = every_layout(3, [*PLAIN, *STRIDED])
    strided = [layout for layout in chosen if any(word[0] == "_" for word in layout.words)]
    draw = random.Random(f"{shape}")
    pairs = [(draw.choice(strided), draw.choice(chosen))[:: draw.choice((1, -1))] for _ in range(4000)]
    judge((2, 2, 2), shape, pairs)


@pytest.mark.parametrize("mesh_shape", [(2,), (4,), (2, 2)], ids=str)
def test_every_pair_of_layouts_of_a_tensor_of_three_dims(mesh_shape: tuple[int, ...]) -> None:
    judge(mesh_shape, (5, 3, 6), all_pairs(len(mesh_shape), "R", "S0", "S1", "S2", "_S1/2", "Psum"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (3, 2)], ids=str)
def test_pairs_of_layouts_go_in_calls_of_many_tensors(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    items = [
        (shape, torch.float64, src, dst)
        for src, dst in all_pairs(len(mesh_shape), *PLAIN, *STRIDED)
        if dst.order is None and not (is_contradictory(src) or is_contradictory(dst))
    ]
    for begin in range(0, len(items), PAIRS_A_CHUNK):
        chunk = items[begin : begin + PAIRS_A_CHUNK]
        of_ranks = run_ranks(
            redistribution_errors, math.prod(mesh_shape), mesh_shape, chunk, timeout=CHUNK_TIMEOUT_S
        )
        assert [*itertools.chain(*of_ranks)] == []
    print(f"\n{mesh_shape} {shape}: {len(items)} right in calls of {PAIRS_A_CHUNK}")
