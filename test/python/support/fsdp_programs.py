"""Programs on FSDP2 that do not know of funcol, and what they do to streams and groups.

Each takes its rank, the number of ranks and options, and gives tensors to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ranks import device_type
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

Log = list[tuple[Any, ...]]

_COLLECTIVES = (
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "all_reduce",
)


@contextmanager
def recorded() -> Iterator[Log]:
    """Logs FSDP2's calls on streams, events and ``torch.distributed``, in order; numbers stand for
    streams, events and groups."""
    log: Log = []
    numbers: dict[int, int] = {}
    kept: list[Any] = []
    device: Any = torch.get_device_module(device_type())

    def number(thing: Any) -> Any:
        if isinstance(thing, (device.Stream, device.Event, dist.ProcessGroup)):
            kept.append(thing)
            return numbers.setdefault(id(thing), len(numbers))
        if isinstance(thing, Tensor):
            return tuple(thing.shape), thing.dtype
        return str(thing)

    def logged(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def log_and_call(*args: Any, **kwargs: Any) -> Any:
            log.append((name, *map(number, args), *((key, number(kwargs[key])) for key in sorted(kwargs))))
            return call(*args, **kwargs)

        return log_and_call

    places = [
        *((device.Stream, name) for name in ("wait_stream", "record_event", "wait_event")),
        *((device.Event, name) for name in ("record", "wait", "synchronize")),
        *((device, name) for name in ("stream", "current_stream")),
        *((dist, name) for name in _COLLECTIVES if hasattr(dist, name)),
    ]
    with ExitStack() as stack:
        for owner, name in places:
            stack.enter_context(mock.patch.object(owner, name, logged(name, getattr(owner, name))))
        yield log


class Block(nn.Module):
    """Its sizes divide by no number of ranks; some parameters have fewer elements than there are ranks."""

    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 7)
        self.down = nn.Linear(7, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


def blocks(number: int = 3) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Block() for _ in range(number)))


def sharded(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator(device_type()).manual_seed(10 * step + rank))


def state(model: nn.Module) -> list[Tensor]:
    """Parameters and gradients as they are."""
    parameters = list(model.parameters())
    return [*parameters, *(one.grad for one in parameters if one.grad is not None)]


def copies(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors]


def steps(
    model: nn.Module, rank: int, number: int = 2, optimizer: torch.optim.Optimizer | None = None
) -> list[Tensor]:
    found = []
    for step in range(number):
        loss = model(batch(rank, step)).float().square().mean()
        loss.backward()
        found += [loss.detach(), *copies(state(model))]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return found


def trains(rank: int, world: int, reshard: bool | int = True) -> list[Tensor]:
    model = sharded(blocks(), reshard_after_forward=reshard)
    return steps(model, rank, 3, torch.optim.SGD(model.parameters(), 0.1))


def trains_with_types(rank: int, world: int, checks: bool) -> list[Tensor]:
    """Parameters have types of spmd_types, which that package checks if ``checks``."""
    import spmd_types
    from spmd_types.checker import typecheck
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    axis = spmd_types.MeshAxis.of(mesh.get_group("dp"))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)))
    for parameter in model.parameters():
        spmd_types.assert_type(parameter, {axis: spmd_types.R})
    sharded(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    found = []
    for step in range(3):
        x = batch(rank, step).requires_grad_()
        with typecheck(strict_mode="strict") if checks else nullcontext():
            spmd_types.assert_type(x, {axis: spmd_types.V})
            out = model(x)
            assert not checks or spmd_types.get_local_type(out) == {axis: spmd_types.V}
            loss = out.square().mean()
        loss.backward()
        found += [loss.detach(), *copies(state(model))]
    return found


def keeps_gradients(rank: int, world: int) -> list[Tensor]:
    """The gradient of the first step is kept when that of the second is reduced."""
    return steps(sharded(blocks()), rank, 2)


def clips_and_optimizes(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    found = []
    for step in range(3):
        model(batch(rank, step)).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        found += [norm.full_tensor() if isinstance(norm, DTensor) else norm, *copies(state(model))]
        optimizer.zero_grad()
    return found


def accumulates(rank: int, world: int, reshard: bool) -> list[Tensor]:
    model = sharded(blocks())
    found = []
    for step in range(4):
        is_last = step % 2 == 1
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(reshard or is_last)
        model(batch(rank, step)).square().mean().backward()
        found += copies(state(model))
    return found


def freezes(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    model[0].requires_grad_(False)
    model[1].up.weight.requires_grad_(False)
    found = steps(model, rank, 2)
    model[0].requires_grad_(True)
    return found + steps(model, rank, 2)


def evaluates(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    with torch.no_grad():
        found = [model(batch(rank))]
    model.eval()
    with torch.inference_mode():
        found.append(model(batch(rank)).clone())
    return found + steps(model.train(), rank, 1)


def evaluates_first_in_inference_mode(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    with torch.inference_mode():
        return [model(batch(rank)).clone(), model(batch(rank, 1)).clone()]


def recomputes(rank: int, world: int, outside: bool) -> list[Tensor]:
    model = blocks()
    for i, block in enumerate(model):
        model[i] = (
            checkpoint_wrapper(fully_shard(block)) if outside else fully_shard(checkpoint_wrapper(block))
        )
    return steps(fully_shard(model), rank)


def runs_twice(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    found = []
    for step in range(2):
        loss = sum(model(batch(rank, 2 * step + i)).square().mean() for i in range(2))
        loss.backward()
        found += [loss.detach(), *copies(state(model))]
    return found


def nests(rank: int, world: int) -> list[Tensor]:
    model = blocks()
    for block in model:
        fully_shard(block.up)
        fully_shard(block)
    return steps(fully_shard(model), rank)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 5)
        self.block = Block()
        self.head = nn.Linear(5, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.abs().mul(3).long() % 9)))


def shares(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = Tied()
    fully_shard(model.block)
    fully_shard(model)
    found = steps(model, rank)
    assert model.head.weight is model.embed.weight
    return found


class NoBias(nn.Linear):
    """Counts how often its parameters are set, as a module of its own kind may."""

    num_set = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            type(self).num_set += 1
        super().__setattr__(name, value)


def sets_by_its_own(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(NoBias(5, 5, bias=False), Block())
    sharded(model)
    NoBias.num_set = 0
    return [*steps(model, rank), torch.tensor(NoBias.num_set)]


def saves_and_loads(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    found = steps(model, rank, 1)
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model[0].unshard()
    found += copies(list(model[0].parameters()))
    found += copies(list(model.state_dict().values()))
    steps(model, rank, 1)
    model.load_state_dict(before)
    return found + steps(model, rank, 1)


def unshards_by_hand(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    found = []
    for block in model:
        handle = block.unshard(async_op=True)
        handle.wait()
        found += copies(list(block.parameters()))
        block.reshard()
        found += copies(list(block.parameters()))
    return found + steps(model, rank)


def prefetches(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks(4))
    for before, after in zip(model, list(model)[1:], strict=False):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])
    return steps(model, rank)


class Fails(Block):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("a forward that fails")
        return super().forward(x)


def fails_between(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = sharded(nn.Sequential(Block(), Fails(), Block()))
    found = steps(model, rank, 1)
    model[1].fails = True
    try:
        model(batch(rank))
    except ValueError:
        found += copies(list(model[1].parameters()))
    model[1].fails = False
    for module in model:
        module.reshard()
    return found


def mixes(rank: int, world: int, param: str, reduce: str, output: str) -> list[Tensor]:
    types = [getattr(torch, name, None) for name in (param, reduce, output)]
    policy = MixedPrecisionPolicy(param_dtype=types[0], reduce_dtype=types[1], output_dtype=types[2])
    model = sharded(blocks(), mp_policy=policy)
    return steps(model, rank, 2, torch.optim.SGD(model.parameters(), 0.1))


def accumulates_mixed(rank: int, world: int) -> list[Tensor]:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(blocks(), mp_policy=policy)
    found = []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        model(batch(rank, step)).float().square().mean().backward()
        found += copies(state(model))
    return found


def trains_in_16_bits(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks().to(torch.bfloat16))
    found = []
    for step in range(2):
        model(batch(rank, step).bfloat16()).float().square().mean().backward()
        found += copies(state(model))
    return found


def shards_columns(rank: int, world: int) -> list[Tensor]:
    """Parameters are sharded along their last dim."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5, bias=False))
    fully_shard(model, shard_placement_fn=lambda weight: Shard(weight.ndim - 1))
    x = torch.randn(4, 8, generator=torch.Generator(device_type()).manual_seed(rank))
    model(x).square().mean().backward()
    return state(model)


