"""The package spmd_types on PyTorch alone and under funcol.install(): values, gradients, types and errors."""

from __future__ import annotations

import importlib.metadata
import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from in_place import is_supported
from ranks import run_ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

import funcol
from funcol.commands.info import info
from funcol.dropin import spmd_types as takeover

spmd = pytest.importorskip("spmd_types", exc_type=ImportError)

WORLDS = [2, 4]
I, P, R, V, S = spmd.I, spmd.P, spmd.R, spmd.V, spmd.S  # noqa: E741
HAS_ASYNC_OP = "async_op" in inspect.signature(spmd.all_reduce).parameters  # from 0.3.1 on


class Case(NamedTuple):
    """A call of the package's API on an input of ``shape``, in which None is the number of ranks."""

    function: str
    source: Any
    target: Any
    shape: tuple[int | None, ...] = (8, 8)
    options: dict[str, Any] = {}  # noqa: RUF012
    is_pending: bool = True
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        options = "".join(f"-{name}={value}" for name, value in self.options.items())
        shape = "x".join(str(size or "n") for size in self.shape)
        return f"{self.function}-{self.source}-{self.target}-{shape}-{self.dtype}{options}".replace(" ", "")


EXPERT = {"expert_mode": True}
IN_HALF = {"op_dtype": torch.bfloat16, "backward_options": {"op_dtype": torch.float32}}

COLLECTIVES = [
    *[Case("all_reduce", source, target) for source in (P, V) for target in (R, I)],
    *[
        Case("all_gather", source, target, shape)
        for target in (R, I)
        for source in (S(0), S(1), S(-1))
        for shape in [(2, 3), (1, 4), (0, 3)]
    ],
    *[
        Case("all_gather", V, target, shape, {"gather_dim": dim})
        for target in (R, I)
        for shape, dim in [((2, 3), None), ((2, 3), 0), ((2, 3), 1), ((2, 3), 2), ((), None)]
        if target is R or not dim or HAS_ASYNC_OP  # of which the gradient was wrong
    ],
    *[Case("unshard", S(dim), target) for dim in (0, 1) for target in (R, I)],
    *[Case("reduce_scatter", source, S(dim)) for source in (P, V) for dim in (0, 1, -1)],
    Case("reduce_scatter", P, V, (None, 3)),
    Case("reduce_scatter", P, V, (3, None), {"scatter_dim": 1}),
    *[Case("all_to_all", S(i), S(j), (4, 8, 3)) for i, j in [(0, 1), (1, 0), (0, 0), (-2, 0), (1, 1)]],
    *[
        Case("all_to_all", V, V, shape, {"split_dim": split, "concat_dim": concat})
        for shape, split, concat in [
            ((None, 3), None, None),
            ((3, None), 1, 0),
            ((3, None, 2), 1, 2),
            ((None, 3, 2), 0, 2),
        ]
    ],
    *[
        Case("redistribute", source, target)
        for source, target in [(S(0), R), (S(1), I), (P, R), (P, I), (P, S(1)), (S(0), S(1)), (S(1), S(0))]
    ],
    # What is sent in another dtype, and gradients that are reduced in another.
    Case("all_gather", S(0), R, (2, 3), IN_HALF, is_pending=True),
    Case("all_gather", S(1), I, (2, 3), {"op_dtype": torch.bfloat16}),
    Case("all_reduce", P, R, (4, 4), {"out_dtype": torch.float64}, is_pending=False),
    Case("reduce_scatter", P, S(0), (4, 4), {"op_dtype": torch.float64, "out_dtype": torch.float32}, False),
    Case(
        "all_gather", S(0), R, (2, 3), {"backward_options": {"op_dtype": torch.float32}}, True, torch.bfloat16
    ),
    Case("reduce_scatter", P, S(0), (8, 3), {}, True, torch.bfloat16),
    Case("reduce_scatter", P, S(0), (8, 3), {"out_dtype": torch.float32}, False, torch.bfloat16),
    Case("all_reduce", P, I, (8, 3), {}, True, torch.bfloat16),
    Case("all_to_all", S(0), S(1), (4, 8), {"out_dtype": torch.bfloat16}),
    Case("all_to_all", S(0), S(1), (4, 8), {"out_dtype": torch.float64}, False),
]

