"""Programs that do not know of funcol compute the same with it installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from programs import WORLDS, Block, check, computes_the_same, mesh_of
from ranks import on_ranks, require_compiled_kernels
from sharded import full
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import funcol

ON_DEVICES = True

# DTensor

PLACEMENTS = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial(), "Pmax": Partial("max")}
PAIRS = ["S0 R", "S1 R", "P R", "Pmax R", "S0 S1", "S1 S0", "P S0", "P S1", "Pmax S1"]


def placements(text: str) -> list[Placement]:
    return [PLACEMENTS[name] for name in text.split(",")]


def distributed(rank: int, mesh: DeviceMesh, source: str, shape: list[int]) -> DTensor:
    """Returns a DTensor of global ``shape``; what is partial differs from rank to rank."""
    sharded = [PLACEMENTS["R"] if isinstance(p, Partial) else p for p in placements(source)]
    local = distribute_tensor(sample(0, shape), mesh, sharded).to_local()
    if "P" in source:
        local = local + rank
    return DTensor.from_local(
        local, mesh, placements(source), run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
    )


def redistributes(
    rank: int, world: int, pair: str, shape: list[int], mesh_shape: list[int], async_op: bool
) -> list[Tensor]:
    source, target = pair.split()
    x = distributed(rank, mesh_of(*mesh_shape), source, shape)
    return [x.redistribute(placements=placements(target), async_op=async_op)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [[4, 6], [5, 3], [1, 1]], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_redistribute_on_one_axis(pair: str, shape: list[int]) -> None:
    check(redistributes, 2, pair, shape, [2], False)


@pytest.mark.parametrize("pair", ["S0 R", "P R", "P S0"])
def test_redistribute_that_does_not_wait(pair: str) -> None:
    check(redistributes, 2, pair, [4, 6], [2], True)


@on_ranks(2)
def test_a_local_tensor_of_a_redistribute_that_does_not_wait_is_pending(rank: int, world: int) -> None:
    x = distributed(rank, mesh_of(world), "P", [4, 6])
    with funcol.installed():
        local = x.redistribute(placements=[Replicate()], async_op=True).to_local()
        assert funcol.is_pending(local)
        assert isinstance(local, stock.AsyncCollectiveTensor)
        assert torch.equal(local, x.full_tensor())


@on_ranks(2)
def test_a_debug_mode_sees_the_same_collectives(rank: int, world: int) -> None:
    block = parallel_block("sequence", mesh_of(world))

    def counts() -> dict[Any, int]:
        with CommDebugMode() as mode:
            full(block(sample(0, [2, 4, 8]))).sum().backward()
        return dict(mode.get_comm_counts())

    expected = counts()
    assert sum(expected.values()) > 0
    with funcol.installed():
        assert counts() == expected


@computes_the_same(4)
def test_redistribute_on_two_axes(rank: int, world: int) -> list[Tensor]:
    mesh = mesh_of(2, 2)
    pairs = ["S0,S1 R,R", "S0,S0 R,R", "P,S0 S0,R", "R,P S1,S0", "S0,R S1,S0", "P,P R,R"]
    results = []
    for pair in pairs:
        source, target = pair.split()
        results.append(distributed(rank, mesh, source, [8, 4]).redistribute(placements=placements(target)))
    return results


@pytest.mark.parametrize("shape", [[4, 6], [5, 3]], ids=str)
@pytest.mark.parametrize("source", ["S0", "S1", "P"])
@computes_the_same(2)
def test_full_tensor_and_its_gradient(rank: int, world: int, source: str, shape: list[int]) -> list[Tensor]:
    x = distributed(rank, mesh_of(world), source, shape).requires_grad_()
    whole = x.full_tensor()
    whole.square().sum().backward()
    assert x.grad is not None
    return [whole.detach(), x.grad.full_tensor()]


@computes_the_same(2)
def test_operators_on_dtensors_and_their_gradients(rank: int, world: int) -> list[Tensor]:
    mesh = mesh_of(world)
    x = distribute_tensor(sample(0, [4, 6]), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(sample(1, [6, 5]), mesh, [Shard(1)]).requires_grad_()
    loss = torch.nn.functional.softmax(x @ w, dim=1).square().mean() + x.std() + w.max()
    loss.backward()
    assert x.grad is not None
    assert w.grad is not None
    return [loss.detach(), x.grad, w.grad]


@computes_the_same(2)
def test_local_map_with_a_collective_inside(rank: int, world: int) -> list[Tensor]:
    mesh = mesh_of(world)
    x = distribute_tensor(sample(0, [4, 6]), mesh, [Shard(0)]).requires_grad_()
    w = distribute_tensor(sample(1, [6, 4]), mesh, [Replicate()]).requires_grad_()

    def product(a: Tensor, b: Tensor) -> Tensor:
        return stock.all_reduce(a @ b, "sum", mesh)

    replicated: list[Any] = [Replicate()]
    mapped = local_map(
        product,
        out_placements=replicated,
        in_placements=([Shard(0)], replicated),
        device_mesh=mesh,
        redistribute_inputs=True,
    )
    result = mapped(x.redistribute(placements=replicated).redistribute(placements=[Shard(0)]), w)
    result.square().sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad.full_tensor()]


# Tensor parallel modules


PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "colwise, rowwise": lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()},
    "gathered outputs": lambda: {
        "up": ColwiseParallel(output_layouts=Replicate()),
        "down": RowwiseParallel(input_layouts=Replicate()),
    },
    "sequence": lambda: {
        "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    },
}


def parallel_block(plan: str, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    block = parallelize_module(Block(), mesh, PLANS[plan]())
    assert isinstance(block, nn.Module)
    return block


def forward_and_gradients(model: Callable[[Tensor], Tensor], block: nn.Module) -> list[Tensor]:
    """Output and gradients after two steps of descent."""
    results = []
    for step in range(2):
        x = sample(step, [2, 4, 8]).requires_grad_()
        output = full(model(x))
        output.square().mean().backward()
        assert x.grad is not None
        results += [output.detach(), x.grad]
        with torch.no_grad():
            for parameter in block.parameters():
                assert parameter.grad is not None
                results.append(full(parameter.grad))
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("plan", PLANS)
@computes_the_same()
def test_a_tensor_parallel_module_trains_the_same(rank: int, world: int, plan: str) -> list[Tensor]:
    block = parallel_block(plan, mesh_of(world))
    return forward_and_gradients(block, block)


@pytest.mark.parametrize("world", WORLDS)
@computes_the_same()
def test_a_parallel_loss_is_the_same(rank: int, world: int) -> list[Tensor]:
    logits = distribute_tensor(sample(0, [4, 10]), mesh_of(world), [Shard(1)]).requires_grad_()
    target = torch.tensor([1, 9, 0, 4])
    with loss_parallel():
        loss = nn.functional.cross_entropy(logits, target)
        loss.backward()
    assert logits.grad is not None
    return [full(loss.detach()), logits.grad]


# FSDP2


def train_and_gather(model: nn.Module, rank: int) -> list[Tensor]:
    """Losses of a few steps of Adam on data that differs from rank to rank, then the whole model."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for step in range(3):
        loss = full(model(sample(10 * step + rank, [2, 4, 8]))).square().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses += [loss.detach(), full(norm)]
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    return [*losses, *state.values()]


