"""Trains a model with Accelerate's FSDP2, on funcol.

torchrun --nproc-per-node 2 tools/examples/accelerate_fsdp2.py
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch import nn

import funcol

funcol.install()
plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer = accelerator.prepare(model, optimizer)

x = torch.randn(8, 16, generator=torch.Generator().manual_seed(accelerator.process_index))
for _ in range(4):
    loss = (model(x) - x).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"loss {accelerator.reduce(loss.detach(), 'mean').item():.6f}")
accelerator.end_training()
