"""Traces of torch.profiler: spans of time, what computes and what communicates, and bars of a picture."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Interval = tuple[float, float]


@dataclass
class Span:
    """An event on one thread of a rank, or on one stream of a device, in ms since the epoch."""

    kind: str
    start: float
    end: float
    thread: int | str = 0
    name: str = ""

    def starts_in(self, other: Span) -> bool:
        return other.start <= self.start < other.end


def read_trace(path: str | Path) -> dict[str, Any]:
    """The content of a trace file, which may be compressed (``.gz``). ``ValueError`` if it is no trace."""
    data = Path(path).read_bytes()
    try:
        content = json.loads(gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data)
    except (ValueError, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is no JSON: {error}.") from None
    if not isinstance(content, dict) or not isinstance(content.get("traceEvents"), list):
        raise ValueError(
            f"{path} has no list 'traceEvents'. Pass what export_chrome_trace() of torch.profiler wrote."
        )
    return content


def spans_of(trace: dict[str, Any]) -> list[Span]:
    """All spans of a trace, the outer before the inner; ``kind`` is the profiler's category."""
    base_us = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and "dur" in event]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    spans = []
    for event in events:
        start = (event["ts"] + base_us) / 1000
        end = start + event["dur"] / 1000
        spans.append(Span(event.get("cat", ""), start, end, event["tid"], event["name"]))
    return spans


def read_spans(path: str | Path) -> list[Span]:
    """:func:`spans_of` the trace in a file."""
    return spans_of(read_trace(path))


# Intervals


def merged(spans: Iterable[Span]) -> list[Interval]:
    """The time that any of ``spans`` covers, as intervals that do not overlap, in order."""
    intervals: list[Interval] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((start, end))
    return intervals


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def common(span: Interval, others: Sequence[Interval]) -> float:
    """Length of ``span`` that lies in ``others``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of ``intervals`` lies outside of ``others``; both in order, neither overlapping itself."""
    left: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(others) and others[first][1] <= start:
            first += 1
        place = first
        while place < len(others) and others[place][0] < end:
            if others[place][0] > start:
                left.append((start, others[place][0]))
            start = max(start, others[place][1])
            place += 1
        if start < end:
            left.append((start, end))
    return left


# What a rank does

_OF_DEVICES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_BACKENDS_OF_HOSTS = ("gloo:", "mpi:", "ucc:")
_OF_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional", "funcol::")
_WAITS = ("funcol::wait", "_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")


@dataclass
class Activity:
    """What one rank does: it computes, sends, or waits for what is sent. Intervals in order, in ms."""

    rank: int
    compute: list[Interval]
    communication: list[Span]
    waits: list[Interval]

    @property
    def bounds(self) -> Interval:
        every = [*self.compute, *self.sending, *self.waits]
        return min(start for start, _ in every), max(end for _, end in every)

    @property
    def sending(self) -> list[Interval]:
        """When any collective runs."""
        return merged(self.communication)

    @property
    def bare(self) -> list[Interval]:
        """When collectives run and nothing is computed: communication that nothing hides."""
        return without(self.sending, self.compute)


def activity(trace: dict[str, Any], rank: int, during: str | None = None) -> Activity:
    """What the rank of a trace does, within the spans whose names start with ``during``, or at any time.

    ``rank`` is its number where the trace does not tell it. On a device, its kernels and copies compute, and
    kernels of NCCL communicate. Of a trace without a device, operators compute, but for the time in which
    they wait for a collective, and the calls of gloo's threads communicate. ``ValueError`` if nothing of all
    this is in the trace.
    """
    rank = trace.get("distributedInfo", {}).get("rank", rank)
    spans = spans_of(trace)
    chosen = spans
    if during is not None:
        outer = merged(span for span in spans if span.name.startswith(during))
        if not outer:
            raise ValueError(f"no span of the trace of rank {rank} has a name that starts with '{during}'.")
        chosen = [_cut(span, within) for span in spans for within in outer if _meet(span, within)]
    on_devices = [span for span in chosen if span.kind in _OF_DEVICES]
    if on_devices:
        communication = [span for span in on_devices if span.name.startswith("nccl")]
        compute, waits = merged(span for span in on_devices if not span.name.startswith("nccl")), []
    else:
        communication = [span for span in chosen if span.name.startswith(_BACKENDS_OF_HOSTS)]
        waits = merged(span for span in chosen if span.name.startswith(_WAITS))
        compute = without(merged(_operators(chosen)), waits)
    if not (communication or compute):
        raise ValueError(f"the trace of rank {rank} has neither operators nor collectives.")
    return Activity(rank, compute, communication, waits)


