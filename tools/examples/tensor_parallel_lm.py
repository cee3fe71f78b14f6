"""Trains a small causal language model, FSDP2 x tensor parallel on 2 x 2 gloo ranks, on stock and on funcol.

The program does not name funcol: it uses DTensor's tensor parallel styles, fully_shard, AdamW and
clip_grad_norm_. It runs once as it is (--stock) and once within funcol.installed() (--funcol), from the same
weights and on the same bytes, those of the Python standard library's sources, and must reach the same losses.
Prints losses, times and where they went, and draws a timeline of each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when torch is imported; else it reports missing GPUs
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from gloo_ranks import run_on_ranks
from language_model import Config, LanguageModel
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.profiler import ProfilerActivity, profile, record_function

import funcol
from funcol.commands.timeline import (
    add_legend,
    draw_bar,
    draw_intervals,
    label_lanes,
    length,
    merge_spans,
    overlap,
)
from funcol.commands.traces import Span, read_trace

MESH = {"dp": 2, "tp": 2}
NUM_RANKS = 4
BATCH_PER_GROUP = 4
LEARNING_RATE = 3e-3
MAX_NORM = 1.0
NUM_BYTES = 1 << 20
NUM_WARM_UP = 3  # steps whose times do not count, where there are more
NUM_PROFILED = 3  # the first of them is not looked at: it pays for starting the profiler
DEADLINE_S = 240
# Partial sums may be added in another order, and training carries such differences from step to step.
LOSS_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
PARTS = {"forward": "#9ecae1", "backward": "#3182bd", "optimizer": "#31a354"}
OPERATOR_COLOR, COMMUNICATION_COLOR = "#08306b", "#fd8d3c"


def say(text: str) -> None:
    print(f"[lm] {text}", flush=True)


def progress(started: float, text: str) -> None:
    say(f"{time.time() - started:5.1f} s  {text}")


# The program.


def parallelized(model: LanguageModel, mesh: DeviceMesh, **of_shards: Any) -> LanguageModel:
    """Cuts weights by heads and columns along ``tp`` and then along ``dp``, activations by the sequence.

    ``of_shards`` goes to ``fully_shard``."""
    of_block = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        **{f"feed_forward.{name}": ColwiseParallel() for name in ("gate", "up")},
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {f"blocks.{i}.{name}": style for i in range(len(model.blocks)) for name, style in of_block.items()}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["norm"] = SequenceParallel()
    plan["scores"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], **of_shards)
    fully_shard(model, mesh=mesh["dp"], **of_shards)
    return model


def text() -> Tensor:
    """Returns the first bytes of the Python standard library's sources."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    read = bytearray()
    for source in sources:
        read += source.read_bytes()
        if len(read) >= NUM_BYTES:
            break
    return torch.frombuffer(read[:NUM_BYTES], dtype=torch.uint8).long()


class Training:
    """One run of the program on one rank."""

    def __init__(self, config: Config, mesh: DeviceMesh) -> None:
        torch.manual_seed(0)
        self._model = parallelized(LanguageModel(config), mesh)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, foreach=True)
        self._text = text()
        self._length = config.max_length
        self._group = mesh.get_local_rank("dp")
        self._batches = torch.Generator().manual_seed(1)
        self.seconds: dict[str, list[float]] = {part: [] for part in PARTS}

    def step(self) -> Tensor:
        """Returns the loss of this rank's part of the batch."""
        tokens = self._batch()
        with self._part("forward"):
            scores = self._model(tokens[:, :-1])
            loss = F.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        with self._part("backward"):
            loss.backward()
        with self._part("optimizer"):
            nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.detach()

    def _batch(self) -> Tensor:
        """This rank's part of a batch that all ranks draw alike; a ``tp`` group takes the same part."""
        starts = torch.randint(
            len(self._text) - self._length, (MESH["dp"] * BATCH_PER_GROUP,), generator=self._batches
        )
        mine = starts[self._group :: MESH["dp"]]
        return self._text[mine[:, None] + torch.arange(self._length + 1)]

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        with record_function(name):
            yield
        self.seconds[name].append(time.perf_counter() - begin)


# The ranks.


@dataclass(frozen=True)
class Settings:
    sides: list[str]
    num_steps: int
    folder: str
    started: float


