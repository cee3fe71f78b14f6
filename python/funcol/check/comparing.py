"""Comparison of what the ranks recorded with the reference: layouts that agree, and kinds of faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layouts import Layout, Parts, Same, Search, Value, parts_of
from .recording import Key

TOLERANCE = 1e-10  # relative, of float64
_LEAST_SCALE = 1e-3  # of the largest value of a kind: round-off of what is smaller counts by this
_NOISE_FACTOR = 4.0  # how much more than a perturbed reference a run may differ
_LEAST_NUMBERS = 8  # distinct ones from which the precision of a tensor is told
_LOWER = {"float64": ("float32", "bfloat16", "float16"), "float32": ("bfloat16", "float16")}
_WEIGHTS = ("param", "grad", "step")
_GRADIENTS = ("grad_input", "grad_output")


@dataclass
class Finding:
    """The result for one recorded tensor. ``agrees`` is None if there is nothing to compare it by."""

    key: Key
    agrees: bool | None
    layout: str = ""
    partial: str = ""  # the axes over which it still has to be reduced
    kind: str = ""
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
        self.scale = 1.0  # of gradients of activations: each rank may take the mean of its part of a batch
        self._scale_is_known = False
        self._weights: dict[tuple[str, str], list[set[str] | None] | None] = {}
        self._largest: dict[str, float] = {}
        for key, value in reference.items():
            group = _group(key.kind)
            self._largest[group] = max(self._largest.get(group, 0.0), _largest(value.local))
        sizes = [mesh.shape[axis] for axis in range(mesh.ndim)]
        products = {
            math.prod(some) for n in range(1, len(sizes) + 1) for some in itertools.combinations(sizes, n)
        }
        factors = {float(one) for one in products} | {1.0 / one for one in products}
        factors |= {a * b for a in factors for b in factors}
        self._factors = sorted(factors - {1.0}, key=lambda factor: abs(math.log(factor)))

    def judge(self, key: Key, values: Sequence[Value | None]) -> Finding:
        """Compares what the ranks have under ``key``; a rank without the module has None."""
        target = self._reference[key].local
        if target is None:
            return Finding(key, None)
        if key.kind in _WEIGHTS:
            lacking = [r for r, one in enumerate(values) if one is not None and one.local is None]
            if lacking and not self._same(target * 0, target, key):
                ranks = f"ranks {', '.join(map(str, lacking))}"
                return Finding(key, False, kind="missing on some ranks", detail=f"{ranks} have none")
        parts = parts_of(values, self._mesh, self._axes)
        if parts is None:
            return Finding(key, None)
        if any(one.ndim != target.ndim for one in parts.values.values()):
            return Finding(key, False if key.kind in _WEIGHTS else None, kind="has another number of dims")
        self._restrict(key, parts)
        if key.kind in _GRADIENTS:
            if not self._scale_is_known and target.numel() > 1:
                self._find_scale(key, parts, target)
            target = target * self.scale
        layout = Search(target, self._sames(key)).run(parts)
        if key.kind == "param":
            self._keep_layout(key, parts, layout)
        if layout is None:
            if key.kind in ("grad", "step") and self._weights.get((key.module, key.path)) is None:
                return Finding(key, None)  # weights in a layout of their own, such as fused ones
            if key.kind == "param" and any(one.shape != target.shape for one in parts.values.values()):
                return Finding(key, None)
            found = self._recognized(key, parts, target, values)
            found.varying = ", ".join(self._varying(key, parts))
            return found
        named = {axis: op for axis, op in layout.items() if parts.ranks.shape[axis] > 1}
        text = ", ".join(f"{parts.names[axis]}: {op}" for axis, op in sorted(named.items()))
        lower = self._lower_precision(target, values) if self._perturbed is not None else ""
        if lower:
            return Finding(key, False, text, kind="lower precision than asked", detail=lower)
        partial = ", ".join(parts.names[axis] for axis, op in sorted(named.items()) if op.startswith("P"))
        return Finding(key, True, text, partial)

    def _restrict(self, key: Key, parts: Parts) -> None:
        """Allows the ops that were declared, or those of the weight whose gradient it is."""
        name = ".".join(filter(None, (key.module, key.path if key.kind in _WEIGHTS else "")))
        declared = self._declared.get(name) if key.kind in (*_WEIGHTS, "output") else None
        if declared is not None and parts.names == list(self._axes):
            parts.allowed = [{op} for op in declared]
        elif key.kind in ("grad", "step") and all(one is None for one in parts.allowed):
            known = self._weights.get((key.module, key.path))
            if known is not None and len(known) == len(parts.allowed):
                parts.allowed = known
        elif key.kind == "param":
            ops = {f"{op}{dim}" for op in "SZ" for dim in range(8)} | {"R"}
            parts.allowed = [ops if one is None else one for one in parts.allowed]

    def _keep_layout(self, key: Key, parts: Parts, layout: Layout | None) -> None:
        self._weights[key.module, key.path] = (
            None if layout is None else [{layout[axis]} for axis in range(parts.ranks.ndim)]
        )

    def _find_scale(self, key: Key, parts: Parts, target: Tensor) -> None:
        """Takes the factor of the first gradient, that of the loss, as one of all activations' gradients."""
        self._scale_is_known = True
        for factor in (1.0, *self._factors):
            if Search(target * factor, self._sames(key)).run(parts) is not None:
                self.scale = factor
                return

    def _same(self, value: Tensor, target: Tensor, key: Key) -> bool:
        if value.shape != target.shape:
            return False
        if not target.is_floating_point():
            return torch.equal(value, target)
        if not target.numel():
            return True
        difference = (value - target).abs()
        difference = torch.where((value == target) | (value.isnan() & target.isnan()), 0.0, difference)
        return bool(difference.max() <= self._bound(key, target))

    def _sames(self, key: Key) -> Same:
        return lambda value, target: self._same(value, target, key)

    def _bound(self, key: Key, target: Tensor) -> float:
        largest = max(_largest(target), _LEAST_SCALE * self._largest[_group(key.kind)])
        if self._perturbed is None:
            return TOLERANCE * largest
        one, other = self._perturbed.get(key), self._reference[key].local
        if one is None or one.local is None or other is None or one.local.shape != other.shape:
            return _NOISE_FACTOR * self._eps * largest
        return _NOISE_FACTOR * max(_largest(one.local - other), self._eps * largest)

    # Kinds of faults

    def _recognized(self, key: Key, parts: Parts, target: Tensor, values: Sequence[Value | None]) -> Finding:
        for recognize in (
            self._scaled,
            self._counted_bias,
            self._never_reduced,
            self._other_order,
            self._stale,
            self._uneven,
        ):
            found = recognize(key, parts, target)
            if found is not None:
                return Finding(key, False, kind=found[0], detail=found[1])
        lower = self._lower_precision(target, values)
        if lower and self._is_near(parts, target):
            return Finding(key, False, kind="lower precision than asked", detail=lower)
        return self._differing(key, parts, target)

    def _scaled(self, key: Key, parts: Parts, target: Tensor) -> tuple[str, str] | None:
        for factor in self._factors:
            if Search(target * factor, self._sames(key)).run(_without_partial(parts)) is not None:
                text = f"{factor:g}" if factor > 1 else f"1/{1 / factor:g}"
                return "reduced twice or scaled", f"it is {text} times the reference"
        return None

    def _counted_bias(self, key: Key, parts: Parts, target: Tensor) -> tuple[str, str] | None:
        if key.kind != "output":
            return None
        for other, value in self._reference.items():
            bias = value.local
            if other.kind != "param" or other.module != key.module or bias is None or bias.ndim != 1:
                continue
            if bias.shape[0] != target.shape[-1] or not _largest(bias):
                continue
            for times in range(1, self._mesh.numel()):
                if Search(target + times * bias, self._sames(key)).run(parts) is not None:
                    return "reduced twice or scaled", f"'{other.path}' is counted {times + 1} times"
            for factor in self._factors:
                scaled = factor * (target - bias) + bias
                if Search(scaled, self._sames(key)).run(_without_partial(parts)) is not None:
                    return (
                        "reduced twice or scaled",
                        f"it is {factor:g} times the reference but for '{other.path}'",
                    )
        return None

    def _never_reduced(self, key: Key, parts: Parts, target: Tensor) -> tuple[str, str] | None:
        extra = frozenset(("P(sum)", "P(avg)"))
        layout = Search(target, self._sames(key), extra=extra).run(parts)
        if layout is None:
            return None
        axes = [axis for axis, op in sorted(layout.items()) if op.startswith("P")]
        names = ", ".join(parts.names[axis] for axis in axes)
        how = "mean" if any(layout[axis] == "P(avg)" for axis in axes) else "sum"
        return "never reduced", f"over {names}: the reference is the {how} of what the ranks have"

    def _other_order(self, key: Key, parts: Parts, target: Tensor) -> tuple[str, str] | None:
        found: list[str] = []

        def same_chunks(value: Tensor, target: Tensor) -> bool:
            for dim, size in itertools.product(range(target.ndim), parts.ranks.shape):
                for num in (size, 2 * size):
                    if size > 1 and target.shape[dim] % num == 0:
                        ours, wanted = list(value.chunk(num, dim)), target.chunk(num, dim)
                        at = [
                            next((i for i, one in enumerate(ours) if self._same(one, w, key)), -1)
                            for w in wanted
                        ]
                        if len(ours) == num and sorted(at) == list(range(num)):
                            found.append(f"dim {dim}: where chunks 0 to {num - 1} belong are chunks {at}")
                            return True
            return False

        Search(target, same_chunks, equal=self._sames(key)).run(_without_partial(parts.with_any_layout()))
        return ("shards in another order", found[0]) if found else None

    def _stale(self, key: Key, parts: Parts, target: Tensor) -> tuple[str, str] | None:
        for other, text in _earlier(key, self._reference):
            value = self._reference[other].local
            if value is None or value.shape != target.shape or self._same(value, target, key):
                continue
            if Search(value, self._sames(key)).run(_without_partial(parts)) is not None:
                return "stale", f"it equals {text}"
        return None

    def _uneven(self, key: Key, parts: Parts, target: Tensor) -> tuple[str, str] | None:
        found: list[str] = []
        sizes = [size for size in parts.ranks.shape if size > 1]

        def near(value: Tensor, layout: Layout) -> None:
            other = [d for d in range(target.ndim) if value.shape[d] != target.shape[d]]
            if len(other) == 1:
                [dim] = other
                least = min(value.shape[dim], target.shape[dim])
                is_cut = any(op in (f"S{dim}", f"Z{dim}") for op in layout.values())
                if is_cut and any(target.shape[dim] % size for size in sizes):
                    same = self._same(value.narrow(dim, 0, least), target.narrow(dim, 0, least), key)
                    if same and least:
                        found.append(f"dim {dim} has {value.shape[dim]} of {target.shape[dim]} elements")

        def same_at_the_start(value: Tensor, target: Tensor) -> bool:
            for dim, size in itertools.product(range(target.ndim), sizes):
                num = target.shape[dim]
                start = min(num // size * size, -(-num // size) * (size - 1))
                is_tail = num % size and start
                if is_tail and self._same(value.narrow(dim, 0, start), target.narrow(dim, 0, start), key):
                    found.append(f"dim {dim} of {num} elements is wrong from element {start} on")
                    return True
            return False

        equal = self._sames(key)
        Search(target, same_at_the_start, equal=equal, near=near).run(_without_partial(parts))
        return ("wrong only where a dim does not divide", found[0]) if found else None

    def _lower_precision(self, target: Tensor, values: Sequence[Value | None]) -> str:
        for one in values:
            if one is None or one.local is None or one.dtype not in _LOWER:
                continue
            if torch.unique(one.local).numel() < _LEAST_NUMBERS:
                continue
            for lower in _LOWER[one.dtype]:
                dtype = getattr(torch, lower)
                if _fits(one.local, dtype) and not _fits(target, dtype):
                    return f"a {one.dtype} tensor with no more than the digits of {lower}"
        return ""

    def _is_near(self, parts: Parts, target: Tensor) -> bool:
        def near(value: Tensor, target: Tensor) -> bool:
            return bool((value - target).abs().max() <= 0.05 * target.abs().max())

        return Search(target, near).run(parts) is not None

    def _differing(self, key: Key, parts: Parts, target: Tensor) -> Finding:
        """Names the axes along which ranks differ that should be equal, and the ranks that are right."""
        whole = all(one.shape == target.shape for one in parts.values.values())
        equal = dict(zip(parts.names, parts.allowed, strict=True))
        varying = self._varying(key, parts)
        axes = [name for name in varying if equal[name] == {"R"} or (equal[name] is None and whole)]
        right = [rank for rank, one in sorted(parts.values.items()) if self._same(one, target, key)]
        told = f"; ranks {', '.join(map(str, right))} agree with the reference" if right else ""
        if axes:
            return Finding(
                key, False, kind="differs between ranks", detail=f"along {', '.join(axes)}, replicated{told}"
            )
        return Finding(key, False, kind="wrong", detail=f"equals the reference in no layout{told}")

    def _varying(self, key: Key, parts: Parts) -> list[str]:
        """The axes along which ranks have other values."""
        axes = []
        for axis, name in enumerate(parts.names):
            lines = parts.ranks.movedim(axis, 0).reshape(parts.ranks.shape[axis], -1).T.tolist()
            pairs = [(parts.values[line[0]], parts.values[other]) for line in lines for other in line[1:]]
            if not all(self._same(other, one, key) for one, other in pairs):
                axes.append(name)
        return axes


def _group(kind: str) -> str:
    return {"grad_input": "gradient", "grad_output": "gradient", "step": "param"}.get(kind, kind)


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or not tensor.numel() or not tensor.is_floating_point():
        return 0.0
    return float(tensor.abs().nan_to_num(0.0, 0.0, 0.0).max())


def _fits(tensor: Tensor, dtype: torch.dtype) -> bool:
    return tensor.is_floating_point() and torch.equal(tensor.to(dtype).to(tensor.dtype), tensor)


def _without_partial(parts: Parts) -> Parts:
    """The parts with layouts that need no reduction: replicas and shards."""
    ops = {f"{op}{dim}" for op in "SZ" for dim in range(8)} | {"R"}
    allowed: list[set[str] | None] = [ops if one is None else one for one in parts.allowed]
    return Parts(parts.ranks, parts.values, parts.names, [*allowed])


def _earlier(key: Key, reference: Mapping[Key, Value]) -> list[tuple[Key, str]]:
    """Returns the keys whose values ``key`` has if it is stale, and a description of each."""
    found = [
        (key._replace(call=call), f"that of call {call + 1} of the module")
        for call in reversed(range(key.call))
    ]
    if key.kind == "step":
        found.append((key._replace(kind="param"), "the value before the step"))
    if key.kind == "output":
        found += [
            (other, f"input {other.path} of the call")
            for other in reference
            if other[:3] == (key.module, "input", key.call)
        ]
    return [(other, text) for other, text in found if other in reference]