# What sends nothing in the forward pass.
LOCAL = [
    *[Case("convert", I, target, shape) for target, shape in [(R, (3, 2)), (S(0), (8, 2)), (V, (None, 2))]],
    *[Case("convert", R, target, shape) for target, shape in [(S(1), (3, 8)), (V, (None, 2)), (P, (3, 2))]],
    *[
        Case("convert", source, target, (3, 2), EXPERT)
        for source, target in [(R, I), (I, P), (V, P), (S(1), P)]
    ],
    *[Case("reinterpret", source, P, (3, 2), EXPERT) for source in (R, I, V)],
    *[Case("reinterpret", source, V, (3, 2), EXPERT) for source in (R, I)],
    Case("reinterpret", I, R, (3, 2), EXPERT),
    Case("reinterpret", R, I, (3, 2), EXPERT),
    Case("shard", I, S(0)),
    Case("shard", R, S(1)),
    *[Case("redistribute", source, target) for source, target in [(R, I), (I, R), (R, S(0)), (R, P), (I, P)]],
    *[Case("redistribute", source, P) for source in (S(0), S(1))],
    Case("invariant_to_replicate", I, R),
    Case(
        "convert", I, R, (3, 2), {"op_dtype": torch.bfloat16, "backward_options": {"op_dtype": torch.float32}}
    ),
    Case("convert", I, S(0), (8, 2), {"op_dtype": torch.bfloat16}),
]

ERRORS = [
    Case("all_reduce", R, R),
    Case("all_reduce", P, V),
    Case("all_reduce", P, R, (8, 8), {"backward_options": {"unknown": 1}}),
    Case("all_reduce", P, R, dtype=torch.bfloat16),  # says nothing of the precision of the gradient
    Case("all_reduce", P, R, (4, 4), {"inplace": True, "op_dtype": torch.float64}),
    Case("all_gather", P, R),
    Case("all_gather", S(0), R, (8, 8), {"gather_dim": 1}),
    Case("all_gather", V, R, (8, 8), {"split_sizes": [4, 4]}),
    Case("all_gather", S(0), V),
    Case("all_gather", S(5), R),
    Case("reduce_scatter", I, V),
    Case("reduce_scatter", P, R),
    Case("reduce_scatter", P, S(0), (8, 8), {"scatter_dim": 1}),
    Case("all_to_all", S(0), S(1), (4, 3)),
    Case("all_to_all", P, V),
    Case("all_to_all", S(0), S(1), (8, 8), {"output_split_sizes": [4, 4]}),
    Case("redistribute", V, S(0)),
    Case("redistribute", R, S(7)),
    Case("convert", P, R),
    Case("convert", I, P),
    Case("reinterpret", V, R, (2, 2), EXPERT),
    Case("unshard", V, R),
    Case("shard", R, V),
]


