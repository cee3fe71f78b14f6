"""Exports weights from FSDP2 to TRL's vLLM engine by a few large collectives, instead of one a parameter.

torchrun --nproc-per-node 2 tools/examples/trl_weights.py
"""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from trl.generation.vllm_generation import VLLMGeneration

import funcol

stock = VLLMGeneration._iter_fsdp2_params


def iter_fsdp2_params(self, module):
    names = ((self._fix_param_name_to_vllm(name), param) for name, param in module.named_parameters())
    yield from funcol.full_tensors(names, bucket_bytes=256 << 20, device=self.accelerator.device)


VLLMGeneration._iter_fsdp2_params = iter_fsdp2_params  # a trainer's engine calls it in sync_weights()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
engine = VLLMGeneration.__new__(VLLMGeneration)  # without vLLM, to show what it would be sent
engine.accelerator = SimpleNamespace(device=torch.device("cpu"))
for (name, ours), (_, theirs) in zip(iter_fsdp2_params(engine, model), stock(engine, model), strict=True):
    if dist.get_rank() == 0:
        print(name, tuple(ours.shape), "equal" if torch.equal(ours, theirs) else "DIFFERENT")
dist.destroy_process_group()
