"""Tensors of a model that correspond to several tensors of another model, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Cat:
    """The tensor of a model that concatenates the tensors named ``parts`` along ``dim``::

        names = {"attention.qkv": Cat("attention.q", "attention.k", "attention.v", sizes=[64, 8, 8])}

    ``sizes`` are those along ``dim``; an export needs them if the parts differ.
    """

    def __init__(self, *parts: str, dim: int = 0, sizes: Sequence[int] | None = None) -> None:
        self.parts, self.dim, self.sizes = parts, dim, sizes
        if not parts or len({*parts}) < len(parts) or len(sizes or parts) != len(parts):
            raise ValueError(
                f"funcol::Cat: got the names {list(parts)} and the sizes {sizes}. Pass each name once, and a "
                "size for each."
            )

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Concatenates the tensors of the parts into the tensor of the model."""
        return torch.cat(list(tensors), self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Returns the parts of ``whole``, as views. Raises ValueError if it is not of their sizes."""
        length = whole.shape[self.dim]
        sizes = list(self.sizes or [length // len(self.parts)] * len(self.parts))
        if sum(sizes) != length:
            raise ValueError(
                f"funcol::Cat: dim {self.dim} of the tensor of {list(self.parts)} has {length} indices, its "
                f"parts have {sizes}. Pass their sizes."
            )
        return list(torch.split(whole, sizes, self.dim))


class Stack:
    """The tensor of a model that stacks the tensors named ``parts`` along a new ``dim``, as for experts."""

    def __init__(self, *parts: str, dim: int = 0) -> None:
        self.parts, self.dim = parts, dim
        if not parts or len({*parts}) < len(parts):
            raise ValueError(f"funcol::Stack: got the names {list(parts)}. Pass each name once.")

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Stacks the tensors of the parts into the tensor of the model."""
        return torch.stack(list(tensors), self.dim)

    def split(self, whole: Tensor) -> list[Tensor]:
        """Returns the parts of ``whole``, as views. Raises ValueError if there are not as many."""
        if whole.shape[self.dim] != len(self.parts):
            raise ValueError(
                f"funcol::Stack: dim {self.dim} has {whole.shape[self.dim]} indices, for {len(self.parts)} "
                f"names from '{self.parts[0]}' on. Pass a name for each."
            )
        return list(whole.unbind(self.dim))


NameOrParts = str | Cat | Stack
"""A name, or those of the parts."""


def parts_of(named: NameOrParts) -> tuple[str, ...]:
    """Returns the name or names in ``named``."""
    return (named,) if isinstance(named, str) else named.parts
