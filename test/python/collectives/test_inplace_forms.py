"""The in-place forms of the collectives: against PyTorch's own, into all kinds of destinations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import sample, world_group
from ranks import run_ranks
from slow_collectives import same
from torch import Tensor

import funcol
from funcol import _C

ON_DEVICES = True

# A form is given stock or funcol, a source of shape (4, 3) for each of `size` ranks, and what makes a
# destination of a shape. It returns what was returned and what should have been, the destination.
Destination = Callable[..., Tensor]
Form = Callable[[Any, Tensor, Destination, int], tuple[Any, Any]]


INTO_DESTINATIONS = [name for name in dir(_C) if name.endswith(("_into", "_into_list"))]


@pytest.fixture(autouse=True, params=[True, False], ids=["received", "copied"])
def way(request: pytest.FixtureRequest) -> None:
    """Selects direct writes to destinations where possible, or copies in all cases."""
    global _received
    _received = request.param


def one_way(rank: int, world: int, function: str, received: bool, *args: Any) -> None:
    never = {name: mock.Mock(return_value=NotImplemented) for name in INTO_DESTINATIONS}
    with mock.patch.dict(vars(_C), {} if received else never):
        globals()[function](rank, world, *args)


def run_both_ways(function: Callable[..., None], world: int, *args: Any) -> None:
    run_ranks(one_way, world, function.__name__, _received, *args)


def all_reduce_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    x = new(4, 3).copy_(x)
    return api.all_reduce_inplace(x, "max" if not x.is_complex() else "sum"), x


def all_gather_tensor_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4 * size, 3)
    return api.all_gather_tensor_inplace(out, x, world_group()), out


def all_gather_dim_1_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4, 3 * size)
    return api.all_gather_tensor_inplace(out, x, world_group(), gather_dim=1), out


def reduce_scatter_tensor_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4, 3)
    return api.reduce_scatter_tensor_inplace(out, torch.cat([x] * size)), out


def reduce_scatter_dim_1_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4, 3)
    return api.reduce_scatter_tensor_inplace(out, torch.cat([x] * size, dim=1), scatter_dim=1), out


def all_to_all_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = new(4 * size, 3)
    return api.all_to_all_inplace(out, torch.cat([x + i for i in range(size)])), out


def all_gather_form(api: Any, x: Tensor, new: Destination, size: int) -> tuple[Any, Any]:
    out = [new(4, 3) for _ in range(size)]
    return api.all_gather_inplace(out, x), out


FORMS: dict[str, Form] = {
    "all_reduce": all_reduce_form,
    "all_gather_tensor": all_gather_tensor_form,
    "all_gather_dim_1": all_gather_dim_1_form,
    "reduce_scatter_tensor": reduce_scatter_tensor_form,
    "reduce_scatter_dim_1": reduce_scatter_dim_1_form,
    "all_to_all": all_to_all_form,
    "all_gather": all_gather_form,
}
DESTINATIONS: dict[str, Callable[[torch.dtype, tuple[int, ...]], Tensor]] = {
    "contiguous": lambda dtype, shape: torch.zeros(shape, dtype=dtype),
    "transposed": lambda dtype, shape: torch.zeros(shape[::-1], dtype=dtype).permute(
        *range(len(shape) - 1, -1, -1)
    ),
    "part of a larger one": lambda dtype, shape: torch.zeros((2, *shape), dtype=dtype)[1],
}


def agrees_in_place(rank: int, world: int, form: str, destination: str, dtype: torch.dtype) -> None:
    def new(*shape: int) -> Tensor:
        return DESTINATIONS[destination](dtype, shape)

    x = sample(rank, (4, 3), dtype)
    expected, _ = FORMS[form](stock, x.clone(), new, world)
    returned, out = FORMS[form](funcol, x.clone(), new, world)
    assert returned is out
    for one, other in zip(*(r if isinstance(r, list) else [r] for r in (out, expected)), strict=True):
        assert not funcol.is_pending(one)
        assert same(one, other)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("destination", DESTINATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_a_form_does_what_that_of_pytorch_does(world: int, destination: str, form: str) -> None:
    run_both_ways(agrees_in_place, world, form, destination, torch.float32)


OTHER_DTYPES = [
    (form, dtype)
    for form in FORMS
    for dtype in (torch.bfloat16, torch.int64, torch.complex64)
    if (form, dtype) != ("all_to_all", torch.complex64)  # which PyTorch's own refuses under gloo
]


@pytest.mark.parametrize(("form", "dtype"), OTHER_DTYPES)
def test_a_form_takes_other_dtypes(form: str, dtype: torch.dtype) -> None:
    run_both_ways(agrees_in_place, 2, form, "contiguous", dtype)


def broadcasts(rank: int, world: int, destination: str, arguments: dict[str, int]) -> None:
    x = DESTINATIONS[destination](torch.float32, (2, 3)).fill_(rank)
    assert funcol.broadcast_inplace(x, **arguments) is x
    assert same(x, torch.full((2, 3), 1.0))


@pytest.mark.parametrize("arguments", [{"src": 1}, {"group_src": 1}])
@pytest.mark.parametrize("destination", DESTINATIONS)
def test_broadcast_in_place_gives_every_rank_the_tensor_of_the_source(
    destination: str, arguments: dict[str, int]
) -> None:
    run_both_ways(broadcasts, 2, destination, arguments)


def counts_peers(rank: int, world: int, compiled: bool) -> None:
    def broadcast_from_global_2(x: Tensor) -> Tensor:
        dist.broadcast(x, 2, group)
        return x + 0

    group = dist.new_group([1, 2])
    if rank > 0:
        x = torch.tensor([rank])
        if compiled:
            x = torch.compile(broadcast_from_global_2, backend="eager", fullgraph=True)(x)
        else:
            funcol.broadcast_inplace(x, 2, group)
        assert x.item() == 2
        dist.destroy_process_group(group)


@pytest.mark.parametrize("compiled", [False, True])
def test_src_is_a_rank_of_the_world_in_a_smaller_group_too(compiled: bool) -> None:
    run_both_ways(counts_peers, 3, compiled)


def gathers_scalars(rank: int, world: int) -> None:
    parts = [torch.zeros(()) for _ in range(world)]
    assert funcol.all_gather_inplace(parts, torch.tensor(float(rank))) is parts
    assert [part.item() for part in parts] == list(range(world))
    out = torch.zeros(world)
    assert funcol.all_gather_tensor_inplace(out, torch.tensor(float(rank))) is out
    assert out.tolist() == list(range(world))


@pytest.mark.parametrize("world", [1, 2, 3])
def test_numbers_are_gathered_as_tensors_of_one(world: int) -> None:
    run_both_ways(gathers_scalars, world)


def scatters_a_list(rank: int, world: int, shape: tuple[int, ...]) -> None:
    out = torch.zeros(shape)
    inputs = [torch.full(shape, 10.0 * r + rank) for r in range(world)]
    assert funcol.reduce_scatter_inplace(out, inputs) is out
    assert same(out, torch.full(shape, 10.0 * rank * world + sum(range(world))))


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)], ids=str)
def test_reduce_scatter_of_a_list(world: int, shape: tuple[int, ...]) -> None:
    run_both_ways(scatters_a_list, world, shape)


def fills_any_shape(rank: int, world: int) -> None:
    x = torch.full((3, 2), float(rank))
    expected = torch.arange(float(world)).repeat_interleave(6)
    for shape in [(world, 3, 2), (6 * world,)]:
        out = torch.zeros(shape)
        assert same(funcol.all_gather_tensor_inplace(out, x), expected.view(shape))
    part = torch.zeros(3, 2)
    stacked = torch.arange(float(world)).view(world, 1, 1).expand(world, 3, 2)
    assert same(funcol.reduce_scatter_tensor_inplace(part, stacked), torch.full((3, 2), float(rank * world)))


def test_along_dim_0_only_the_number_of_elements_counts() -> None:
    run_both_ways(fills_any_shape, 3)


def writes_into_its_own_input(rank: int, world: int) -> None:
    buffer = torch.zeros(world, 4)
    buffer[rank] = rank + 1
    funcol.all_gather_tensor_inplace(buffer, buffer[rank : rank + 1])
    assert buffer[:, 0].tolist() == [r + 1.0 for r in range(world)]
    funcol.reduce_scatter_tensor_inplace(buffer[0], buffer)
    assert buffer[0].tolist() == [world * (rank + 1.0)] * 4


def test_a_destination_may_lie_in_the_input() -> None:
    run_both_ways(writes_into_its_own_input, 2)


def converts(rank: int, world: int) -> None:
    out = torch.zeros(2 * world, dtype=torch.float64)
    funcol.all_gather_tensor_inplace(out, torch.full((2,), rank, dtype=torch.int32))
    assert out.tolist() == [0.0, 0.0, 1.0, 1.0]


def test_a_destination_of_another_dtype_is_converted_to() -> None:
    run_both_ways(converts, 2)


def differentiates(rank: int, world: int) -> None:
    def gradient(api: Any) -> Tensor:
        x = torch.arange(3.0).requires_grad_()
        y = x * (rank + 1)
        api.all_reduce_inplace(y)
        (y * (rank + 1)).sum().backward()
        return x.grad

    assert same(gradient(funcol), gradient(stock))


def differentiates_a_list(rank: int, world: int) -> None:
    def gradient(api: Any) -> Tensor:
        x = torch.arange(6.0).view(3, 2).requires_grad_()
        parts = api.all_gather_inplace([torch.zeros(3, 2) for _ in range(world)], x * (rank + 1))
        sum((other + 1) * part.sum() for other, part in enumerate(parts)).backward()
        return x.grad

    assert same(gradient(funcol), gradient(stock))


@pytest.mark.parametrize("world", [1, 2])
def test_gradients_flow_through_a_gathered_list(world: int) -> None:
    run_both_ways(differentiates_a_list, world)


def test_gradients_flow_through_a_form() -> None:
    run_both_ways(differentiates, 2)


def is_noticed_by_autograd(rank: int, world: int) -> None:
    weight = torch.ones(3, requires_grad=True)
    x = torch.ones(3)
    product = weight * x
    funcol.all_reduce_inplace(x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_autograd_notices_that_a_form_has_written() -> None:
    run_both_ways(is_noticed_by_autograd, 2)


def broadcasts_a_parameter(rank: int, world: int) -> None:
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    with torch.no_grad():
        assert funcol.broadcast_inplace(parameter, 1) is parameter
    assert parameter.is_leaf
    assert parameter.requires_grad
    assert parameter.tolist() == [1.0] * 3


def test_a_parameter_is_broadcast_without_a_gradient() -> None:
    run_both_ways(broadcasts_a_parameter, 2)


def raises_before_sending(rank: int, world: int, call: str, says: str) -> None:
    x = torch.ones(4, 3)
    with pytest.raises(ValueError, match=says):
        eval(call, {"funcol": funcol, "torch": torch, "x": x})


REFUSED = {
    "funcol.all_reduce_inplace(x, async_op=True)": "async_op",
    "funcol.all_gather_inplace([x, x], x, async_op=True)": "async_op",
    "funcol.all_gather_tensor_inplace(torch.ones(7, 3), x)": "expected 24",
    "funcol.reduce_scatter_tensor_inplace(torch.ones(3), x)": "1/2",
    "funcol.all_to_all_inplace(torch.ones(5, 3), x)": "expected 12",
    "funcol.all_to_all_inplace(x, x, [1, 1], [2, 2])": "expected .2, 3",
    "funcol.all_to_all_inplace(x[:3], x, None, [2, 2])": "output_split_sizes",
    "funcol.all_gather_inplace([x], x)": "one tensor per rank",
    "funcol.all_gather_inplace([x, x[:1]], x)": "one shape",
    "funcol.reduce_scatter_inplace(x, [x, x[:1]])": "one shape",
    "funcol.broadcast_inplace(x)": "src",
    "funcol.broadcast_inplace(x, 0, group_src=0)": "not both",
    "funcol.isend_inplace(x)": "group_dst",
    "funcol.irecv_inplace(x, 0, group_src=0)": "not both",
}


@pytest.mark.parametrize(("call", "says"), REFUSED.items())
def test_wrong_arguments_are_refused_before_anything_is_sent(call: str, says: str) -> None:
    run_both_ways(raises_before_sending, 2, call, says)


def in_order_of_ranks(rank: int, starts: list[Callable[[], Tensor]]) -> list[Tensor]:
    """Runs a send and a receive. NCCL runs them one after the other: one rank has to receive first."""
    if rank == 0:
        return [start() for start in starts]
    return [start() for start in reversed(starts)][::-1]


def exchanges(rank: int, world: int, batched: bool) -> None:
    peer = 1 - rank
    out = torch.full((3,), rank + 1.0)
    buffer = torch.zeros(3)
    if batched:
        works = funcol.batch_p2p_ops_inplace(["isend", "irecv"], [peer] * 2, [5, 5], [out, buffer], None)
    else:
        starts = [
            lambda: funcol.isend_inplace(out, peer, 5),
            lambda: funcol.irecv_inplace(buffer, group_src=peer, tag=5),
        ]
        works = in_order_of_ranks(rank, starts)
    assert same(works[1], torch.full((3,), peer + 1.0))
    funcol.wait_tensors(works)
    assert same(buffer, torch.full((3,), peer + 1.0))


@pytest.mark.parametrize("batched", [False, True])
def test_point_to_point_forms_exchange_tensors(batched: bool) -> None:
    run_both_ways(exchanges, 2, batched)


def fills_in_missing_splits(rank: int, world: int) -> None:
    x = torch.full((4, 2), float(rank))
    out = torch.zeros(4, 2)
    funcol.all_to_all_inplace(out, x, None, [2, 2])
    assert out[:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    funcol.all_to_all_inplace(out, x + 1, [], [])
    assert out[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]


def sends_everything_to_rank_0(rank: int, world: int) -> None:
    x = torch.full((2 * rank, 3), float(rank))
    out = torch.zeros(2 if rank == 0 else 0, 3)
    funcol.all_to_all_inplace(out, x, [0, 2] if rank == 0 else [0, 0], [2 * rank, 0])
    assert same(out, torch.ones(out.shape))


def test_a_rank_may_have_nothing_to_send_or_to_receive() -> None:
    run_both_ways(sends_everything_to_rank_0, 2)


def test_split_sizes_that_are_not_given_are_equal_shares() -> None:
    run_both_ways(fills_in_missing_splits, 2)


def exchanges_in_a_region(rank: int, world: int, batched: bool, backend: str) -> None:
    peer = 1 - rank

    @torch.compile(backend=backend, fullgraph=True)
    def region(out: Tensor) -> Tensor:
        buffer = torch.zeros(3)
        if batched:
            works = funcol.batch_p2p_ops_inplace(["isend", "irecv"], [peer] * 2, [5, 5], [out, buffer], None)
        else:
            starts = [
                lambda: funcol.isend_inplace(out, peer, 5),
                lambda: funcol.irecv_inplace(buffer, peer, 5),
            ]
            works = in_order_of_ranks(rank, starts)
        return funcol.wait_tensors(works)[1] + 1

    torch._dynamo.reset()
    assert same(region(torch.full((3,), rank + 1.0)), torch.full((3,), peer + 2.0))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("batched", [False, True])
def test_point_to_point_forms_can_be_traced(batched: bool, backend: str) -> None:
    run_both_ways(exchanges_in_a_region, 2, batched, backend)


def reduces_by_object(rank: int, world: int) -> None:
    x = torch.full((2, 2), float(rank))
    assert same(funcol.all_reduce_inplace(x.clone(), dist.ReduceOp.MAX), torch.full((2, 2), 1.0))
    out = torch.full((1, 2), -1.0)
    assert same(funcol.reduce_scatter_tensor_inplace(out, x, dist.ReduceOp.MIN), torch.zeros(1, 2))


def test_a_reduce_op_may_be_an_object() -> None:
    run_both_ways(reduces_by_object, 2)