def offloads(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    return steps(model, rank)


def offloads_mixed(rank: int, world: int) -> list[Tensor]:
    """In 16 bits, with a gradient that accumulates before it is reduced, and one after."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded(blocks(), offload_policy=CPUOffloadPolicy(pin_memory=False), mp_policy=policy)
    found = []
    for step in range(3):
        model.set_requires_gradient_sync(step > 0)
        model(batch(rank, step)).float().square().mean().backward()
        found += copies(state(model))
    return found


def replicates(rank: int, world: int, types: str = "") -> list[Tensor]:
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, types or "float32"))
    model = sharded(blocks(), mesh=mesh, **({"mp_policy": policy} if types else {}))
    return steps(model, rank, 2, torch.optim.SGD(model.parameters(), 0.1))


def over_tensor_parallel(rank: int, world: int) -> list[Tensor]:
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(2)))
    for part in model:
        parallelize_module(part, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(part, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    found = []
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator(device_type()).manual_seed(10 * step + rank // 2))
        model(x).square().mean().backward()
        found += copies(state(model))
    return found


def optimizes_in_the_backward_pass(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    order: list[Tensor] = []

    def update(parameter: Tensor) -> None:
        order.append(torch.tensor(parameter.numel()))
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    return steps(model, rank) + order


def divides_by(rank: int, world: int, factor: float) -> list[Tensor]:
    model = sharded(blocks())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(True)
    return steps(model, rank)


def leaves_some_unused(rank: int, world: int) -> list[Tensor]:
    """One block gets no gradient; the input of another needs none."""
    model = sharded(blocks())
    found = []
    for step in range(2):
        x = model[0](batch(rank, step))
        (x.detach() if step else model[2](x)).square().mean().requires_grad_().backward()
        found += copies(state(model))
    return found


class ManyInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor) -> dict[str, Tensor]:
        return {"sum": self.block(pair[0]) + pair[1] * scale, "other": pair[1] * 2}


def passes_structures(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = ManyInputs()
    fully_shard(model)
    first, second = batch(rank).requires_grad_(), batch(rank, 1).requires_grad_()
    out = model((first, second), scale=torch.ones(()).requires_grad_())
    (out["sum"].square().mean() + out["other"].sum()).backward()
    return [first.grad, second.grad, *state(model)]
