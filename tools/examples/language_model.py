"""A small causal language model as Llama's: RMSNorm, rotary positions, SwiGLU. Plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    vocabulary: int = 256
    width: int = 128
    num_layers: int = 4
    num_heads: int = 4
    hidden_width: int = 352
    max_length: int = 64
    rotary_base: float = 10000.0


def rotated(x: Tensor, base: float) -> Tensor:
    """Returns ``x`` of (batch, length, heads, head width), halves turned in pairs by its position."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[1]), base ** (-torch.arange(half) / half))[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


class Attention(nn.Module):
    """Takes as many heads as its weights have."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_width = config.width // config.num_heads
        self.base = config.rotary_base
        self.query, self.key, self.value, self.out = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_width)) for project in (self.query, self.key, self.value)
        )
        heads_first = (
            part.transpose(1, 2) for part in (rotated(query, self.base), rotated(key, self.base), value)
        )
        mixed = F.scaled_dot_product_attention(*heads_first, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.hidden_width, bias=False)
        self.up = nn.Linear(config.width, config.hidden_width, bias=False)
        self.down = nn.Linear(config.hidden_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class LanguageModel(nn.Module):
    """From tokens of (batch, length) to scores of the next one, (batch, length, vocabulary)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width)
        self.scores = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))
