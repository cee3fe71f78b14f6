"""One collective of the surface as cases to measure: on PyTorch's functions, raw and on funcol's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from measure import Call, Case
from torch import Tensor

LIMITS = {"stock overhead": 0.15, "raw": 1.0}

# One side of a row: from its inputs to the result or the list of results.
Collective = Callable[..., Any]


def of_stock(*names: str) -> Collective | None:
    """Stock's function by the first name that the running minor has, the newest of which does not warn."""
    return next((getattr(stock, name) for name in names if hasattr(stock, name)), None)


def forward_call(collective: Collective, inputs: list[Tensor], gives_list: bool) -> Call:
    """The collective and one op on each result."""
    if gives_list:
        return lambda: [result + 1 for result in collective(*inputs)]
    return lambda: collective(*inputs) + 1


def backward_call(
    collective: Collective, inputs: list[Tensor], gradients: list[Tensor], gives_list: bool
) -> Call:
    """The collective, one op on each result, the backward pass to the inputs, and one op on each gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    forward = forward_call(collective, leaves, gives_list)
    return lambda: [gradient + 1 for gradient in torch.autograd.grad(forward(), leaves, gradients)]


class CollectiveCases:
    """Cases of collectives of tensors on ``device`` over the default group of ``num_ranks`` ranks."""

    def __init__(self, device: torch.device, num_ranks: int) -> None:
        self.group: Any = dist.group.WORLD
        self.num_ranks = num_ranks
        self.small = torch.ones(4, 8, device=device)
        num_rows = num_ranks * max(1, 8 // num_ranks)
        self.square = torch.ones(num_rows, num_rows, device=device)

    def cases(
        self,
        name: str,
        inputs: list[Tensor],
        stock: Collective | None,
        raw: Collective,
        funcol: Collective,
        raw_autograd: Collective | None = None,
        stock_differentiates: bool = True,
        prepare: Callable[[Any], Any] | None = None,
    ) -> Iterator[Case]:
        """The line of the forward pass and, with ``raw_autograd``, the line with the backward pass.

        ``prepare`` is what all sides do to the first input before the collective, such as allocating results.
        """
        results = raw(*inputs)
        gives_list = not isinstance(results, Tensor)
        plain = [torch.ones_like(result) for result in (results if gives_list else [results])]

        def use_alone(*xs: Tensor) -> Any:
            if prepare is not None:
                prepare(xs[0])
            return xs if gives_list else xs[0]

        def forward(side: Collective | None) -> Call | None:
            return None if side is None else forward_call(side, inputs, gives_list)

        def backward(side: Collective | None) -> Call | None:
            return None if side is None else backward_call(side, inputs, plain, gives_list)

        use = forward_call(use_alone, plain, gives_list)
        yield Case(name, forward(stock), forward(raw), forward(funcol), use, LIMITS)
        if raw_autograd is not None:
            stock = stock if stock_differentiates else None
            use = backward_call(use_alone, plain, plain, gives_list)
            name = f"{name}, backward"
            yield Case(name, backward(stock), backward(raw_autograd), backward(funcol), use, LIMITS)
