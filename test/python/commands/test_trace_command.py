"""``python -m funcol trace``: what computes, what communicates, and what of it nothing hid."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from slow_collectives import SlowCollective
from torch.profiler import ProfilerActivity, profile, record_function

import funcol
from funcol.__main__ import main
from funcol.commands.timeline import Activity, activity, length, merge_spans, subtract
from funcol.commands.traces import Span, read_trace, trace_of

Event = tuple[str, str, int, float, float]  # category, name, thread, begin and end in ms


def trace(events: Sequence[Event], rank: int | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {
        "traceEvents": [
            {
                "ph": "X",
                "cat": kind,
                "name": name,
                "tid": thread,
                "ts": 1e3 * begin,
                "dur": 1e3 * (end - begin),
            }
            for kind, name, thread, begin, end in events
        ]
    }
    return content if rank is None else content | {"distributedInfo": {"rank": rank}}


def of(*events: Event, during: str | None = None) -> Activity:
    return activity(trace_of(trace(events)), 0, during)


def op(name: str, begin: float, end: float, thread: int = 1) -> Event:
    return ("cpu_op", name, thread, begin, end)


def gloo(begin: float, end: float) -> Event:
    return ("user_annotation", "gloo:all_reduce", 2, begin, end)


# Intervals


def test_spans_that_touch_are_one_interval() -> None:
    spans = [Span("", 4, 6), Span("", 0, 2), Span("", 2, 3), Span("", 5, 9)]
    assert merge_spans(spans) == [(0, 3), (4, 9)]


@pytest.mark.parametrize(
    ("others", "left"),
    [
        ([], [(0, 4), (6, 8)]),
        ([(1, 2)], [(0, 1), (2, 4), (6, 8)]),
        ([(3, 7)], [(0, 3), (7, 8)]),
        ([(0, 1), (2, 3), (5, 9)], [(1, 2), (3, 4)]),
        ([(-1, 10)], []),
    ],
)
def test_intervals_without_others_are_what_is_left(others: list[Any], left: list[Any]) -> None:
    assert subtract([(0, 4), (6, 8)], others) == left


# Hosts


def test_communication_beside_an_operator_is_hidden_and_the_rest_is_bare() -> None:
    found = of(op("aten::mm", 0, 4), gloo(2, 10), op("aten::add", 8, 9))
    assert found.sending == [(2, 10)]
    assert found.exposed == [(4, 8), (9, 10)]


def test_the_time_in_which_an_operator_waits_is_no_compute() -> None:
    found = of(op("aten::add", 0, 10), op("funcol::wait", 1, 6), gloo(0, 6))
    assert found.compute == [(0, 1), (6, 10)]
    assert found.exposed == [(1, 6)]


def test_operators_inside_an_operator_are_part_of_it() -> None:
    assert of(op("aten::mm", 0, 10), op("aten::resolve_conj", 1, 2)).compute == [(0, 10)]


def test_of_an_operator_on_dtensors_the_local_one_computes() -> None:
    found = of(op("aten::matmul", 0, 20), op("aten::mm", 0, 18), op("aten::mm", 7, 16))
    assert found.compute == [(7, 16)]


def test_starting_a_collective_is_no_compute() -> None:
    found = of(
        op("_c10d_functional::all_reduce", 0, 9), op("aten::clone", 1, 3), op("c10d::allreduce_", 4, 8)
    )
    assert found.compute == [(1, 3)]


# Devices


def test_on_a_device_kernels_compute_and_nccls_communicate() -> None:
    found = of(
        op("aten::mm", 0, 9),
        ("kernel", "gemm", 7, 10, 14),
        ("gpu_memcpy", "Memcpy DtoD", 7, 15, 16),
        ("kernel", "ncclDevKernel_AllReduce_Sum", 20, 12, 18),
    )
    assert found.compute == [(10, 14), (15, 16)]
    assert found.exposed == [(14, 15), (16, 18)]


# Parts of a trace


def test_only_what_is_within_the_named_spans_counts() -> None:
    step = ("user_annotation", "ProfilerStep#3", 1, 5.0, 10.0)
    found = of(op("aten::mm", 0, 7), gloo(4, 20), step, during="ProfilerStep")
    assert (length(found.compute), found.sending) == (2, [(5, 10)])


def test_spans_that_are_not_there_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"no span of the trace of rank 0 .* starts with 'step'"):
        of(op("aten::mm", 0, 7), during="step")


def test_a_trace_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="has neither operators nor collectives"):
        of(("user_annotation", "step", 1, 0.0, 1.0))


# The command


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Traces of ranks 1 and 0, one of them compressed."""
    first, second = tmp_path / "a.json", tmp_path / "b.json.gz"
    first.write_text(json.dumps(trace([op("aten::mm", 0, 4), gloo(2, 10)], rank=1)))
    second.write_bytes(gzip.compress(json.dumps(trace([op("aten::mm", 0, 8), gloo(0, 8)], rank=0)).encode()))
    return [str(first), str(second)]


