"""Shows on one screen what funcol changes: the time of a step, values, and overlap, on 4 gloo ranks.

  SPEED    a small transformer, tensor parallel x FSDP2, stock and with one line added: funcol.install()
  RIGHT    lines on DTensors that stock PyTorch gets wrong or refuses
  OVERLAP  a gather beside work that does not need it; draws both timelines

Each figure is measured in this run. Exits with 1 if losses or values of funcol are wrong.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when torch is imported; else it reports missing GPUs

import torch
from demo_overlap import LATE_S, Overlap, draw, overlap
from demo_right import NUM_RANKS, Values, right
from demo_speed import Speed, speed
from gloo_ranks import run_on_ranks

EXAMPLE = Path(__file__).resolve().parent / "examples" / "tensor_parallel_lm.py"
DEADLINE_S = 240
LOSS_TOLERANCE = 1e-4  # relative; sums may be added in another order
NUM_STEPS = 6
BAR = 44  # characters


def run_rank(rank: int, num_steps: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)  # stock PyTorch warns of plans that take more collectives than needed
    steps = speed(num_steps)
    return {"speed": steps, "right": right(), "overlap": overlap()}


def gain(stock: float, ours: float) -> str:
    return f"{stock / ours:.1f}x"


def bars(lengths: dict[str, float], unit: str) -> list[str]:
    """Returns a line a side, with a bar as long as its part of the longest."""
    longest = max(lengths.values())
    return [
        f"  {side:<8}{'#' * max(1, round(BAR * length / longest)):<{BAR}} {length:6.1f} {unit}"
        for side, length in lengths.items()
    ]


def of_speed(sides: dict[str, Speed]) -> list[str]:
    stock, ours = sides["stock"], sides["funcol"]
    losses = f"{stock['losses'][-1]:.6f}, {ours['losses'][-1]:.6f}"
    less = gain(stock["cpu_ms"], ours["cpu_ms"])
    return [
        f"SPEED    one line added, funcol.install(): {less} less CPU time a step",
        "  transformer, bf16, tensor parallel 2 x FSDP2 2; CPU time of a rank's thread",
        *bars({side: one["cpu_ms"] for side, one in sides.items()}, "ms"),
        f"  by the clock, ranks sharing {os.cpu_count()} cores: {stock['ms']:.0f} and {ours['ms']:.0f} ms, "
        f"{gain(stock['ms'], ours['ms'])}",
        f"  loss after {len(ours['losses'])} steps: {losses}, "
        + ("equal" if stock["losses"] == ours["losses"] else "not the same bits"),
    ]


def of_right(lines: dict[str, Values]) -> list[str]:
    num_wrong = sum(not values.is_right("stock") for values in lines.values())
    row = "  {:<38}{:>8}{:>9}{:>9}"
    printed = [
        f"RIGHT    {num_wrong} of {len(lines)} lines on DTensors are wrong (<-) or refused on stock",
        row.format("tensors cut along dim 0", "1 device", "stock", "funcol"),
    ]
    for name, values in lines.items():
        cells = ("refused" if isinstance(value, str) else f"{value:g}" for value in values)
        wrong = [side for side in ("stock", "funcol") if is_wrong(values, side)]
        printed.append(row.format(name, *cells) + (f"  <- {', '.join(wrong)}" if wrong else ""))
    return printed


def is_wrong(values: Values, side: str) -> bool:
    return not values.is_right(side) and not isinstance(getattr(values, side), str)


def of_overlap(sides: dict[str, Overlap]) -> list[str]:
    return [
        f"OVERLAP  {conditions(sides)}: {gain(sides['stock'].used, sides['funcol'].used)} less time",
        *bars({side: one.used for side, one in sides.items()}, "ms"),
    ]


def conditions(sides: dict[str, Overlap]) -> str:
    worked = sides["funcol"].worked - sides["funcol"].called
    return f"a gather {1e3 * LATE_S:.0f} ms in flight beside {worked:.0f} ms of work"


def title(sides: dict[str, Overlap]) -> str:
    """Returns the picture's title, which states the gain."""
    stock, ours = sides["stock"].used, sides["funcol"].used
    return (
        f"{conditions(sides).capitalize()}: {stock:.0f} ms on stock PyTorch, {ours:.0f} ms on funcol, "
        f"{gain(stock, ours)}"
    )


def failures(found: dict[str, Any], lines: dict[str, Values]) -> list[str]:
    """Returns the results of funcol that are not as expected."""
    pairs = zip(*(found["speed"][side]["losses"] for side in ("stock", "funcol")), strict=True)
    wrong = [name for name, values in lines.items() if not values.is_right("funcol")]
    if not all(math.isclose(*pair, rel_tol=LOSS_TOLERANCE) for pair in pairs):
        wrong.insert(0, f"losses differ by more than {LOSS_TOLERANCE:g}: {found['speed']}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--quick", action="store_true", help="prints the text and draws nothing")
    length.add_argument("--full", action="store_true", help=f"then runs {EXAMPLE.name}, with its timelines")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--picture", type=Path, default=Path("demo_timeline.png"), metavar="PATH")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("needs at least 1 step")
    if not args.picture.resolve().parent.is_dir():
        parser.error(f"there is no folder {args.picture.resolve().parent} to write the picture to")

    started = time.monotonic()
    print(f"[demo] PyTorch {torch.__version__}, {NUM_RANKS} gloo ranks, one thread each ...", flush=True)
    found = run_on_ranks(run_rank, NUM_RANKS, args.steps, limit_s=DEADLINE_S)
    lines = {name: Values(*values) for name, values in found["right"].items()}
    overlaps = {side: Overlap(*moments) for side, moments in found["overlap"].items()}
    for part in (of_speed(found["speed"]), of_right(lines), of_overlap(overlaps)):
        print("", *part, sep="\n")
    print()
    if not args.quick:
        draw(overlaps, title(overlaps), args.picture)
        print(f"[demo] both timelines: {args.picture.resolve()}")
    print(f"[demo] done in {time.monotonic() - started:.0f} s", flush=True)
    wrong = failures(found, lines)
    if wrong:
        sys.exit("[demo] FAILED: " + "; ".join(wrong))
    if args.full:
        command = [sys.executable, str(EXAMPLE), "--pictures", str(args.picture.resolve().parent)]
        sys.exit(subprocess.run(command).returncode)


if __name__ == "__main__":
    main()
