"""The type checker of spmd_types under funcol.install(), which remembers what it found."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import handle_torch_function
from versions import TORCH

import funcol
from funcol import _C

spmd = pytest.importorskip("spmd_types", exc_type=ImportError)

from spmd_types import _checker  # noqa: E402
from spmd_types.checker import typecheck  # noqa: E402

WORLD = 8

pytestmark = pytest.mark.usefixtures("fake_world")

I, P, R, V, S = spmd.I, spmd.P, spmd.R, spmd.V, spmd.S  # noqa: E741

AXES = ("dp", "tp")

# PyTorch 2.11 refuses to flatten a sharded dim, takes any() of shards for a sum, and counts a negative dim of
# stack() from the wrong end.
HAS_RIGHT_RULES = TORCH >= (2, 15)


@pytest.fixture
def mesh() -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=AXES)


def leaves(found: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


def types_of(tensor: Tensor) -> str:
    if not spmd.has_local_type(tensor):
        return f"{tuple(tensor.shape)} untyped"
    return f"{tuple(tensor.shape)} {dict(spmd.get_local_type(tensor))} {spmd.get_partition_spec(tensor)}"


def outcome(call: Callable[[], Any]) -> tuple[Any, str]:
    """Returns the result of ``call`` and its types, or the error and its first line."""
    try:
        found = call()
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return found, "; ".join(map(types_of, leaves(found)))


@contextlib.contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Yields the functions that the package itself checks meanwhile."""
    checked: list[Any] = []
    theirs = _checker._SpmdTypeMode._typecheck_core

    def core(self: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
        checked.append(func)
        return theirs(self, func, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(_checker._SpmdTypeMode, "_typecheck_core", core)
        yield checked


# Drawn programs

Draw = random.Random


def of_one(x: Tensor, draw: Draw) -> list[Callable[[], Any]]:
    dim = draw.randrange(-1, max(x.dim(), 1))
    return [
        lambda: x * 2.5,
        lambda: 3 - x,
        lambda: x / 2,
        lambda: 1 / (x + 2),
        lambda: x.sum(),
        lambda: x.sum(dim),
        lambda: x.mean(dim, keepdim=True),
        lambda: x.amax(dim),
        lambda: torch.max(x, dim),
        lambda: torch.topk(x, 1, dim),
        *([lambda: x.flatten(), lambda: x.reshape(-1, 2)] if HAS_RIGHT_RULES else []),
        lambda: x.view(x.shape),
        lambda: x.transpose(0, dim),
        lambda: x.T if x.dim() == 2 else x.mT,
        lambda: x.contiguous(),
        lambda: x.transpose(0, dim).contiguous(),
        lambda: x.float(),
        lambda: x.to(torch.bfloat16),
        lambda: x.clone().detach(),
        lambda: torch.relu(x),
        lambda: torch.softmax(x, dim),
        lambda: F.layer_norm(x, x.shape[-1:]),
        lambda: F.gelu(x),
        lambda: x[0],
        lambda: x[..., :2],
        lambda: x[None],
        lambda: x.unsqueeze(dim),
        lambda: torch.split(x, 2, dim),
        lambda: x.split([1, x.shape[0] - 1]),
        lambda: x.chunk(2, dim),
        lambda: x.unbind(dim),
        lambda: torch.zeros_like(x),
        lambda: x.new_zeros(3),
        lambda: x.add_(1),
        lambda: x.mul_(2.0),
        lambda: x.zero_(),
        lambda: x.detach().fill_(1.0),
        lambda: torch.exp(x, out=torch.empty_like(x)),
        lambda: x.detach().requires_grad_(),
        lambda: x * spmd.Scalar(2.0, {"tp": draw.choice([R, V, P])}),
        lambda: x.pow(2),
        *([lambda: (x > 0).any()] if HAS_RIGHT_RULES else []),
        lambda: torch.nonzero(torch.ones_like(x)),  # x may come from a fake group, which writes nothing
        lambda: torch.where(x > 0),
        lambda: x.item() if x.numel() == 1 else x.tolist(),
        lambda: torch.einsum("...i->...", x),
    ]


def of_two(x: Tensor, y: Tensor, draw: Draw) -> list[Callable[[], Any]]:
    dim = draw.randrange(-1, max(x.dim(), 1))
    return [
        lambda: x + y,
        lambda: x * y,
        lambda: x / (y + 3),
        lambda: torch.sub(x, y, alpha=2),
        lambda: x @ y,
        lambda: F.linear(x, y),
        lambda: torch.mm(x, y),
        lambda: torch.addmm(x, x, y),
        lambda: torch.cat([x, y], dim),
        *([lambda: torch.stack([x, y], dim)] if HAS_RIGHT_RULES else []),
        lambda: torch.where(x > 0, x, y),
        lambda: x.add_(y),
        lambda: x.mul_(y),
        lambda: x.detach().copy_(y),
        lambda: torch.maximum(x, y),
        lambda: torch.add(x, y, out=torch.empty_like(x)),
        lambda: x.type_as(y),
        lambda: x.expand_as(y),
        lambda: x.view_as(y),
        lambda: x.__setitem__(0, y[0]),
        lambda: torch._foreach_add([x, y], 1.0),
    ]


def drawn_types(draw: Draw, ndim: int) -> Any:
    kinds = [R, I, V, P, *(S(dim) for dim in range(-1, ndim))]
    named = {axis: draw.choice(kinds) for axis in AXES if draw.random() < 0.8}
    return named or {"dp": draw.choice(kinds)}


def of_types(x: Tensor, mesh: DeviceMesh, draw: Draw) -> list[Callable[[], Any]]:
    axis = draw.choice(AXES)
    named: Any = draw.choice([axis, mesh.get_group(axis), spmd.MeshAxis.of(mesh.get_group(axis))])
    kinds = [R, I, V, P, S(0), S(1)]
    source, target = draw.choice(kinds), draw.choice(kinds)
    types = drawn_types(draw, x.dim())
    return [
        lambda: spmd.assert_type(x, types),
        lambda: spmd.assert_type(x, {named: source}),
        lambda: spmd.assert_type(x, {"dp": V, "tp": R}, partition_spec=spmd.PartitionSpec("dp", None)),
        lambda: spmd.assert_type(x, {named: V}, partition_spec=spmd.PartitionSpec(None, (axis,))),
        lambda: spmd.assert_type(torch.ones(4, 4), types),
        lambda: spmd.mutate_type(x, named, src=source, dst=target),
        lambda: spmd.all_reduce(x, named, src=P, dst=draw.choice([R, I])),
        lambda: spmd.all_gather(x, named, src=draw.choice([S(0), V]), dst=R),
        lambda: spmd.reduce_scatter(x, named, src=P, dst=draw.choice([S(0), V])),
        lambda: spmd.redistribute(x, mesh.get_group(axis), src=source, dst=target),
        lambda: spmd.convert(x, named, src=source, dst=target),
        lambda: spmd.reinterpret(x, named, src=source, dst=target),
    ]


def trace(seed: int, mesh: DeviceMesh) -> list[str]:
    """Returns the types and errors of a drawn program."""
    draw = Draw(seed)
    torch.manual_seed(seed)
    shapes = [(8, 4), (4, 8), (4, 4), (8,), (2, 4, 4)]
    found: list[str] = []
    with contextlib.ExitStack() as stack:
        if draw.random() < 0.9:
            stack.enter_context(spmd.set_current_mesh(mesh))
        strict = draw.choice(["strict", "strict", "permissive"])
        stack.enter_context(typecheck(strict_mode=strict, local=draw.random() < 0.5))
        tensors = [torch.rand(draw.choice(shapes)) for _ in range(3)]
        for tensor in tensors:
            tensor.requires_grad_(draw.random() < 0.5)
            if draw.random() < 0.85:
                types = drawn_types(draw, tensor.dim())
                found.append(outcome(lambda: spmd.assert_type(tensor, types))[1])  # noqa: B023
        for _ in range(12):
            x, y = draw.choice(tensors), draw.choice(tensors)
            calls = draw.choice([of_one(x, draw), of_two(x, y, draw), of_types(x, mesh, draw)])
            call = draw.choice(calls)
            rare = draw.choice([spmd.no_typecheck, spmd.local, torch.no_grad])
            with rare() if draw.random() < 0.3 else contextlib.nullcontext():
                result, line = outcome(call)
            found += [line, types_of(x), types_of(y)]
            tensors += [leaf for leaf in leaves(result) if 0 < leaf.numel() < 200][:2]
    return found


def told(lines: list[str]) -> list[str]:
    """Returns the lines that have to be equal: types and type errors. funcol's collectives have other errors,
    and writable results where stock's are views that autograd protects."""
    protected = (place for place, line in enumerate(lines) if "is being modified inplace" in line)
    end = next(protected, len(lines))
    return [
        line.partition(":")[0] in ("ValueError", "AssertionError", "ValueEitherError") or line
        for line in lines[:end]
    ]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_drawn_programs_have_the_types_and_errors_of_stock(first: int, mesh: DeviceMesh) -> None:
    seeds = range(first, first + 50)
    theirs = {seed: trace(seed, mesh) for seed in seeds}
    with funcol.installed():
        for _ in range(2):  # the second time, mostly from memory
            for seed in seeds:
                expected = told(theirs[seed])
                assert told(trace(seed, mesh)[: len(expected)]) == expected, seed
    assert sum("SpmdTypeError" in line for lines in theirs.values() for line in lines) > 20


# Cached types


def typed(shape: tuple[int, ...], **types: Any) -> Tensor:
    return spmd.assert_type(torch.rand(shape), types)  # type: ignore[no-any-return]


def test_an_equal_call_is_not_checked_again(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> str:
        x, w = typed((8, 4), dp=S(0), tp=R), typed((6, 4), dp=R, tp=S(0))
        return types_of(torch.relu(F.linear(x, w)) * 2)

    equal = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=AXES)
    with funcol.installed(), spmd.set_current_mesh(mesh), typecheck(local=False):
        with counted(monkeypatch) as checked:
            first = step()
        assert len(checked) == 5
        with counted(monkeypatch) as checked:
            assert step() == first
            with spmd.set_current_mesh(equal):
                assert step() == first
        assert checked == []
    assert _C.num_checked_types() == 0


# Calls that differ in one respect from one that is remembered: each is decided for itself.
OTHERS: dict[str, Callable[[], Any]] = {
    "type": lambda: typed((8, 4), dp=V, tp=I) + typed((8, 4), dp=V, tp=R),
    "two partial factors": lambda: typed((8, 4), dp=V, tp=P) * typed((8, 4), dp=V, tp=P),
    "untyped": lambda: typed((8, 4), dp=V, tp=R) + torch.rand(8, 4),
    "fewer axes": lambda: typed((8, 4), dp=V, tp=R) + spmd.assert_type(torch.rand(8, 4), {"dp": V}),
    "shape": lambda: typed((8, 4), dp=V, tp=R) + typed((4,), dp=V, tp=R),
    "partial and a number": lambda: typed((8, 4), dp=V, tp=P) + 1.0,
    "a typed number": lambda: typed((8, 4), dp=V, tp=R) + spmd.Scalar(1.0, {"dp": V, "tp": P}),
    "out=": lambda: torch.add(typed((8, 4), dp=V, tp=R), 1, out=typed((8, 4), dp=R, tp=R)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_call_is_checked_for_itself(name: str, mesh: DeviceMesh) -> None:
    def program() -> list[str]:
        with spmd.set_current_mesh(mesh), typecheck():
            usual = outcome(lambda: typed((8, 4), dp=V, tp=R) + typed((8, 4), dp=V, tp=R))[1]
            return [usual, outcome(OTHERS[name])[1], usual]

    theirs = program()
    with funcol.installed():
        assert program() == theirs
        assert program() == theirs


def test_a_mode_or_mesh_is_part_of_a_call(mesh: DeviceMesh) -> None:
    def program() -> list[str]:
        found = []
        for strict in ("permissive", "strict"):
            for local in (True, False):
                for current in (mesh, None):
                    with contextlib.ExitStack() as stack:
                        if current is not None:
                            stack.enter_context(spmd.set_current_mesh(current))
                        stack.enter_context(typecheck(strict_mode=strict, local=local))  # type: ignore[arg-type]
                        x = torch.rand(8, 4)
                        group = mesh.get_group("tp")
                        found.append(outcome(lambda: spmd.assert_type(x, {group: S(0)}))[1])  # noqa: B023
                        found.append(outcome(lambda: x + torch.rand(8, 4))[1])  # noqa: B023
                        found.append(outcome(lambda: x.sum(0))[1])  # noqa: B023
                        found.append(outcome(lambda: torch.zeros(3))[1])
        return found

    theirs = program()
    with funcol.installed():
        assert program() == theirs
        assert program() == theirs


def test_a_result_of_another_kind_is_checked(mesh: DeviceMesh) -> None:
    ran = []
    results: list[Any] = []

    def function(x: Tensor) -> Any:
        ran.append(x)
        return results[0](x)

    exec("def kind(x):\n    return function(x)", names := {"function": function, "__name__": "torch.kinds"})

    def program() -> list[str]:
        found = []
        with spmd.set_current_mesh(mesh), typecheck():
            # A scalar, a vector, a matrix, two tensors, the argument itself, a number.
            kinds: list[Callable[[Tensor], Any]] = [torch.sum, lambda x: x.sum(0), torch.clone]
            for of in (*kinds, lambda x: [x + 1, x], lambda x: x, torch.numel):
                results[:] = [of]
                x = typed((8, 4), dp=V, tp=R)
                found.append(outcome(lambda: handle_torch_function(names["kind"], (x,), x))[1])  # noqa: B023
                found.append(types_of(x))
        return found

    theirs = program()
    assert len(ran) == 6
    with funcol.installed():
        assert program() == theirs
        assert program() == theirs
    assert len(ran) == 18


def test_a_call_keeps_neither_tensors_nor_groups_alive(mesh: DeviceMesh) -> None:
    group = dist.new_group([0, 1, 2, 3], use_local_synchronization=True)
    with funcol.installed(), typecheck():
        x = spmd.assert_type(torch.rand(8, 4), {group: P})
        y = spmd.all_reduce(x, group, src=P, dst=R) + 1
        held = [weakref.ref(one) for one in (x, y)]
        del x, y
        gc.collect()
        assert [one() for one in held] == [None, None]
        known = weakref.ref(group)
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert known() is None


def test_the_checker_goes_back() -> None:
    mode = _checker._SpmdTypeMode
    function = mode.__torch_function__
    code = function.__code__
    with funcol.installed():
        assert mode.__torch_function__ is function
        assert function.__code__ is not code
    assert function.__code__ is code


def test_an_unknown_checker_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from funcol.installation import spmd_types as takeover

    code = _checker._SpmdTypeMode.__torch_function__.__code__
    monkeypatch.setitem(takeover._KNOWN_CHECKER, "spmd_types._checker", set())
    with funcol.installed():
        assert _checker._SpmdTypeMode.__torch_function__.__code__ is code
