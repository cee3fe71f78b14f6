"""Results on CUDA devices: which streams wait for what, and when memory is reused.

On a simulated GPU, an order that is missing is reported with both operations. On a real one, it is a wrong
value at times.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, run_ranks

import funcol

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_devices")]

WORLD = 2
SIZE = 64  # of both dims
NUM_THREADS = 4


def numbered(rank):
    return torch.arange(float(SIZE * SIZE), device="cuda").reshape(SIZE, SIZE) + 10_000 * rank


def all_reduced(rank, world):
    return funcol.all_reduce(numbered(rank), "sum", dist.group.WORLD)


def gathered(rank, world):
    """A result whose collective reads the input itself."""
    return funcol.all_gather_tensor(numbered(rank), 0, dist.group.WORLD)


def merged(rank, world):
    """A result with an epilogue: the gathered blocks are merged once it is waited for."""
    return funcol.all_gather_tensor(numbered(rank), 1, dist.group.WORLD)


def want(start, rank, world):
    parts = [numbered(r) for r in range(world)]
    return sum(parts) if start is all_reduced else torch.cat(parts, int(start is merged))


def overwrite(like):
    """Takes memory of that size from the current stream, as often as there may be some, and writes it."""
    return [torch.full_like(like, -1.0) for _ in range(32)]


def is_waited_for_elsewhere_and_dropped(rank, world, start):
    like = torch.empty_like(want(start, rank, world))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    result = start(rank, world)
    with torch.cuda.stream(side):
        funcol.wait_tensor(result)
    del result  # nothing but the collective itself used its memory, and that of its input
    for written in [*overwrite(like), *overwrite(like[:SIZE, :SIZE])]:
        assert torch.equal(written, torch.full_like(written, -1.0))


@pytest.mark.parametrize("start", [all_reduced, gathered], ids=lambda start: start.__name__)
def test_memory_of_a_result_waited_for_elsewhere_is_handed_out_after_the_collective(start):
    run_ranks(is_waited_for_elsewhere_and_dropped, WORLD, start)


def test_memory_of_a_merged_result_waited_for_elsewhere_is_handed_out_after_the_merge():
    run_ranks(is_waited_for_elsewhere_and_dropped, WORLD, merged)


def is_read_on_streams(rank, world, start, order):
    expected = want(start, rank, world)
    streams = {"start": torch.cuda.current_stream(), "b": torch.cuda.Stream(), "c": torch.cuda.Stream()}
    torch.cuda.synchronize()
    result = start(rank, world)
    sums = []
    for name in order:
        with torch.cuda.stream(streams[name]):
            sums.append(result + 1)
    torch.cuda.synchronize()
    for once in sums:
        assert torch.equal(once, expected + 1)


ORDERS = [("start", "b", "c"), ("b", "start"), ("b", "c", "start"), ("b", "c", "b")]


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_result_is_read_on_every_stream_after_the_collective(order):
    run_ranks(is_read_on_streams, WORLD, all_reduced, order)


@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_a_merged_result_is_read_on_another_stream_after_the_merge(order):
    run_ranks(is_read_on_streams, WORLD, merged, order)


@pytest.mark.parametrize("start", [all_reduced, gathered, merged], ids=lambda start: start.__name__)
@on_ranks(WORLD)
def test_the_memory_of_an_input_is_handed_out_after_the_collective(rank, world, start):
    expected = want(start, rank, world)
    torch.cuda.synchronize()
    result = start(rank, world)  # only funcol and the backend hold its input
    overwritten = overwrite(numbered(rank))
    assert torch.equal(result, expected)
    del overwritten


@pytest.mark.parametrize("start", [all_reduced, gathered, merged], ids=lambda start: start.__name__)
@on_ranks(WORLD)
def test_memory_of_a_result_that_nobody_waited_for_is_handed_out_after_the_collective(rank, world, start):
    torch.cuda.synchronize()
    for _ in range(3):
        start(rank, world)
        overwrite(numbered(rank))
        overwrite(want(start, rank, world))
    assert torch.equal(start(rank, world), want(start, rank, world))


@pytest.mark.parametrize("start", [all_reduced, gathered, merged], ids=lambda start: start.__name__)
@on_ranks(WORLD)
def test_a_result_started_on_a_side_stream_is_right_on_the_current_one(rank, world, start):
    expected = want(start, rank, world)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = start(rank, world)
    total = result + 1
    assert torch.equal(total, expected + 1)


@pytest.mark.parametrize("start", [all_reduced, gathered, merged], ids=lambda start: start.__name__)
@on_ranks(WORLD)
def test_a_result_is_used_by_threads_at_once_each_on_its_stream(rank, world, start):
    expected = want(start, rank, world)
    for _ in range(4):
        torch.cuda.synchronize()
        result = start(rank, world)
        view = result.t()
        arrived = threading.Barrier(NUM_THREADS)

        def use(number, result=result, view=view, arrived=arrived):
            torch.cuda.set_device(rank)
            with torch.cuda.stream(torch.cuda.Stream()):
                arrived.wait()
                return (result if number % 2 else view.t()) + number

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            sums = list(pool.map(use, range(NUM_THREADS)))
        torch.cuda.synchronize()
        for number, once in enumerate(sums):
            assert torch.equal(once, expected + number)
