"""Ranks that run the same program in different ways: under a dispatch mode, compiled, or as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Watching(TorchDispatchMode):
    """Sees every operator and leaves it as it is."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_a_mode(program: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with Watching():
            return program(*args)

    return run


def compiled(program: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(program, backend="aot_eager", fullgraph=True)


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "mode": under_a_mode,
    "compiled": compiled,
}


def mixed(program: Callable[..., Any], way: str, rank: int, others: list[int]) -> Callable[..., Any]:
    """Returns ``program``, run ``way`` on the ranks ``others`` and unchanged on the rest."""
    return WAYS[way](program) if rank in others else program