def trace_path(folder: str, side: str, rank: int) -> Path:
    return Path(folder, f"trace-{side}-{rank}.json")


def run_side(rank: int, mesh: DeviceMesh, side: str, settings: Settings) -> dict[str, Any]:
    with funcol.installed() if side == "funcol" else nullcontext():
        training = Training(Config(), mesh)
        losses = [training.step() for _ in range(settings.num_steps)]
        first = min(NUM_WARM_UP, settings.num_steps - 1)
        ms = {part: 1e3 * statistics.median(times[first:]) for part, times in training.seconds.items()}
        steps = [sum(times) for times in zip(*training.seconds.values(), strict=True)]
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(NUM_PROFILED):
                with record_function("step"):
                    training.step()
        profiler.export_chrome_trace(str(trace_path(settings.folder, side, rank)))
        dist.barrier()
    mean_losses = torch.stack(losses)
    dist.all_reduce(mean_losses)
    ms["step"] = 1e3 * statistics.median(steps[first:])
    return {"losses": (mean_losses / NUM_RANKS).tolist(), "ms": ms}


def run_rank(rank: int, settings: Settings) -> dict[str, dict[str, Any]]:
    warnings.filterwarnings("ignore", message=".*returned a view tensor", category=UserWarning)  # FSDP2
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    mesh._flatten("world")  # so that a reduction over both axes is one collective
    results = {}
    for side in settings.sides:
        if rank == 0:
            progress(settings.started, f"{side}: {settings.num_steps} steps")
        results[side] = run_side(rank, mesh, side, settings)
    return results


# Time per kind of work


@dataclass
class Timeline:
    """One rank's profiled steps but the first. ``operators`` call no others: they are arithmetic and views;
    starts and waits of collectives are none. gloo runs on other threads."""

    steps: list[Span]
    parts: list[Span]
    operators: list[Span]
    collectives: list[Span]


def read_timeline(path: Path) -> Timeline:
    trace = read_trace(path).spans
    steps = [span for span in trace if span.name == "step"][1:]
    trace = [span for span in trace if any(span.starts_in(step) for step in steps)]
    on_thread = [span for span in trace if span.thread == steps[0].thread]
    calls = [span for span in on_thread if span.kind == "cpu_op"]
    leaves = [
        call for call, following in zip(calls, [*calls[1:], None], strict=True)
        if following is None or following.start >= call.end
    ]  # fmt: skip
    return Timeline(
        steps,
        [span for span in on_thread if span.name in PARTS],
        [leaf for leaf in leaves if leaf.name.startswith("aten::")],
        [span for span in trace if span.name.startswith("gloo:")],
    )


SHARES = {
    "operators, no collective": "operators",
    "operators beside collectives": "both",
    "collectives, no operator": "collectives",
    "DTensor, FSDP2, autograd, Python": "neither",
}


def shares(timelines: list[Timeline]) -> dict[str, float]:
    """Returns milliseconds a profiled step, mean over ranks, ``SHARES`` adding up to ``"step"``; and how many
    collectives there are in it."""
    found = {"step": 0.0, "num_collectives": 0.0, **dict.fromkeys(SHARES.values(), 0.0)}
    for timeline in timelines:
        whole = merge_spans(timeline.steps)
        step, operators = length(whole), length(merge_spans(timeline.operators))
        busy, sending = merge_spans(timeline.operators), merge_spans(timeline.collectives)
        collectives = sum(overlap(interval, whole) for interval in sending)
        both = sum(overlap(interval, busy) for interval in sending)
        of_rank = {
            "step": step,
            "num_collectives": len(timeline.collectives),
            "operators": operators - both,
            "both": both,
            "collectives": collectives - both,
            "neither": step - operators - collectives + both,
        }
        for name, amount in of_rank.items():
            found[name] += amount / len(timeline.steps) / len(timelines)
    return found


