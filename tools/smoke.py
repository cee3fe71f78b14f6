"""Runs a little of each part of funcol on two gloo ranks, as it is installed, and prints a line a part.

    python tools/smoke.py

For packages: whether all that they need is in them. The tests are for whether it is right.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import funcol

NUM_RANKS = 2


def collectives(rank: int, mesh: DeviceMesh) -> None:
    x = torch.full((2,), float(rank + 1), requires_grad=True)
    total = funcol.all_reduce(x, "sum", mesh)
    assert funcol.is_pending(total)
    total.square().sum().backward()
    assert x.grad.tolist() == [12.0, 12.0]
    rows = funcol.all_gather_tensor(torch.tensor([[rank]]), gather_dim=1, group=mesh)
    assert rows.tolist() == [[0, 1]]


def redistribution(rank: int, mesh: DeviceMesh) -> None:
    whole = torch.arange(15.0).view(5, 3)
    moved = funcol.redistribute(distribute_tensor(whole, mesh, [Shard(0)]), placements=[Shard(1)])
    assert torch.equal(moved.full_tensor(), whole)
    plan = funcol.plan_redistribution("S0", "S1", mesh={"tp": NUM_RANKS}, shape=(5, 3), dtype=torch.float32)
    assert len(plan.steps) == 1


def dtensors(rank: int, mesh: DeviceMesh) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(4, 4, generator=generator) for _ in range(2))
    with funcol.installed():
        product = distribute_tensor(a, mesh, [Shard(1)]) @ distribute_tensor(b, mesh, [Shard(0)])
        torch.testing.assert_close(product.redistribute(placements=[Replicate()]).to_local(), a @ b)


def fsdp(rank: int, mesh: DeviceMesh) -> None:
    torch.manual_seed(0)
    alone, sharded = (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)) for _ in range(2))
    sharded.load_state_dict(alone.state_dict())
    with funcol.installed():
        fully_shard(sharded, mesh=mesh)
        x = torch.ones(3, 4)
        sharded(x).sum().backward()
        alone(x).sum().backward()
        for (_, whole), other in zip(
            funcol.full_tensors([(name, p.grad) for name, p in sharded.named_parameters()]),
            alone.parameters(),
            strict=True,
        ):
            torch.testing.assert_close(whole, other.grad)


def run_parts(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tp",))
    done = []
    for part in (collectives, redistribution, dtensors, fsdp):
        part(rank, mesh)
        dist.barrier()
        done.append(part.__name__)
    return done


if __name__ == "__main__":
    parts = run_on_ranks(run_parts, NUM_RANKS, limit_s=120)
    where = f"funcol {funcol.__version__} in {funcol.__path__[-1]}, PyTorch {torch.__version__}"
    print(f"{where}: {', '.join(parts)}")
