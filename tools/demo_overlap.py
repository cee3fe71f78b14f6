"""The demo's part on overlap: a gather along dim 1 beside work that does not need it, and its picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from torch import Tensor

import funcol
from funcol.commands.timeline import add_legend, draw_bar
from funcol.commands.traces import Span

LATE_S = 0.060  # how much later than rank 0 the peers call
WORK_S = 0.060
NUM_ROUNDS = 7
COLORS = {
    "the call": "#de2d26",
    "other work": "#3182bd",
    "the first use of the result": "#31a354",
    "peers that have not called yet": "#d9d9d9",
}


class Overlap(NamedTuple):
    """A round on rank 0, in milliseconds from the call of the gather: when the call returned, when the work
    was done, when the result had been used; and when the last peer called."""

    called: float
    worked: float
    used: float
    peers: float

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """Start and end of what rank 0 did, and of its peers' delay, by their names in :data:`COLORS`."""
        starts = (0.0, self.called, self.worked, 0.0)
        ends = (self.called, self.worked, self.used, self.peers)
        return dict(zip(COLORS, zip(starts, ends, strict=True), strict=True))


def overlap() -> dict[str, Overlap]:
    """Returns the round of the median time of each side; the sides take turns."""
    sides = {"stock": stock.all_gather_tensor, "funcol": funcol.all_gather_tensor}
    rounds: dict[str, list[Overlap]] = {side: [] for side in sides}
    for _ in range(NUM_ROUNDS):
        for side, gather in sides.items():
            rounds[side].append(one_round(gather))
    return {side: sorted(of_side, key=lambda r: r.used)[NUM_ROUNDS // 2] for side, of_side in rounds.items()}


def one_round(gather: Callable[..., Tensor]) -> Overlap:
    is_first = dist.get_rank() == 0
    x = torch.ones(128, 128)
    dist.barrier()
    if not is_first:
        time.sleep(LATE_S)
    begin = time.perf_counter()
    gathered = gather(x, 1, dist.group.WORLD)
    called = time.perf_counter()
    if is_first:
        work()
    worked = time.perf_counter()
    gathered.sum()
    used = time.perf_counter()
    last = torch.tensor(0.0 if is_first else begin, dtype=torch.float64)  # all ranks read one clock
    dist.all_reduce(last, dist.ReduceOp.MAX)
    return Overlap(*(1e3 * (moment - begin) for moment in (called, worked, used, last.item())))


def work() -> None:
    end = time.perf_counter() + WORK_S
    while time.perf_counter() < end:
        torch.ones(64).sum()


def draw(found: dict[str, Overlap], title: str, path: Path) -> None:
    """Writes the picture: for each side a lane of rank 0 and one of its peers, all on one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(11, 3.4), layout="constrained")
    names = {"stock": "stock PyTorch", "funcol": "funcol"}
    places = []
    for number, (side, of_side) in enumerate(found.items()):
        top = 2.6 * number
        places += [(top, f"{names[side]}: rank 0"), (top + 1, "its peers")]
        for part, (start, end) in of_side.parts.items():
            lane = top + 1 if part.startswith("peers") else top
            draw_bar(ax, Span(part, start, end), 0.0, lane - 0.4, 0.8, COLORS[part])
        ax.text(of_side.used + 1, top, f"{of_side.used:.0f} ms", va="center", weight="bold")
    ax.set_yticks([place for place, _ in places], [name for _, name in places])
    ax.invert_yaxis()
    ax.set_xlim(0, 1.12 * max(of_side.used for of_side in found.values()))
    ax.set_xlabel("ms since rank 0 called the gather")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(title, loc="left", weight="bold")
    add_legend(figure, COLORS)
    figure.savefig(path, dpi=110)
    plt.close(figure)
