"""``python -m funcol trace``: from traces of torch.profiler, how much communication nothing hid, by rank."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .._progress import Progress
from ..redistribution.plan_tables import Rows, aligned
from ..redistribution.texts import bytes_of, one_line
from .arguments import argument_read_by, writing
from .timeline import (
    Activity,
    activity,
    add_legend,
    draw_intervals,
    label_lanes,
    length,
)
from .traces import MOST_BYTES, TraceError, read_trace

MOST_RANKS_DRAWN = 16
_COLORS = {
    "compute": "#3182bd",
    "waits": "#de2d26",
    "communication beside compute": "#fdd0a2",
    "communication that nothing hid": "#e6550d",
}


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "trace",
        help="from profiles: how much communication nothing hid, by rank",
        description="Reads traces of torch.profiler (export_chrome_trace), one a rank, of any program. "
        "Prints for each rank how long it computed and communicated, and how much of the "
        "communication ran while nothing was computed; draws a timeline.",
        epilog="example: python -m funcol trace trace-*.json --out timeline.png",
    )
    command.add_argument("traces", nargs="+", type=Path, metavar="TRACE", help="files, .json or .json.gz")
    command.add_argument("--out", type=Path, metavar="FILE", help="draw a timeline: .png, .svg or .pdf")
    command.add_argument(
        "--during",
        metavar="NAME",
        help="only within the spans whose names start so, such as ProfilerStep or a record_function's",
    )
    command.add_argument(
        "--max-bytes",
        type=argument_read_by(bytes_of),
        default=MOST_BYTES,
        help="the most that is read of a trace, decompressed (default: %(default)s)",
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    found = []
    with Progress("trace", len(arguments.traces)) as progress:
        for place, path in enumerate(arguments.traces):
            progress.show(one_line(str(path)))
            found.append(_activity_in(path, place, arguments))
            progress.advance()
    found.sort(key=lambda one: one.rank)
    print("\n".join(aligned(activity_rows(found), num_left=1)))
    if arguments.out is not None:
        draw(found, arguments.out)
        print(f"\ndrawn in {one_line(str(arguments.out))}")


def _activity_in(path: Path, rank: int, arguments: argparse.Namespace) -> Activity:
    trace = read_trace(path, arguments.max_bytes)
    try:
        return activity(trace, rank, arguments.during)
    except ValueError as error:
        raise TraceError(f"{path}: {error}") from None


def activity_rows(activities: Sequence[Activity]) -> Rows:
    """Returns a header, a row per rank and, for several ranks, their mean; times in ms."""
    rows: Rows = [("rank", "time, ms", "compute", "communication", "nothing hid", "share")]
    numbers = []
    for one in activities:
        start, end = one.bounds
        numbers.append((end - start, length(one.compute), length(one.sending), length(one.exposed)))
        rows.append((str(one.rank), *_row(numbers[-1])))
    if len(activities) > 1:
        means = [sum(column) / len(numbers) for column in zip(*numbers, strict=True)]
        rows.append(("mean", *_row(means)))
    return rows


def _row(numbers: Sequence[float]) -> tuple[str, ...]:
    *_, sending, exposed = numbers
    return (*(f"{number:.1f}" for number in numbers), f"{exposed / sending:.0%}" if sending else "-")


def draw(activities: Sequence[Activity], path: Path) -> None:
    """Writes a picture with two lanes a rank: compute and waits; communication, dark where nothing hid it.

    Raises ``ValueError`` without matplotlib, or if the file cannot be written. Of more than
    :data:`MOST_RANKS_DRAWN` ranks the first are drawn.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "drawing needs matplotlib, which is not there. Install it, or leave out --out."
        ) from None
    drawn = activities[:MOST_RANKS_DRAWN]
    figure = Figure(figsize=(16, 1.8 + 0.75 * len(drawn)), layout="constrained")
    ax = figure.subplots()
    origin = min(one.bounds[0] for one in drawn)
    for place, one in enumerate(drawn):
        top = 2.3 * place
        for intervals, of_lane, kind in (
            (one.compute, top - 0.45, "compute"),
            (one.waits, top - 0.45, "waits"),
            (one.sending, top + 0.57, "communication beside compute"),
            (one.exposed, top + 0.57, "communication that nothing hid"),
        ):
            draw_intervals(ax, intervals, origin, of_lane, 0.88, _COLORS[kind])
    label_lanes(ax, [one.rank for one in drawn], "communication")
    ax.set_xlim(left=0)
    ax.set_xlabel("ms")
    sending = sum(length(one.sending) for one in activities)
    exposed = sum(length(one.exposed) for one in activities)
    if sending:
        ax.set_title(f"nothing hid {exposed / sending:.0%} of the communication", loc="left")
    add_legend(figure, _COLORS)
    with writing(path):
        figure.savefig(path, dpi=110)
