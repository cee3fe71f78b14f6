"""Spans of traces: what computes and what communicates, when nothing hides it, and bars of a picture."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .traces import Span, Trace

Interval = tuple[float, float]


# Intervals


def merge_spans(spans: Iterable[Span]) -> list[Interval]:
    """Returns the time that any of ``spans`` covers, as intervals that do not overlap, in order."""
    intervals: list[Interval] = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if intervals and start <= intervals[-1][1]:
            intervals[-1] = (intervals[-1][0], max(end, intervals[-1][1]))
        else:
            intervals.append((start, end))
    return intervals


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def overlap(span: Interval, others: Sequence[Interval]) -> float:
    """Returns the length of ``span`` that lies in ``others``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def subtract(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Returns the parts of ``intervals`` outside of ``others``. Both are sorted, and neither overlaps
    itself."""
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


def intersect(intervals: Iterable[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """Yields the parts of ``intervals`` inside of ``others``, which are in order and do not overlap each
    other."""
    ends = [end for _, end in others]
    for start, end in intervals:
        for place in range(bisect_right(ends, start), len(others)):
            if others[place][0] >= end:
                break
            yield max(start, others[place][0]), min(end, others[place][1])


# The activity of a rank

_OF_DEVICES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_BACKENDS_OF_HOSTS = ("gloo:", "mpi:", "ucc:")
_OF_COLLECTIVES = ("c10d::", "_c10d_functional", "c10d_functional", "funcol::")
_WAITS = ("funcol::wait", "_c10d_functional::wait_tensor", "c10d_functional::wait_tensor")


@dataclass
class Activity:
    """The activity of one rank: it computes, sends, or waits for data that is sent. Sorted intervals, in ms.

    ``sending`` is when any collective of ``communication`` runs.
    """

    rank: int
    compute: list[Interval]
    communication: list[Span]
    sending: list[Interval]
    waits: list[Interval]

    @property
    def bounds(self) -> Interval:
        every = [*self.compute, *self.sending, *self.waits]
        return min(start for start, _ in every), max(end for _, end in every)

    @property
    def exposed(self) -> list[Interval]:
        """The time when collectives run and nothing is computed: communication that nothing hides."""
        return subtract(self.sending, self.compute)


def activity(trace: Trace, rank: int, during: str | None = None) -> Activity:
    """Returns the activity of a rank within the spans whose names start with ``during``, or at any time.

    ``rank`` is its number if the trace does not contain it. On a device, kernels of NCCL communicate; other
    kernels and copies compute. In a trace without a device, operators compute, except for the time in which
    they wait for a collective, and the calls of gloo's threads communicate. Raises ``ValueError`` if the
    trace contains none of this. Takes as long as sorting the spans, however they overlap.
    """
    rank = rank if trace.rank is None else trace.rank
    window = _Window(trace.spans, during, rank)
    on_devices = window.spans(span for span in trace.spans if span.kind in _OF_DEVICES)
    if on_devices:
        communication = [span for span in on_devices if span.name.startswith("nccl")]
        compute = merge_spans(span for span in on_devices if not span.name.startswith("nccl"))
        waits: list[Interval] = []
    else:
        communication = window.spans(span for span in trace.spans if span.name.startswith(_BACKENDS_OF_HOSTS))
        waits = merge_spans(span for span in trace.spans if span.name.startswith(_WAITS))
        compute = subtract(merge_spans(_operators(trace.spans)), waits)
    found = Activity(
        rank,
        window.intervals(compute),
        communication,
        window.intervals(merge_spans(communication)),
        window.intervals(waits),
    )
    if not (found.communication or found.compute):
        raise ValueError(f"the trace of rank {rank} has neither operators nor collectives.")
    return found


class _Window:
    """The time within the spans whose names start with ``during``, or any time without it."""

    def __init__(self, spans: Sequence[Span], during: str | None, rank: int) -> None:
        self._outer: list[Interval] | None = None
        if during is not None:
            self._outer = merge_spans(span for span in spans if span.name.startswith(during))
            if not self._outer:
                raise ValueError(
                    f"no span of the trace of rank {rank} has a name that starts with '{during}'."
                )

    def spans(self, spans: Iterable[Span]) -> list[Span]:
        """Returns the spans of which any part is in the window."""
        if self._outer is None:
            return list(spans)
        ends = [end for _, end in self._outer]
        first = ((span, bisect_right(ends, span.start)) for span in spans)
        return [span for span, place in first if place < len(ends) and self._outer[place][0] < span.end]

    def intervals(self, intervals: list[Interval]) -> list[Interval]:
        """Returns the parts of ``intervals``, which do not overlap each other, in the window."""
        return intervals if self._outer is None else list(intersect(intervals, self._outer))


def _operators(spans: Sequence[Span]) -> list[Span]:
    """Returns the operators that compute.

    An operator without others inside it computes. An operator of ATen with others inside computes as one, as
    ``aten::mm`` does, unless one of those starts or waits for a collective, or has the name of an operator
    around it: then the outer one is DTensor's, or another class's, and the inner ones are looked at.
    """
    by_thread: dict[int | str, list[Span]] = {}
    for span in spans:
        if span.kind == "cpu_op" and not span.name.startswith(_WAITS):
            by_thread.setdefault(span.thread, []).append(span)
    return [call for calls in by_thread.values() for call in _computing(calls)]


def _computing(calls: Sequence[Span]) -> Iterator[Span]:
    """Yields the operators that compute among one thread's ``calls``, the outer before the inner.

    What is inside a call starts before its end, and before the ends of the calls around it. Those ends, as
    places in ``calls``, are the stack ``limits``.
    """
    starts = [call.start for call in calls]
    breaks = _breaks(calls)
    limits = [len(calls)]
    place = 0
    while place < len(calls):
        while place >= limits[-1]:
            limits.pop()
        call = calls[place]
        end = min(max(bisect_left(starts, call.end), place + 1), limits[-1])
        is_leaf = end == place + 1
        if not call.name.startswith(_OF_COLLECTIVES) and (is_leaf or breaks[place] >= end):
            yield call
            place = end
        else:
            limits.append(end)
            place += 1


def _breaks(calls: Sequence[Span]) -> list[int]:
    """Returns, for each place, the first place from there on with a call that is not ATen's, or that is
    inside a call of its own name at or after the place."""
    breaks = [len(calls)] * (len(calls) + 1)
    for place, around in reversed(list(enumerate(_namesakes(calls)))):
        if around is not None:
            breaks[around] = min(breaks[around], place)
    for place in reversed(range(len(calls))):
        is_aten = calls[place].name.startswith("aten::")
        breaks[place] = min(breaks[place], breaks[place + 1]) if is_aten else place
    return breaks


def _namesakes(calls: Sequence[Span]) -> list[int | None]:
    """Returns, for each call, the place of the innermost one around it that has its name."""
    found: list[int | None] = []
    around: list[int] = []
    by_name: dict[str, list[int]] = {}
    for place, call in enumerate(calls):
        while around and calls[around[-1]].end <= call.start:
            by_name[calls[around.pop()].name].pop()
        namesakes = by_name.setdefault(call.name, [])
        found.append(namesakes[-1] if namesakes else None)
        namesakes.append(place)
        around.append(place)
    return found


# Pictures


def draw_bar(ax: Any, span: Span, origin: float, y: float, height: float, color: str) -> None:
    where = [(span.start - origin, span.end - span.start)]
    ax.broken_barh(where, (y, height), facecolor=color, edgecolor="none")


def draw_intervals(
    ax: Any, intervals: Iterable[Interval], origin: float, y: float, height: float, color: str
) -> None:
    ax.broken_barh([(start - origin, end - start) for start, end in intervals], (y, height), facecolor=color)


def label_lanes(ax: Any, ranks: Sequence[int], communication: str) -> None:
    """Labels a lane of compute and one of communication for each rank, 2.3 below the rank before."""
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