def draw(timelines: list[Timeline], title: str, path: Path) -> None:
    """For each rank a lane of compute, operators dark in the parts of the step, and one of gloo."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, ax = plt.subplots(figsize=(16, 1.8 + 0.75 * len(timelines)), layout="constrained")
    origin = min(timeline.steps[0].start for timeline in timelines)

    for rank, timeline in enumerate(timelines):
        top = 2.3 * rank
        for span in timeline.parts:
            draw_bar(ax, span, origin, top - 0.45, 0.9, PARTS[span.name])
        draw_intervals(ax, merge_spans(timeline.operators), origin, top - 0.3, 0.6, OPERATOR_COLOR)
        draw_intervals(ax, merge_spans(timeline.collectives), origin, top + 0.57, 0.86, COMMUNICATION_COLOR)
    label_lanes(ax, range(len(timelines)), "gloo")
    ax.set_xlim(left=0)
    ax.set_xlabel("ms")
    ax.set_title(title, loc="left")
    add_legend(figure, {**PARTS, "operators": OPERATOR_COLOR, "gloo collectives": COMMUNICATION_COLOR})
    figure.savefig(path, dpi=110)
    plt.close(figure)


def print_results(results: dict[str, dict[str, Any]], of_profile: dict[str, dict[str, float]]) -> None:
    line = "  {:<36}" + "{:>12}" * len(results)
    num_steps = len(next(iter(results.values()))["losses"])
    print()
    print(line.format("", *results))
    for i in sorted({0, num_steps // 3, 2 * num_steps // 3, num_steps - 1}):
        losses = (f"{of_side['losses'][i]:.6f}" for of_side in results.values())
        print(line.format(f"loss at step {i + 1}", *losses))
    for part in ("step", *PARTS):
        title = "a step, ms (median)" if part == "step" else f"  {part}"
        print(line.format(title, *(f"{of_side['ms'][part]:.1f}" for of_side in results.values())))
    counts = (f"{one['num_collectives']:g}" for one in of_profile.values())
    print(line.format("collectives in a step", *counts))
    print(line.format("a profiled step, ms (mean)", *(f"{one['step']:.1f}" for one in of_profile.values())))
    for title, name in SHARES.items():
        print(line.format(f"  {title}", *(f"{one[name]:.1f}" for one in of_profile.values())))
    print()


def check_losses(results: dict[str, dict[str, Any]]) -> None:
    expected, losses = (torch.tensor(results[side]["losses"]) for side in ("stock", "funcol"))
    different = ~torch.isclose(losses, expected, **LOSS_TOLERANCE)
    if different.any():
        i = int(different.nonzero()[0])
        sys.exit(
            f"[lm] FAILED: the loss of 'funcol' leaves that of stock at step {i + 1}: {losses[i]:.6f}, "
            f"expected {expected[i]:.6f} within {LOSS_TOLERANCE}"
        )
    difference = (losses - expected).abs().max().item()
    say(f"losses agree over all {len(losses)} steps (largest difference {difference:.1e}, {LOSS_TOLERANCE})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", action="store_true", help="only as it is (default: both sides)")
    parser.add_argument("--funcol", action="store_true", help="only on funcol (default: both sides)")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="a side (default %(default)s)")
    parser.add_argument("--pictures", type=Path, default=Path(), metavar="FOLDER", help="default: here")
    args = parser.parse_args()
    if args.steps < 1:
        parser.error("needs at least 1 step")
    if not args.pictures.is_dir():
        parser.error(f"there is no folder {args.pictures.resolve()} to write the pictures to")
    sides = [side for side in ("stock", "funcol") if getattr(args, side) or args.stock == args.funcol]

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(sides, args.steps, folder, time.time())
        progress(
            settings.started, f"{NUM_RANKS} gloo ranks as {MESH}, PyTorch {torch.__version__}; {Config()}"
        )
        results = run_on_ranks(run_rank, NUM_RANKS, settings, limit_s=DEADLINE_S)
        progress(settings.started, "reading traces, drawing")
        timelines = {
            side: [read_timeline(trace_path(folder, side, rank)) for rank in range(NUM_RANKS)]
            for side in sides
        }
    of_profile = {side: shares(of_side) for side, of_side in timelines.items()}
    print_results(results, of_profile)
    for side in sides:
        picture = args.pictures / f"lm_timeline_{side}.png"
        title = (
            f"{side}: {NUM_PROFILED - 1} steps, {results[side]['ms']['step']:.0f} ms each when not profiled"
        )
        draw(timelines[side], title, picture)
        say(f"timeline of {side}: {picture.resolve()}")
    if len(sides) == 2:
        check_losses(results)


if __name__ == "__main__":
    main()
