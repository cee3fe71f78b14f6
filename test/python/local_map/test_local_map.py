"""Functions on local tensors in eager mode: values, gradients and errors, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_programs import (
    PROGRAMS,
    P,
    R,
    S,
    applied,
    check,
    sharded_leaves,
    tensors_of,
    weighted,
    whole_tensors,
)
from ranks import on_ranks, run_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.experimental import local_map
from torch.distributed.tensor.placement_types import _StridedShard

import funcol
from funcol.local_map import apply_local_map
from funcol.local_map.arguments import LocalMapArguments
from funcol.local_map.eager import LocalMap
from funcol.local_map.regions import gradient_placements, placements_of, text_of

ON_DEVICES = True


def runs_as_a_whole(rank: int, world: int, name: str) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    leaves = sharded_leaves(program, mesh)
    results = tensors_of(applied(program, mesh)(*leaves))
    gradients = torch.autograd.grad(weighted([one.full_tensor() for one in results]), leaves)
    check(program, results, gradients)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_one_process(name: str) -> None:
    run_ranks(runs_as_a_whole, PROGRAMS[name].world(), name)


def returns_what_stock_does(rank: int, world: int, name: str) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    leaves = sharded_leaves(program, mesh, [[R] * mesh.ndim] * len(program.inputs))
    stock = local_map(program.local, program.outputs, program.inputs, None, mesh, redistribute_inputs=True)
    results, expected = tensors_of(applied(program, mesh)(*leaves)), tensors_of(stock(*leaves))
    for got, want in zip(results, expected, strict=True):
        assert isinstance(got, DTensor)
        assert isinstance(want, DTensor)
        assert (got.placements, got.shape, got.stride()) == (want.placements, want.shape, want.stride())
        assert torch.equal(got.to_local(), want.to_local())


# The sizes of uneven results, and the way to a partial tensor, are other ones in PyTorch.
DIFFERENT = ("uneven batch", "one row", "partial input", "average of averages")


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in DIFFERENT])
def test_results_are_those_of_stock(name: str) -> None:
    run_ranks(returns_what_stock_does, PROGRAMS[name].world(), name)


def second_derivatives(leaves: list[Any], results: list[Tensor]) -> list[Any]:
    loss = weighted([one.full_tensor() if isinstance(one, DTensor) else one for one in results])
    firsts = torch.autograd.grad(loss, leaves, create_graph=True)
    wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in firsts]
    return list(torch.autograd.grad(weighted([whole * whole for whole in wholes]), leaves))


def differentiates_twice(rank: int, world: int, name: str) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    plain = [one.requires_grad_() for one in whole_tensors(program)]
    want = second_derivatives(plain, tensors_of(program.whole(*plain)))
    leaves = sharded_leaves(program, mesh)
    got = second_derivatives(leaves, tensors_of(applied(program, mesh)(*leaves)))
    for one, other in zip(got, want, strict=True):
        assert torch.allclose(one.full_tensor(), other, rtol=1e-10)


@pytest.mark.parametrize(
    "name", ["batch", "uneven batch", "columns", "both axes", "reduced inside", "average"]
)
def test_second_derivatives_are_those_of_one_process(name: str) -> None:
    run_ranks(differentiates_twice, PROGRAMS[name].world(), name)


@pytest.mark.parametrize("world", [1, 2, 3])
@on_ranks()
def test_arguments_are_redistributed_and_their_gradients_back(rank: int, world: int) -> None:
    program = PROGRAMS["batch"]
    mesh = mesh_of((world,))
    leaves = sharded_leaves(program, mesh, ([S(1)], [S(0)]))
    results = tensors_of(applied(program, mesh)(*leaves))
    assert results[0].placements == (S(0),)  # type: ignore[attr-defined]
    gradients = torch.autograd.grad(weighted([one.full_tensor() for one in results]), leaves)
    assert [gradient.placements for gradient in gradients] == [(S(1),), (S(0),)]  # type: ignore[attr-defined]
    check(program, results, gradients)


@on_ranks(4)
def test_shards_in_an_order_of_their_own_are_redistributed(rank: int, world: int) -> None:
    mesh = mesh_of((2, 2))
    whole = torch.arange(8.0)
    x = funcol.redistribute(
        distribute_tensor(whole, mesh, [R, R]), placements=[S(0), S(0)], shard_order=((0, (1, 0)),)
    ).requires_grad_()
    both = ([S(0), S(0)],)
    result = apply_local_map(torch.square, *both, both, redistribute_inputs=True)(x)
    assert torch.equal(result.full_tensor(), whole.square())
    (gradient,) = torch.autograd.grad(weighted([result.full_tensor()]), x)
    assert torch.allclose(gradient.full_tensor(), 2 * whole * torch.arange(1.0, 9.0).cos())
    with pytest.raises(ValueError, match=r"argument 0 has the placements .* in an order of its own"):
        apply_local_map(torch.square, *both, both)(x)


class SummedGradient(torch.autograd.Function):
    """The identity, whose gradient is the sum over all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return funcol.all_reduce(grad, "sum", mesh_of((2,)))


