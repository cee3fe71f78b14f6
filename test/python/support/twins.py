"""A function on DTensors against the same function on plain tensors, on real ranks.

@pytest.mark.parametrize("words", ["S0", "Psum"])
@pytest.mark.parametrize("name", MEANS)
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_a_mean_of_shards_is_that_of_the_whole(x: Tensor, *, name: str) -> Tensor:
    return MEANS[name](x)
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from ranks import device_type, run_ranks
from sharded import full, layouts, mesh_of, placed
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

import funcol

Function = Callable[..., Any]


def replicated(value: Any, like: Tensor) -> Any:
    """Returns ``value`` as a replicated DTensor if ``like`` is a DTensor, else as it is."""
    if not isinstance(like, DTensor):
        return value
    return DTensor.from_local(value, like.device_mesh, [Replicate()] * like.device_mesh.ndim, run_check=False)


def assert_same(actual: Any, expected: Any) -> None:
    for (path, one), other in zip(tree_leaves_with_path(actual), tree_leaves(expected), strict=True):
        if isinstance(other, Tensor):
            assert isinstance(one, DTensor)
            assert (one.shape, one.dtype, one._local_tensor.dtype) == (other.shape, other.dtype, other.dtype)
        one, other = torch.as_tensor(full(one)), torch.as_tensor(other)
        relative, absolute = (1e-4, 1e-5) if other.dtype is torch.float32 else (1e-7, 1e-8)
        message = f"{keystr(path)}: {{}}".format
        torch.testing.assert_close(one, other, rtol=relative, atol=absolute, equal_nan=True, msg=message)


def agrees(
    rank: int,
    world: int,
    function: Function,
    wholes: Sequence[Tensor],
    words: Sequence[str],
    shape: tuple[int, ...],
    backward: bool,
    compiles: dict[str, Any] | None = None,
) -> None:
    """Asserts that results, gradients and written tensors are those of ``function`` on plain tensors."""
    mesh = mesh_of(shape)
    wholes = [whole.to(device_type()) for whole in wholes]
    plain = [whole.clone() for whole in wholes]
    on_dtensors = function
    if compiles is not None:
        torch._dynamo.reset()
        on_dtensors = torch.compile(function, backend="aot_eager", **compiles)
    with funcol.installed():
        dtensors = [
            placed(whole, layout, mesh) for whole, layout in zip(wholes, layouts(*words), strict=True)
        ]
        if not backward:
            expected, actual = function(*plain), on_dtensors(*dtensors)
            assert_same([actual, *dtensors], [expected, *plain])
            return
        expected, actual = _with_gradients(function, plain), _with_gradients(on_dtensors, dtensors)
        assert_same(actual, expected)


def _with_gradients(function: Function, tensors: Sequence[Tensor]) -> list[Any]:
    leaves = [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]
    result = function(*(leaf * 1 if leaf.requires_grad else leaf for leaf in leaves))
    (result * result).sum().backward()
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def as_on_plain_tensors(
    make: Callable[..., Sequence[Tensor]],
    *,
    words: str | Sequence[str] | None = None,
    mesh: tuple[int, ...] | None = None,
    backward: bool | None = False,
    compiles: dict[str, Any] | None = None,
) -> Callable[[Function], Callable[..., None]]:
    """Makes a test of a function of the tensors that ``make`` returns: on DTensors it gives what it gives on
    plain ones.

    ``words`` are the layouts, for all tensors one or one for each, an axis a word; the mesh has two ranks an
    axis unless ``mesh`` says otherwise. ``words`` and ``backward`` are parameters of the test where they are
    None. Parameters of ``make``, which may skip the test, are parameters of the test, too, and so are the
    keyword-only ones of the function. With ``compiles``, options of ``torch.compile``, the function on
    DTensors is compiled.
    """

    def decorate(function: Function) -> Callable[..., None]:
        made = list(inspect.signature(make).parameters)
        signature = inspect.signature(function).parameters.values()
        own = [parameter.name for parameter in signature if parameter.kind is parameter.KEYWORD_ONLY]
        options = [name for name, value in (("words", words), ("backward", backward)) if value is None]

        @functools.wraps(function)
        def test(**given: Any) -> None:
            wholes = list(make(**{name: given[name] for name in made}))
            chosen = given.get("words", words)
            each = [chosen] * len(wholes) if isinstance(chosen, str) else chosen
            shape = mesh or (2,) * len(each[0].split())
            call = functools.partial(function, **{name: given[name] for name in own})
            with_gradients = given.get("backward", backward)
            run_ranks(agrees, math.prod(shape), call, wholes, each, shape, with_gradients, compiles)

        function.__qualname__ += ".on_tensors"
        test.on_tensors = function  # type: ignore[attr-defined]
        names = dict.fromkeys([*made, *own, *options])
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        )
        return test

    return decorate


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Between 0 and 1, of double precision."""
    return torch.rand(shape, dtype=torch.float64, generator=torch.Generator(device_type()).manual_seed(seed))
