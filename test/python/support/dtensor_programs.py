"""Small programs on tensors as data: inputs with layouts, then operators on what is there so far.

Any numbers make a program: a step takes its operands, dims and sizes modulo what there is, so that programs
can be drawn and made smaller at will. The same program runs on plain tensors and on DTensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from sharded import Layout
from torch import Tensor
from torch.distributed.tensor import DTensor

MOST_ELEMENTS = 512


class Input(NamedTuple):
    shape: tuple[int, ...]
    words: tuple[str, ...]  # a placement for each mesh axis
    seed: int


class Step(NamedTuple):
    op: str
    first: int
    second: int
    number: int


class Program(NamedTuple):
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    backward: bool

    def __str__(self) -> str:
        inputs = [f"{one.shape} as {' '.join(one.words)}" for one in self.inputs]
        steps = [f"{one.op}({one.first}, {one.second}, {one.number})" for one in self.steps]
        return f"{inputs}: {'; '.join(steps)}{'; backward' if self.backward else ''}"


Operator = Callable[[Tensor, Tensor, int], Tensor]


def _dim(tensor: Tensor, number: int) -> int:
    return number % tensor.dim()


def _joined(one: Tensor, other: Tensor, number: int) -> Tensor:
    return torch.cat(
        [one, other if other.dim() == one.dim() and _fits(one, other, number) else one], _dim(one, number)
    )


def _fits(one: Tensor, other: Tensor, number: int) -> bool:
    dim = _dim(one, number)
    return all(a == b for at, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if at != dim)


def _alike(one: Tensor, other: Tensor) -> Tensor:
    """Returns ``other`` if it has the shape of ``one``, else ``one``."""
    return other if one.shape == other.shape else one


def _product(one: Tensor, other: Tensor, number: int) -> Tensor:
    if one.dim() != 2:
        return one * 2
    if other.dim() == 2 and other.shape[0] == one.shape[1]:
        return one @ other.to(one.dtype)
    return one @ one.t()


def _split_view(one: Tensor, other: Tensor, number: int) -> Tensor:
    dim = _dim(one, number)
    for factor in (2, 3):
        if one.shape[dim] > 0 and one.shape[dim] % factor == 0:
            shape = [*one.shape[:dim], factor, one.shape[dim] // factor, *one.shape[dim + 1 :]]
            return one.reshape(shape)
    return one.unsqueeze(dim)


def _part(one: Tensor, other: Tensor, number: int) -> Tensor:
    dim = _dim(one, number)
    return one.narrow(dim, 0, max(1, one.shape[dim] // 2)) if one.shape[dim] else one


def _chosen(one: Tensor, other: Tensor, number: int) -> Tensor:
    dim = _dim(one, number)
    return one.select(dim, number % one.shape[dim]) if one.dim() > 1 and one.shape[dim] else one


def _written(one: Tensor, other: Tensor, number: int) -> Tensor:
    """Writes to a part of a copy."""
    written = one.clone()
    dim = _dim(one, number)
    if one.shape[dim] > 0:
        written.select(dim, number % one.shape[dim]).mul_(2)
    return written


def _added_in_place(one: Tensor, other: Tensor, number: int) -> Tensor:
    return one.clone().add_(_alike(one, other), alpha=number % 3)


def _quotient(one: Tensor, other: Tensor, number: int) -> Tensor:
    """Of integers, whose dtype is the default one: first in another default, then in float32 or float64."""
    whole = one.detach().clamp(-999, 999).round().long()
    before = torch.get_default_dtype()
    dtypes = (torch.float64, torch.float32) if number % 2 else (torch.float32, torch.float64)
    try:
        for dtype in dtypes:
            torch.set_default_dtype(dtype)
            result = whole / 4
    finally:
        torch.set_default_dtype(before)
    return result


def _written_list(one: Tensor, other: Tensor, number: int) -> Tensor:
    """Writes to copies by operators on lists, which return nothing."""
    written = [one.clone(), _alike(one, other).clone()]
    in_place = (torch._foreach_neg_, torch._foreach_abs_, torch._foreach_mul_, torch._foreach_add_)
    if number % 4 < 2:
        in_place[number % 4](written)
    else:
        in_place[number % 4](written, number - 5)
    return written[number % 2]


OPERATORS: dict[str, Operator] = {
    "add": lambda one, other, number: one + _alike(one, other),
    "subtract": lambda one, other, number: one - _alike(one, other) * (number % 3),
    # Exact, whatever order sums are in: the gradient of amax parts ties.
    "multiply": lambda one, other, number: one.clamp(-2, 2) * _alike(one, other),
    "scale": lambda one, other, number: one * (number % 5 - 2),
    "maximum": lambda one, other, number: torch.maximum(one, _alike(one, other)),
    "relu": lambda one, other, number: torch.relu(one),
    "negate": lambda one, other, number: -one,
    "where": lambda one, other, number: torch.where(one > 0, one, _alike(one, other)),
    "sum": lambda one, other, number: one.sum(_dim(one, number), keepdim=number % 2 == 0),
    "mean": lambda one, other, number: one.mean(_dim(one, number), keepdim=True) if one.numel() else one,
    "amax": lambda one, other, number: one.amax(_dim(one, number), keepdim=True) if one.numel() else one,
    "cumsum": lambda one, other, number: one.cumsum(_dim(one, number)),
    "softmax": lambda one, other, number: one.softmax(_dim(one, number)),
    "transpose": lambda one, other, number: one.transpose(_dim(one, number), -1),
    "unsqueeze": lambda one, other, number: one.unsqueeze(number % (one.dim() + 1)),
    "flatten": lambda one, other, number: one.flatten(0, 1) if one.dim() > 1 else one,
    "split_view": _split_view,
    "part": _part,
    "select": _chosen,
    "cat": _joined,
    "stack": lambda one, other, number: torch.stack([one, _alike(one, other)], number % (one.dim() + 1)),
    "product": _product,
    "flip": lambda one, other, number: one.flip(_dim(one, number)),
    "write": _written,
    "add_in_place": _added_in_place,
    "write_list": _written_list,
    "quotient": _quotient,
    "same_view": lambda one, other, number: one.view(one.shape),
}


def whole(one: Input) -> Tensor:
    """Returns the numbers of an input: multiples of 6, whose averages over 2 and 3 ranks are exact."""
    generator = torch.Generator().manual_seed(one.seed)
    return (6 * torch.randint(-4, 5, one.shape, generator=generator)).double()


def run(program: Program, make: Callable[[Tensor, Layout], Tensor]) -> list[Tensor]:
    """Returns all values of the program, and the gradients of its inputs, as plain tensors."""
    leaves = [make(whole(one), Layout(one.words)) for one in program.inputs]
    if program.backward:
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    values = [leaf * 1 for leaf in leaves]
    for step in program.steps:
        one, other = values[step.first % len(values)], values[step.second % len(values)]
        if one.dim() == 0:
            one = one.unsqueeze(0)
        result = OPERATORS[step.op](one, other, step.number)
        if 0 < result.dim() <= 4 and result.numel() <= MOST_ELEMENTS:
            values.append(result)
    if program.backward:
        sum((value * value.detach()).sum() for value in values[-3:]).backward()  # type: ignore[union-attr]
        values += [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [_plain(value) for value in values]


class DtypeError(Exception):
    """A DTensor that does not have one dtype. Not an error that a program may raise."""


def _plain(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach()
    full: Tensor = value.full_tensor()
    meta = value._spec.tensor_meta
    assert meta is not None
    if not full.dtype == value.dtype == meta.dtype:
        raise DtypeError(f"{value.dtype}, its spec {meta.dtype}, its values {full.dtype}: {value}")
    return full.detach()


def difference(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str | None:
    if len(actual) != len(expected):
        return f"{len(actual)} values, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            actual_kind, expected_kind = ((tuple(x.shape), x.dtype) for x in (one, other))
            return f"value {number} has shape and dtype {actual_kind}, expected {expected_kind}"
        largest = max(1.0, float(other.abs().max())) if other.numel() else 1.0
        rounding = 1e-9 if other.dtype == torch.float64 else 1e-4
        if not torch.allclose(one, other, rtol=100 * rounding, atol=rounding * largest):
            return f"value {number} is\n{one}\nexpected\n{other}"
    return None


def outcome(program: Program, make: Callable[[Tensor, Layout], Tensor]) -> str | list[Tensor]:
    """Returns the values, or what was raised."""
    try:
        return run(program, make)
    except DtypeError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def is_finite(values: Any) -> bool:
    return not isinstance(values, str) and all(bool(value.isfinite().all()) for value in values)
