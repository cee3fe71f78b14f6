"""Comparison of what the ranks recorded with the reference: layouts that agree, and kinds of faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .layouts import Layout, Parts, assembled, parts_of
from .recording import Key, Value

TOLERANCE = 1e-10  # relative, of float64
_LEAST_SCALE = 1e-3  # of the largest value of a kind: round-off of what is smaller counts by this
NOISE_FACTOR = 4.0  # how much more than a perturbed reference a run may differ
_LEAST_NUMBERS = 8  # distinct ones from which the precision of a tensor is told
_NEAR = 0.05  # relative to the largest value: what a lower precision may change
_LOWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
WEIGHTS = ("param", "grad", "step")
_GROUPS = {"grad_input": "gradient", "grad_output": "gradient", "step": "param"}  # of equal magnitude
_REDUCED = ("P(sum)", "P(avg)")


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
    """Compares values of the ranks with those of a reference run.

    ``perturbed`` is a second reference run with random errors of the size ``eps``, or None in float64.
    ``declared`` has the ops of the mesh axes for outputs of modules and for parameters, by name.
    """

    def __init__(
        self,
        reference: Mapping[Key, Value],
        perturbed: Mapping[Key, Value] | None,
        mesh: Tensor,
        axes: Sequence[str],
        eps: float,
        declared: Mapping[str, Sequence[str]],
    ) -> None:
        self._reference = reference
        self._perturbed = perturbed
        self._mesh = mesh
        self._axes = axes
        self._eps = eps
        self._declared = declared
        self._scale: float | None = None
        self._weights: dict[tuple[str, str], Layout | None] = {}  # the layouts of parameters
        self._largest: dict[str, float] = {}
        for key, value in reference.items():
            group = _GROUPS.get(key.kind, key.kind)
            self._largest[group] = max(self._largest.get(group, 0.0), _largest(value.local))
        products = {
            math.prod(some) for n in range(mesh.ndim) for some in itertools.combinations(mesh.shape, n + 1)
        }
        factors = {factor for one in products for factor in (float(one), 1.0 / one)}
        factors |= {a * b for a in factors for b in factors}
        self._factors = sorted(factors - {1.0}, key=lambda factor: abs(math.log(factor)))

    def judge(self, key: Key, values: Sequence[Value | None]) -> Finding:
        """Compares what the ranks have under ``key``, parameters first; None is a rank without it."""
        target = self._reference[key].local
        unknown = Finding(*key)
        if target is None:
            return unknown
        if key.kind in WEIGHTS and bool(target.count_nonzero()):
            lacking = [str(r) for r, one in enumerate(values) if one is not None and one.local is None]
            if lacking:
                detail = f"ranks {', '.join(lacking)} have none"
                return replace(unknown, agrees=False, fault="missing on some ranks", detail=detail)
        parts = parts_of(values, self._mesh, self._axes)
        if parts is None:
            return unknown
        if any(one.ndim != target.ndim for one in parts.tensors.values()):
            if key.kind not in WEIGHTS:
                return unknown
            return replace(unknown, agrees=False, fault="has another number of dims")
        self._declare(key, parts)
        case = _Case(key, parts, target, self._bound(key), self._factors)
        if _GROUPS.get(key.kind) == "gradient":
            if self._scale is None and target.numel() > 1:
                self._scale = next((f for f in (1.0, *self._factors) if case.layout_of(target * f)), 1.0)
            case.target = target * (self._scale or 1.0)
        layout = case.layout_of(case.target)
        has_own_layout = layout is None and any(one.shape != target.shape for one in parts.tensors.values())
        if key.kind == "param":
            self._weights[key.module, key.path] = layout
            if has_own_layout:  # such as that of fused weights
                return unknown
        is_of_weight = key.kind in ("grad", "step")
        if layout is None and is_of_weight and self._weights.get((key.module, key.path)) is None:
            return unknown
        varying = ", ".join(parts.names[axis] for axis in parts.varying(case.same))
        if layout is None:
            fault, detail = self._recognized(case, values)
            return replace(unknown, agrees=False, fault=fault, detail=detail, varying=varying)
        found = replace(unknown, layout=parts.text(layout), partial=parts.text(layout, "P"))
        lower = _lower_precision(target, values) if self._perturbed is not None else ""
        if lower:
            return replace(found, agrees=False, fault="lower precision than asked", detail=lower)
        return replace(found, agrees=True)

    def _declare(self, key: Key, parts: Parts) -> None:
        """Adds the ops that the user declared, or those of the weight whose gradient it is."""
        name = ".".join(filter(None, (key.module, key.path if key.kind in WEIGHTS else "")))
        if key.kind in (*WEIGHTS, "output") and name in self._declared and parts.names == [*self._axes]:
            parts.declared = dict(enumerate(self._declared[name]))
        elif key.kind in ("grad", "step") and not parts.declared:
            known = self._weights.get((key.module, key.path))
            if known is not None and len(known) == len(parts.sizes):
                parts.declared = known

    def _bound(self, key: Key) -> float:
        """The largest difference from the reference that is round-off."""
        target = self._reference[key].local
        assert target is not None
        scale = _LEAST_SCALE * self._largest[_GROUPS.get(key.kind, key.kind)]
        largest = max(_largest(target), scale)
        if self._perturbed is None:
            return TOLERANCE * largest
        one = self._perturbed.get(key)
        noise = 0.0
        if one is not None and one.local is not None and one.local.shape == target.shape:
            noise = _largest(one.local - target)
        return NOISE_FACTOR * max(noise, self._eps * largest)

    def _recognized(self, case: _Case, values: Sequence[Value | None]) -> tuple[str, str]:
        """The kind of a fault, and a description."""
        for kind, details in (
            ("reduced twice or scaled", case.scaled()),
            ("reduced twice or scaled", self._counted_bias(case)),
            ("never reduced", case.never_reduced()),
            ("shards in another order", case.in_another_order()),
            ("stale", self._stale(case)),
            ("wrong only where a dim does not divide", case.uneven()),
        ):
            detail = next(details, None)
            if detail is not None:
                return kind, detail
        lower = _lower_precision(case.target, values)
        if lower and any(
            _largest(one - case.target) <= _NEAR * _largest(case.target) for one in case.fitting()
        ):
            return "lower precision than asked", lower
        return case.differing()

    def _counted_bias(self, case: _Case) -> Iterator[str]:
        for other, value in self._reference.items():
            bias = value.local
            is_own = case.key.kind == "output" and (other.module, other.kind) == (case.key.module, "param")
            if not is_own or bias is None or bias.ndim != 1 or not _largest(bias):
                continue
            if bias.shape[0] == case.target.shape[-1]:
                for times in range(2, self._mesh.numel() + 1):
                    if case.layout_of(case.target + (times - 1) * bias):
                        yield f"'{other.path}' is counted {times} times"
                for factor in self._factors:
                    if case.layout_of(factor * (case.target - bias) + bias, is_complete=True):
                        yield f"it is {factor:g} times the reference but for '{other.path}'"

    def _stale(self, case: _Case) -> Iterator[str]:
        key = case.key
        earlier = {
            key._replace(call=call): f"that of call {call + 1} of the module"
            for call in reversed(range(key.call))
        }
        if key.kind == "step":
            earlier[key._replace(kind="param")] = "the value before the step"
        if key.kind == "output":
            inputs = (one for one in self._reference if one[:3] == (key.module, "input", key.call))
            earlier |= {one: f"input {one.path} of the call" for one in inputs}
        for other, text in earlier.items():
            value = self._reference[other].local if other in self._reference else None
            if value is None or case.same(value, case.target):
                continue
            if case.layout_of(value, is_complete=True):
                yield f"it equals {text}"


@dataclass
class _Case:
    """A tensor of the ranks, and the target that it should make up but for differences up to ``bound``.

    Each method that is named like a kind of fault yields a description if it is of this kind.
    """

    key: Key
    parts: Parts
    target: Tensor
    bound: float
    factors: Sequence[float]

    def same(self, value: Tensor, target: Tensor) -> bool:
        if value.shape != target.shape:
            return False
        if not target.is_floating_point():
            return torch.equal(value, target)
        if not target.numel():
            return True
        difference = (value - target).abs()
        difference = torch.where((value == target) | (value.isnan() & target.isnan()), 0.0, difference)
        return bool(difference.max() <= self.bound)

    def layout_of(self, target: Tensor, is_complete: bool = False) -> Layout | None:
        """The layout in which the ranks' tensors make up ``target``; a parameter, and any if ``is_complete``,
        needs no reduction."""
        is_complete |= self.key.kind == "param"
        allows = self.parts.allows_complete if is_complete else self.parts.allows
        for layout, value in assembled(self.parts, target, self.same, allows):
            if self.same(value, target):
                return layout
        return None

    def fitting(self) -> Iterator[Tensor]:
        """What the tensors make up in layouts that need no reduction, in the shape of the target."""
        for _, value in assembled(self.parts, self.target, self.same, self.parts.allows_complete):
            if value.shape == self.target.shape:
                yield value

    def scaled(self) -> Iterator[str]:
        for factor in self.factors:
            if self.layout_of(self.target * factor, is_complete=True) is not None:
                times = f"{factor:g}" if factor > 1 else f"1/{1 / factor:g}"
                yield f"it is {times} times the reference"

    def never_reduced(self) -> Iterator[str]:
        def allows(axis: int, op: str) -> bool:
            return op in _REDUCED or self.parts.allows(axis, op)

        for layout, value in assembled(self.parts, self.target, self.same, allows):
            if self.same(value, self.target):
                axes, how = self.parts.text(layout, "P"), "mean" if "P(avg)" in layout.values() else "sum"
                yield f"over {axes}: the reference is the {how} of what the ranks have"

    def in_another_order(self) -> Iterator[str]:
        undeclared = replace(self, parts=replace(self.parts, declared={}))
        nums = {times * size for size in self.parts.sizes if size > 1 for times in (1, 2)}
        for value, dim, num in itertools.product(undeclared.fitting(), range(self.target.ndim), sorted(nums)):
            if self.target.shape[dim] % num == 0 and self.target.numel():
                ours, wanted = value.chunk(num, dim), self.target.chunk(num, dim)
                at = [next((i for i, one in enumerate(ours) if self.same(one, w)), -1) for w in wanted]
                if sorted(at) == [*range(num)]:
                    yield f"dim {dim}: where chunks 0 to {num - 1} belong are chunks {at}"

    def uneven(self) -> Iterator[str]:
        for layout, value in assembled(self.parts, self.target, self.same, self.parts.allows_complete):
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
            names = ", ".join(parts.names[axis] for axis in axes)
            return "differs between ranks", f"along {names}, replicated{told}"
        return "wrong", f"equals the reference in no layout{told}"


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _lower_precision(target: Tensor, values: Sequence[Value | None]) -> str:
    """A description if a rank's tensor has no more digits than a lower dtype, and the reference has."""

    def fits(tensor: Tensor, dtype: torch.dtype) -> bool:
        return tensor.is_floating_point() and torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)

    for one in values:
        if one is not None and one.local is not None and torch.unique(one.local).numel() >= _LEAST_NUMBERS:
            for lower in _LOWER.get(one.dtype, ()):
                dtype: torch.dtype = getattr(torch, lower)
                if fits(one.local, dtype) and not fits(target, dtype):
                    return f"a {one.dtype} tensor with no more than the digits of {lower}"
    return ""
