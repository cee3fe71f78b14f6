"""CUDA graphs that hold a forward and a backward pass with collectives, over NCCL ranks.

A graph that funcol's program was captured into gives, with new inputs, what PyTorch's own program gives
without a graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from ranks import on_ranks, run_ranks, stop_all
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import funcol

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_devices")]

WORLD = 2
ROWS, WIDTH, HIDDEN = 3, 4, 6  # of one rank
STEPS = range(3)


def drawn(seed: int, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator("cuda").manual_seed(seed))


def warm_up(step: Callable[[], Any]) -> None:
    """Runs ``step`` before it is captured, on a side stream, as PyTorch's documentation of graphs says."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


class Captured:
    """A graph of ``step``, which gives tensors."""

    def __init__(self, step: Callable[[], list[Tensor]], pool: Any = None) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, pool=pool):
            self.results = step()

    def replay(self) -> list[Tensor]:
        self.graph.replay()
        return [result.detach().clone() for result in self.results]


class PlainStep:
    """A block of plain tensors: its inner dim is split, outside its rows are; ``ops`` has the collectives."""

    def __init__(self, ops: Any, rank: int) -> None:
        self.gather = getattr(ops, "all_gather_tensor_autograd", ops.all_gather_tensor)
        self.scatter = getattr(ops, "reduce_scatter_tensor_autograd", ops.reduce_scatter_tensor)
        self.x = drawn(rank, ROWS, WIDTH).requires_grad_()
        self.up = drawn(10 + rank, WIDTH, HIDDEN).requires_grad_()
        self.down = drawn(20 + rank, HIDDEN, WIDTH).requires_grad_()

    def feed(self, seed: int) -> None:
        with torch.no_grad():
            self.x.copy_(drawn(seed, ROWS, WIDTH))

    def __call__(self) -> list[Tensor]:
        group = dist.group.WORLD
        hidden = torch.tanh(self.gather(self.x, 0, group) @ self.up)
        result = self.scatter(hidden @ self.down, "sum", 0, group)
        loss = result.square().mean()
        return [loss, *torch.autograd.grad(loss, [self.x, self.up, self.down])]


@on_ranks(WORLD)
def test_a_graph_of_a_step_of_plain_tensors_gives_with_new_inputs_what_stock_gives(
    rank: int, world: int
) -> None:
    eager, step = PlainStep(stock, rank), PlainStep(funcol, rank)
    warm_up(step)
    captured = Captured(step)
    for seed in STEPS:
        for one in (eager, step):
            one.feed(100 * seed + rank)
        torch.testing.assert_close(captured.replay(), eager())


@on_ranks(WORLD)
def test_two_graphs_that_share_a_pool_give_what_stock_gives(rank: int, world: int) -> None:
    eager = [PlainStep(stock, rank) for _ in range(2)]
    steps = [PlainStep(funcol, rank) for _ in range(2)]
    for step in steps:
        warm_up(step)
    captured = [Captured(steps[0])]
    captured.append(Captured(steps[1], pool=captured[0].graph.pool()))
    for seed in STEPS:
        # Graphs that share a pool may use the same memory: results are copied before the other is replayed.
        for number in (0, 1):
            for one in (eager[number], steps[number]):
                one.feed(100 * seed + 10 * number + rank)
            torch.testing.assert_close(captured[number].replay(), eager[number]())


@on_ranks(WORLD)
def test_a_graph_of_a_step_with_its_optimizer_trains_as_stock(rank: int, world: int) -> None:
    """The optimizer's step is in the graph, so that each replay reads what the last one wrote."""
    eager, step = PlainStep(stock, rank), PlainStep(funcol, rank)

    def trained(one: PlainStep) -> list[Tensor]:
        loss, _, *gradients = one()
        with torch.no_grad():
            for weight, gradient in zip((one.up, one.down), gradients, strict=True):
                weight -= 0.1 * gradient
        return [loss]

    before = [weight.detach().clone() for weight in (step.up, step.down)]
    warm_up(lambda: trained(step))
    with torch.no_grad():
        step.up.copy_(before[0])
        step.down.copy_(before[1])
    captured = Captured(lambda: trained(step))
    for seed in STEPS:
        for one in (eager, step):
            one.feed(100 * seed + rank)
        torch.testing.assert_close(captured.replay(), trained(eager))
    torch.testing.assert_close([step.up, step.down], [eager.up, eager.down])


