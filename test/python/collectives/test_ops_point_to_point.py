"""``torch.ops.funcol``: isend, irecv and batches of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from differential import assert_same, sample, world_group
from ranks import device_type, on_ranks

import funcol

ON_DEVICES = True

ops = torch.ops.funcol


def name() -> str:
    return world_group().group_name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int64], ids=str)
@pytest.mark.parametrize("namespace", ["funcol", "_c10d_functional"])
@on_ranks(2, timeout=20)
def test_isend_reaches_irecv(rank: int, world: int, namespace: str, dtype: torch.dtype) -> None:
    space = getattr(torch.ops, namespace)
    if rank == 0:
        sent = space.isend(sample(0, (5, 3), dtype), 1, 7, name())
        assert sent.numel() == 0
        assert sent.dtype == dtype
        funcol.wait_tensor(sent)
    else:
        buffer = sample(1, (5, 3), dtype)
        received = space.irecv(buffer, 0, 7, name())
        funcol.wait_tensor(received)
        assert received.data_ptr() == buffer.data_ptr()
        assert_same(received, sample(0, (5, 3), dtype))
        assert_same(buffer, sample(0, (5, 3), dtype))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int16, torch.float8_e4m3fn], ids=str)
@on_ranks(2, timeout=20)
def test_isend_reaches_irecv_for_dtypes_that_gloo_does_not_know(
    rank: int, world: int, dtype: torch.dtype
) -> None:
    x = sample(rank, (8, 3), torch.uint8).to(dtype)
    if rank == 0:
        funcol.wait_tensor(ops.isend(x, 1, 0, name()))
    else:
        received = ops.irecv(x, 0, 0, name())
        expected = sample(0, (8, 3), torch.uint8).to(dtype)
        assert received.dtype == dtype
        assert torch.equal(received.view(torch.uint8), expected.view(torch.uint8))


@on_ranks(2, timeout=20)
def test_isend_takes_a_tensor_of_any_strides(rank: int, world: int) -> None:
    if rank == 0:
        funcol.wait_tensor(ops.isend(sample(0, (4, 6)).t()[::2], 1, 0, name()))
    else:
        received = ops.irecv(torch.empty(3, 4), 0, 0, name())
        assert torch.equal(received, sample(0, (4, 6)).t()[::2])


@pytest.mark.cpu_only  # NCCL has no tags: the first send meets the first receive
@on_ranks(2, timeout=20)
def test_a_tag_pairs_a_send_with_its_receive(rank: int, world: int) -> None:
    if rank == 0:
        works = [ops.isend(torch.tensor([float(tag)]), 1, tag, name()) for tag in (1, 2)]
        funcol.wait_tensors(works)
    else:
        second = ops.irecv(torch.empty(1), 0, 2, name())
        first = ops.irecv(torch.empty(1), 0, 1, name())
        assert (first.item(), second.item()) == (1.0, 2.0)


@on_ranks(2, timeout=20)
def test_receives_in_the_order_of_sending_may_be_waited_for_in_any_order(rank: int, world: int) -> None:
    if rank == 0:
        works = [ops.isend(torch.tensor([float(tag)]), 1, tag, name()) for tag in (1, 2)]
        funcol.wait_tensors(works)
    else:
        first, second = (ops.irecv(torch.empty(1), 0, tag, name()) for tag in (1, 2))
        assert (second.item(), first.item()) == (2.0, 1.0)


def before_anything_is_on_its_way() -> None:
    """Both ranks come here before the send, and after the receive was started.

    Not over NCCL, whose first receive from a rank returns once that rank sends.
    """
    if device_type() == "cpu":
        dist.barrier()


@on_ranks(2, timeout=20)
def test_waiting_for_the_buffer_of_an_irecv_is_enough(rank: int, world: int) -> None:
    if rank == 0:
        before_anything_is_on_its_way()
        funcol.wait_tensor(ops.isend(torch.ones(3), 1, 0, name()))
    else:
        buffer = torch.zeros(3)
        ops.irecv(buffer, 0, 0, name())
        before_anything_is_on_its_way()
        assert ops.wait_tensor(buffer) is buffer
        assert buffer.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("result_first", [True, False])
@on_ranks(2, timeout=20)
def test_the_result_and_the_buffer_of_an_irecv_may_both_be_waited_for(
    rank: int, world: int, result_first: bool
) -> None:
    if rank == 0:
        before_anything_is_on_its_way()
        funcol.wait_tensor(ops.isend(torch.ones(3), 1, 0, name()))
    else:
        buffer = torch.zeros(3)
        received = ops.irecv(buffer, 0, 0, name())
        before_anything_is_on_its_way()
        for tensor in (received, buffer) if result_first else (buffer, received):
            assert funcol.wait_tensor(tensor).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("num_elements", [4, 0])
@pytest.mark.parametrize(
    ("namespace", "dtype"),
    [
        *(("funcol", dtype) for dtype in (torch.float32, torch.bool, torch.complex64)),
        # PyTorch's own hands complex numbers to gloo, which does not know them.
        *(("_c10d_functional", dtype) for dtype in (torch.float32, torch.bool)),
    ],
    ids=str,
)
@on_ranks(2, timeout=20)
def test_a_batch_sends_and_receives(
    rank: int, world: int, namespace: str, dtype: torch.dtype, num_elements: int
) -> None:
    peer, shape = 1 - rank, (num_elements,)
    buffer = torch.empty(shape, dtype=dtype)
    sent, received = getattr(torch.ops, namespace).batch_p2p_ops(
        ["isend", "irecv"], [peer, peer], [3, 3], [sample(rank, shape, dtype), buffer], name()
    )
    funcol.wait_tensors([sent, received])
    assert sent.numel() == 0
    assert_same(received, sample(peer, shape, dtype))
    assert_same(buffer, sample(peer, shape, dtype))


@on_ranks(2, timeout=20)
def test_isend_of_nothing_reaches_irecv(rank: int, world: int) -> None:
    if rank == 0:
        funcol.wait_tensor(ops.isend(torch.empty(0, 3), 1, 0, name()))
    else:
        received = funcol.wait_tensor(ops.irecv(torch.empty(0, 3), 0, 0, name()))
        assert received.shape == (0, 3)


@on_ranks(1, timeout=20)
def test_a_batch_of_nothing_is_nothing(rank: int, world: int) -> None:
    assert list(ops.batch_p2p_ops([], [], [], [], name())) == []
