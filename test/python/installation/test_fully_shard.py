"""FSDP2 trains the same, bit for bit and call for call, with funcol under it."""

from __future__ import annotations

from collections.abc import Callable

import fsdp_programs as programs
import pytest
from fsdp_checks import assert_same, check
from fsdp_programs import Block, recorded
from programs import settled
from ranks import on_ranks
from torch import Tensor

import funcol
from funcol.installation import dtensor_on_import

ON_DEVICES = True


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_training_loop(world: int, reshard: bool) -> None:
    check(programs.trains, world, reshard)


def test_resharding_to_fewer_ranks_after_the_forward_pass() -> None:
    check(programs.trains, 4, 2)


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_accumulated_without_reduction(reshard: bool) -> None:
    check(programs.accumulates, 2, reshard)


@pytest.mark.parametrize("outside", [True, False])
def test_activation_checkpointing(outside: bool) -> None:
    check(programs.recomputes, 2, outside)


@pytest.mark.parametrize(
    "types",
    [
        ("bfloat16", "float32", ""),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "", ""),
        ("float16", "float16", ""),
        ("", "bfloat16", ""),
        ("", "float64", ""),
    ],
)
def test_mixed_precision(types: tuple[str, str, str]) -> None:
    check(programs.mixes, 2, *types)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_factor_that_gradients_are_divided_by(factor: float) -> None:
    check(programs.divides_by, 2, factor)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "program",
    [
        programs.accumulates_mixed,
        programs.clips_and_optimizes,
        programs.evaluates,
        programs.evaluates_first_in_inference_mode,
        programs.fails_between,
        programs.freezes,
        programs.keeps_gradients,
        programs.leaves_some_unused,
        programs.nests,
        programs.offloads,
        programs.offloads_mixed,
        programs.optimizes_in_the_backward_pass,
        programs.passes_structures,
        programs.prefetches,
        programs.runs_twice,
        programs.saves_and_loads,
        programs.sets_by_its_own,
        programs.shards_columns,
        programs.shares,
        programs.trains_in_16_bits,
        programs.unshards_by_hand,
    ],
    ids=lambda program: program.__name__,
)
def test_a_program(program: Callable[..., list[Tensor]]) -> None:
    check(program, 2)


@pytest.mark.parametrize("types", ["", "float32", "bfloat16", "float16"])
def test_replicas_of_shards(types: str) -> None:
    check(programs.replicates, 4, types)


@on_ranks(4)
def test_tensor_parallel_modules(rank: int, world: int) -> None:
    def run() -> tuple[list[Tensor], programs.Log]:
        with recorded() as log:
            return settled(programs.over_tensor_parallel(rank, world)), log

    # Partial sums of DTensors may be added up in another order with funcol: it is there in both.
    with funcol.installed():
        found = run()
        dtensor_on_import.remove_fully_shard()
        expected = run()
    assert found[1] == expected[1]
    assert_same(found[0], expected[0])


def test_a_block_is_uneven_on_every_world_here() -> None:
    sizes = [tuple(parameter.shape) for parameter in Block().parameters()]
    assert (1,) in sizes
    assert all(size[0] % 2 for size in sizes)
