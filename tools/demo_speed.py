"""The demo's part on speed: a small transformer, tensor parallel 2 x FSDP2 2, on both sides."""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).resolve().parent / "examples"))

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from language_model import Config, LanguageModel
from tensor_parallel_lm import MESH, parallelized
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import funcol

CONFIG = Config(width=64, num_layers=4, num_heads=4, hidden_width=160, max_length=16)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BATCH_PER_GROUP = 1
SIDES = ("stock", "funcol")
TURNS = ("funcol", "stock", "funcol")  # stock's first step takes seconds
NUM_WARM_UP = 2  # steps of a turn whose times do not count, where there are more


class Speed(TypedDict):
    """One side's steps: medians over its turns, in milliseconds, and the losses of a turn."""

    ms: float
    cpu_ms: float  # of the thread that runs the program
    losses: list[float]


def speed(num_steps: int) -> dict[str, Speed]:
    """Trains from the same weights in each of :data:`TURNS`; both sides' times on this rank."""
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    mesh._flatten("world")  # so that a reduction over both axes is one collective
    ms: dict[str, list[float]] = {side: [] for side in SIDES}
    cpu_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    losses: dict[str, list[float]] = {}
    for side in TURNS:  # the machine may be busy with other things in one of them
        with funcol.installed() if side == "funcol" else nullcontext():
            times, losses[side] = train(mesh, num_steps)
        first = min(NUM_WARM_UP, num_steps - 1)
        ms[side] += [1e3 * by_clock for by_clock, _ in times[first:]]
        cpu_ms[side] += [1e3 * on_cpu for _, on_cpu in times[first:]]
    return {
        side: {
            "ms": statistics.median(ms[side]),
            "cpu_ms": statistics.median(cpu_ms[side]),
            "losses": losses[side],
        }
        for side in SIDES
    }


def train(mesh: DeviceMesh, num_steps: int) -> tuple[list[tuple[float, float]], list[float]]:
    """Returns seconds of each step, by the clock and of this thread's processor time; and the mean losses
    over the ranks."""
    torch.manual_seed(0)
    model = parallelized(LanguageModel(CONFIG), mesh, mp_policy=POLICY)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
    texts = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
    times, losses = [], []
    for _ in range(num_steps):
        tokens = torch.randint(32, (BATCH_PER_GROUP, CONFIG.max_length + 1), generator=texts)
        dist.barrier()
        begin, on_cpu = time.perf_counter(), time.thread_time()
        scores = model(tokens[:, :-1])
        loss = F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append((time.perf_counter() - begin, time.thread_time() - on_cpu))
        losses.append(loss.detach())
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    return times, (mean_losses / dist.get_world_size()).tolist()