PLANS: dict[str, dict[str, Any]] = {
    "tensor": {"0": ColwiseParallel(), "2": RowwiseParallel()},
    "sequence": {
        "0": ColwiseParallel(input_layouts=Shard(0)),
        "2": RowwiseParallel(output_layouts=Shard(0)),
        "3": SequenceParallel(sequence_dim=0, use_local_output=True),
    },
}


class DTensorStep:
    """A step of a module that is parallelized by ``plan``."""

    def __init__(self, rank: int, world: int, plan: str) -> None:
        mesh = init_device_mesh("cuda", (world,))
        torch.manual_seed(1)
        layers = [nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH)]
        self.model = parallelize_module(nn.Sequential(*layers), mesh, PLANS[plan])
        self.x = drawn(0, ROWS, WIDTH).requires_grad_()
        self.number_of_rows = rank if plan == "sequence" else 0  # else all ranks have the same

    def feed(self, seed: int) -> None:
        with torch.no_grad():
            self.x.copy_(drawn(100 * seed + self.number_of_rows, ROWS, WIDTH))

    def __call__(self) -> list[Tensor]:
        self.model.zero_grad()
        self.x.grad = None
        loss = self.model(self.x).square().sum()
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters()]
        return [loss, self.x.grad, *(g.to_local() if isinstance(g, DTensor) else g for g in gradients)]


@pytest.mark.parametrize("plan", PLANS)
@on_ranks(WORLD)
def test_a_graph_of_a_step_of_dtensors_gives_with_new_inputs_what_stock_gives(
    rank: int, world: int, plan: str
) -> None:
    eager = DTensorStep(rank, world, plan)
    with funcol.installed():
        step = DTensorStep(rank, world, plan)
        warm_up(step)
        captured = Captured(step)
    for seed in STEPS:
        for one in (eager, step):
            one.feed(seed)
        torch.testing.assert_close(captured.replay(), eager())


@on_ranks(WORLD)
def test_a_graph_of_redistributions_gives_with_new_inputs_what_stock_gives(rank: int, world: int) -> None:
    mesh = init_device_mesh("cuda", (world,))
    x = drawn(rank, 2 * world, 2 * world)

    def step() -> list[Tensor]:
        sharded = DTensor.from_local(x, mesh, [Shard(0)], run_check=False)
        columns = sharded.redistribute(placements=[Shard(1)])
        whole = (columns * 2).redistribute(placements=[Replicate()], async_op=True)
        return [columns.to_local() + 0, whole.to_local() + 1]

    with funcol.installed():
        warm_up(step)
        captured = Captured(step)
    for seed in STEPS:
        x.copy_(drawn(100 * seed + rank, 2 * world, 2 * world))
        torch.testing.assert_close(captured.replay(), step())


class Block(nn.Module):
    def __init__(self, ops: Any, rank: int) -> None:
        super().__init__()
        step = PlainStep(ops, rank)
        self.gather, self.scatter = step.gather, step.scatter
        self.up, self.down = nn.Parameter(step.up.detach()), nn.Parameter(step.down.detach())

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        hidden = torch.tanh(self.gather(x, 0, group) @ self.up)
        return self.scatter(hidden @ self.down, "sum", 0, group) * 2


@on_ranks(WORLD)
def test_make_graphed_callables_gives_a_module_with_the_gradients_of_stock(rank: int, world: int) -> None:
    eager, block = Block(stock, rank), Block(funcol, rank)
    sample = drawn(rank, ROWS, WIDTH).requires_grad_()
    graphed = torch.cuda.make_graphed_callables(block, (sample,))

    def results(module: Any, seed: int) -> list[Tensor]:
        x = drawn(100 * seed + rank, ROWS, WIDTH).requires_grad_()
        module.zero_grad()
        out = module(x)
        (out**3).sum().backward()
        return [tensor.detach().clone() for tensor in (out, x.grad, module.up.grad, module.down.grad)]

    for seed in STEPS:
        torch.testing.assert_close(results(graphed, seed), results(eager, seed))