def exchange_lists(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """``all_to_all`` of lists, by one of tensors."""
    received = torch.empty(sum(one.numel() for one in outputs), dtype=outputs[0].dtype)
    sent = torch.cat([one.flatten() for one in inputs])
    sizes = [one.numel() for one in outputs], [one.numel() for one in inputs]
    dist.all_to_all_single(received, sent, *sizes, group=group)
    for one, part in zip(outputs, received.split(sizes[0]), strict=True):
        one.copy_(part.view_as(one))


def with_lists_exchanged(rank: int, world: int, name: str, args: tuple[Any, ...]) -> None:
    """Calls the function ``name`` here. The package sends lists, which gloo of older minors does not."""
    if is_supported("alltoall_"):
        return globals()[name](rank, world, *args)
    own, dist.all_to_all = dist.all_to_all, exchange_lists
    try:
        return globals()[name](rank, world, *args)
    finally:
        dist.all_to_all = own


def run(function: Callable[..., None], world: int, *args: Any, timeout: float = 60) -> None:
    run_ranks(with_lists_exchanged, world, function.__name__, args, timeout=timeout)


def call(case: Case, x: Tensor, axis: Any, **more: Any) -> Any:
    function = getattr(spmd, case.function)
    options = {**case.options, **more}
    if case.function == "invariant_to_replicate":
        return function(x, axis, **options)
    return function(x, axis, src=case.source, dst=case.target, **options)


def sample(rank: int, world: int, case: Case) -> Tensor:
    """Small whole numbers, whose sums every dtype holds."""
    shape = [world if size is None else size for size in case.shape]
    same = case.source in (R, I)
    generator = torch.Generator().manual_seed(5 if same else 7 + rank)
    return torch.randint(-3, 4, shape, generator=generator).to(case.dtype)


def outcome(rank: int, world: int, case: Case, axis: Any, **more: Any) -> tuple[Any, ...]:
    """Whether the result was pending, the result, and the gradients of two passes, of which the second one
    differentiates the first."""
    leaf = sample(rank, world, case).requires_grad_()
    y = call(case, leaf * 1, axis, **more)
    is_pending = funcol.is_pending(y)
    value = y.detach().clone()
    weights = torch.arange(1, y.numel() + 1).remainder(3).add(1).view(y.shape).to(y.dtype)
    (first,) = torch.autograd.grad(y, leaf, weights)
    return is_pending, value, first + 0


def second_order(rank: int, world: int, case: Case, axis: Any) -> Tensor:
    leaf = sample(rank, world, case).requires_grad_()
    y = call(case, leaf * leaf, axis)
    (first,) = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    return second + 0


def same(ours: Tensor, theirs: Tensor, case: Case | str = "") -> None:
    """Strides count, too: the order of later sums depends on them."""
    torch.testing.assert_close(
        ours, theirs, rtol=0, atol=0, check_stride=True, msg=lambda text: f"{case}: {text}"
    )


# Values and gradients


def later(case: Case) -> dict[str, Any]:
    """What asks for results that are waited for later, in both passes where nothing is said of the second."""
    options: dict[str, Any] = {"async_op": True}
    if "backward_options" not in case.options and case.dtype is torch.float32:
        options["backward_options"] = {"async_op": True}
    return options


def is_as_on_stock(rank: int, world: int, table: str, function: str) -> None:
    cases = [case for case in globals()[table] if case.function == function]
    group = world_group()
    theirs = [outcome(rank, world, case, group) for case in cases]
    sends = table == "COLLECTIVES"
    with funcol.installed():
        for case, (_, value, gradient) in zip(cases, theirs, strict=True):
            is_pending, ours, our_gradient = outcome(rank, world, case, group)
            same(ours, value, case)
            same(our_gradient, gradient, case)
            assert is_pending == (sends and case.is_pending), str(case)
            if HAS_ASYNC_OP and sends:
                _, ours, our_gradient = outcome(rank, world, case, group, **later(case))
                same(ours, value, case)
                same(our_gradient, gradient, case)


def functions_of(cases: list[Case]) -> list[str]:
    return list(dict.fromkeys(case.function for case in cases))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("function", functions_of(COLLECTIVES))
def test_a_collective_is_as_on_stock_and_pending(function: str, world: int) -> None:
    run(is_as_on_stock, world, "COLLECTIVES", function)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("function", functions_of(LOCAL))
def test_a_change_that_sends_nothing_is_as_on_stock(function: str, world: int) -> None:
    run(is_as_on_stock, world, "LOCAL", function)


def differentiates_twice(rank: int, world: int, table: str) -> None:
    cases = [
        case
        for case in globals()[table]
        if not case.options and case.dtype is torch.float32 and 0 not in case.shape
    ]
    theirs = [second_order(rank, world, case, world_group()) for case in cases]
    with funcol.installed():
        for case, value in zip(cases, theirs, strict=True):
            same(second_order(rank, world, case, world_group()), value, case)


@pytest.mark.parametrize("table", ["COLLECTIVES", "LOCAL"])
@pytest.mark.parametrize("world", WORLDS)
def test_second_derivatives_are_those_of_stock(world: int, table: str) -> None:
    run(differentiates_twice, world, table)


def parts_differ(rank: int, world: int) -> None:
    sizes = [r + 1 for r in range(world)]
    total = sum(sizes)
    group = world_group()

    def scattered() -> tuple[Tensor, ...]:
        x = torch.arange(total * 2.0).view(total, 2).add(rank).requires_grad_()
        y = spmd.reduce_scatter(x * 1, group, dst=S(0), split_sizes=sizes)
        return (y.detach() + 0,)

    def exchanged() -> tuple[Tensor, ...]:
        rows = world * (rank + 1)
        x = torch.arange(rows * 2.0).view(rows, 2).add(100 * rank).requires_grad_()
        y = spmd.all_to_all(
            x * 1,
            group,
            src=S(0),
            dst=S(0),
            output_split_sizes=sizes,
            input_split_sizes=[rank + 1] * world,
        )
        weights = torch.arange(float(y.numel())).view(y.shape)
        value = y.detach() + 0
        return value, torch.autograd.grad(y, x, weights)[0] + 0

    theirs = scattered()
    with funcol.installed():
        for one, other in zip(scattered(), theirs, strict=True):
            same(one, other)
    # gloo neither exchanges nor gathers parts of different sizes in a list.
    with funcol.installed():
        received, gradient = exchanged()
    sent = [torch.arange(2.0 * world * (r + 1)).view(-1, 2).add(100 * r).split(r + 1) for r in range(world)]
    same(received, torch.cat([parts[rank] for parts in sent]))
    weights = [torch.arange(2.0 * total).view(total, 2).split(sizes)[rank] for _ in range(world)]
    same(gradient, torch.cat(weights))
    whole = torch.arange(total * 2.0).view(total, 2)
    with funcol.installed():
        x = whole.split(sizes)[rank].clone().requires_grad_()
        y = spmd.all_gather(x * 1, group, src=S(0), dst=R, split_sizes=sizes)
        assert funcol.is_pending(y)
        same(y + 0, whole)
        (gradient,) = torch.autograd.grad(y, x, whole)
        same(gradient + 0, whole.split(sizes)[rank] * world)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_of_different_sizes(world: int) -> None:
    run(parts_differ, world)


def an_input_is_the_callers_again(rank: int, world: int) -> None:
    cases = [case for case in COLLECTIVES if not case.options and case.dtype is torch.float32]
    theirs = [call(case, sample(rank, world, case), world_group()) + 0 for case in cases]
    with funcol.installed():
        for case, value in zip(cases, theirs, strict=True):
            x = sample(rank, world, case)
            y = call(case, x, world_group())
            x.fill_(1e6)
            same(y + 0, value, case)


@pytest.mark.parametrize("world", WORLDS)
def test_the_input_may_be_overwritten_after_a_call_without_async_op(world: int) -> None:
    run(an_input_is_the_callers_again, world)


def sends_once(rank: int, world: int) -> None:
    with funcol.installed():
        for x, types, options in [
            (torch.ones(4, 8), (S(0), S(1)), {}),
            (torch.ones(world, 3), (V, V), {}),
            (torch.ones(8, 3), (S(0), S(0)), {"output_split_sizes": [8 // world] * world}),
        ]:
            before = Counter(funcol.unwaited_collectives())
            y = spmd.all_to_all(x, world_group(), src=types[0], dst=types[1], **options)
            assert funcol.is_pending(y)
            assert Counter(funcol.unwaited_collectives()) - before == {"all_to_all_single": 1}
            y + 0


@pytest.mark.parametrize("world", WORLDS)
def test_an_all_to_all_is_one_exchange(world: int) -> None:
    run(sends_once, world)


def in_place(rank: int, world: int) -> None:
    x = torch.full((3,), float(rank))
    with funcol.installed():
        assert spmd.all_reduce(x, world_group(), dst=R, inplace=True) is not None
    assert x.tolist() == [float(sum(range(world)))] * 3


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_in_place(world: int) -> None:
    run(in_place, world)


# Errors


def error_of(program: Callable[[], object]) -> tuple[type, str] | None:
    try:
        program()
    except Exception as error:
        return type(error), str(error).splitlines()[0]
    return None


def error_of_case(rank: int, world: int, case: Case) -> tuple[type, str] | None:
    x = sample(rank, world, case).requires_grad_() * 1
    return error_of(lambda: call(case, x, world_group()))


def errors_are_alike(rank: int, world: int) -> None:
    theirs = [error_of_case(rank, world, case) for case in ERRORS]
    with funcol.installed():
        ours = [error_of_case(rank, world, case) for case in ERRORS]
    for case, one, other in zip(ERRORS, ours, theirs, strict=True):
        assert one == other, str(case)
    with funcol.installed():
        assert error_of(lambda: spmd.all_reduce(torch.ones(2), "tp", dst=R)) is not None
        transposed = torch.ones(2, 3).t()
        error = error_of(lambda: spmd.all_reduce(transposed, world_group(), dst=R))
    assert error == (AssertionError, "all_reduce input must be contiguous")


@pytest.mark.parametrize("world", WORLDS)
def test_errors_are_those_of_stock(world: int) -> None:
    run(errors_are_alike, world)


# Types


def typed_run(rank: int, world: int, case: Case) -> Any:
    """The types of the result and of the gradient, and their values, while the package checks types."""
    from spmd_types.checker import typecheck

    group = world_group()
    axis = spmd.MeshAxis.of(group)
    local = V if isinstance(case.source, spmd.Shard) else case.source
    leaf = sample(rank, world, case).requires_grad_()
    with spmd.set_current_mesh(frozenset({axis})), typecheck():
        spmd.assert_type(leaf, {axis: local})
        y = call(case, leaf, group)
        is_pending = funcol.is_pending(y)
        types = dict(spmd.get_local_type(y))
        doubled = y + y
        after = dict(spmd.get_local_type(doubled))
        mixed = error_of(lambda: spmd.assert_type(y, {axis: P if case.target is not P else R}))
    return is_pending, (types, after, mixed and mixed[0]), doubled.detach()


def typed_or_error(rank: int, world: int, case: Case) -> Any:
    try:
        return typed_run(rank, world, case)
    except Exception as error:
        return type(error), str(error).splitlines()[0]


def types_are_alike(rank: int, world: int, table: str) -> None:
    cases: list[Case] = globals()[table]
    theirs = [typed_or_error(rank, world, case) for case in cases]
    with funcol.installed():
        ours = [typed_or_error(rank, world, case) for case in cases]
    num_errors = 0
    for case, one, other in zip(cases, ours, theirs, strict=True):
        if len(other) == 2:
            num_errors += 1
            assert one == other, str(case)
            continue
        assert one[1] == other[1], str(case)
        same(one[2], other[2], case)
        if table == "COLLECTIVES":
            assert one[0] == case.is_pending, str(case)
    assert num_errors < len(cases) / 4


@pytest.mark.parametrize("table", ["COLLECTIVES", "LOCAL"])
@pytest.mark.parametrize("world", WORLDS)
def test_types_are_those_of_stock_while_they_are_checked(world: int, table: str) -> None:
    run(types_are_alike, world, table)


def typed_block(rank: int, world: int) -> list[Any]:
    """A block whose activations are sharded along the sequence, its weights along the hidden dim."""
    from spmd_types.checker import typecheck

    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    x = torch.arange(world * 6.0).view(2 * world, 3).chunk(world)[rank].clone().requires_grad_()
    up = torch.full((3, 4), 1.0 + rank).requires_grad_()
    down = torch.full((4, 3), 0.5 * (1 + rank)).requires_grad_()
    scale = torch.ones(3).requires_grad_()
    with spmd.set_current_mesh(mesh), typecheck():
        for tensor in (x, up, down):
            spmd.assert_type(tensor, {"tp": V})
        spmd.assert_type(scale, {"tp": I})
        whole = spmd.all_gather(x, "tp", src=S(0), dst=R)
        hidden = torch.relu(whole @ up) @ down
        partial = spmd.reinterpret(hidden, "tp", src=V, dst=P)
        y = spmd.reduce_scatter(partial, "tp", src=P, dst=S(0))
        y = y * spmd.convert(scale, "tp", src=I, dst=R)
        types = [dict(spmd.get_local_type(tensor)) for tensor in (whole, hidden, partial, y)]
        loss = spmd.all_reduce(spmd.reinterpret(y.sum(), "tp", src=V, dst=P), "tp", src=P, dst=I)
        loss.backward()
    return [types, loss.detach() + 0, *(tensor.grad + 0 for tensor in (x, up, down, scale))]


def blocks_are_alike(rank: int, world: int) -> None:
    theirs = typed_block(rank, world)
    with funcol.installed():
        ours = typed_block(rank, world)
    assert ours[0] == theirs[0]
    for one, other in zip(ours[1:], theirs[1:], strict=True):
        same(one, other)


@pytest.mark.parametrize("world", WORLDS)
def test_a_typed_block_trains_as_on_stock(world: int) -> None:
    run(blocks_are_alike, world)


def rest_of_the_api(rank: int, world: int) -> list[Any]:
    """Queries and changes of types on results that may be pending, and what else takes them."""
    from spmd_types.checker import typecheck

    group = world_group()
    axis = spmd.MeshAxis.of(group)
    x, other = torch.full((world, 2), 1.0 + rank).requires_grad_(), torch.full((2, 3), 2.0 + rank)
    found: list[Any] = []

    @spmd.local_map(out_types={axis: V})
    def product(a: Tensor, b: Tensor) -> Tensor:
        return a @ b

    @spmd.no_typecheck()
    def unchecked(a: Tensor) -> Tensor:
        return a.cumsum(0)

    with spmd.set_current_mesh(frozenset({axis})), typecheck():
        assert spmd.is_type_checking()
        spmd.assert_type(x, {axis: P})
        spmd.assert_type(other, {axis: V})
        y = spmd.all_reduce(x, group, src=P, dst=R)
        found.append(spmd.get_axis_local_type(y, group))
        found.append(spmd.maybe_get_axis_local_type(y, axis))
        found.append(spmd.has_local_type(y))
        found.append(str(spmd.get_partition_spec(y)))
        out = product(y, other)
        found.append((dict(spmd.get_local_type(out)), out.detach() + 0))
        scaled = y * spmd.Scalar(3.0, {axis: R})
        found.append((dict(spmd.get_local_type(scaled)), scaled.detach() + 0))
        quiet = spmd.all_reduce(x.detach(), group, src=P, dst=R)
        again = spmd.reinterpret_no_grad(quiet, group, dst=I) if HAS_ASYNC_OP else quiet + 0
        found.append((dict(spmd.get_local_type(again)), again + 0))
        if HAS_ASYNC_OP:
            spmd.mutate_type(again, axis, src=I, dst=R)
        found.append(dict(spmd.get_local_type(again)))
        alias = spmd.reinterpret_mesh(again, frozenset({axis}))
        found.append(dict(spmd.get_local_type(alias)))
        spmd.assert_type_like(alias, quiet if dict(spmd.get_local_type(quiet)) else again)
        found.append(error_of(lambda: spmd.assert_local_type(quiet, {axis: P})) is not None)
    (gradient,) = torch.autograd.grad(scaled.sum(), x)
    found += [unchecked(y).detach() + 0, gradient + 0]
    return found


def with_dtensors(rank: int, world: int) -> list[Any]:
    mesh = dist.device_mesh.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    local = torch.full((2, 2 * world), 1.0 + rank).requires_grad_()
    x = DTensor.from_local(local, mesh, [Shard(0)], run_check=False)
    rows, columns = spmd.TensorSharding("tp"), spmd.TensorSharding(None, "tp")
    whole = spmd.spmd_redistribute(x, rows, spmd.TensorSharding())
    cut = spmd.spmd_redistribute(x, rows, columns)
    found: list[Any] = [whole.placements, cut.placements]
    found += [whole.to_local().detach() + 0, cut.to_local().detach() + 0]
    loss = (cut.to_local() * (1 + rank)).sum()
    return [*found, torch.autograd.grad(loss, local)[0] + 0]


def runs_the_rest(rank: int, world: int) -> None:
    programs = (rest_of_the_api, with_dtensors)
    theirs = [program(rank, world) for program in programs]
    with funcol.installed():
        ours = [program(rank, world) for program in programs]
    torch.testing.assert_close(without_types(ours), without_types(theirs), rtol=0, atol=0)
    assert repr(ours) == repr(theirs)


def without_types(found: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(found) if isinstance(leaf, Tensor)]


@pytest.mark.parametrize("world", WORLDS)
def test_the_rest_of_the_api_takes_pending_results(world: int) -> None:
    run(runs_the_rest, world)


# What is replaced


def test_info_tells_the_version_and_that_it_is_taken_over() -> None:
    version = importlib.metadata.version("spmd_types")
    assert takeover.known_version() == (version, True)
    assert info().endswith(f"{version}: takes over its collectives")


def test_functions_stay_the_same_objects_and_go_back() -> None:
    names = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "convert", "invariant_to_replicate"]
    before = {name: getattr(spmd, name) for name in names}
    codes = {name: getattr(found, "__wrapped__", found).__code__ for name, found in before.items()}
    with funcol.installed():
        assert takeover.replaced_functions() == names
        for name, found in before.items():
            assert getattr(spmd, name) is found
            assert getattr(found, "__wrapped__", found).__code__ is not codes[name]
    assert takeover.replaced_functions() == []
    for name, found in before.items():
        assert getattr(found, "__wrapped__", found).__code__ is codes[name]


def test_an_unknown_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(takeover._KNOWN, "spmd_types._local", set())
    with funcol.installed():
        assert takeover.replaced_functions() == []


def as_an_unknown_version(rank: int, world: int) -> None:
    theirs = [outcome(rank, world, case, world_group()) for case in COLLECTIVES]
    known = takeover._KNOWN["spmd_types._local"]
    takeover._KNOWN["spmd_types._local"] = set()
    try:
        with funcol.installed():
            ours = [outcome(rank, world, case, world_group()) for case in COLLECTIVES]
    finally:
        takeover._KNOWN["spmd_types._local"] = known
    for case, one, other in zip(COLLECTIVES, ours, theirs, strict=True):
        same(one[1], other[1], case)
        same(one[2], other[2], case)


def test_an_unknown_version_computes_the_same() -> None:
    run(as_an_unknown_version, 2)


def with_a_module_of_its_own(rank: int, world: int) -> None:
    class Counted:
        count = 0

        def __getattr__(self, name: str) -> Any:
            return getattr(dist, name)

        def all_to_all(self, *args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return dist.all_to_all(*args, **kwargs)

    module = Counted()
    spmd.set_dist(module)
    try:
        with funcol.installed():
            spmd.all_to_all(torch.ones(4, 4), world_group(), src=S(0), dst=S(1))
    finally:
        spmd.set_dist(None)
    assert module.count == 1


def test_what_a_program_sets_as_dist_is_called() -> None:
    run(with_a_module_of_its_own, 2)


PROGRAM = """
import funcol
funcol.install()
import spmd_types
from funcol.dropin import spmd_types as takeover
from funcol.commands.info import info
assert "all_reduce" in takeover.replaced_functions()
funcol.uninstall()
assert takeover.replaced_functions() == []
"""


def test_the_package_may_be_imported_after_install() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


def compiles(rank: int, world: int) -> None:
    torch._dynamo.reset()

    def program(x: Tensor) -> Tensor:
        return spmd.all_gather(x * 2, world_group(), src=S(0), dst=R).sin()

    x = torch.full((2, 2), float(rank))
    theirs = program(x)
    with funcol.installed():
        same(torch.compile(program, backend="aot_eager")(x), theirs)


def test_a_compiled_program_computes_the_same() -> None:
    run(compiles, 2, timeout=180)
