"""Runs torchtitan's trainer on 4 gloo ranks, FSDP2 x tensor parallel, on stock and on funcol.

The program is torchtitan's: its entry point, trainer and debug model, which learns the sources of Python's
standard library. On funcol, funcol.install() is called before it starts. Prints losses, gradient norms and
times side by side, eager and compiled, and fails unless losses and norms of both sides have the same bits.

    python tools/examples/torchtitan_trainer.py
    python tools/examples/torchtitan_trainer.py --eager --parallelism.spmd-backend=full_dtensor

Options that are none of its own go to torchtitan.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torchtitan_on_cpu import write_data

NUM_RANKS = 4
NUM_WARM_UP = 2  # steps whose times do not count, where there are more
# Of torchtitan; of an option given twice, the last one counts.
DEFAULTS = ["--module=torchtitan_on_cpu", "--config=llama3", "--parallelism.tensor-parallel-degree=2"]
SIDES = ("stock", "funcol")
DEADLINE_S = 600
ON_CPU = Path(__file__).with_name("torchtitan_on_cpu.py")

Steps = list[dict[str, float]]


def say(text: str) -> None:
    print(f"[torchtitan] {text}", flush=True)


def train(side: str, options: list[str]) -> Steps:
    """Loss, gradient norm and times of each step of one run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_data(folder)
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NUM_RANKS}"),
            *(str(ON_CPU), f"--folder={folder}", *(["--funcol"] if side == "funcol" else [])),
            *options,
        ]
        # Each run compiles from the start.
        env = os.environ | {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(folder / "compiled")}
        ranks = subprocess.Popen(
            command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        try:
            printed, _ = ranks.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            ranks.terminate()  # torchrun ends its ranks then
            printed, _ = ranks.communicate()
        if ranks.returncode:
            sys.exit(f"{printed}\n[torchtitan] FAILED: the run on {side}")
        steps: Steps = json.loads((folder / "steps.json").read_text())
        return steps


def print_steps(title: str, runs: dict[str, Steps]) -> None:
    columns = [(what, side) for what in ("loss", "norm") for side in SIDES]
    print(f"\n  {title}")
    print("  step", *(f"{f'{what}, {side}':>16}" for what, side in columns))
    for i in range(len(runs["stock"])):
        print(f"{i + 1:>6}", *(f"{runs[side][i][what]:16.9f}" for what, side in columns))
    for side, steps in runs.items():
        later = steps[min(NUM_WARM_UP, len(steps) - 1) :]
        wall, cpu = (1e3 * statistics.median(step[of] for step in later) for of in ("seconds", "cpu_seconds"))
        print(
            f"  {side}: {steps[0]['seconds']:.1f} s the first step; a later one {wall:.0f} ms, "
            f"of which the last rank computes {cpu:.0f} (medians)"
        )


def difference(runs: dict[str, Steps]) -> str | None:
    """Returns the first value in which the sides differ, if they do."""
    for i, (stock, on_funcol) in enumerate(zip(*runs.values(), strict=True)):
        for what in ("loss", "norm"):
            if stock[what] != on_funcol[what]:
                return f"{what} of step {i + 1}: {stock[what]!r} on stock, {on_funcol[what]!r} on funcol"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--eager", action="store_true", help="only not compiled (default: both)")
    parser.add_argument("--compiled", action="store_true", help="only compiled (default: both)")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="a run (default %(default)s)")
    args, of_torchtitan = parser.parse_known_args()
    if args.steps < 1:
        parser.error("needs at least 1 step")
    options = [*DEFAULTS, f"--training.steps={args.steps}", *of_torchtitan]
    version = importlib.metadata.version("torchtitan")
    say(f"torchtitan {version}, PyTorch {torch.__version__}, {NUM_RANKS} gloo ranks: {' '.join(options)}")
    failed = False
    for way in ("eager", "compiled"):
        if not getattr(args, way) and args.eager != args.compiled:
            continue
        of_way = ["--compile.enable"] if way == "compiled" else []
        runs = {side: train(side, [*options, *of_way]) for side in SIDES}
        print_steps(way, runs)
        found = difference(runs)
        failed |= found is not None
        say(f"{way}: all losses and norms agree, bit by bit" if found is None else f"{way}: FAILED: {found}")
    sys.exit(failed)


if __name__ == "__main__":
    main()