def _meet(span: Span, within: Interval) -> bool:
    return span.start < within[1] and within[0] < span.end


def _cut(span: Span, within: Interval) -> Span:
    return Span(span.kind, max(span.start, within[0]), min(span.end, within[1]), span.thread, span.name)


def _operators(spans: Sequence[Span]) -> list[Span]:
    """The operators that compute.

    An operator without others inside it computes. One of ATen with others inside computes as a whole, as
    ``aten::mm`` does, unless one of those starts or waits for a collective, or has the name of an operator
    around it: then the outer one is DTensor's, or another class's, and the inner ones are looked at.
    """
    by_thread: dict[int | str, list[Span]] = {}
    for span in spans:
        if span.kind == "cpu_op" and not span.name.startswith(_WAITS):
            by_thread.setdefault(span.thread, []).append(span)
    return [call for calls in by_thread.values() for call in _computing(calls)]


def _computing(calls: Sequence[Span]) -> Iterator[Span]:
    """Those of one thread's ``calls``, outer before inner, that :func:`_operators` is about."""
    place = 0
    while place < len(calls):
        call = calls[place]
        end = place + 1
        while end < len(calls) and calls[end].start < call.end:
            end += 1
        inner = calls[place + 1 : end]
        sends = call.name.startswith(_OF_COLLECTIVES)
        if not sends and (not inner or (call.name.startswith("aten::") and _is_plain([call, *inner]))):
            yield call
        else:
            yield from _computing(inner)
        place = end


def _is_plain(calls: Sequence[Span]) -> bool:
    """Whether ``calls``, the first with all that is inside it, are of ATen, none inside one of its name."""
    around: list[Span] = []
    for call in calls:
        while around and around[-1].end <= call.start:
            around.pop()
        if not call.name.startswith("aten::") or any(outer.name == call.name for outer in around):
            return False
        around.append(call)
    return True


# Pictures


def draw_bar(ax: Any, span: Span, origin: float, y: float, height: float, color: str, edge: str) -> None:
    where = [(span.start - origin, span.end - span.start)]
    ax.broken_barh(where, (y, height), facecolor=color, edgecolor=edge, linewidth=0.6)


def draw_intervals(
    ax: Any, intervals: Iterable[Interval], origin: float, y: float, height: float, color: str
) -> None:
    ax.broken_barh([(start - origin, end - start) for start, end in intervals], (y, height), facecolor=color)


def draw_communication(ax: Any, spans: list[Span], origin: float, y: float, color: str) -> None:
    """A lane of 0.86 from ``y``, in it a row for each thread that sends."""
    threads = sorted({span.thread for span in spans})
    for span in spans:
        height = 0.86 / len(threads)
        row = y + height * threads.index(span.thread)
        draw_bar(ax, span, origin, row, height, color, edge="#a63603")
        middle = (span.start + span.end) / 2 - origin
        ax.text(middle, row + height / 2, span.name, ha="center", va="center", fontsize=7)


def label_lanes(ax: Any, ranks: Sequence[int], communication: str) -> None:
    """For each rank, 2.3 below the one before, a lane of compute and one of communication."""
    ax.set_yticks(
        [2.3 * place + lane for place in range(len(ranks)) for lane in (0, 1)],
        [f"rank {rank} {lane}" for rank in ranks for lane in ("compute", communication)],
    )
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelbottom=True)


def add_legend(figure: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
