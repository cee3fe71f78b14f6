"""Compiled FSDP2 modules compute the same with funcol under them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_checks import assert_same
from fsdp_programs import blocks, steps
from programs import settled
from ranks import on_ranks
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import funcol


def compiled(place: str, checkpoint: str, **options: Any) -> Any:
    """Returns a model of blocks that FSDP2 has hooks on, compiled in one of several places."""

    def compile_(module: Any) -> None:
        module.compile(backend="aot_eager", **options)

    model: Any = blocks()
    for i, block in enumerate(model):
        if place == "within the blocks":
            compile_(block.up)
            compile_(block.norm)
        if place == "blocks, then sharded":
            compile_(block)
        if checkpoint == "within":
            block = checkpoint_wrapper(block)
        if place == "blocks as another module":
            block = torch.compile(block, backend="aot_eager", **options)
        model[i] = fully_shard(block)
        if place == "sharded blocks":
            compile_(block)
        if checkpoint == "around":
            model[i] = checkpoint_wrapper(block)
    fully_shard(model)
    if place == "everything":
        compile_(model)
    if place == "a step":

        @torch.compile(backend="aot_eager", **options)
        def step(x: Tensor) -> Tensor:
            return model(x * 2).sin()

        step.parameters = model.parameters
        return step
    return model


PLACES = [
    "within the blocks",
    "blocks, then sharded",
    "blocks as another module",
    "sharded blocks",
    "everything",
    "a step",
]
WAYS = [("", True), ("around", False), ("within", True), ("", False), ("around", True), ("within", False)]
# Of each place two ways, so that each way has two places; the others with --long.
CASES = [
    pytest.param(place, *way, marks=() if (i - j) % 3 == 0 else pytest.mark.long)
    for i, place in enumerate(PLACES)
    for j, way in enumerate(WAYS)
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("place", "checkpoint", "fullgraph"), CASES)
@on_ranks(2, timeout=180)
def test_compiled_modules(rank: int, world: int, place: str, checkpoint: str, fullgraph: bool) -> None:
    def run() -> tuple[list[Tensor], dict[str, dict[str, int]], str]:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        error = ""
        found: list[Tensor] = []
        try:
            model = compiled(place, checkpoint, fullgraph=fullgraph)
            found = settled(steps(model, rank, 3, torch.optim.SGD(model.parameters(), 0.1)))
        except Exception as raised:  # Dynamo's, of several classes
            error = str(raised).splitlines()[0]
        names = ("stats", "frames", "graph_break", "unimplemented", "recompile_limit")
        return found, {name: dict(counters[name]) for name in names}, error

    found_before, counts_before, error_before = run()
    # Hooks within blocks keep Dynamo of older releases from any graph.
    assert any(counts_before.values()) or error_before or place == "within the blocks"
    with funcol.installed():
        found, counts, error = run()
    assert error == error_before
    assert counts == counts_before
    torch.testing.assert_close(found, found_before, rtol=0, atol=0)


@on_ranks(2, timeout=180)
def test_a_compiled_model_may_see_funcol_come_and_go(rank: int, world: int) -> None:
    """A model that was compiled with funcol runs on without it, and the other way round, and is not compiled
    once more for that."""

    def run(come_and_go: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = compiled("blocks, then sharded", "", fullgraph=True)
        found = []
        for step in range(4):
            if come_and_go:
                funcol.uninstall() if step % 2 else funcol.install()
            found += steps(model, rank, 1)
        return settled(found), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    expected, num_graphs = run(come_and_go=False)
    try:
        found, num_graphs_found = run(come_and_go=True)
    finally:
        funcol.uninstall()
    assert_same(found, expected)
    assert num_graphs_found == num_graphs
