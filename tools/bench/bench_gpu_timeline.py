"""Estimates when a GPU would run programs on DTensor, with PyTorch's own layers (stock) and with funcol.

An estimate, not a measurement: a simulated GPU (test/simulated_gpu) says what the host issues and when, and
a model says how long an H100 takes for it (gpu_replay.py). Prints a table and draws a picture. See README.md
beside this file.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from gpu_replay import Machine, Ran, Replay, Share, Step, main_stream, median_step, read_trace, shares

from funcol.commands.timeline import add_legend, draw_bar
from funcol.commands.traces import Span

FOLDER = Path(__file__).resolve().parent
SIDES = ("stock", "funcol")
NAMES = ("tensor parallel 8", "data 2 x tensor 4", "FSDP2")
NUM_WARM_UP = 3

COLORS = {
    "host works": "#bdbdbd",
    "computes": "#3182bd",
    "collective": "#fd8d3c",
    "waits for the host": "#fee0d2",
    "waits for other streams": "#fee391",
}


# The traced process


def run_steps(name: str, side: str, num_steps: int) -> None:
    """Runs a program under tools/simulated_gpu; marks in its trace file say where steps begin and end."""
    import parallel_steps
    import torch
    from measure import lone_group

    import funcol

    program = next(program for program in parallel_steps.PROGRAMS if program.name == name)
    mark = ctypes.CDLL(None).simulated_gpu_trace_mark
    device = torch.device("cuda", 0)
    with (
        lone_group(device, parallel_steps.NUM_RANKS),
        funcol.installed() if side == "funcol" else nullcontext(),
    ):
        with device:
            step = program.parallel("cuda")
        for _ in range(NUM_WARM_UP):
            step()
            torch.cuda.synchronize()
        gc.collect()
        gc.disable()
        for _ in range(num_steps):
            mark(b"begin")
            step()
            mark(b"end")
            torch.cuda.synchronize()


def set_sizes(width: int, batch: int, length: int) -> None:
    import parallel_steps

    parallel_steps.WIDTH, parallel_steps.BATCH, parallel_steps.LENGTH = width, batch, length


def trace(name: str, side: str, args: argparse.Namespace, path: Path) -> None:
    command = [
        str(FOLDER.parent / "simulated_gpu"),
        *("--alone", "--no-races", "--devices", "1", "--trace-file", str(path)),
        *(sys.executable, __file__, "--traced", name, side, "--steps", str(args.steps)),
        *("--sizes", *map(str, args.sizes)),
    ]
    done = subprocess.run(
        command, env=os.environ | {"PYTHON": sys.executable}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        sys.exit(f"{name}, {side}: status {done.returncode}\n{done.stdout}{done.stderr}")


# The estimate


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Of one side of a program: all steps, and the index of the one that stands for them."""

    steps: list[Step]
    chosen: int
    share: Share

    @property
    def step(self) -> Step:
        return self.steps[self.chosen]


def estimate(name: str, side: str, args: argparse.Namespace) -> Estimate:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        trace(name, side, args, path)
        steps = Replay(Machine.read(args.machine)).run(read_trace(path)).steps
    of_steps = shares(steps)
    chosen = median_step(of_steps)
    return Estimate(steps, chosen + 1, of_steps[chosen])


def print_table(estimates: dict[str, dict[str, Estimate]]) -> None:
    line = "{:<20}{:<16}{:>8}{:>10}{:>14}{:>16}{:>8}"
    print("\nEstimated ms of a step; the device computes, or waits for the host or for other streams")
    print(line.format("", "", "host", "computes", "waits: host", "waits: streams", "step"))
    for name, sides in estimates.items():
        for side, found in sides.items():
            share = found.share
            cells = (share.host, share.computes, share.waits_for_host, share.waits_for_streams, share.step)
            print(line.format(name, side, *(f"{cell:.2f}" for cell in cells)))
        ratio = sides["funcol"].share.step / sides["stock"].share.step
        print(line.format("", "funcol / stock", "", "", "", "", f"{ratio:.2f}"))


# The picture


def spans_of_host(step: Step) -> list[Span]:
    """Work without a gap of more than 2 us is one span."""
    spans: list[Span] = []
    for begin, end in step.host:
        if spans and begin - spans[-1].end < 2e-3:
            spans[-1].end = end
        else:
            spans.append(Span("host works", begin, end))
    return spans


