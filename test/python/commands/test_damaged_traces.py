"""``python -m funcol trace`` on files that are no good traces: read, or refused in one line that names the
file and the fault."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from commands import printed_or_refused, refusal
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_settings import checked

from funcol.__main__ import main
from funcol.commands.timeline import Interval, intersect
from funcol.commands.traces import TraceError, read_trace

MISSING = object()
HUGE = 10**400


def event(**changes: Any) -> dict[str, Any]:
    known = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 1000, "dur": 4000, **changes}
    return {key: value for key, value in known.items() if value is not MISSING}


SENDING = event(cat="user_annotation", name="gloo:all_reduce", tid=2, ts=3000)


def trace(*events: Any, **others: Any) -> dict[str, Any]:
    return {"traceEvents": [event(), SENDING, *events], **others}


GOOD = json.dumps(trace()).encode()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


def refused(capsys: pytest.CaptureFixture[str], path: Path, content: Any, *options: str) -> str:
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    line = refusal(capsys, "trace", str(path), *options)
    assert line.startswith(f"python -m funcol trace: {path}: ")
    return line


# Fields of an event


@pytest.mark.parametrize("wrong", [5, None, [1], "text", True])
def test_an_event_that_is_no_object_is_named(
    capsys: pytest.CaptureFixture[str], path: Path, wrong: Any
) -> None:
    line = refused(capsys, path, trace(wrong))
    assert f"traceEvents[2] is {json.dumps(wrong)}, expected an object" in line


@pytest.mark.parametrize("key", ["ts", "tid", "name"])
def test_a_key_that_is_missing_is_named(capsys: pytest.CaptureFixture[str], path: Path, key: str) -> None:
    assert f"traceEvents[2] has no '{key}', expected" in refused(capsys, path, trace(event(**{key: MISSING})))


WRONG_KINDS = {
    "ts": ["5", None, [1], {}, True],
    "dur": ["5", None, [1], {}, True],
    "tid": [None, [1], {}, True, 1.5],
    "name": [5, None, [1], {}, True],
    "cat": [5, None, [1], {}, True],
}


@pytest.mark.parametrize(
    ("key", "wrong"), [(key, one) for key, kinds in WRONG_KINDS.items() for one in kinds]
)
def test_a_value_of_another_kind_is_named(
    capsys: pytest.CaptureFixture[str], path: Path, key: str, wrong: Any
) -> None:
    line = refused(capsys, path, trace(event(**{key: wrong})))
    assert f"'{key}' of traceEvents[2] is {json.dumps(wrong)}, expected" in line


@pytest.mark.parametrize(
    ("key", "wrong"),
    [(key, one) for key in ("ts", "dur") for one in (HUGE, -HUGE, float("nan"), float("inf"), 2**64)]
    + [("dur", -1)],
)
def test_a_time_out_of_range_is_named(
    capsys: pytest.CaptureFixture[str], path: Path, key: str, wrong: float
) -> None:
    line = refused(capsys, path, trace(event(**{key: wrong})))
    assert f"'{key}' of traceEvents[2] is " in line
    assert "expected a number from" in line


@pytest.mark.parametrize(
    ("others", "fault"),
    [
        ({"distributedInfo": None}, "'distributedInfo' of the trace is null, expected an object"),
        ({"distributedInfo": []}, "'distributedInfo' of the trace is [], expected an object"),
        ({"distributedInfo": {"rank": "a"}}, "'rank' of 'distributedInfo' is \"a\", expected"),
        ({"distributedInfo": {"rank": None}}, "'rank' of 'distributedInfo' is null, expected"),
        ({"distributedInfo": {"rank": 1.5}}, "'rank' of 'distributedInfo' is 1.5, expected"),
        ({"distributedInfo": {"rank": -1}}, "is -1, expected a number from 0 to 2147483647"),
        ({"distributedInfo": {"rank": HUGE}}, "expected a number from 0 to 2147483647"),
        ({"baseTimeNanoseconds": "1"}, "'baseTimeNanoseconds' of the trace is \"1\", expected a number"),
        ({"baseTimeNanoseconds": HUGE}, "'baseTimeNanoseconds' of the trace is 1000"),
    ],
)
def test_a_value_of_the_trace_is_named(
    capsys: pytest.CaptureFixture[str], path: Path, others: dict[str, Any], fault: str
) -> None:
    assert fault in refused(capsys, path, trace(**others))


def test_events_that_are_not_looked_at_may_hold_anything(path: Path) -> None:
    path.write_text(json.dumps(trace(event(ph="M", name=MISSING), event(dur=MISSING, ts="5"), {})))
    assert len(read_trace(path).spans) == 2


# Contents of a file

ZIPPED = gzip.compress(GOOD)


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "it is empty"),
        (GOOD[:-9], "is not valid JSON"),
        (b"\xff\xfe\xfa", "is not valid JSON"),
        (GOOD.replace(b"mm", b"\xff"), "is not valid JSON: 'utf-8' codec"),
        (GOOD.replace(b"1000", b"9" * 5000), "is not valid JSON: Exceeds the limit"),
        (b"[" * 100_000, "its JSON is nested too deeply"),
        (b'{"traceEvents":' + b"[" * 100_000, "its JSON is nested too deeply"),
        (b"null", "no list 'traceEvents'"),
        (b'{"traceEvents": {}}', "no list 'traceEvents'"),
        (ZIPPED[:-9], "gzip data is cut or damaged"),
        (ZIPPED[:2], "gzip data is cut or damaged"),
        (ZIPPED[:20] + b"\xff\xff\xff" + ZIPPED[23:], "gzip data is cut or damaged"),
        (ZIPPED + b"xx", "gzip data is cut or damaged"),
    ],
)
def test_a_file_that_is_no_trace_says_why(
    capsys: pytest.CaptureFixture[str], path: Path, content: bytes, fault: str
) -> None:
    assert fault in refused(capsys, path, content)


def test_a_value_that_is_nested_deeply_is_named_without_it(
    capsys: pytest.CaptureFixture[str], path: Path
) -> None:
    for depth in (100, 500, 900):
        nested = b"[" * depth + b"]" * depth
        assert "trace" in refused(capsys, path, GOOD.replace(b'"aten::mm"', nested))


@pytest.mark.parametrize("name", ["missing.json", "folder", "\0", "new\nline", "\ud800"])
def test_a_path_that_is_no_file_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder").mkdir()
    line = refusal(capsys, "trace", str(tmp_path / name))
    assert line.startswith(f"python -m funcol trace: {tmp_path}")
    assert "cannot be read: " in line


@pytest.mark.parametrize("zipped", [False, True])
def test_no_more_than_the_limit_is_read(capsys: pytest.CaptureFixture[str], path: Path, zipped: bool) -> None:
    content = GOOD + b" " * 5_000_000
    line = refused(capsys, path, gzip.compress(content) if zipped else content, "--max-bytes", "1000000")
    assert "it has more than 1000000 bytes" in line
    assert ("once decompressed" in line) == zipped
    assert len(read_trace(path, len(content)).spans) == 2
    with pytest.raises(TraceError, match=f"more than {len(content) - 1} bytes"):
        read_trace(path, len(content) - 1)


def test_a_file_without_an_end_is_read_to_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    assert "more than 4096 bytes" in refusal(capsys, "trace", "/dev/zero", "--max-bytes", "4096")


@pytest.mark.parametrize("limit", ["-1", "x", "9" * 5000, str(2**63), "1.5", ""])
def test_a_limit_that_is_no_number_of_bytes_is_refused(
    capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    assert "is not a number of bytes" in refusal(capsys, "trace", "t.json", f"--max-bytes={limit}")


@pytest.mark.parametrize("name", ["folder.png", "missing/t.png", "t.unknown", "\0.png"])
def test_a_picture_that_cannot_be_written_is_named(
    capsys: pytest.CaptureFixture[str], path: Path, tmp_path: Path, name: str
) -> None:
    path.write_bytes(GOOD)
    (tmp_path / "folder.png").mkdir()
    line = refusal(capsys, "trace", str(path), "--out", str(tmp_path / name))
    assert str(tmp_path) in line
    assert "cannot be written" in line


# Many spans


def rows(capsys: pytest.CaptureFixture[str], path: Path, content: Any, *options: str) -> list[list[str]]:
    path.write_text(json.dumps(content))
    main(["trace", str(path), *options])
    return [line.split() for line in capsys.readouterr().out.splitlines()[1:]]


@pytest.mark.parametrize("name", ["aten::", "other::"])
@pytest.mark.parametrize(
    "length", [lambda place: 40_000 - 2 * place, lambda _: 30_000], ids=["nested", "overlapping"]
)
def test_spans_inside_and_across_each_other_are_read_in_any_number(
    capsys: pytest.CaptureFixture[str], path: Path, name: str, length: Any
) -> None:
    spans = [event(name=f"{name}{place}", ts=place, dur=length(place)) for place in range(20_000)]
    # The last one is inside all others, none of which then computes as a whole.
    [row] = rows(capsys, path, {"traceEvents": [*spans, event(name="other::x", ts=20_000, dur=1000)]})
    assert row[2] == "1.0"


def test_steps_in_any_number_are_looked_at(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    steps = [event(cat="user_annotation", name="step", ts=10_000 * place, dur=5000) for place in range(8000)]
    across = [event(name="other::x", ts=place, dur=80_000_000 - place) for place in range(2000)]
    [row] = rows(capsys, path, {"traceEvents": [*steps, *across]}, "--during", "step")
    assert float(row[2]) == pytest.approx(8000 * 5, rel=1e-3)


class CountedReads(list[Interval]):
    """Intervals that count how often one of them is read."""

    num_reads = 0

    def __getitem__(self, place: Any) -> Any:
        self.num_reads += 1
        return super().__getitem__(place)


@pytest.mark.parametrize("count", [10, 1000])
def test_a_sweep_reads_each_interval_a_fixed_number_of_times(count: int) -> None:
    others = CountedReads((10 * place, 10 * place + 5) for place in range(count))
    intervals = [(10 * place + 2, 10 * place + 9) for place in range(count)]
    assert len(list(intersect(intervals, others))) == count
    assert others.num_reads <= 5 * count


# Any damage


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(HUGE),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
KEYS = ("ph", "cat", "name", "tid", "ts", "dur", "traceEvents", "distributedInfo", "baseTimeNanoseconds")


@checked(300)
@given(value=VALUES, key=st.sampled_from(KEYS), place=st.integers(0, 3))
def test_any_value_in_any_place_is_read_or_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, value: Any, key: str, place: int
) -> None:
    content: Any = trace(distributedInfo={"rank": 1})
    changed = [content, content["distributedInfo"], *content["traceEvents"]][place]
    changed["rank" if place == 1 else key] = value
    path = tmp_path / "t.json"
    path.write_text(json.dumps(content))
    assert_read_or_named(capsys, path)


@checked(300)
@given(
    damage=st.binary(max_size=4), at=st.integers(0, len(GOOD)), cut=st.integers(0, 8), zipped=st.booleans()
)
@example(damage=b"", at=0, cut=8, zipped=True)
@example(damage=b"\x1f\x8b", at=0, cut=0, zipped=False)
def test_any_bytes_in_any_place_are_read_or_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, damage: bytes, at: int, cut: int, zipped: bool
) -> None:
    good = ZIPPED if zipped else GOOD
    at %= len(good)
    path = tmp_path / "t.json"
    path.write_bytes(good[:at] + damage + good[at + cut :])
    assert_read_or_named(capsys, path)


def assert_read_or_named(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    line = printed_or_refused(capsys, "trace", str(path))
    assert line is None or line.startswith(f"python -m funcol trace: {path}: ")
