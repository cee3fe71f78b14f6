"""Times steps of torchtitan's trainer with PyTorch's own layers (stock) and with funcol under them.

torchtitan 0.3.0's Llama 3 debug model, FSDP2 4 x tensor parallel 2 with sequence parallelism, its own bf16
policy, eager, as one rank of a `fake` group of 8, which sends nothing: the time is that of the host. *plain*
is the same model on one rank. Processor time of a step; processes take turns. Needs torchtitan, see
tools/examples/torchtitan.md.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from runner import Table, cell, each, mark, number, repeat, run, say, summary

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from torchtitan_on_cpu import write_data  # noqa: E402

NUM_RANKS = 8
TENSOR_PARALLEL = 2
OVERHEAD_LIMIT = 0.5  # funcol's time above plain, of stock's time above it
CHECKED_LIMIT = 1.2  # a step of funcol with the type checker on, of one with it off
NUM_WARM_UP = 8
SMALL = ["--training.seq-len=16", "--training.local-batch-size=1"]  # so that layers of PyTorch take the time
PARALLEL = [f"--parallelism.tensor-parallel-degree={TENSOR_PARALLEL}"]
CHECKED = ["--debug.spmd-typechecking"]

# By side: ranks, options of the program, options of torchtitan.
SIDES: dict[str, tuple[int, list[str], list[str]]] = {
    "plain": (1, [], []),
    "stock": (NUM_RANKS, [], PARALLEL),
    "funcol": (NUM_RANKS, ["--funcol"], PARALLEL),
    "stock, types checked": (NUM_RANKS, [], [*PARALLEL, *CHECKED]),
    "funcol, types checked": (NUM_RANKS, ["--funcol"], [*PARALLEL, *CHECKED]),
}


def step_ms(side: str, folder: Path, num_steps: int) -> float:
    """Returns the median processor time of a step, in milliseconds."""
    num_ranks, of_program, of_torchtitan = SIDES[side]
    command = [
        *(sys.executable, str(EXAMPLES / "torchtitan_on_cpu.py"), f"--folder={folder}", *of_program),
        *("--module=torchtitan_on_cpu", "--config=llama3_narrow", "--comm.mode=fake_backend"),
        *(f"--training.steps={NUM_WARM_UP + num_steps}", *SMALL, *of_torchtitan),
    ]
    # The last rank writes its times.
    of_rank = {"RANK": num_ranks - 1, "LOCAL_RANK": 0, "WORLD_SIZE": num_ranks, "NGPU": num_ranks}
    env = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in of_rank.items()}
    done = subprocess.run(
        command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{side} failed:\n{done.stdout[-4000:]}")
    steps = json.loads((folder / "steps.json").read_text())[NUM_WARM_UP:]
    return 1e3 * statistics.median(step["cpu_seconds"] for step in steps)


def bench(repeat: int, num_steps: int) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name))
        return [
            {side: step_ms(side, Path(name), num_steps) for side in SIDES}
            for _ in each("rounds", range(repeat))
        ]


def print_rounds(rounds: list[dict[str, float]]) -> None:
    def median(of_round: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(of_round(times) for times in rounds)

    say(f"\nprocessor time of a step in ms, median (best) of {len(rounds)} rounds")
    for side in SIDES:
        say(f"{side:<24}{cell(summary([times[side] for times in rounds]), 1)}")
    overhead = median(lambda t: (t["funcol"] - t["plain"]) / (t["stock"] - t["plain"]))
    say(f"funcol / stock: {median(lambda t: t['funcol'] / t['stock']):.3f}")
    say(f"overhead: {overhead:.3f}, limit {OVERHEAD_LIMIT} {mark(overhead <= OVERHEAD_LIMIT)}")
    checked = median(lambda t: t["funcol, types checked"] / t["funcol"])
    met = mark(checked <= CHECKED_LIMIT)
    say(f"types checked / not, on funcol: {checked:.3f}, limit {CHECKED_LIMIT} {met}")
    say(f"types checked / not, on stock: {median(lambda t: t['stock, types checked'] / t['stock']):.3f}")


if __name__ == "__main__":
    table = Table("rounds", lambda args: bench(args.repeat, args.steps), print_rounds)
    run(__doc__, [table], repeat(5), number("--steps", 40, "of a round (default %(default)s)"))
