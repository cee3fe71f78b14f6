"""The model of time behind tools/bench/bench_gpu_timeline.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu_replay import Call, Machine, Mark, Operation, Replay, Step, main_stream, read_trace, shares

BENCH = Path(__file__).resolve().parents[3] / "tools" / "bench"

US = 1000

# A kernel takes 1 us, and 1 us for each MB that it reads or writes; a launch takes 2 us of the host's time.
MACHINE = Machine(
    matrix_tflops={"Float": 1.0},
    memory_gb_per_s=1000.0,
    host_copy_gb_per_s=10.0,
    collective_gb_per_s=100.0,
    collective_latency_us=10.0,
    kernel_latency_us=1.0,
    launch_latency_us=0.0,
    launch_us={"kernel": 2.0, "collective": 2.0, "copy": 2.0},
)

MB = 1_000_000


def replayed(*calls: Call) -> Step:
    """One step, whose calls are given."""
    events = [Mark("begin", 0), *calls, Mark("end", calls[-1].begin)]
    return Replay(MACHINE).run(events).steps[0]


def times(step: Step) -> list[tuple[float, float]]:
    """Of operations that take time, in us."""
    return [
        (round(ran.begin * US, 6), round(ran.end * US, 6))
        for ran in step.ran
        if ran.operation.kind != "order"
    ]


def calls_of(*issued: Operation, own_us: int = 0) -> list[Call]:
    """Calls of an operation each, 100 us apart, of which the host has worked so long."""
    return [Call(100 * US * i, own_us * US, (operation,)) for i, operation in enumerate(issued)]


def test_a_call_costs_the_hosts_own_time_and_a_launch() -> None:
    calls = calls_of(Operation(1, 1), Operation(1, 2), own_us=10)
    assert times(replayed(*calls)) == [(12, 13), (24, 25)]


def test_a_stream_runs_one_operation_after_the_other() -> None:
    calls = calls_of(Operation(1, 1, read=20 * MB), Operation(1, 2))
    assert times(replayed(*calls)) == [(2, 23), (23, 24)]


def test_streams_run_beside_each_other() -> None:
    calls = calls_of(Operation(1, 1, read=20 * MB), Operation(2, 1))
    assert times(replayed(*calls)) == [(2, 23), (4, 5)]


def test_an_operation_begins_when_all_that_it_comes_after_is_over() -> None:
    calls = calls_of(
        Operation(1, 1, read=20 * MB),
        Operation(2, 1, kind="order", after=((1, 1),)),
        Operation(2, 2),
    )
    assert times(replayed(*calls)) == [(2, 23), (23, 24)]


def test_a_collective_takes_its_latency_and_the_time_of_what_it_sends() -> None:
    gather = Operation(1, 1, kind="collective", name="nccl all_gather", read=MB, written=4 * MB, ranks=4)
    reduction = Operation(1, 1, kind="collective", name="nccl all_reduce", read=MB, written=MB, ranks=4)
    assert MACHINE.duration(gather) * US == pytest.approx(10 + 30)
    assert MACHINE.duration(reduction) * US == pytest.approx(10 + 15)


def test_a_matrix_product_takes_the_longer_of_arithmetic_and_memory() -> None:
    assert MACHINE.duration(Operation(1, 1, flops=30 * MB, type="Float", read=MB)) * US == pytest.approx(31)
    assert MACHINE.duration(Operation(1, 1, flops=MB, type="Float", read=30 * MB)) * US == pytest.approx(31)


def test_the_host_waits_for_what_it_synchronizes_with() -> None:
    first = Call(0, 0, (Operation(1, 1, read=20 * MB),), waits=((1, 1),))
    second = Call(50 * US, 0, (Operation(1, 2),))
    step = replayed(first, second)
    assert times(step) == [(2, 23), (25, 26)]
    assert step.host_time() * US == pytest.approx(4)


def test_poison_takes_no_time_at_all() -> None:
    calls = calls_of(Operation(1, 1, kind="poison", written=50 * MB), Operation(1, 2))
    assert times(replayed(*calls)) == [(2, 3)]


def test_what_lies_between_steps_costs_nothing() -> None:
    between = Call(10 * US, 10 * US, (Operation(1, 1, read=50 * MB),), waits=((1, 1),))
    events = [Mark("begin", 0), Mark("end", 0), between, Mark("begin", 950 * US)]
    inside = Call(951 * US, US, (Operation(1, 2, after=((1, 1),)),))
    steps = Replay(MACHINE).run([*events, inside, Mark("end", 990 * US)]).steps
    assert times(steps[1]) == [(3, 4)]


def test_a_step_is_split_into_computing_and_the_two_kinds_of_waiting() -> None:
    """A kernel, a collective, and a kernel that waits for it; the host is 100 us late with the last."""
    events: list[Call | Mark] = []
    for step in range(2):
        begin = 1000 * step * US
        number = 3 * step
        gather = Operation(2, step + 1, "collective", "nccl all_gather", read=0, written=4 * MB, ranks=4)
        after = ((2, step + 1),)
        events += [
            Mark("begin", begin),
            Call(begin, 0, (Operation(1, number + 1, read=9 * MB),)),
            Call(begin + 1, 0, (gather, Operation(1, number + 2, "order", after=after))),
            Call(begin + 2, 100 * US, (Operation(1, number + 3),)),
            Mark("end", begin + 3),
        ]
    steps = Replay(MACHINE).run(events).steps
    assert main_stream(steps) == 1
    (share,) = shares(steps)
    assert share.host * US == pytest.approx(106)
    assert share.computes * US == pytest.approx(10 + 1)
    # The first kernel ends at 2 + 10, the collective at 4 + 40, the last kernel is issued at 106.
    assert share.waits_for_streams * US == pytest.approx(44 - 12)
    assert share.step * US == pytest.approx(106)
    assert share.waits_for_host * US == pytest.approx(106 - 11 - 32)


def test_a_trace_file_is_read_in_the_order_of_time(tmp_path: Path) -> None:
    operation: dict[str, Any] = {
        "device": 0,
        "stream": 2,
        "number": 5,
        "name": "aten::mm#1",
        "kind": "kernel",
        "after": [[1, 4]],
        "read": 8,
        "written": 4,
        "host": 0,
        "flops": 16,
        "type": "Float",
        "ranks": 0,
    }
    lines = [
        {"thread": 7, "issued": [operation], "waits": [[2, 5]], "own": 9, "begin": 30, "end": 40},
        {"mark": "begin", "begin": 10},
    ]
    path = tmp_path / "trace"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = Operation(2, 5, "kernel", "aten::mm#1", ((1, 4),), read=8, written=4, flops=16, type="Float")
    assert read_trace(path) == [Mark("begin", 10), Call(30, 9, (expected,), ((2, 5),))]


def test_the_numbers_of_the_node_are_there() -> None:
    machine = Machine.read(BENCH / "h100_node.json")
    assert machine.duration(Operation(1, 1, flops=10**12, type="BFloat16")) > 1.0
