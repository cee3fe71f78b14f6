"""distribute_tensor while funcol is under DTensor: PyTorch's results, fewer bytes, errors before any."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import sample
from programs import mesh_of
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import placement_types as stock_placements
from torch.distributed.tensor._ops._mask_buffer import MaskBuffer
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

import funcol

ON_DEVICES = True

R, S0, S1 = Replicate(), Shard(0), Shard(1)

LAYOUTS: dict[str, list[Placement]] = {
    "RR": [R, R],
    "S0 R": [S0, R],
    "R S0": [R, S0],
    "S0 S0": [S0, S0],
    "S1 S0": [S1, S0],
    "R S(-1)": [R, Shard(-1)],
    "P S0": [Partial(), S0],
    "S1 P": [S1, Partial()],
    "P P": [Partial(), Partial()],
    "Pmax R": [Partial("max"), R],
    "R Pavg": [R, Partial("avg")],
    "_S0 S0": [_StridedShard(0, split_factor=2), S0],
}


def strides_that_matter(tensor: Tensor) -> list[int]:
    if tensor.numel() < 2:
        return []
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def described(dtensor: DTensor) -> tuple[Any, ...]:
    local = dtensor._local_tensor
    return (
        dtensor._spec,
        hash(dtensor._spec),
        [
            stride
            for size, stride in zip(local.shape, local.stride(), strict=True)
            if size > 1 < local.numel()
        ],
        local.requires_grad,
        dtensor.requires_grad,
        dtensor.is_leaf,
        type(local),
    )


def places_as_pytorch(
    rank: int, world: int, layout: str, shape: list[int], source: int | None, transposed: bool
) -> None:
    mesh = mesh_of(2, world // 2)

    def placed(inside: Any) -> DTensor:
        x = sample(0 if source is None else rank, shape)
        x = (x.t() if transposed else x).requires_grad_()
        with inside:
            return distribute_tensor(x, mesh, LAYOUTS[layout], src_data_rank=source)

    expected, found = placed(nullcontext()), placed(funcol.installed())
    assert described(found) == described(expected)
    torch.testing.assert_close(found._local_tensor, expected._local_tensor, rtol=0, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("source", [0, 1, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_as_pytorch(layout: str, source: int | None, transposed: bool) -> None:
    run_ranks(places_as_pytorch, 4, layout, [8, 4], source, transposed)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [[5, 3], [1, 2], [0, 4], [3, 1]])
@pytest.mark.parametrize("source", [0, None])
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "_" not in name])
def test_sizes_that_do_not_divide(layout: str, source: int | None, shape: list[int]) -> None:
    run_ranks(places_as_pytorch, 4, layout, shape, source, False)


@on_ranks(2)
def test_strided_shards_of_uneven_size_are_sent(rank: int, world: int) -> None:
    """PyTorch's own stops with an assertion."""
    mesh, whole = mesh_of(2), torch.arange(7)
    with funcol.installed():
        sent = distribute_tensor(whole + 100 * rank, mesh, [_StridedShard(0, split_factor=2)])
        cut = distribute_tensor(whole, mesh, [_StridedShard(0, split_factor=2)], src_data_rank=None)
    assert sent._local_tensor.tolist() == cut._local_tensor.tolist() == [[0, 1, 4, 5], [2, 3, 6]][rank]


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn],
    ids=str,
)
@on_ranks(2)
def test_dtypes(rank: int, world: int, dtype: torch.dtype) -> None:
    """Among them dtypes that gloo cannot send by itself."""
    mesh = mesh_of(world)
    x = (sample(rank, [5, 2]) * 4).to(dtype)
    for placement in (S0, R):
        with funcol.installed():
            found = distribute_tensor(x.clone(), mesh, [placement])
        of_source = (sample(0, [5, 2]) * 4).to(dtype)
        expected = of_source.chunk(world)[rank] if placement == S0 else of_source
        assert found._local_tensor.dtype == dtype
        assert found._local_tensor.view(torch.uint8).equal(expected.contiguous().view(torch.uint8))


