"""The arguments of :func:`funcol.local_map.apply_local_map`, checked and normalized, and calls' flat ones.

Nested arguments are flattened and restored in a tenth of the time of ``torch.utils._pytree``, in its order.
Pytree handles containers other than tuples, lists and dicts.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from .regions import Placements

PlacementsLike: TypeAlias = Sequence[Placement] | None


class LocalMapArguments(NamedTuple):
    """The arguments of :func:`funcol.local_map.apply_local_map` but for the function."""

    out_placements: PlacementsLike | Sequence[PlacementsLike]
    in_placements: Sequence[PlacementsLike] | None = None
    in_grad_placements: Sequence[PlacementsLike] | None = None
    device_mesh: DeviceMesh | None = None
    redistribute_inputs: bool = False


def name_of(func: Callable[..., Any]) -> str:
    """Returns the name of ``func`` and where it is defined: ``"attention at model.py:41"``."""
    inner: Any = func
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    if isinstance(inner, torch.nn.Module):
        name, inner = type(inner).__name__, inner.forward
    else:
        name = getattr(inner, "__name__", type(inner).__name__)
    code = getattr(getattr(inner, "__func__", inner), "__code__", None)
    name = "lambda" if name == "<lambda>" else name
    return name if code is None else f"{name} at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"


def _are_of_one_tensor(placements: Any) -> bool:
    return len(placements) > 0 and all(isinstance(one, Placement) for one in placements)


def output_placements(stated: Any, name: str) -> tuple[Placements | None, ...]:
    if stated is None or _are_of_one_tensor(_sequence(stated, "out_placements", name)):
        return (None if stated is None else tuple(stated),)
    return tuple(_of_one_tensor(one, "out_placements", name) for one in stated)


def input_placements(stated: Any, what: str, name: str) -> tuple[Placements | None, ...] | None:
    if stated is None:
        return None
    if _are_of_one_tensor(_sequence(stated, what, name)):
        raise ValueError(
            f"funcol.apply_local_map: {name}: {what} is {list(stated)}, expected a sequence of "
            f"placements for each argument: ({list(stated)},) if there is one."
        )
    return tuple(_of_one_tensor(one, what, name) for one in stated)


def _of_one_tensor(stated: Any, what: str, name: str) -> Placements | None:
    if stated is None:
        return None
    for one in _sequence(stated, what, name):
        if not isinstance(one, Placement):
            raise TypeError(
                f"funcol.apply_local_map: {name}: {what} has {one!r} where a placement belongs, such as "
                "Shard(0) or Replicate()."
            )
    return tuple(stated)


def _sequence(stated: Any, what: str, name: str) -> Any:
    if not isinstance(stated, (list, tuple)):
        raise TypeError(
            f"funcol.apply_local_map: {name}: {what} holds a {type(stated).__name__}, expected a list "
            "or tuple."
        )
    return stated


def check_keywords(kwargs: dict[str, Any], name: str) -> None:
    """Raises for DTensors in keyword arguments: placements are stated by position."""
    for keyword, value in kwargs.items():
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
            raise ValueError(
                f"funcol.apply_local_map: {name}: the keyword argument '{keyword}' holds a DTensor. "
                "Placements are stated for positional arguments: pass it by position."
            )


# Nested arguments


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Returns the leaves of ``value``, and a template for :func:`unflatten`."""
    leaves: list[Any] = []
    return leaves, _template(value, leaves)


def unflatten(leaves: Iterable[Any], template: Any) -> Any:
    """Returns a value with other leaves, nested like the value that ``template`` came from."""
    return _fill(template, iter(leaves))


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Applies ``function`` to the leaves of ``value``: everything that is not a tuple, a list or a dict."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(map_leaves(function, item) for item in value)
    if kind is dict:
        return {key: map_leaves(function, item) for key, item in value.items()}
    return function(value)


def _template(value: Any, leaves: list[Any]) -> Any:
    kind = type(value)
    if kind is tuple or kind is list:
        return kind, None, [_template(item, leaves) for item in value]
    if kind is dict:
        return kind, list(value), [_template(item, leaves) for item in value.values()]
    if kind in pytree.SUPPORTED_NODES or isinstance(value, tuple):
        found, structure = pytree.tree_flatten(value)
        leaves.extend(found)
        return pytree.TreeSpec, structure, []
    leaves.append(value)
    return None


def _fill(template: Any, leaves: Iterator[Any]) -> Any:
    if template is None:
        return next(leaves)
    kind, keys, items = template
    if kind is pytree.TreeSpec:
        return pytree.tree_unflatten([next(leaves) for _ in range(keys.num_leaves)], keys)
    filled = [_fill(item, leaves) for item in items]
    if kind is list:
        return filled
    return tuple(filled) if kind is tuple else dict(zip(keys, filled, strict=True))
