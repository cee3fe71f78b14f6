"""Pending results in checkpoints, autocast, replicas, files, queues and CUDA streams."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import device_type, forking_context, on_ranks
from slow_collectives import SlowCollective, make_pending, same, values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import funcol

each_world = pytest.mark.parametrize("world", [1, 2])


def scaled_by_its_sum(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.all_reduce(t.detach(), "sum", group).t() * t.t()


@pytest.mark.on_devices_too
@each_world
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("of_pending", [False, True])
@on_ranks()
def test_a_checkpointed_function_runs_its_collectives_again(
    rank: int, world: int, use_reentrant: bool, of_pending: bool
) -> None:
    group = world_group()

    def gradients(run: Callable[..., Tensor], is_pending: bool) -> list[Any]:
        x = torch.full((2, 3), rank + 1.0, requires_grad=True)
        scale = torch.full((2, 3), 2.0)
        if is_pending:
            scale = funcol.all_reduce(torch.full((2, 3), 2.0 / world), "sum", group)
            assert funcol.is_pending(scale)
        result = run(lambda x, scale: scaled_by_its_sum(x * scale, group).sin(), x, scale)
        result.sum().backward()
        return [result.tolist(), x.grad.tolist()]

    def checkpointed(*args: Any) -> Tensor:
        return checkpoint(*args, use_reentrant=use_reentrant)

    plain = gradients(lambda function, *args: function(*args), False)
    assert gradients(checkpointed, of_pending) == plain


@pytest.mark.on_devices_too
@each_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks()
def test_autocast_casts_a_pending_operand_as_a_plain_one(rank: int, world: int, dtype: torch.dtype) -> None:
    x = (torch.arange(12, dtype=dtype).reshape(3, 4) / 8 + rank).requires_grad_(False)
    reduced = funcol.all_reduce(x, "sum", world_group())
    plain = funcol.wait_tensor(funcol.all_reduce(x, "sum", world_group())).clone()
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        expected = plain @ plain.t()
        assert funcol.is_pending(reduced)
        product = reduced @ reduced.t()
        again = funcol.all_reduce(product, "sum", world_group())
    assert product.dtype == torch.bfloat16
    assert same(product, expected)
    assert again.dtype == torch.bfloat16
    assert same(again, expected * world)


class Scaled(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() * self.scale.sum()


@pytest.mark.parametrize("copy_module", [copy.deepcopy, lambda module: module], ids=["copied", "shared"])
def test_replicas_in_threads_may_have_pending_weights_buffers_and_inputs(
    copy_module: Callable[[nn.Module], nn.Module],
) -> None:
    weight, scale, inputs = values(), torch.tensor([1.0, 2.0]), torch.arange(32.0).reshape(8, 4)
    expected = Scaled(weight, scale)(inputs)
    module = Scaled(SlowCollective(weight).tensor, SlowCollective(scale).tensor)
    replicas = [copy_module(module) for _ in range(4)]
    chunks = SlowCollective(inputs).tensor.chunk(4)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda replica, chunk: replica(chunk), replicas, chunks))
    assert same(torch.cat(outputs), expected)


def test_a_state_dict_of_pending_tensors_is_saved_with_its_data() -> None:
    module = Scaled(SlowCollective(values()).tensor, SlowCollective(torch.ones(2)).tensor)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert same(loaded["weight"], values())
    assert same(loaded["scale"], torch.ones(2))


def send_back(queue: Any, answers: Any) -> None:
    answers.put(queue.get().tolist())


def test_a_queue_gives_another_process_the_data() -> None:
    context = forking_context()
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=send_back, args=(queue, answers), daemon=True)
    process.start()
    try:
        queue.put(SlowCollective(values()).tensor.t())
        assert answers.get(timeout=60) == values().t().tolist()
    finally:
        process.kill()
        process.join()


# CUDA streams


@pytest.fixture
def slow_on_device() -> tuple[Tensor, Tensor]:
    """Returns a pending tensor whose data arrives on the device a while after its wait, and that data."""
    expected = torch.arange(1 << 16, device="cuda", dtype=torch.float32)
    buffer = torch.full_like(expected, float("nan"))

    def arrive() -> None:
        torch.cuda._sleep(100_000_000)
        buffer.copy_(expected)

    return make_pending([buffer], arrive)[0], expected


@pytest.mark.cuda
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(256, 256).t()], ids=["itself", "view"])
def test_a_result_crosses_streams_as_a_plain_tensor_does(
    slow_on_device: tuple[Tensor, Tensor], view: Callable[[Tensor], Tensor]
) -> None:
    result, expected = slow_on_device
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        used = view(result) + 1
    second.wait_stream(first)
    with torch.cuda.stream(second):
        again = view(result) + used
    second.synchronize()
    assert torch.equal(again, 2 * view(expected) + 1)


@pytest.mark.cuda
@pytest.mark.on_devices_too
@each_world
@on_ranks()
def test_results_started_on_some_streams_are_used_on_another(rank: int, world: int) -> None:
    group = world_group()
    x = torch.full((1 << 20,), rank + 1.0, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            results.append(funcol.all_reduce(x * (i + 1), "sum", group))
            funcol.all_reduce(x, "sum", group)  # dropped, while others use the memory around it
    with torch.cuda.stream(streams[0]):
        sums = [result.sum() for result in reversed(results)]
    streams[0].synchronize()
    size = (1 << 20) * sum(range(1, world + 1))
    assert [s.item() for s in sums] == [size * (i + 1) for i in reversed(range(4))]