def test_the_command_has_a_row_a_rank_and_the_mean(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["trace", *files])
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split("  ")[0] == "rank"
    assert [row.split() for row in rows] == [
        ["0", "8.0", "8.0", "8.0", "0.0", "0%"],
        ["1", "10.0", "4.0", "8.0", "6.0", "75%"],
        ["mean", "9.0", "6.0", "8.0", "3.0", "38%"],
    ]


def test_a_rank_that_sends_nothing_has_no_share(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(trace([op("aten::mm", 0, 4)])))
    main(["trace", str(path)])
    assert capsys.readouterr().out.splitlines()[1].split() == ["0", "4.0", "4.0", "0.0", "0.0", "-"]


@pytest.mark.parametrize(("name", "beginning"), [("t.png", b"\x89PNG"), ("t.svg", b"<?xml")])
def test_the_command_draws(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, beginning: bytes
) -> None:
    main(["trace", *files, "--out", str(tmp_path / name)])
    assert capsys.readouterr().out.splitlines()[-1] == f"drawn in {tmp_path / name}"
    assert (tmp_path / name).read_bytes().startswith(beginning)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("[]", "no list 'traceEvents'"),
        ('{"traceEvents": []}', "has neither operators"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, message: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    error = refused(capsys, str(path))
    assert message in error
    assert str(path) in error


def test_without_matplotlib_drawing_is_refused(
    files: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "needs matplotlib" in refused(capsys, *files, "--out", "t.png")


# A profile of gloo ranks


def profiled(rank: int, world: int, folder: str) -> None:
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("step"):
        big = torch.ones(1 << 20)
        total = funcol.all_reduce(big, "sum", dist.group.WORLD)
        product = torch.ones(128, 128) @ torch.ones(128, 128)
        assert (total + 1).sum() + product.sum() > 0
    profiler.export_chrome_trace(f"{folder}/trace-{rank}.json")


def test_a_profile_has_compute_and_communication(tmp_path: Path) -> None:
    run_ranks(profiled, 2, str(tmp_path))
    for rank in range(2):
        content = json.loads((tmp_path / f"trace-{rank}.json").read_text())
        found = activity(trace_of(content), 7, "step")
        assert found.rank == rank
        assert [span.name for span in found.communication] == ["gloo:all_reduce"]
        assert 0 <= length(found.exposed) <= length(found.sending)
        assert length(found.compute) > 0


def test_a_profile_tells_a_wait_from_the_operator_that_it_is_part_of(tmp_path: Path) -> None:
    slow = SlowCollective(torch.full((3,), 7.0))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        result = slow.tensor + 1
    assert result.tolist() == [8, 8, 8]
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    spans = read_trace(tmp_path / "trace.json").spans
    [wait] = [span for span in spans if span.name == "funcol::wait"]
    assert any(wait.starts_in(span) for span in spans if span.name == "aten::add")


def test_a_profile_with_shapes_has_those_of_the_operator_that_waits() -> None:
    slow = SlowCollective(torch.full((3, 2), 7.0))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        result = slow.tensor + torch.ones(2)
    assert result.tolist() == [[8, 8]] * 3
    [added] = [event for event in profiler.events() if event.name == "aten::add"]
    assert added.input_shapes == [[3, 2], [2], []]
