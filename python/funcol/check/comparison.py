"""Comparison of what the ranks recorded with the reference: layouts that agree, and kinds of faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .layouts import Layout, RankTensors, place_on_mesh
from .recording import RecordedTensor, Recording, TensorKey

_TOLERANCE = 1e-10  # relative, of float64
_NORM_TOLERANCE = 1e-6  # relative, between ranks that have all gradients
_LEAST_SCALE = 1e-3  # relative to the largest value of a kind: smaller tensors get the bound of this one
_NOISE_FACTOR = 4.0  # by which a run may differ more than the perturbed reference does
_LEAST_NUMBERS = 8  # distinct numbers without which the precision of a tensor is not judged
_NEAR = 0.05  # difference that a lower precision may make, relative to the largest value
_LOWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
_WEIGHTS = ("param", "grad", "step")
_GROUPS = {"grad_input": "gradient", "grad_output": "gradient", "step": "param"}  # of equal magnitude


@dataclass
class Finding:
    """The result for one recorded tensor. ``agrees`` is None if it cannot be compared."""

    module: str
    kind: str  # of tensor: see TensorKey
    call: int
    path: str
    agrees: bool | None = None
    layout: str = ""
    partial: str = ""  # the axes over which it is still to be reduced
    fault: str = ""  # the kind of the fault
    detail: str = ""
    varying: str = ""  # the axes along which ranks differ


class Comparison:
    """Compares values of the ranks of ``mesh`` with the reference. ``declared`` has the ops of the mesh axes
    for outputs of modules and for parameters, by name."""

    def __init__(
        self, reference: Recording, mesh: Tensor, axes: Sequence[str], declared: Mapping[str, Sequence[str]]
    ) -> None:
        self._reference = reference
        self._values = reference.values
        self._mesh = mesh
        self._axes = axes
        self._declared = declared
        self._scale: float | None = None  # of gradients: a rank may take the mean of its part of the batch
        self._weights: dict[tuple[str, str], Layout | None] = {}  # the layouts of parameters
        self._largest: dict[str, float] = {}
        for key, value in self._values.items():
            group = _GROUPS.get(key.kind, key.kind)
            self._largest[group] = max(self._largest.get(group, 0.0), _largest(value.local))
        sizes = [
            math.prod(some) for n in range(mesh.ndim) for some in itertools.combinations(mesh.shape, n + 1)
        ]
        factors = {factor for size in sizes for factor in (float(size), 1.0 / size)}
        factors |= {a * b for a in factors for b in factors}
        self._factors = sorted(factors - {1.0}, key=lambda factor: abs(math.log(factor)))

    def judge(self, key: TensorKey, values: Sequence[RecordedTensor | None]) -> Finding:
        """Compares the values of the ranks under ``key``, None for a rank without it; parameters come
        first."""
        target = self._values[key].local
        finding = Finding(*key)
        if target is None or (key.kind == "step" and self._is_round_off(key._replace(kind="grad"))):
            return finding  # optimizers such as Adam amplify round-off
        lacking = [str(r) for r, one in enumerate(values) if one is not None and one.local is None]
        if lacking and key.kind in _WEIGHTS and bool(target.count_nonzero()):
            detail = f"ranks {', '.join(lacking)} have none"
            return replace(finding, agrees=False, fault="missing on some ranks", detail=detail)
        parts = place_on_mesh(values, self._mesh, self._axes, self._bound(key))
        if parts is None:
            return finding
        if key.kind == "norm" and replace(parts, bound=_NORM_TOLERANCE * float(target)).varying():
            return finding  # norms of shards
        self._declare(key, parts)
        if _GROUPS.get(key.kind) == "gradient":
            if self._scale is None and target.numel() > 1:
                self._scale = next((f for f in (1.0, *self._factors) if parts.layout_of(target * f)), 1.0)
            target = target * (self._scale or 1.0)
        layout = parts.layout_of(target, "none" if key.kind in ("param", "norm") else "declared")
        weight = key.module, key.path
        if key.kind == "param":
            self._weights[weight] = layout
            is_own = any(one.shape != target.shape for one in parts.tensors.values())  # such as fused weights
        else:
            is_own = key.kind in _WEIGHTS and self._weights.get(weight) is None
        if layout is not None:
            finding = replace(finding, layout=parts.text(layout), partial=parts.text(layout, "P"))
            is_exact = self._reference.perturbed is None
            finding.detail = "" if is_exact else _lower_precision(target, values)
            finding.fault = "lower precision than asked" if finding.detail else ""
            finding.agrees = not finding.fault
        elif not is_own:
            difference = _Difference(key, values, parts, target, self._values, self._factors)
            finding.agrees = False
            finding.fault, finding.detail = difference.classify()
            finding.varying = ", ".join(parts.names[axis] for axis in parts.varying())
        return finding

    def _declare(self, key: TensorKey, parts: RankTensors) -> None:
        """Adds the ops that the user declared, or those of the weight whose gradient it is."""
        name = ".".join(filter(None, (key.module, key.path if key.kind in _WEIGHTS else "")))
        if key.kind in (*_WEIGHTS, "output") and name in self._declared and parts.names == [*self._axes]:
            parts.declared = dict(enumerate(self._declared[name]))
        elif key.kind in ("grad", "step") and not parts.declared:
            known = self._weights.get((key.module, key.path))
            if known is not None and len(known) == len(parts.sizes):
                parts.declared = known

    def _is_round_off(self, key: TensorKey) -> bool:
        """Returns true if the tensor is not zero, but no more than round-off."""
        return 0.0 < _largest(self._values[key].local) <= self._bound(key)

    def _bound(self, key: TensorKey) -> float:
        """Returns the largest difference from the reference that is round-off."""
        target = self._values[key].local
        assert target is not None
        largest = max(_largest(target), _LEAST_SCALE * self._largest[_GROUPS.get(key.kind, key.kind)])
        perturbed = self._reference.perturbed
        if perturbed is None:
            return _TOLERANCE * largest
        one = perturbed.values.get(key, RecordedTensor(None)).local
        noise = 0.0 if one is None or one.shape != target.shape else _largest(one - target)
        return _NOISE_FACTOR * max(noise, perturbed.noise * largest)


@dataclass
class _Difference:
    """A tensor of the ranks that does not make up ``target``.

    Each method that is named like a kind of fault yields a description if it is of this kind.
    """

    key: TensorKey
    values: Sequence[RecordedTensor | None]
    parts: RankTensors
    target: Tensor
    reference: Mapping[TensorKey, RecordedTensor]
    factors: Sequence[float]

    def classify(self) -> tuple[str, str]:
        """Returns the kind of the fault, and a description."""
        if self.key.kind == "norm":
            norm = float(self.parts.tensors[next(iter(self.parts.tensors))])
            return "wrong", f"it is {norm:.10g}, and {float(self.target):.10g} in the reference"
        kinds = (
            ("reduced twice or scaled", self.scaled()),
            ("reduced twice or scaled", self.counted_bias()),
            ("never reduced", self.never_reduced()),
            ("shards in another order", self.in_another_order()),
            ("stale", self.stale()),
            ("wrong only where a dim does not divide", self.uneven()),
            ("lower precision than asked", self.lower_precision()),
            ("differs between ranks", self.differing()),
        )
        found = ((kind, detail) for kind, details in kinds for detail in details)
        return next(found, ("wrong", f"equals the reference in no layout{self._right_ranks()}"))

    def _has_layout_of(self, target: Tensor) -> bool:
        return self.parts.layout_of(target, "none") is not None

    def _unreduced(self) -> Iterator[Tensor]:
        """Yields what the tensors make up with no reduction in the shape of the target."""
        made = self.parts.assemblies(self.target)
        return (value for _, value in made if value.shape == self.target.shape)

    def scaled(self) -> Iterator[str]:
        for factor in self.factors:
            if self._has_layout_of(self.target * factor):
                times = f"{factor:g}" if factor > 1 else f"1/{1 / factor:g}"
                yield f"it is {times} times the reference"

    def counted_bias(self) -> Iterator[str]:
        for other, value in self.reference.items():
            bias = value.local
            is_own = self.key.kind == "output" and (other.module, other.kind) == (self.key.module, "param")
            if is_own and bias is not None and bias.shape == self.target.shape[-1:] and _largest(bias):
                for times in range(2, len(self.values) + 1):
                    if self.parts.layout_of(self.target + (times - 1) * bias):
                        yield f"'{other.path}' is counted {times} times"
                for factor in self.factors:
                    if self._has_layout_of(factor * (self.target - bias) + bias):
                        yield f"it is {factor:g} times the reference but for '{other.path}'"

    def never_reduced(self) -> Iterator[str]:
        layout = self.parts.layout_of(self.target, "any")
        if layout is not None:
            axes, how = self.parts.text(layout, "P"), "mean" if "P(avg)" in layout.values() else "sum"
            yield f"over {axes}: the reference is the {how} of what the ranks have"

    def in_another_order(self) -> Iterator[str]:
        undeclared = replace(self, parts=replace(self.parts, declared={}))
        nums = sorted({times * size for size in self.parts.sizes if size > 1 for times in (1, 2)})
        for value, dim, num in itertools.product(undeclared._unreduced(), range(self.target.ndim), nums):
            if self.target.shape[dim] % num == 0 and self.target.numel():
                ours, wanted = value.chunk(num, dim), self.target.chunk(num, dim)
                at = [next((i for i, x in enumerate(ours) if self.parts.equal(x, w)), -1) for w in wanted]
                if sorted(at) == [*range(num)]:
                    yield f"dim {dim}: where chunks 0 to {num - 1} belong are chunks {at}"

    def stale(self) -> Iterator[str]:
        key = self.key
        calls = reversed(range(key.call))
        earlier = {key._replace(call=call): f"that of call {call + 1} of the module" for call in calls}
        if key.kind == "step":
            earlier[key._replace(kind="param")] = "the value before the step"
        if key.kind == "output":
            inputs = (one for one in self.reference if one[:3] == (key.module, "input", key.call))
            earlier |= {one: f"input {one.path} of the call" for one in inputs}
        for other, text in earlier.items():
            value = self.reference.get(other, RecordedTensor(None)).local
            if value is None or value.shape != self.target.shape or self.parts.equal(value, self.target):
                continue
            if self._has_layout_of(value):
                yield f"it equals {text}"

    def uneven(self) -> Iterator[str]:
        for layout, value in self.parts.assemblies(self.target):
            for dim, (size, wanted) in enumerate(zip(value.shape, self.target.shape, strict=True)):
                is_cut = f"S{dim}" in layout.values() or f"Z{dim}" in layout.values()
                for ranks in (one for one in self.parts.sizes if one > 1 and wanted % one):
                    start = min(wanted // ranks * ranks, -(-wanted // ranks) * (ranks - 1))
                    text = f"of {wanted} elements is wrong from element {start} on"
                    if size != wanted:
                        start, text = min(size, wanted) * is_cut, f"has {size} of {wanted} elements"
                    right = self.target.narrow(dim, 0, start)
                    if start and self.parts.equal(value.narrow(dim, 0, start), right):
                        yield f"dim {dim} {text}"

    def lower_precision(self) -> Iterator[str]:
        lower = _lower_precision(self.target, self.values)
        near = _NEAR * _largest(self.target)
        if lower and any(_largest(one - self.target) <= near for one in self._unreduced()):
            yield lower

    def differing(self) -> Iterator[str]:
        """Names the axes along which ranks differ that should be equal, and the ranks that are right."""
        parts = self.parts
        is_full = all(one.shape == self.target.shape for one in parts.tensors.values())
        axes = [a for a in parts.varying() if parts.declared.get(a, "R" if is_full else "") == "R"]
        if axes:
            names = ", ".join(parts.names[axis] for axis in axes)
            yield f"along {names}, replicated{self._right_ranks()}"

    def _right_ranks(self) -> str:
        parts = self.parts
        right = sorted(parts.ranks[at] for at, one in parts.tensors.items() if parts.equal(one, self.target))
        return f"; ranks {', '.join(map(str, right))} agree with the reference" if right else ""


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _lower_precision(target: Tensor, values: Sequence[RecordedTensor | None]) -> str:
    """Returns a text if a rank's tensor has no more digits than a lower dtype, and the reference has."""

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
