"""Times the first step of a transformer of four blocks, tensor parallel x FSDP2 on 4 x 2 ranks, in fresh
processes with all caches empty: eager, and compiled without a backend's code generation.

The model is made before the clock starts. Fake ranks: nothing is sent. See docs/performance.md.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from runner import Table, each, mark, repeat, run, show

LIMITS = {"eager": 0.2, "aot_eager": 0.5}  # of stock's time

PROGRAM = """
import json, sys, time
sys.path.insert(0, {here!r})
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from measure import lone_group
from parallel_steps import BATCH, LENGTH, NUM_RANKS, WIDTH, cut_by_modules, forward_and_backward, transformer
import funcol
import torch._dynamo
way, with_funcol = sys.argv[1:]
torch.set_num_threads(1)
with lone_group(torch.device("cpu"), NUM_RANKS):
    if with_funcol == "funcol":
        funcol.install()
    mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
    model = transformer()
    cut_by_modules(model, mesh["tp"])
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if way != "eager":
        model.compile(backend=way)
    step = forward_and_backward(model, torch.randn(BATCH, LENGTH // (NUM_RANKS // 2), WIDTH))
    times = []
    for _ in range(3):
        begin = time.thread_time()
        step()
        times.append(time.thread_time() - begin)
print(json.dumps(times))
"""


def first_steps(way: str, side: str, num_processes: int) -> list[float]:
    """Milliseconds of CPU time of the first step in each process."""
    program = PROGRAM.format(here=str(Path(__file__).parent))
    command = [sys.executable, "-c", program, way, side]
    return [
        1e3 * json.loads(subprocess.run(command, capture_output=True, check=True).stdout.splitlines()[-1])[0]
        for _ in each(f"{way}, {side}", list(range(num_processes)))
    ]


def bench(num_processes: int) -> dict[str, Any]:
    return {
        way: {side: first_steps(way, side, num_processes) for side in ("stock", "funcol")} for way in LIMITS
    }


def print_steps(found: dict[str, Any]) -> None:
    def row(way: str) -> list[str]:
        stock, ours = (found[way][side] for side in ("stock", "funcol"))
        ratio = statistics.median(ours) / statistics.median(stock)
        times = [f"{statistics.median(times):.0f} ({min(times):.0f})" for times in (stock, ours)]
        return [way, *times, f"{ratio:.2f}", f"{LIMITS[way]} {mark(ratio <= LIMITS[way])}"]

    show(
        "The first step in ms of CPU time, median (best) of fresh processes",
        "{:<12}{:>16}{:>16}{:>8}   {}",
        ("", "stock", "funcol", "ratio", "limit"),
        map(row, LIMITS),
    )


if __name__ == "__main__":
    run(
        __doc__,
        [Table("first_steps", lambda args: bench(args.repeat), print_steps)],
        repeat(5, "processes"),
    )
