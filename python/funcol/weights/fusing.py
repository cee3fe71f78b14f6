"""Tensors of a model that stand for several of another one, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Cat:
    """The tensor of a model that is those named ``parts``, one after the other along ``dim``::

        names = {"attention.qkv": Cat("attention.q", "attention.k", "attention.v", sizes=[64, 8, 8])}

    ``sizes``, which an export needs if the parts differ, are those along ``dim``.
    """

    def __init__(self, *parts: str, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        self.parts, self.dim, self.sizes = parts, dim, sizes
        if not parts or len({*parts}) < len(parts) or len(sizes or parts) != len(parts):
            raise ValueError(
                f"funcol::Cat: got the names {list(parts)} and the sizes {sizes}. Pass each name once, and a "
                "size for each."
            )

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor of the model, made of those of the parts."""
        return torch.cat(list(tensors), self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """The parts, as views. ``ValueError`` if ``whole`` is not of their sizes."""
        length = whole.shape[self.dim]
        sizes = list(self.sizes or [length // len(self.parts)] * len(self.parts))
        if sum(sizes) != length:
            raise ValueError(
                f"funcol::Cat: dim {self.dim} of the tensor of {list(self.parts)} has {length} indices, its "
                f"parts have {sizes}. Pass their sizes."
            )
        return list(torch.split(whole, sizes, self.dim))


class Stack:
    """The tensor of a model that is those named ``parts``, stacked along a new ``dim``, as experts are."""

    def __init__(self, *parts: str, dim: int = 0) -> None:
        self.parts, self.dim = parts, dim
        if not parts or len({*parts}) < len(parts):
            raise ValueError(f"funcol::Stack: got the names {list(parts)}. Pass each name once.")

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensor of the model, made of those of the parts."""
        return torch.stack(list(tensors), self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """The parts, as views. ``ValueError`` if there are not as many."""
        if whole.shape[self.dim] != len(self.parts):
            raise ValueError(
                f"funcol::Stack: dim {self.dim} has {whole.shape[self.dim]} indices, for {len(self.parts)} "
                f"names from '{self.parts[0]}' on. Pass a name for each."
            )
        return list(whole.unbind(self.dim))


Named = str | Cat | Stack
"""A name, or those of the parts."""


def parts_of(named: Named) -> tuple[str, ...]:
    """Returns the names that ``named`` stands for."""
    return (named,) if isinstance(named, str) else named.parts