@on_ranks(2)
def test_stated_placements_of_gradients_are_taken_at_their_word(rank: int, world: int) -> None:
    program = PROGRAMS["columns"]._replace(local=lambda x, w: (SummedGradient.apply(x) @ w).sin())
    mesh = mesh_of((world,))
    function = apply_local_map(program.local, [S(1)], program.inputs, ([R], [S(1)]), mesh)
    leaves = sharded_leaves(program, mesh)
    result = function(*leaves)
    gradients = torch.autograd.grad(weighted([result.full_tensor()]), leaves)
    check(program, [result], gradients)


def multiplies(x: Tensor, pair: tuple[Tensor, float], names: dict[str, Tensor], power: int = 1) -> Any:
    return {"y": (x * pair[0] * pair[1]) ** power, "n": [names["b"].sum(), power, None]}


@pytest.mark.parametrize("world", [1, 2])
@on_ranks()
def test_arguments_and_results_may_be_nested(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    whole = torch.arange(8.0).view(4, 2)
    x = distribute_tensor(whole, mesh, [S(0)])
    function = apply_local_map(
        multiplies, ([S(0)], [P], None, None), ([S(0)], [S(0)], None, [S(0)]), device_mesh=mesh
    )
    result = function(x, (x, 2.0), {"b": x}, power=2)
    assert torch.equal(result["y"].full_tensor(), (whole * whole * 2) ** 2)
    assert torch.equal(result["n"][0].full_tensor(), whole.sum())
    assert result["n"][1:] == [2, None]


@on_ranks(1)
def test_without_dtensors_the_function_runs_as_it_is(rank: int, world: int) -> None:
    function = apply_local_map(torch.add, [S(0)], ([S(0)], [S(0)]))
    result = function(torch.ones(2), torch.ones(2))
    assert type(result) is Tensor
    assert result.tolist() == [2.0, 2.0]


def test_a_decorated_function_keeps_its_name_and_text() -> None:
    @apply_local_map([S(0)], ([S(0)],))
    def doubled(x: Tensor) -> Tensor:
        """Twice."""
        return x * 2

    assert (doubled.__name__, doubled.__doc__) == ("doubled", "Twice.")


@on_ranks(2)
def test_plain_tensors_are_handed_on_and_closed_over(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    x = distribute_tensor(torch.ones(4, 2), mesh, [S(0)])
    bias = torch.tensor([1.0, 2.0])
    function = apply_local_map(lambda x, b: x + b + bias, [S(0)], ([S(0)], [R]), device_mesh=mesh)
    assert torch.equal(function(x, bias).full_tensor(), 1 + 2 * bias.expand(4, 2))


@on_ranks(2)
def test_a_checkpoint_around_an_applied_function_recomputes_it(rank: int, world: int) -> None:
    from torch.utils.checkpoint import checkpoint

    program = PROGRAMS["batch"]
    mesh = mesh_of((world,))
    function = applied(program, mesh)
    leaves = sharded_leaves(program, mesh)
    result = checkpoint(function, *leaves, use_reentrant=False)
    gradients = torch.autograd.grad(weighted([result.full_tensor()]), leaves)
    check(program, [result], gradients)


@on_ranks(2)
def test_the_gradient_of_a_partial_maximum_is_refused(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    whole = torch.arange(4.0)
    function = apply_local_map(lambda x: x.amax(), [Partial("max")], ([S(0)],))
    assert function(distribute_tensor(whole, mesh, [S(0)])).full_tensor() == whole.max()
    with pytest.raises(NotImplementedError, match=r"result 0 is P\(max\) and requires a gradient"):
        function(distribute_tensor(whole, mesh, [S(0)]).requires_grad_())


@pytest.mark.parametrize(
    ("inputs", "outputs", "gradients_in", "gradients_out"),
    [
        (([R], [S(0)]), ([S(0)],), ([P], [S(0)]), ([S(0)],)),
        (([S(1)], [S(0)]), ([P],), ([S(1)], [S(0)]), ([R],)),
        (([R], [R]), ([R],), ([R], [R]), ([R],)),
        (([S(0)],), ([R],), ([S(0)],), ([P],)),
        (([P],), ([P],), ([R],), ([R],)),
        (([R], None), ([R], [S(0)]), ([P], None), ([P], [S(0)])),
        (([S(0), R], [R, R]), ([S(0), R],), ([S(0), R], [P, R]), ([S(0), R],)),
    ],
)
def test_gradients_are_partial_where_ranks_compute_different_parts(
    inputs: Any, outputs: Any, gradients_in: Any, gradients_out: Any
) -> None:
    def tuples(placements: Any) -> list[Any]:
        return [None if one is None else tuple(one) for one in placements]

    found = gradient_placements(tuples(inputs), tuples(outputs))
    assert found == (tuples(gradients_in), tuples(gradients_out))


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((), ""),
        ((R, S(0), S(12)), "RS(0)S(12)"),
        ((P, Partial("avg"), _StridedShard(1, split_factor=4)), "P(sum)P(avg)_S(1, 4)"),
        (None, None),
    ],
)
def test_placements_are_kept_as_text(placements: Any, text: str | None) -> None:
    assert text_of(placements) == text
    assert placements_of(text) == placements


# Errors

ERRORS: dict[str, tuple[type[Exception], str]] = {
    "other placements": (ValueError, r"identity at test_local_map.py:\d+: argument 0 has the placements "),
    "too few in_placements": (ValueError, r"1 entries in in_placements, but the call has 2 flattened"),
    "too few in_grad_placements": (ValueError, r"1 entries in in_grad_placements, but the call has 2"),
    "none for a dtensor": (
        ValueError,
        r"argument 0 is a DTensor of shape \(4, 2\), but in_placements has None",
    ),
    "placements of a number": (ValueError, r"argument 0 is a int, but in_placements has \[Shard\(dim=0\)\]"),
    "too few axes": (ValueError, r"in_placements has \[\], 0 placements for the 1 axes"),
    "too many axes": (
        ValueError,
        r"out_placements has \[Shard\(dim=0\), Replicate\(\)\], 2 placements for the 1",
    ),
    "too few results": (ValueError, r"returned 1 values, but out_placements has 2 entries"),
    "none for a result": (ValueError, r"result 0 is a tensor of shape .*, but out_placements has None"),
    "placements of no tensor": (ValueError, r"result 0 is a int, but out_placements has \[Shard\(dim=0\)\]"),
    "a dim the result lacks": (ValueError, r"result 0 has 0 dims, but its placements .* shard dim 0"),
    "a dim the argument lacks": (ValueError, r"argument 0 has 2 dims, but its placements .* shard dim 2"),
    "another mesh": (ValueError, r"argument 0 is on DeviceMesh.*, expected DeviceMesh.* as device_mesh says"),
    "a dtensor result": (ValueError, r"result 0 is a DTensor, expected this rank's tensor"),
    "a dtensor keyword": (ValueError, r"the keyword argument 'w' holds a DTensor"),
    "gradients cut otherwise": (ValueError, r"in_grad_placements has \[Replicate\(\)\] for argument 0"),
    "no sequence": (TypeError, r"in_placements holds a Shard, expected a list or tuple"),
    "no placement": (TypeError, r"out_placements has 'S0' where a placement belongs, such as Shard\(0\)"),
    "one tensor's placements": (ValueError, r"expected a sequence of placements for each argument"),
    "no function": (TypeError, r"got a int, expected a function"),
    "uneven": (ValueError, r"result 0 has shape .* dim 0 lies on axes whose shards of the inputs are uneven"),
}


def identity(x: Any, *rest: Any, **named: Any) -> Any:
    return x


@pytest.mark.parametrize("what", ERRORS)
@on_ranks(2)
def test_errors_say_what_came_and_what_was_expected(rank: int, world: int, what: str) -> None:
    mesh, other = mesh_of((world,)), mesh_of((world, 1))
    x = distribute_tensor(torch.ones(4, 2), mesh, [S(0)])
    uneven = distribute_tensor(torch.ones(5, 2), mesh, [S(0)])
    s0: Any = [S(0)]
    calls: dict[str, Any] = {
        "other placements": lambda: apply_local_map(identity, s0, ([R],))(x),
        "too few in_placements": lambda: apply_local_map(identity, s0, (s0,))(x, x),
        "too few in_grad_placements": lambda: apply_local_map(identity, s0, None, (s0,))(x, x),
        "none for a dtensor": lambda: apply_local_map(identity, s0, (None,))(x),
        "placements of a number": lambda: apply_local_map(identity, s0, (s0, s0))(1, x),
        "too few axes": lambda: apply_local_map(identity, s0, ([],))(x),
        "too many axes": lambda: apply_local_map(identity, [S(0), R], (s0,))(x),
        "too few results": lambda: apply_local_map(identity, (s0, s0), (s0,))(x),
        "none for a result": lambda: apply_local_map(identity, None, (s0,))(x),
        "placements of no tensor": lambda: apply_local_map(len, s0, (s0,))(x),
        "a dim the result lacks": lambda: apply_local_map(torch.sum, s0, (s0,))(x),
        "a dim the argument lacks": lambda: apply_local_map(identity, s0, ([S(2)],))(x),
        "another mesh": lambda: apply_local_map(identity, s0, (s0,), None, other)(x),
        "a dtensor result": lambda: apply_local_map(lambda _: x, s0, (s0,))(x),
        "a dtensor keyword": lambda: apply_local_map(identity, s0, (s0,))(x, w=x),
        "gradients cut otherwise": lambda: apply_local_map(identity, s0, (s0,), ([R],))(x),
        "no sequence": lambda: apply_local_map(identity, s0, S(0)),  # type: ignore[arg-type]
        "no placement": lambda: apply_local_map(identity, [["S0"]], (s0,)),
        "one tensor's placements": lambda: apply_local_map(identity, s0, s0),
        "no function": lambda: apply_local_map(func=3, out_placements=s0),
        "uneven": lambda: apply_local_map(lambda x: torch.cat([x, x, x[:0]]), s0, (s0,))(uneven),
    }
    error, message = ERRORS[what]
    with pytest.raises(error, match=message):
        calls[what]()


@on_ranks(4)
def test_a_local_map_keeps_one_signature_of_a_call_however_often_specs_are_forgotten(
    rank: int, world: int
) -> None:
    placements = (Shard(0),)
    weight = distribute_tensor(torch.ones(4, 4), mesh_of((world,)), placements)
    doubled = LocalMap(lambda local: local * 2, LocalMapArguments(out_placements=(placements,)))
    for _ in range(3):
        doubled.run((weight,), {})
        funcol._C.clear_tables()
    assert len(doubled._by_identity) == len(doubled._kept) == 1
