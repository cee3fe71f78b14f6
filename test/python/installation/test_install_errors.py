"""A wrong call under install() raises what its callers know of PyTorch: that type, and funcol's own."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import world_group
from programs import mesh_of
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import funcol

ON_DEVICES = True


class Wrong(NamedTuple):
    call: Callable[[], Any]
    ours: type[Exception]


ones = torch.ones


def summed(op: Any, dtype: torch.dtype = torch.float32) -> Any:
    return stock.all_reduce(ones(4, dtype=dtype), op, world_group())


def scattered(x: torch.Tensor, dim: int) -> Any:
    return stock.reduce_scatter_tensor(x, "sum", dim, world_group())


def exchanged(size: int, received: list[int] | None, sent: list[int] | None) -> Any:
    return stock.all_to_all_single(ones(size), received, sent, world_group())


def moved(held: Placement, *wanted: Placement, dtype: torch.dtype = torch.float32) -> Any:
    return DTensor.from_local(ones(2, 2, dtype=dtype), mesh_of(2), [held]).redistribute(placements=wanted)


def held() -> DTensor:
    return DTensor.from_local(ones(2, 2), mesh_of(2), [Shard(0)])


def distributed(placement: Placement, shape: tuple[int, ...] = (4, 4), src: int = 0) -> Any:
    return distribute_tensor(ones(shape), mesh_of(2), [placement], src_data_rank=src)


core = torch.ops._c10d_functional


def group_name() -> str:
    return world_group().group_name


CASES: dict[str, Wrong] = {
    "operator, indivisible": Wrong(
        lambda: core.wait_tensor(core.reduce_scatter_tensor(ones(3), "sum", 2, group_name())), ValueError
    ),
    "operator, another group size": Wrong(
        lambda: core.wait_tensor(core.all_gather_into_tensor(ones(4), 3, group_name())), ValueError
    ),
    "operator, unknown reduce op": Wrong(
        lambda: core.wait_tensor(core.all_reduce(ones(2), "mean", group_name())), ValueError
    ),
    "operator, unknown group": Wrong(lambda: core.all_reduce(ones(2), "sum", "nobody"), ValueError),
    "operator, splits of less": Wrong(
        lambda: core.wait_tensor(core.all_to_all_single(ones(4), [1, 1], [1, 1], group_name())), ValueError
    ),
    "indivisible": Wrong(lambda: scattered(ones(3, 4), 0), ValueError),
    "indivisible dim": Wrong(lambda: scattered(ones(4, 5), -1), ValueError),
    "indivisible, with a gradient": Wrong(lambda: scattered(ones(3, 4, requires_grad=True), 0), ValueError),
    "scatter of a number": Wrong(lambda: scattered(torch.tensor(1.0), 0), ValueError),
    "no such dim": Wrong(lambda: scattered(ones(2, 4), 2), IndexError),
    "coalesced, indivisible": Wrong(
        lambda: stock.reduce_scatter_tensor_coalesced([ones(2), ones(5)], "sum", [0, 0], world_group()),
        ValueError,
    ),
    "a dim too few": Wrong(
        lambda: stock.reduce_scatter_tensor_coalesced([ones(2), ones(2)], "sum", [0], world_group()),
        ValueError,
    ),
    "no such gather dim": Wrong(lambda: stock.all_gather_tensor(ones(2, 3), 2, world_group()), IndexError),
    "gather of a number": Wrong(
        lambda: stock.all_gather_tensor(torch.tensor(1.0), 1, world_group()), IndexError
    ),
    "gather dim None": Wrong(
        lambda: stock.all_gather_tensor(ones(2), None, world_group()),  # type: ignore[arg-type]
        TypeError,
    ),
    "no such source": Wrong(lambda: stock.broadcast(ones(2), 2, world_group()), ValueError),
    "all_to_all of a number": Wrong(
        lambda: stock.all_to_all_single(torch.tensor(1.0), None, None, world_group()), ValueError
    ),
    "output splits alone": Wrong(lambda: exchanged(2, [1, 1], None), ValueError),
    "input splits alone": Wrong(lambda: exchanged(2, None, [1, 1]), ValueError),
    "indivisible all_to_all": Wrong(lambda: exchanged(3, None, None), ValueError),
    "too many splits": Wrong(lambda: exchanged(3, [1] * 3, [1] * 3), ValueError),
    "splits of less": Wrong(lambda: exchanged(3, [1, 1], [1, 1]), ValueError),
    "unknown reduce op": Wrong(lambda: summed("mean"), ValueError),
    "no reduce op": Wrong(lambda: summed(None), TypeError),
    "bits of floats": Wrong(lambda: summed("band"), TypeError),
    "average of integers": Wrong(lambda: summed("avg", torch.int32), TypeError),
    "minimum of complex numbers": Wrong(lambda: summed("min", torch.complex64), TypeError),
    "dtype unknown to gloo": Wrong(lambda: summed("sum", torch.int16), TypeError),
    "coalesced, unknown reduce op": Wrong(
        lambda: stock.all_reduce_coalesced([ones(4)], "mean", world_group()), ValueError
    ),
    "coalesced, two dtypes": Wrong(
        lambda: stock.all_reduce_coalesced([ones(4), ones(4).double()], "sum", world_group()), TypeError
    ),
    "no tensor": Wrong(lambda: stock.all_reduce(3.0, "sum", world_group()), TypeError),  # type: ignore[arg-type]
    "no list": Wrong(
        lambda: stock.all_reduce_coalesced(3, "sum", world_group()),  # type: ignore[arg-type]
        TypeError,
    ),
    "unknown group": Wrong(lambda: stock.all_reduce(ones(2), "sum", "nobody"), ValueError),
    "ranks without a group": Wrong(
        lambda: stock.all_reduce(ones(2), "sum", [dist.get_rank(), 7]), ValueError
    ),
    "mesh of two dims": Wrong(
        lambda: stock.all_reduce(ones(2), "sum", init_device_mesh("cpu", (2, 1))), ValueError
    ),
    "no such mesh dim": Wrong(lambda: stock.all_reduce(ones(2), "sum", (mesh_of(2), 1)), ValueError),
    "a DTensor": Wrong(lambda: stock.all_reduce(held(), "sum", world_group()), TypeError),
    "a list of DTensors": Wrong(
        lambda: stock.all_reduce_coalesced([held()], "sum", world_group()), TypeError
    ),
    "a number for a group": Wrong(
        lambda: stock.all_reduce(ones(2), "sum", 3.5),  # type: ignore[arg-type]
        TypeError,
    ),
    "distribute, no such dim": Wrong(lambda: distributed(Shard(2)), ValueError),
    "distribute, no such negative dim": Wrong(lambda: distributed(Shard(-3)), ValueError),
    "distribute a number": Wrong(lambda: distributed(Shard(0), ()), ValueError),
    "distribute, no such source": Wrong(lambda: distributed(Shard(0), src=5), ValueError),
    "replicate, no such source": Wrong(lambda: distributed(Replicate(), src=5), ValueError),
    "redistribute to no such dim": Wrong(lambda: moved(Replicate(), Shard(2)), ValueError),
    "redistribute a shard to no such dim": Wrong(lambda: moved(Shard(0), Shard(2)), ValueError),
    "redistribute to nothing": Wrong(lambda: moved(Shard(0)), ValueError),
    "redistribute an unknown reduction": Wrong(lambda: moved(Partial("prod"), Replicate()), ValueError),
    "scatter an unknown reduction": Wrong(lambda: moved(Partial("prod"), Shard(0)), ValueError),
    "redistribute bits of floats": Wrong(lambda: moved(Partial("band"), Replicate()), TypeError),
    "redistribute an average of integers": Wrong(
        lambda: moved(Partial("avg"), Replicate(), dtype=torch.int64), TypeError
    ),
    "redistribute to text": Wrong(lambda: held().redistribute(mesh_of(2), ["R"]), TypeError),  # type: ignore[list-item]
    "redistribute to a list for a mesh": Wrong(
        lambda: held().redistribute([Replicate()]),  # type: ignore[arg-type]
        TypeError,
    ),
    "gather an unknown reduction": Wrong(
        lambda: DTensor.from_local(ones(2), mesh_of(2), [Partial("prod")]).full_tensor(), ValueError
    ),
    "indivisible, traced": Wrong(
        lambda: make_fx(lambda x: scattered(x, 0), tracing_mode="fake")(ones(3)), ValueError
    ),
    "splits alone, traced": Wrong(
        lambda: make_fx(
            lambda x: stock.all_to_all_single(x, [1, 1], None, world_group()), tracing_mode="fake"
        )(ones(2)),
        ValueError,
    ),
}


# NCCL averages integers, and says by other types what it does not send.
_OF_GLOO = {
    "bits of floats",
    "average of integers",
    "dtype unknown to gloo",
    "redistribute bits of floats",
    "redistribute an average of integers",
}
# Simulated devices find out as they run.
_FOUND_LATE = {"softmax of no such dim", "sort of no such dim"}


def _marked(names: Iterable[str]) -> list[Any]:
    on_cpu = _OF_GLOO | _FOUND_LATE
    return [pytest.param(name, marks=pytest.mark.cpu_only if name in on_cpu else ()) for name in names]


def sharded() -> DTensor:
    return DTensor.from_local(ones(2, 4), mesh_of(2), [Shard(0)])


# Errors that PyTorch raises itself.
LEFT: dict[str, Callable[[], Any]] = {
    "softmax of no such dim": lambda: sharded().softmax(5),
    "sort of no such dim": lambda: sharded().sort(5),
    "sum of no such dim": lambda: sharded().sum(5),
    "to_local, no placements": lambda: sharded().to_local(grad_placements=5),  # type: ignore[arg-type]
    "redistribute in no dtype": lambda: sharded().redistribute(
        placements=[Replicate()],
        forward_dtype="x",  # type: ignore[arg-type]
    ),
}


def error_of(call: Callable[[], Any]) -> Exception | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            result = call()
            for one in result if isinstance(result, list) else [result]:
                if isinstance(one, torch.Tensor):
                    one + 0  # waits
        except Exception as error:
            return error
    return None


@pytest.mark.parametrize("case", _marked(CASES))
@on_ranks(2, timeout=30)
def test_it_is_of_pytorchs_type_and_of_ours(rank: int, world: int, case: str) -> None:
    wrong = CASES[case]
    theirs = error_of(wrong.call)
    with funcol.installed():
        ours = error_of(wrong.call)
    plain = None if theirs is None else type(theirs)
    assert isinstance(ours, wrong.ours), repr(ours)
    # An AttributeError is not a type to catch: PyTorch 2.11 takes lower() of a reduce op that is None.
    if plain in (RuntimeError, ValueError, TypeError, IndexError, AssertionError, NotImplementedError):
        assert isinstance(ours, plain), (type(ours).__mro__, plain)
    assert str(ours).startswith("funcol")
    # No rank is ahead of another.
    assert funcol.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


@pytest.mark.parametrize("case", _marked(LEFT))
@on_ranks(2, timeout=30)
def test_what_is_left_to_pytorch_is_of_its_type(rank: int, world: int, case: str) -> None:
    theirs = error_of(LEFT[case])
    with funcol.installed():
        ours = error_of(LEFT[case])
    assert theirs is not None
    assert type(ours) is type(theirs), repr(ours)


# Leaves out the cases that make a mesh, for which the ranks meet.
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", _marked(case for case in CASES if "mesh" not in case))
@on_ranks(2, timeout=30)
def test_nothing_was_sent_when_it_is_raised(rank: int, world: int, case: str) -> None:
    with funcol.installed():
        before = funcol.unwaited_collectives()
        if rank == 1:
            assert error_of(CASES[case].call) is not None
        assert funcol.unwaited_collectives() == before
        assert stock.all_reduce(torch.tensor(1.0), "sum", world_group()).item() == world


@on_ranks(2)
def test_without_install_it_is_of_our_type_alone(rank: int, world: int) -> None:
    with funcol.installed():
        pass
    with pytest.raises(ValueError, match="not divisible") as raised:
        funcol.reduce_scatter_tensor(ones(3), "sum", 0, world_group())
    assert type(raised.value) is ValueError


@on_ranks(2)
def test_it_has_its_traceback_and_survives_a_pickle(rank: int, world: int) -> None:
    with funcol.installed(), pytest.raises(ValueError, match="not divisible") as raised:
        scattered(ones(3), 0)
    assert any(entry.name == "scattered" for entry in raised.traceback)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(copied, AssertionError)
    assert isinstance(copied, ValueError)
    assert str(copied) == str(raised.value)
