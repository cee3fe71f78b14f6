"""A collective as cases to measure: on PyTorch's functions, raw and on funcol's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed._functional_collectives as stock
from measure import Case
from runner import Call
from torch import Tensor

LIMITS = {"stock overhead": 0.15, "raw": 1.0}

# One side of a row: from its inputs to the result or the list of results.
Collective = Callable[..., Any]


# Names that newer PyTorch releases give to functions; calls by the old names warn.
NEWER_NAMES = {
    "all_gather_tensor": "all_gather_single",
    "reduce_scatter_tensor": "reduce_scatter_single",
    "all_gather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}


def of_stock(name: str) -> Collective | None:
    """Returns stock's function; None if this PyTorch release does not have it."""
    return getattr(stock, NEWER_NAMES.get(name, name), None) or getattr(stock, name, None)


def with_arguments(function: Collective | None, *arguments: Any) -> Collective | None:
    """Returns ``function`` of a tensor and ``arguments``, up to three, called as a program would."""
    if function is None or not arguments:
        return function
    first, second, third = (*arguments, None, None)[:3]
    if len(arguments) == 1:
        return lambda x: function(x, first)
    if len(arguments) == 2:
        return lambda x: function(x, first, second)
    return lambda x: function(x, first, second, third)


def of_list(function: Collective | None, *arguments: Any) -> Collective | None:
    """Returns ``function`` of a list of tensors and ``arguments`` as a function of the tensors."""
    of_tensors = with_arguments(function, *arguments)
    return of_tensors and (lambda *xs: of_tensors(list(xs)))


def into(prepare: Collective, function: Collective | None) -> Collective | None:
    """Returns ``function`` of the tensor that ``prepare`` makes, and of the input."""
    return function and (lambda x: function(prepare(x), x))


def on_clone(function: Collective | None) -> Collective | None:
    return function and (lambda x: function(x.clone()))


def forward_call(collective: Collective, inputs: list[Tensor], gives_list: bool) -> Call:
    """Returns a call of the collective and one op on each result."""
    if gives_list:
        return lambda: [result + 1 for result in collective(*inputs)]
    return lambda: collective(*inputs) + 1


def backward_call(
    collective: Collective, inputs: list[Tensor], gradients: list[Tensor], gives_list: bool
) -> Call:
    """Returns a call of the collective, an op on each result, the backward pass, and an op on gradients."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward = forward_call(collective, leaves, gives_list)
    return lambda: [gradient + 1 for gradient in torch.autograd.grad(forward(), leaves, gradients)]


@dataclass(frozen=True)
class Row:
    """A collective by its sides, each a function of ``inputs``, and the limits of its lines.

    ``stock`` is None if stock has no such function. ``gradient`` is the raw side with a gradient; without it,
    there is no line with the backward pass. ``prepare`` is what all sides do to the first input before the
    collective, such as allocating results.
    """

    name: str
    inputs: list[Tensor]
    stock: Collective | None
    raw: Collective
    funcol: Collective
    gradient: Collective | None = None
    stock_differentiates: bool = True
    prepare: Callable[[Any], Any] | None = None

    def cases(self) -> Iterator[Case]:
        """Yields the line of the forward pass and the line with the backward pass."""
        results = self.raw(*self.inputs)
        gives_list = not isinstance(results, Tensor)
        plain = [torch.ones_like(result) for result in (results if gives_list else [results])]

        def use_alone(*xs: Tensor) -> Any:
            if self.prepare is not None:
                self.prepare(xs[0])
            return xs if gives_list else xs[0]

        def forward(side: Collective) -> Call:
            return forward_call(side, self.inputs, gives_list)

        def backward(side: Collective) -> Call:
            return backward_call(side, self.inputs, plain, gives_list)

        stock = self.stock
        use = forward_call(use_alone, plain, gives_list)
        yield Case(self.name, stock and forward(stock), forward(self.raw), forward(self.funcol), use, LIMITS)
        if self.gradient is not None:
            stock = stock if self.stock_differentiates else None
            use = backward_call(use_alone, plain, plain, gives_list)
            sides = (stock and backward(stock), backward(self.gradient), backward(self.funcol))
            yield Case(f"{self.name}, backward", *sides, use, LIMITS)
