"""Right programs of several streams, and the same without one order: values, and what is reported."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from simulated_gpu_programs.reports import take_reports

ROUNDS = 8


def read_on_another_stream(is_ordered: bool) -> float:
    """Returns the number of additions that the other stream saw, of 4."""
    side = torch.cuda.Stream()
    data = torch.zeros(256, device="cuda")
    torch.cuda.synchronize()
    for _ in range(4):
        data.add_(1)
    if is_ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        seen = data * 1
    torch.cuda.current_stream().wait_stream(side)
    return seen.sum().item() / 256


def reuse_of_memory(is_ordered: bool) -> float:
    """2, unless the next owner of the memory writes before the other stream reads."""
    side = torch.cuda.Stream()
    data = torch.ones(1 << 16, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = data * 2
    if is_ordered:
        data.record_stream(side)
    del data
    torch.full((1 << 16,), 7.0, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    return doubled.mean().item()


def write_of_rows(is_ordered: bool) -> float:
    """Two streams write to one tensor: to different columns if ordered, else to the same ones."""
    side = torch.cuda.Stream()
    data = torch.zeros(8, 8, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    data[:, :4].fill_(1)
    with torch.cuda.stream(side):
        (data[:, 4:] if is_ordered else data[:, 3:]).fill_(2)
    torch.cuda.current_stream().wait_stream(side)
    data.record_stream(side)
    return data[:, 0].mean().item()


def copy_to_the_host(is_ordered: bool) -> float:
    """The copy on a side stream reads what the current stream writes."""
    side = torch.cuda.Stream()
    data, target = torch.zeros(64, device="cuda"), torch.zeros(64).pin_memory()
    torch.cuda.synchronize()
    data.fill_(1)
    if is_ordered:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        target.copy_(data, non_blocking=True)
    torch.cuda.synchronize()
    return target.mean().item()


def copy_from_the_host(is_ordered: bool) -> float:
    """The program writes to pinned memory before the copy from there has run, unless it waits."""
    source, target = torch.ones(64).pin_memory(), torch.zeros(64, device="cuda")
    torch.cuda.synchronize()
    target.add_(0)
    target.copy_(source, non_blocking=True)
    if is_ordered:
        torch.cuda.current_stream().synchronize()
    source.fill_(2)
    return target.mean().item()


def use_of_a_collective(is_ordered: bool) -> float:
    """Another stream than NCCL's reads the result, after the watchdog of the group has looked at it.

    It looks once a second, and PyTorch's wait() does nothing once it has seen the end.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    data = torch.ones(256, device="cuda")
    work = dist.all_reduce(data, async_op=True)
    time.sleep(2.5)
    if is_ordered:
        work.wait()
    seen = data * 3
    value = seen.mean().item()
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return value


def is_right(program: Callable[[bool], float], value: float) -> None:
    """All rounds give the value; whatever is reported fails the check."""
    num_rounds = 2 if program is use_of_a_collective else ROUNDS
    assert [program(True) for _ in range(num_rounds)] == [value] * num_rounds


def is_reported(program: Callable[[bool], float]) -> None:
    """The first round already: a report needs no unlucky order. It names the program's line."""
    program(False)
    torch.cuda.synchronize()
    reports = take_reports()
    assert "race" in reports, reports
    assert f"in {program.__name__}" in reports, reports


def uninitialized_memory_shows() -> None:
    assert torch.empty(8, device="cuda").sum().isnan().item()


PROGRAMS = {
    read_on_another_stream: 4.0,
    reuse_of_memory: 2.0,
    write_of_rows: 1.0,
    copy_to_the_host: 1.0,
    copy_from_the_host: 1.0,
    use_of_a_collective: 3.0,
}

CHECKS: dict[str, Callable[[], None]] = {
    "uninitialized_memory_shows": uninitialized_memory_shows,
    **{
        f"{program.__name__} is right": functools.partial(is_right, program, value)
        for program, value in PROGRAMS.items()
    },
    **{f"{program.__name__} is reported": functools.partial(is_reported, program) for program in PROGRAMS},
}
