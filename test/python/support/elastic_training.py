"""A training that torchrun starts: FSDP2 on all ranks, a checkpoint after each step, and what ended it.

    elastic_training.py FOLDER NUM_STEPS TIME_OUT_S [STEP_THAT_BREAKS]

Rank 0 appends each loss to FOLDER/losses. A rank that ends by an error writes FOLDER/error_of_RANK. At
STEP_THAT_BREAKS, the last rank raises once.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import funcol


class Training:
    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        torch.manual_seed(0)
        self.folder, self.group = folder, group
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6))
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
        for layer in self.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.05)
        self.next_step = 0

    def step(self) -> None:
        samples = torch.Generator().manual_seed(100 * self.next_step + dist.get_rank())
        x = torch.randn(8, 6, generator=samples)
        loss = (self.model(x) - x.flip(1)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = funcol.all_reduce(loss.detach(), "avg", self.group).item()
        if dist.get_rank() == 0:
            with (self.folder / "losses").open("a") as losses:
                losses.write(json.dumps([self.next_step, mean]) + "\n")
        self.next_step += 1

    def state(self) -> tuple[Any, Any]:
        return get_state_dict(self.model, self.optimizer, options=StateDictOptions(full_state_dict=True))

    def save(self) -> None:
        model, optimizer = self.state()
        if dist.get_rank() == 0:
            torch.save([self.next_step, model, optimizer], self.folder / "being_written")
            (self.folder / "being_written").replace(self.folder / "checkpoint")

    def resume(self) -> None:
        if (self.folder / "checkpoint").exists():
            self.state()  # the optimizer's state comes to be
            self.next_step, model, optimizer = torch.load(self.folder / "checkpoint", weights_only=True)
            options = StateDictOptions(full_state_dict=True)
            set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=model,
                optim_state_dict=optimizer,
                options=options,
            )


def breaks_once(folder: Path) -> None:
    if dist.get_rank() == dist.get_world_size() - 1 and not (folder / "has_broken").exists():
        (folder / "has_broken").touch()
        raise RuntimeError("this step breaks once")


def train(folder: Path, num_steps: int, timeout_s: float, breaks_at: int) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    begin = time.time()
    try:
        training = Training(folder, group)
        training.resume()
        while training.next_step < num_steps:
            begin = time.time()
            if training.next_step == breaks_at:
                breaks_once(folder)
            training.step()
            training.save()
    except Exception as error:
        told = {"type": type(error).__name__, "text": str(error), "step_began": begin, "at": time.time()}
        (folder / f"error_of_{dist.get_rank()}").write_text(json.dumps({**told, "group": group.group_name}))
        raise
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with funcol.installed():
        train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int([*sys.argv, -1][4]))
