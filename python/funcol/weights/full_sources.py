"""The full tensors of the rank that loads them, checked against the model's tensors that they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..redistribution.agreement import staging_device
from ..redistribution.local_redistribute import settled
from .export import ByName, by_name, local_of
from .fusing import NameOrParts, parts_of

GivenTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None


class Target:
    """A tensor of the model, with its device and spec."""

    def __init__(self, index: int, name: str, tensor: Tensor) -> None:
        self.index = index
        self.name = name
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.local = local_of(tensor)
        staged = staging_device(tensor) if isinstance(tensor, DTensor) else None
        self.device = staged or self.local.device  # to receive on
        # None for a plain tensor, which every rank gets in full.
        self.spec = tensor._spec if isinstance(tensor, DTensor) else None

    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


class TensorSource:
    """The tensors of rank ``src``, by name."""

    def __init__(
        self,
        op: str,
        given: tuple[GivenTensors, Any],
        target_of: Mapping[str, Target],
        names: ByName[NameOrParts] | None,
        strict: bool,
        offered: set[str],
    ) -> None:
        self._op = op
        tensors, self._extra = given
        if tensors is None:
            raise ValueError(
                f"funcol::{self._op}: no tensors on the rank that is to send them. Pass them there."
            )
        self._target_of = target_of
        self._strict = strict
        self._given: dict[str, NameOrParts] = {name: by_name(names, name, name) for name in target_of}
        self._wanted: dict[str, list[str]] = {}  # names of the model, by those that are given
        for name, theirs in self._given.items():
            for part in parts_of(theirs):
                self._wanted.setdefault(part, []).append(name)
        self._waiting: dict[str, dict[str, Tensor]] = {}  # parts that have come, by the name in the model
        self._mapping = tensors if isinstance(tensors, Mapping) else None
        self._pairs = iter(()) if isinstance(tensors, Mapping) else iter(tensors)
        self._unread: tuple[str, Tensor] | None = None
        self._bucket_names: list[str] = []
        self.loaded: list[str] = []  # targets of buckets that were sent
        self._found: set[str] = set()  # names of the model
        self._loaded_indices: set[int] = set()  # indices of targets
        self._unexpected: list[str] = []
        self._missing: list[str] = []
        # Names of the model, and those of shards that ranks offer for them.
        self.moved: dict[str, str] = {}
        if self._mapping is not None:
            for theirs in self._mapping:
                self._check_known(theirs)
            self.moved = {
                name: theirs
                for name, theirs in self._given.items()
                if isinstance(theirs, str) and theirs in offered and self._moves_as_shards(theirs)
            }
            self._found = {
                name
                for name, theirs in self._given.items()
                if name in self.moved or all(part in self._mapping for part in parts_of(theirs))
            }
            self._check_missing()
            if type(self._mapping) is dict:  # others may read a file for each
                for name in self._found - {*self.moved}:
                    self._check(target_of[name], self._given[name], self._mapping)
        # By target: the name that is given, where it is one of several tied ones.
        found = (name for name in reversed([*target_of]) if name in self._found)
        self._source_of = {target_of[name].index: self._given[name] for name in found}

    def metadata(self) -> dict[str, Any]:
        """Returns the data that the other ranks need."""
        return {
            "in_own_order": self._mapping is None,
            "names": self._bucket_names,
            "incompatible": [self._missing, self._unexpected],
            "extra": self._extra,
        }

    def tensor_for(self, target: Target) -> Tensor:
        """Returns the full tensor of ``target``, checked, with the dtype and on the device of the model."""
        assert self._mapping is not None
        given = self._source_of[target.index]
        return self._convert(target, given, {part: self._mapping[part] for part in parts_of(given)})

    def read(self, most: int) -> list[Tensor | None]:
        """Returns the next tensors of pairs, of ``most`` bytes, if any; :meth:`metadata` has their names."""
        self.loaded += self._bucket_names
        self._bucket_names = []
        full_tensors: list[Tensor | None] = []
        while True:
            pair, self._unread = self._unread or next(self._pairs, None), None
            if pair is None:
                if not full_tensors:
                    self._check_missing()
                return full_tensors
            self._check_known(pair[0])
            for name in self._wanted.get(pair[0], ()):
                target, given = self._target_of[name], self._given[name]
                parts = self._waiting.setdefault(name, {})
                parts[pair[0]] = pair[1]
                if len(parts) < len(parts_of(given)):
                    continue
                if target.index in self._loaded_indices:  # tied to one before
                    self._check(target, given, parts)
                elif full_tensors and target.num_bytes() > most:
                    self._unread = pair
                    return full_tensors
                else:
                    full_tensors.append(self._convert(target, given, parts))
                    most -= target.num_bytes()
                    self._bucket_names.append(target.name)
                    self._loaded_indices.add(target.index)
                self._found.add(name)
                del self._waiting[name]

    def _moves_as_shards(self, name: str) -> bool:
        assert self._mapping is not None
        own = self._mapping.get(name)
        return own is None or is_sharded(own)

    def _convert(self, target: Target, given: NameOrParts, tensors: Mapping[str, Tensor]) -> Tensor:
        """Returns the full tensor of the name or names ``given``, with the dtype and device of the model."""
        parts = [
            part.detach().to(device=target.device, dtype=target.dtype)
            for part in self._check(target, given, tensors)
        ]
        return parts[0] if isinstance(given, str) else given.join(parts)

    def _check(self, target: Target, given: NameOrParts, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Returns the dense tensors of the name or names ``given``."""
        parts = [self._dense(target, tensors[part]) for part in parts_of(given)]
        shapes = [tuple(part.shape) for part in parts]
        if isinstance(given, str):
            if parts[0].shape != target.shape:
                self._refuse(
                    target, f"has shape {shapes[0]}, in the model {tuple(target.shape)}", "the whole tensor"
                )
            return parts
        try:
            shape = given.join([torch.empty(one, device="meta") for one in shapes]).shape
        except (IndexError, RuntimeError):
            shape = None
        if shape != target.shape:
            self._refuse(
                target,
                f"is made of tensors of the shapes {shapes}, and has {tuple(target.shape)} in the model",
                "parts that make up the tensor",
            )
        return parts

    def _dense(self, target: Target, full: Any) -> Tensor:
        """Returns the dense tensor in ``full``. Raises ValueError if there is none."""
        if isinstance(full, DTensor):
            if is_sharded(full):
                self._refuse(
                    target, f"is a DTensor with the placements {full.placements}", "its full_tensor()"
                )
            full = full._local_tensor
        if not isinstance(full, Tensor) or full.layout != torch.strided or full.is_meta:
            kind = type(full).__name__ if not isinstance(full, Tensor) else full.layout
            self._refuse(
                target, "is on the meta device" if kind == torch.strided else f"is a {kind}", "a dense tensor"
            )
        return settled(full)

    def _refuse(self, target: Target, what: str, expected: str) -> NoReturn:
        listed = ", ".join(map(repr, self.loaded[:10])) + (", ..." if len(self.loaded) > 10 else "")
        loaded = f" Loaded are {listed}." if listed else ""
        raise ValueError(f"funcol::{self._op}: '{target.name}' {what}. Pass {expected}.{loaded}")

    def _check_known(self, given: str) -> None:
        if given in self._wanted:
            return
        if self._strict:
            raise ValueError(
                f"funcol::{self._op}: the model has no tensor {given!r}. Leave it out, or pass strict=False."
            )
        self._unexpected.append(given)

    def _check_missing(self) -> None:
        self._missing = [name for name in self._target_of if name not in self._found]
        if self._strict and self._missing:
            listed = ", ".join(map(repr, self._missing[:10]))
            raise ValueError(
                f"funcol::{self._op}: {listed} of the model is missing. Pass every tensor of its "
                "state_dict(), or strict=False."
            )


def is_sharded(tensor: object) -> bool:
    """Returns true for a DTensor that no rank holds in full."""
    return isinstance(tensor, DTensor) and not all(one.is_replicate() for one in tensor.placements)
