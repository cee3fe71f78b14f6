"""FSDP2 over ``dp`` and tensor parallelism over ``tp``, of a language model with tied weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WORDS, WIDTH, HEADS = 22, 12, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            linear(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        ]
        y = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.attention = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x.to(torch.float32)).to(x.dtype))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def language_model(mesh: DeviceMesh | None, fault: str | None) -> tuple[nn.Module, Tensor, Any]:
    """Returns a step of AdamW. ``scaled_loss``: the mean over ``dp`` is taken twice."""
    torch.manual_seed(0)
    model = Model()
    ids = torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(2))
    if mesh is not None:
        plan = {name: ColwiseParallel() for name in ("query", "key", "value")} | {"out": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block.attention, mesh["tp"], plan)
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        ids = ids.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    if fault == "scaled_loss" and mesh is not None:
        loss = loss / mesh["dp"].size()
    loss.backward()
    return model, loss, optimizer
