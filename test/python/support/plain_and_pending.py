"""The same program on a plain and on a pending tensor: results, errors and autograd metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from slow_collectives import SlowCollective, dispatch_keys, same, values
from torch import Tensor

Make = Callable[[], Tensor]

Program = Callable[[Make], Any]


def pending() -> Tensor:
    return SlowCollective(values()).tensor


def tensors_in(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (list, tuple)):
        for element in result:
            yield from tensors_in(element)


def outcome(program: Program, make: Make) -> Any:
    try:
        return program(make)
    except Exception as error:
        return (type(error), str(error).splitlines()[0])


def check_alike(program: Program) -> None:
    expected = outcome(program, values)
    actual = outcome(program, pending)
    assert same(actual, expected)
    assert list(map(dispatch_keys, tensors_in(actual))) == list(map(dispatch_keys, tensors_in(expected)))


def autograd_metadata(t: Tensor) -> tuple[Any, ...]:
    return (
        t.requires_grad,
        t.is_leaf,
        type(t.grad_fn).__name__,
        t.output_nr,
        t._is_view(),
        t._version,
        t.is_inference(),
    )


def made_in_inference_mode(make: Make) -> Tensor:
    with torch.inference_mode():
        return make()
