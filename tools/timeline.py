"""Traces of torch.profiler as spans of time, drawn as bars of a picture."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Span:
    """An event on one thread of a rank, in ms since the epoch."""

    kind: str
    start: float
    end: float
    thread: int = 0
    name: str = ""

    def starts_in(self, other: Span) -> bool:
        return other.start <= self.start < other.end


def read_spans(path: str | Path) -> list[Span]:
    """All spans of a trace, the outer before the inner; ``kind`` is the profiler's category."""
    trace = json.loads(Path(path).read_text())
    base_us = trace.get("baseTimeNanoseconds", 0) / 1000
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: (event["ts"], -event["dur"]))
    spans = []
    for event in events:
        start = (event["ts"] + base_us) / 1000
        end = start + event["dur"] / 1000
        spans.append(Span(event["cat"], start, end, event["tid"], event["name"]))
    return spans


def common(span: tuple[float, float], others: list[tuple[float, float]]) -> float:
    """Length of ``span`` that lies in ``others``, which do not overlap each other."""
    return sum(max(0.0, min(span[1], end) - max(span[0], start)) for start, end in others)


def draw_bar(ax: Any, span: Span, origin: float, y: float, height: float, color: str, edge: str) -> None:
    where = [(span.start - origin, span.end - span.start)]
    ax.broken_barh(where, (y, height), facecolor=color, edgecolor=edge, linewidth=0.6)


def draw_communication(ax: Any, spans: list[Span], origin: float, y: float, color: str) -> None:
    """A lane of 0.86 from ``y``, in it a row for each thread that sends."""
    threads = sorted({span.thread for span in spans})
    for span in spans:
        height = 0.86 / len(threads)
        row = y + height * threads.index(span.thread)
        draw_bar(ax, span, origin, row, height, color, edge="#a63603")
        middle = (span.start + span.end) / 2 - origin
        ax.text(middle, row + height / 2, span.name, ha="center", va="center", fontsize=7)


def label_lanes(ax: Any, num_ranks: int) -> None:
    """For each rank, 2.3 below the one before, a lane of compute and one of communication."""
    ax.set_yticks(
        [2.3 * rank + lane for rank in range(num_ranks) for lane in (0, 1)],
        [f"rank {rank} {lane}" for rank in range(num_ranks) for lane in ("compute", "gloo")],
    )
    ax.invert_yaxis()
    ax.grid(axis="x", alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.tick_params(labelbottom=True)


def add_legend(figure: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
