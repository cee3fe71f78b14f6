"""A function on DTensors against the same function on plain tensors, on real ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from ranks import device_type, run_ranks
from sharded import Layout, layouts, local_of, mesh_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

import funcol

Function = Callable[..., Any]


def placed(whole: Tensor, layout: Layout, mesh: DeviceMesh) -> DTensor:
    """Returns ``whole`` as the ranks of ``mesh`` hold it under ``layout``, a leaf."""
    at = mesh.get_coordinate()
    assert at is not None
    local = local_of(whole.detach(), layout, tuple(mesh.shape), at).clone()
    return DTensor.from_local(
        local, mesh, layout.placements(), run_check=False, shape=whole.shape, stride=whole.stride()
    )


def replicated(value: Any, like: Tensor) -> Any:
    """Returns ``value`` as a replicated DTensor if ``like`` is a DTensor, else as it is."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def whole_of(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(actual: Any, expected: Any) -> None:
    for one, other in zip(tree_leaves(actual), tree_leaves(expected), strict=True):
        torch.testing.assert_close(
            torch.as_tensor(whole_of(one)), torch.as_tensor(other), rtol=1e-6, atol=1e-8, equal_nan=True
        )


def agrees(
    rank: int,
    world: int,
    function: Function,
    wholes: Sequence[Tensor],
    words: Sequence[str],
    shape: tuple[int, ...],
    backward: bool,
) -> None:
    """Asserts that results, gradients and written tensors are those of ``function`` on plain tensors."""
    mesh = mesh_of(shape)
    wholes = [whole.to(device_type()) for whole in wholes]
    plain = [whole.clone() for whole in wholes]
    with funcol.installed():
        dtensors = [
            placed(whole, layout, mesh) for whole, layout in zip(wholes, layouts(*words), strict=True)
        ]
        if not backward:
            expected, actual = function(*plain), function(*dtensors)
            assert_same([actual, *dtensors], [expected, *plain])
            return
        expected, actual = _with_gradients(function, plain), _with_gradients(function, dtensors)
        assert_same(actual, expected)


def _with_gradients(function: Function, tensors: Sequence[Tensor]) -> list[Any]:
    leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
    result = function(*(leaf * 1 if leaf.requires_grad else leaf for leaf in leaves))
    (result * result).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def check_twin(
    function: Function,
    wholes: Sequence[Tensor],
    *words: str,
    mesh: tuple[int, ...] = (2,),
    backward: bool = False,
) -> None:
    """``function`` on plain tensors and on DTensors, which are under ``words``, an axis a word, agrees."""
    world = 1
    for size in mesh:
        world *= size
    run_ranks(agrees, world, function, list(wholes), words, mesh, backward)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Between 0 and 1, of double precision."""
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator(device_type()).manual_seed(seed))