def spans_of_stream(ran: list[Ran], last: float) -> list[Span]:
    """Returns the spans of the main stream from ``last`` on."""
    spans = []
    for one in ran:
        launched = min(max(one.arrived, last), one.begin)
        spans += [
            Span("waits for the host", last, launched),
            Span("waits for other streams", launched, one.begin),
            Span("computes", one.begin, one.end),
        ]
        last = one.end
    return [span for span in spans if span.end > span.start]


def draw_side(ax: Any, estimate: Estimate, y: float) -> None:
    """Three lanes, downwards from ``y``."""
    main = main_stream(estimate.steps)
    before = estimate.steps[estimate.chosen - 1].ran
    origin = max(one.end for one in before if one.operation.stream == main)
    on_main = [one for one in estimate.step.ran if one.operation.stream == main]
    sent = [one for one in estimate.step.ran if one.operation.kind == "collective"]
    others = [
        one
        for one in estimate.step.ran
        if one.operation.stream != main and one.operation.kind in ("kernel", "copy")
    ]
    lanes = [
        spans_of_host(estimate.step),
        spans_of_stream(on_main, origin),
        [Span("collective", one.begin, one.end) for one in sent]
        + [Span("computes", one.begin, one.end) for one in others],
    ]
    for lane, spans in enumerate(lanes):
        for span in spans:
            color = COLORS[span.kind]
            draw_bar(ax, span, origin, y + lane, 0.86, color, edge="none")


def draw(estimates: dict[str, dict[str, Estimate]], picture: Path, title: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(estimates), 1, figsize=(13, 2.6 * len(estimates) + 1), layout="constrained", squeeze=False
    )
    for ax, (name, sides) in zip(axes[:, 0], estimates.items(), strict=True):
        labels = {}
        for number, (side, found) in enumerate(sides.items()):
            y = 3.4 * number
            draw_side(ax, found, y)
            lanes = ("host", "compute", "other streams")
            labels |= {y + lane + 0.43: f"{side}: {what}" for lane, what in enumerate(lanes)}
        times = ", ".join(f"{side} {found.share.step:.2f} ms" for side, found in sides.items())
        ax.set_title(f"{name}: {times} a step (estimates)", loc="left", fontsize=10)
        ax.set_yticks(list(labels), list(labels.values()), fontsize=8)
        ax.invert_yaxis()
        ax.grid(axis="x", alpha=0.3)
        ax.spines[["top", "right"]].set_visible(False)
        ax.axvline(0, color="black", linewidth=0.6)
    axes[-1, 0].set_xlabel("ms since the step before ended on the compute stream")
    figure.suptitle(title, fontsize=11)
    add_legend(figure, COLORS)
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="programs whose names hold TEXT")
    parser.add_argument("--steps", type=int, default=7, metavar="N", help="traced (default %(default)s)")
    sizes = ("WIDTH", "BATCH", "LENGTH")
    parser.add_argument(
        "--sizes",
        type=int,
        nargs=3,
        default=(512, 4, 64),
        metavar=sizes,
        help="of activations; 4 or more in a batch, for two axes (default %(default)s)",
    )
    parser.add_argument("--machine", type=Path, default=FOLDER / "h100_node.json", metavar="FILE")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the timelines to FILE (PNG)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE as well")
    parser.add_argument("--traced", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.traced is not None:
        set_sizes(*args.sizes)
        run_steps(*args.traced, args.steps)
        return
    names = [name for name in NAMES if args.only in name]
    estimates = {name: {side: estimate(name, side, args) for side in SIDES} for name in names}
    print_table(estimates)
    if args.json is not None:
        table = {
            name: {side: dataclasses.asdict(found.share) for side, found in sides.items()}
            for name, sides in estimates.items()
        }
        args.json.write_text(json.dumps(table, indent=2) + "\n")
    if args.picture is not None:
        width, batch, length = args.sizes
        sizes_text = f"width {width}, {batch} x {length} tokens"
        draw(estimates, args.picture, f"An estimate: simulated GPU, model {args.machine.stem}, {sizes_text}")


if __name__ == "__main__":
    main()
