"""Trains a Llama of transformers with its own tensor parallel plan, on funcol.

torchrun --nproc-per-node 2 tools/examples/transformers_tp.py
"""

import tempfile

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import funcol

funcol.install()
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM(config).save_pretrained(folder)  # stands for a checkpoint that you have
    dist.init_process_group("gloo")
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
tokens = torch.arange(32).view(2, 16) % 8
for _ in range(4):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss.item():.6f}")
dist.destroy_process_group()