class Sent(TorchDispatchMode):
    """The collectives of c10d, with the number of elements of the tensor that is received."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.calls.append((func._schema.name.partition("::")[2], args[0][0].numel()))
        return func(*args, **(kwargs or {}))


@on_ranks(4)
def test_replicas_receive_shards(rank: int, world: int) -> None:
    mesh = mesh_of(2, 2)
    with funcol.installed(), Sent() as sent:
        distribute_tensor(torch.ones(8, 4), mesh, [R, S0])
    assert sent.calls == [("scatter_", 16), ("broadcast_", 16)]
    with Sent() as by_pytorch:
        distribute_tensor(torch.ones(8, 4), mesh, [R, S0])
    assert sorted(name for name, _ in by_pytorch.calls) == ["broadcast_", "scatter_"]


@on_ranks(4)
def test_a_watched_rank_sends_as_the_others_do(rank: int, world: int) -> None:
    mesh = mesh_of(2, 2)
    with funcol.installed(), Sent() if rank == 0 else nullcontext():
        dtensor = distribute_tensor(sample(rank, [8, 4]), mesh, [R, S0])
    assert dtensor._local_tensor.equal(sample(0, [8, 4]).chunk(2)[rank % 2])


@on_ranks(4)
def test_the_tensor_of_a_rank_that_receives_a_shard_stays_as_it_is(rank: int, world: int) -> None:
    mesh, x = mesh_of(2, 2), sample(rank, [8, 4])
    with funcol.installed():
        distribute_tensor(x, mesh, [R, S0])
    assert x.equal(sample(rank, [8, 4]))


@on_ranks(2)
def test_replicas_are_received_in_place(rank: int, world: int) -> None:
    """Receives a replica into the tensor that was passed, as PyTorch does."""
    x = sample(rank, [4, 2])
    with funcol.installed():
        dtensor = distribute_tensor(x, mesh_of(world), [R])
    assert dtensor._local_tensor.data_ptr() == x.data_ptr()
    assert x.equal(sample(0, [4, 2]))


@on_ranks(2)
def test_ranks_that_hold_other_shapes_are_told(rank: int, world: int) -> None:
    message = r"distribute_tensor\(S\(0\), src_data_rank=0\)"
    with (
        funcol.installed(),
        funcol.check_agreement(),
        pytest.raises(dist.DistBackendError, match=message),
    ):
        distribute_tensor(torch.ones(4 + rank, 2), mesh_of(world), [S0])


# On one rank of a group that sends nothing


@pytest.mark.usefixtures("_installed")
class TestOneRank:
    @pytest.mark.parametrize(
        ("placements", "source", "message"),
        [
            ([R, Shard(2)], 0, r"S\(2\) on mesh axis tp .* shape \[8, 4\] has not.* below 2"),
            ([Shard(-3), R], None, r"S\(-3\) on mesh axis dp"),
            ([S0, Partial("product")], 0, r"P\(product\) on mesh axis tp"),
            ([S0, R], 2, "src_data_rank is 2, but mesh axis dp has 2 ranks"),
            ([S0, R], -1, "src_data_rank is -1"),
            ([Partial(), Partial("max")], 0, "Partial"),
            ([S0], 0, "same length"),
        ],
    )
    def test_errors_come_before_anything_is_sent(
        self, mesh_2x2: DeviceMesh, placements: list[Placement], source: int | None, message: str
    ) -> None:
        with Sent() as sent, pytest.raises(ValueError, match=message):
            distribute_tensor(torch.ones(8, 4), mesh_2x2, placements, src_data_rank=source)
        assert not sent.calls

    def test_only_leaves_are_distributed(self, mesh_2x2: DeviceMesh) -> None:
        with pytest.raises(RuntimeError, match="non-leaf"):
            distribute_tensor(torch.ones(8, 4, requires_grad=True) + 1, mesh_2x2, [R, R])

    def test_without_placements_it_is_replicated(self, mesh_2x2: DeviceMesh) -> None:
        assert distribute_tensor(torch.ones(8, 4), mesh_2x2).placements == (R, R)

    def test_a_shard_does_not_keep_the_whole(self, mesh_2x2: DeviceMesh) -> None:
        shard = distribute_tensor(torch.ones(8, 4), mesh_2x2, [S0, S0], src_data_rank=None)
        assert shard._local_tensor.untyped_storage().nbytes() == 2 * 4 * 4

    def test_parameters_and_buffers(self, mesh_2x2: DeviceMesh) -> None:
        parameter = distribute_tensor(nn.Parameter(torch.ones(8, 4)), mesh_2x2, [S0, R])
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert type(parameter._local_tensor) is Tensor
        assert not distribute_tensor(torch.ones(8), mesh_2x2, [S0, R]).requires_grad

    def test_on_the_meta_device_nothing_is_sent(self, mesh_2x2: DeviceMesh) -> None:
        with Sent() as sent:
            dtensor = distribute_tensor(torch.ones(5, 4, device="meta"), mesh_2x2, [S0, R])
        assert not sent.calls
        assert dtensor._local_tensor.is_meta
        assert list(dtensor._local_tensor.shape) == [3, 4]

    def test_a_pending_tensor(self, mesh_2x2: DeviceMesh) -> None:
        pending = funcol.all_reduce(torch.ones(8, 4), "sum", mesh_2x2["tp"])
        assert funcol.is_pending(pending)
        shard = distribute_tensor(pending, mesh_2x2, [S0, S0], src_data_rank=None)
        assert not funcol.is_pending(shard._local_tensor)
        assert shard._local_tensor.equal(torch.ones(2, 4))

    def test_a_subclass_stays_one(self, mesh_2x2: DeviceMesh) -> None:
        class Mine(Tensor):
            pass

        dtensor = distribute_tensor(torch.ones(8, 4).as_subclass(Mine), mesh_2x2, [S0, R], src_data_rank=None)
        assert type(dtensor._local_tensor) is Mine

    def test_masked_partials_are_pytorchs(self, mesh_2x2: DeviceMesh) -> None:
        masked = _MaskPartial(
            reduce_op="sum", mask_buffer=MaskBuffer(), offset_shape=torch.Size([4, 2]), offset_dim=0
        )
        dtensor = distribute_tensor(torch.arange(4), mesh_2x2, [masked, R], src_data_rank=None)
        assert dtensor._local_tensor.tolist() == [0, 1, 0, 0]

    @pytest.mark.parametrize("name", ["mesh_scatter", "mesh_broadcast"])
    def test_a_replaced_sender_is_called(
        self, mesh_2x2: DeviceMesh, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: list[str] = []
        own: Callable[..., Any] = getattr(stock_placements, name)

        def noted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(*args, **kwargs)

        monkeypatch.setattr(stock_placements, name, noted)
        distribute_tensor(torch.ones(8, 4), mesh_2x2, [S0, R])
        assert calls == [name]