GATHERS = {"as it comes": 0, "merged": 1}


def gathered(x: Tensor, dim: int) -> Tensor:
    return funcol.all_gather_tensor(x, dim, dist.group.WORLD)


@pytest.mark.parametrize("dim", GATHERS.values(), ids=GATHERS)
@on_ranks(WORLD)
def test_a_result_that_is_pending_as_a_capture_begins_is_right_within_it(
    rank: int, world: int, dim: int
) -> None:
    x = drawn(0, ROWS, WIDTH)
    expected = torch.cat([x] * world, dim)
    whole = gathered(x, dim)
    assert funcol.is_pending(whole)
    captured = Captured(lambda: [whole + 1])
    torch.testing.assert_close(captured.replay(), [expected + 1])
    torch.testing.assert_close(whole + 2, expected + 2)


@on_ranks(WORLD)
def test_a_gradient_that_is_pending_as_a_capture_begins_is_right_within_it(rank: int, world: int) -> None:
    x = drawn(0, ROWS, WIDTH).requires_grad_()
    funcol.all_reduce(x, "sum", dist.group.WORLD).sum().backward()
    assert x.grad is not None
    assert funcol.is_pending(x.grad)

    def update() -> list[Tensor]:
        with torch.no_grad():
            x.sub_(x.grad)
        return [x]

    before = x.detach().clone()
    captured = Captured(update)
    for number in STEPS:
        torch.testing.assert_close(captured.replay(), [before - (number + 1) * world])


@pytest.mark.parametrize("dim", GATHERS.values(), ids=GATHERS)
@on_ranks(WORLD)
def test_a_result_that_a_capture_uses_is_right_after_each_replay(rank: int, world: int, dim: int) -> None:
    x = drawn(0, ROWS, WIDTH)
    warm_up(lambda: gathered(x, dim) + 1)
    results = []

    def step() -> list[Tensor]:
        results.append(gathered(x, dim))
        return [results[0] + 1]

    captured = Captured(step)
    for seed in STEPS:
        x.copy_(drawn(seed, ROWS, WIDTH))
        expected = torch.cat([x] * world, dim)
        torch.testing.assert_close(captured.replay(), [expected + 1])
        torch.testing.assert_close(results[0], expected)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.testing.assert_close(results[0] * 2, expected * 2)
        torch.cuda.current_stream().wait_stream(side)


@on_ranks(WORLD)
def test_a_merged_result_that_no_capture_uses_is_right_after_each_replay(rank: int, world: int) -> None:
    """PyTorch waits for it at once."""
    x = drawn(0, ROWS, WIDTH)
    warm_up(lambda: gathered(x, 1) + 1)
    captured = Captured(lambda: [gathered(x, 1)])
    for seed in STEPS:
        x.copy_(drawn(seed, ROWS, WIDTH))
        torch.testing.assert_close(captured.replay(), [torch.cat([x] * world, 1)])


def leaves_a_result_pending(rank: int, world: int, ops: Any) -> None:
    x = drawn(0, ROWS, WIDTH)
    module = funcol if ops == "funcol" else stock
    warm_up(lambda: module.all_reduce(x, "sum", dist.group.WORLD) + 1)
    with pytest.raises(RuntimeError, match="unjoined work"):
        Captured(lambda: [module.all_reduce(x, "sum", dist.group.WORLD)])


@pytest.mark.parametrize("ops", ["funcol", "stock"])
def test_a_capture_that_leaves_a_result_pending_is_an_error(ops: str) -> None:
    # New ranks: PyTorch allocates 32 streams in turn, and in others NCCL's may be the one that is captured.
    stop_all()
    try:
        run_ranks(leaves_a_result_pending, WORLD, ops)
    finally:
        stop_all()  # before PyTorch 2.15, generators stay in a capture that fails