@pytest.mark.parametrize("world", WORLDS)
@computes_the_same()
def test_fully_shard_trains_the_same(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(Block(), Block())
    for block in model:
        fully_shard(block, mesh=mesh_of(world))
    fully_shard(model, mesh=mesh_of(world))
    return train_and_gather(model, rank)


@computes_the_same(4)
def test_fully_shard_over_tensor_parallel_trains_the_same(rank: int, world: int) -> list[Tensor]:
    mesh = mesh_of(2, 2)
    model = nn.Sequential(parallel_block("sequence", mesh["tp"]))
    fully_shard(model, mesh=mesh["dp"])
    return train_and_gather(model, rank // 2)


# Compiled programs


def trains_compiled(rank: int, world: int, backend: str) -> list[Tensor]:
    block = parallel_block("colwise, rowwise", mesh_of(world))
    return forward_and_gradients(torch.compile(block, backend=backend, fullgraph=True), block)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "backend"), [(4, "aot_eager"), (2, "inductor")])
def test_a_compiled_tensor_parallel_module_trains_the_same(world: int, backend: str) -> None:
    if backend == "inductor":
        require_compiled_kernels()
    check(trains_compiled, world, backend, counts=False)


def runs_compiled_collectives(rank: int, world: int, backend: str) -> list[Tensor]:
    group = world_group()

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(x: Tensor) -> tuple[Tensor, ...]:
        reduced = stock.all_reduce(x * 2, "sum", group)
        gathered = stock.all_gather_tensor(reduced[:1], 0, group)
        scattered = stock.reduce_scatter_tensor(gathered + 1, "sum", 0, group)
        swapped = stock.all_to_all_single(gathered, None, None, group)
        return reduced + 1, gathered.t(), stock.wait_tensor(scattered), swapped * 3

    return [*compiled(sample(rank, [4, 3])), *compiled(sample(rank + 5, [4, 3]))]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_collectives_give_the_same(backend: str) -> None:
    if backend == "inductor":
        require_compiled_kernels()
    check(runs_compiled_collectives, 2, backend, pends=False, counts=False)


@computes_the_same(2, pends=False, counts=False)
def test_collectives_that_dynamo_rewrites_give_the_same(rank: int, world: int) -> list[Tensor]:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        reduced, gathered = x.clone(), x.new_empty(world * x.shape[0], x.shape[1])
        scattered = torch.empty_like(x)
        dist.all_reduce(reduced)
        dist.all_gather_into_tensor(gathered, x)
        dist.reduce_scatter_tensor(scattered, gathered)
        return reduced, gathered, scattered

    return list(compiled(sample(rank, [4, 3])))


def counted_region() -> tuple[Callable[[Tensor], Tensor], Any]:
    """Returns a compiled function with an all_reduce, and the counter of its compilations."""
    group = world_group()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, fullgraph=True)
    def compiled(x: Tensor) -> Tensor:
        return stock.all_reduce(x, "sum", group) + 1

    return compiled, counter


@on_ranks(2)
def test_a_region_compiles_once_while_installed(rank: int, world: int) -> None:
    compiled, counter = counted_region()
    with funcol.installed():
        for _ in range(3):
            compiled(stock.all_reduce(torch.ones(3), "sum", world_group()))
        compiled(torch.ones(3))
    assert counter.frame_count == 1


@on_ranks(2)
def test_a_region_that_calls_a_collective_compiles_once_for_either_state(rank: int, world: int) -> None:
    compiled, counter = counted_region()
    for _ in range(3):
        assert compiled(torch.ones(3)).tolist() == [world + 1.0] * 3
        with funcol.installed():
            assert compiled(torch.ones(3)).tolist() == [world + 1.0] * 3
    assert counter.frame_count == 2
