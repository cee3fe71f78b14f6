"""Comparison of what the ranks recorded with the reference: layouts that agree, and kinds of faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .layouts import Allowed, Layout, Parts, assembled, parts_of
from .recording import Key, Value

_TOLERANCE = 1e-10  # relative, of float64
_LEAST_SCALE = 1e-3  # of the largest value of a kind: round-off of what is smaller counts by this
_NOISE_FACTOR = 4.0  # how much more than a perturbed reference a run may differ
_LEAST_NUMBERS = 8  # distinct ones from which the precision of a tensor is told
_NEAR = 0.05  # relative to the largest value: what a lower precision may change
_LOWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
_WEIGHTS = ("param", "grad", "step")
_GROUPS = {"grad_input": "gradient", "grad_output": "gradient", "step": "param"}  # of equal magnitude


@dataclass
class Reference:
    """The run without a mesh, and unless in float64 one with random errors of the size ``eps``."""

    values: Mapping[Key, Value]
    facts: Mapping[str, Any]
    norm: float  # of all gradients
    eps: float
    perturbed: Mapping[Key, Value] | None = None
    norm_noise: float = 0.0


@dataclass
class Finding:
    """The result for one recorded tensor. ``agrees`` is None if there is nothing to compare it by."""

    module: str
    kind: str  # of tensor: see Key
    call: int
    path: str
    agrees: bool | None = None
    layout: str = ""
    partial: str = ""  # the axes over which it still has to be reduced
    fault: str = ""  # the kind of the fault
    detail: str = ""
    varying: str = ""  # the axes along which ranks have other values


class Comparison:
    """Compares values of the ranks of ``mesh`` with the reference. ``declared`` has the ops of the mesh axes
    for outputs of modules and for parameters, by name."""

    def __init__(
        self, reference: Reference, mesh: Tensor, axes: Sequence[str], declared: Mapping[str, Sequence[str]]
    ) -> None:
        self._reference = reference
        self._mesh = mesh
        self._axes = axes
        self._declared = declared
        self._scale: float | None = None  # of gradients: a rank may take the mean of its part of the batch
        self._weights: dict[tuple[str, str], Layout | None] = {}  # the layouts of parameters
        self._largest: dict[str, float] = {}
        for key, value in reference.values.items():
            group = _GROUPS.get(key.kind, key.kind)
            self._largest[group] = max(self._largest.get(group, 0.0), _largest(value.local))
        sizes = [
            math.prod(some) for n in range(mesh.ndim) for some in itertools.combinations(mesh.shape, n + 1)
        ]
        factors = {factor for size in sizes for factor in (float(size), 1.0 / size)}
        factors |= {a * b for a in factors for b in factors}
        self._factors = sorted(factors - {1.0}, key=lambda factor: abs(math.log(factor)))

    def judge(self, key: Key, values: Sequence[Value | None]) -> Finding:
        """Compares what the ranks have under ``key``, parameters first; None is a rank without it."""
        target = self._reference.values[key].local
        unknown = Finding(*key)
        if target is not None and key.kind in _WEIGHTS and bool(target.count_nonzero()):
            lacking = [str(r) for r, one in enumerate(values) if one is not None and one.local is None]
            if lacking:
                detail = f"ranks {', '.join(lacking)} have none"
                return replace(unknown, agrees=False, fault="missing on some ranks", detail=detail)
        parts = parts_of(values, self._mesh, self._axes)
        if target is None or parts is None:
            return unknown
        self._declare(key, parts)
        case = _Case(parts, target, self._bound(key), key.kind == "param")
        if _GROUPS.get(key.kind) == "gradient":
            if self._scale is None and target.numel() > 1:
                self._scale = next((f for f in (1.0, *self._factors) if case.layout_of(target * f)), 1.0)
            case.target = target * (self._scale or 1.0)
        layout = case.layout_of(case.target)
        weight = key.module, key.path
        if key.kind == "param":
            self._weights[weight] = layout
        if layout is None and key.kind in _WEIGHTS:
            has_own_layout = any(one.shape != target.shape for one in parts.tensors.values())
            if has_own_layout if key.kind == "param" else self._weights.get(weight) is None:
                return unknown  # such as fused weights
        if layout is None:
            fault, detail = self._recognized(key, case, values)
            varying = ", ".join(parts.names[axis] for axis in parts.varying(case.same))
            return replace(unknown, agrees=False, fault=fault, detail=detail, varying=varying)
        found = replace(unknown, agrees=True, layout=parts.text(layout), partial=parts.text(layout, "P"))
        lower = _lower_precision(target, values) if self._reference.perturbed is not None else ""
        if lower:
            return replace(found, agrees=False, fault="lower precision than asked", detail=lower)
        return found

    def judge_norm(self, norm: float | None) -> Finding:
        """Compares the norm of the gradients; it is None if plain gradients are shards."""
        finding, reference = Finding("", "norm", 0, ""), self._reference
        if norm is not None:
            least = _TOLERANCE if reference.perturbed is None else _NOISE_FACTOR * reference.eps
            bound = max(_NOISE_FACTOR * reference.norm_noise, least * reference.norm)
            finding.agrees = abs(norm - reference.norm) <= bound
        if finding.agrees is False:
            finding.fault = "wrong"
            finding.detail = f"it is {norm:.10g}, and {reference.norm:.10g} in the reference"
        return finding

    def _declare(self, key: Key, parts: Parts) -> None:
        """Adds the ops that the user declared, or those of the weight whose gradient it is."""
        name = ".".join(filter(None, (key.module, key.path if key.kind in _WEIGHTS else "")))
        if key.kind in (*_WEIGHTS, "output") and name in self._declared and parts.names == [*self._axes]:
            parts.declared = dict(enumerate(self._declared[name]))
        elif key.kind in ("grad", "step") and not parts.declared:
            known = self._weights.get((key.module, key.path))
            if known is not None and len(known) == len(parts.sizes):
                parts.declared = known

    def _bound(self, key: Key) -> float:
        """The largest difference from the reference that is round-off."""
        target = self._reference.values[key].local
        assert target is not None
        largest = max(_largest(target), _LEAST_SCALE * self._largest[_GROUPS.get(key.kind, key.kind)])
        if self._reference.perturbed is None:
            return _TOLERANCE * largest
        one = self._reference.perturbed.get(key, Value(None)).local
        noise = 0.0 if one is None or one.shape != target.shape else _largest(one - target)
        return _NOISE_FACTOR * max(noise, self._reference.eps * largest)

    def _recognized(self, key: Key, case: _Case, values: Sequence[Value | None]) -> tuple[str, str]:
        """The kind of a fault, and a description."""
        for kind, details in (
            ("reduced twice or scaled", self._scaled(case)),
            ("reduced twice or scaled", self._counted_bias(key, case)),
            ("never reduced", case.never_reduced()),
            ("shards in another order", case.in_another_order()),
            ("stale", self._stale(key, case)),
            ("wrong only where a dim does not divide", case.uneven()),
        ):
            detail = next(details, None)
            if detail is not None:
                return kind, detail
        lower = _lower_precision(case.target, values)
        near = _NEAR * _largest(case.target)
        if lower and any(_largest(one - case.target) <= near for _, one in case.fitting()):
            return "lower precision than asked", lower
        return case.differing()

    def _scaled(self, case: _Case) -> Iterator[str]:
        for factor in self._factors:
            if case.layout_of(case.target * factor, is_complete=True) is not None:
                yield (
                    f"it is {factor:g} times the reference"
                    if factor > 1
                    else f"it is 1/{1 / factor:g} times the reference"
                )

    def _counted_bias(self, key: Key, case: _Case) -> Iterator[str]:
        for other, value in self._reference.values.items():
            bias = value.local
            is_own = key.kind == "output" and (other.module, other.kind) == (key.module, "param")
            if is_own and bias is not None and bias.shape == case.target.shape[-1:] and _largest(bias):
                for times in range(2, self._mesh.numel() + 1):
                    if case.layout_of(case.target + (times - 1) * bias):
                        yield f"'{other.path}' is counted {times} times"
                for factor in self._factors:
                    if case.layout_of(factor * (case.target - bias) + bias, is_complete=True):
                        yield f"it is {factor:g} times the reference but for '{other.path}'"

    def _stale(self, key: Key, case: _Case) -> Iterator[str]:
        calls = reversed(range(key.call))
        earlier = {key._replace(call=call): f"that of call {call + 1} of the module" for call in calls}
        if key.kind == "step":
            earlier[key._replace(kind="param")] = "the value before the step"
        if key.kind == "output":
            inputs = (one for one in self._reference.values if one[:3] == (key.module, "input", key.call))
            earlier |= {one: f"input {one.path} of the call" for one in inputs}
        for other, text in earlier.items():
            value = self._reference.values.get(other, Value(None)).local
            if value is None or value.shape != case.target.shape or case.same(value, case.target):
                continue
            if case.layout_of(value, is_complete=True):
                yield f"it equals {text}"


@dataclass
class _Case:
    """A tensor of the ranks, and the target that it should make up but for differences up to ``bound``.

    Each method that is named like a kind of fault yields a description if it is of this kind.
    """

    parts: Parts
    target: Tensor
    bound: float
    is_weight: bool  # which needs no reduction

    def same(self, value: Tensor, target: Tensor) -> bool:
        if value.shape != target.shape:
            return False
        if not target.is_floating_point() or not target.numel():
            return torch.equal(value, target)
        difference = (value - target).abs()
        difference = torch.where((value == target) | (value.isnan() & target.isnan()), 0.0, difference)
        return bool(difference.max() <= self.bound)

    def _assembled(self, allows: Allowed | None = None) -> Iterator[tuple[Layout, Tensor]]:
        """What the tensors make up, by default in layouts that need no reduction."""
        return assembled(self.parts, self.target, self.same, allows or self.parts.allows_complete)

    def fitting(self) -> Iterator[tuple[Layout, Tensor]]:
        return (found for found in self._assembled() if found[1].shape == self.target.shape)

    def layout_of(self, target: Tensor, is_complete: bool = False) -> Layout | None:
        """The layout in which the tensors make up ``target``; if ``is_complete``, with no reduction."""
        found = self._assembled(None if is_complete or self.is_weight else self.parts.allows)
        return next((layout for layout, value in found if self.same(value, target)), None)

    def never_reduced(self) -> Iterator[str]:
        def allows(axis: int, op: str) -> bool:
            return op in ("P(sum)", "P(avg)") or self.parts.allows(axis, op)

        for layout, value in self._assembled(allows):
            if self.same(value, self.target):
                axes, how = self.parts.text(layout, "P"), "mean" if "P(avg)" in layout.values() else "sum"
                yield f"over {axes}: the reference is the {how} of what the ranks have"

    def in_another_order(self) -> Iterator[str]:
        undeclared = replace(self, parts=replace(self.parts, declared={}))
        nums = sorted({times * size for size in self.parts.sizes if size > 1 for times in (1, 2)})
        for (_, value), dim, num in itertools.product(undeclared.fitting(), range(self.target.ndim), nums):
            if self.target.shape[dim] % num == 0 and self.target.numel():
                ours, wanted = value.chunk(num, dim), self.target.chunk(num, dim)
                at = [next((i for i, one in enumerate(ours) if self.same(one, w)), -1) for w in wanted]
                if sorted(at) == [*range(num)]:
                    yield f"dim {dim}: where chunks 0 to {num - 1} belong are chunks {at}"

    def uneven(self) -> Iterator[str]:
        for layout, value in self._assembled():
            for dim, (size, wanted) in enumerate(zip(value.shape, self.target.shape, strict=True)):
                is_cut = f"S{dim}" in layout.values() or f"Z{dim}" in layout.values()
                for ranks in (one for one in self.parts.sizes if one > 1 and wanted % one):
                    start = min(wanted // ranks * ranks, -(-wanted // ranks) * (ranks - 1))
                    text = f"of {wanted} elements is wrong from element {start} on"
                    if size != wanted:
                        start, text = min(size, wanted) * is_cut, f"has {size} of {wanted} elements"
                    if start and self.same(value.narrow(dim, 0, start), self.target.narrow(dim, 0, start)):
                        yield f"dim {dim} {text}"

    def differing(self) -> tuple[str, str]:
        """Names the axes along which ranks differ that should be equal, and the ranks that are right."""
        parts = self.parts
        is_full = all(one.shape == self.target.shape for one in parts.tensors.values())
        axes = [a for a in parts.varying(self.same) if parts.declared.get(a, "R" if is_full else "") == "R"]
        right = sorted(parts.ranks[at] for at, one in parts.tensors.items() if self.same(one, self.target))
        told = f"; ranks {', '.join(map(str, right))} agree with the reference" if right else ""
        if axes:
            return (
                "differs between ranks",
                f"along {', '.join(parts.names[a] for a in axes)}, replicated{told}",
            )
        return "wrong", f"equals the reference in no layout{told}"


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _lower_precision(target: Tensor, values: Sequence[Value | None]) -> str:
    """A description if a rank's tensor has no more digits than a lower dtype, and the reference has."""

    def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
        return tensor.is_floating_point() and torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)

    for one in filter(None, values):
        for lower in _LOWER.get(one.dtype, ()):
            dtype: torch.dtype = getattr(torch, lower)
            if one.local is None or torch.unique(one.local).numel() < _LEAST_NUMBERS:
                continue
            if fits(one.local, dtype) and not fits(target, dtype):
                return f"a {one.dtype} tensor with no more than the digits of {lower}"
    return ""
