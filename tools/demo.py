"""Trains a small network on handwritten digits, data parallel, with three kinds of collectives in one run.

Every rank reduces a layer's gradients as soon as they are there and uses them at the end of the step, so that
the reduction runs beside the rest of the backward pass:

  stock     torch.distributed._functional_collectives
  funcol    the same program with funcol in its place
  compiled  the same program with funcol, the whole step compiled by torch.compile (needs a C++ compiler)

All start from the same weights and must reach the same losses. Prints losses, accuracy and times, and draws
what each rank computed and sent when.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # read when torch is imported; else it reports missing GPUs

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.nn.functional as F  # noqa: N812
from gloo_ranks import run_on_ranks
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

import funcol
from funcol.commands.timeline import add_legend, common, draw_bar, draw_communication, label_lanes
from funcol.commands.traces import Span, read_spans

ALL_WAYS = ("stock", "funcol", "compiled")
WIDTHS = (64, 1024, 1024, 1024, 10)
BATCH_PER_RANK = 128
LEARNING_RATE = 0.01
MOMENTUM = 0.9
NUM_TEST = 360
NUM_WARM_UP = 3  # steps that are not timed; the first of the compiled way compiles
NUM_PROFILED = 3  # the first of them is not drawn: it pays for starting the profiler
MAX_RANKS_DRAWN = 4
DEADLINE_S = 300
# Inductor adds in another order than eager PyTorch, and training carries such differences from step to step.
LOSS_TOLERANCE = {"rtol": 5e-4, "atol": 5e-5}

# Starts each collective as early and waits for it as late as the data allow.
OVERLAP = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
    "cpp.enable_kernel_profile": True,
}

Layer = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], Tensor]


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


# The program.


def forward_layer(layers: list[Layer], i: int, inputs: Tensor) -> Tensor:
    outputs = F.linear(inputs, *layers[i])
    return outputs if i == len(layers) - 1 else F.relu(outputs)


def train_step(
    layers: list[Layer],
    momenta: list[Layer],
    images: Tensor,
    labels: Tensor,
    all_reduce: Callable[[Tensor], Tensor],
    num_ranks: int,
) -> Tensor:
    """One step of SGD with momentum; returns this rank's loss. The backward pass goes layer by layer."""
    inputs, outputs = [], []
    hidden = images
    for i in range(len(layers)):
        inputs.append(hidden.detach().requires_grad_())
        hidden = forward_layer(layers, i, inputs[-1])
        outputs.append(hidden)
    loss = F.cross_entropy(hidden, labels)
    outputs[-1] = loss

    gradient = None
    reduced = []
    for i in reversed(range(len(layers))):
        gradient, *of_layer = torch.autograd.grad(outputs[i], [inputs[i], *layers[i]], gradient)
        flat = torch.cat([part.flatten() for part in of_layer])
        reduced.append(all_reduce(flat))  # under way while the loop goes on

    with torch.no_grad():
        for i, flat in zip(reversed(range(len(layers))), reduced, strict=True):
            parts = flat.split([parameter.numel() for parameter in layers[i]])
            for parameter, momentum, part in zip(layers[i], momenta[i], parts, strict=True):
                momentum.mul_(MOMENTUM).add_(part.view_as(parameter), alpha=1 / num_ranks)
                parameter.sub_(momentum, alpha=LEARNING_RATE)
    return loss.detach()


def load_digits() -> dict[str, Tensor]:
    from sklearn.datasets import load_digits as load

    digits = load()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(digits.data, dtype=torch.float32)[order] / 16
    labels = torch.tensor(digits.target)[order]
    return {
        "images": images[NUM_TEST:],
        "labels": labels[NUM_TEST:],
        "test_images": images[:NUM_TEST],
        "test_labels": labels[:NUM_TEST],
    }


def initial_layers() -> list[Layer]:
    generator = torch.Generator().manual_seed(0)
    layers = []
    for fan_in, fan_out in itertools.pairwise(WIDTHS):
        weight = torch.randn(fan_out, fan_in, generator=generator) * (2 / fan_in) ** 0.5
        layers.append((weight.requires_grad_(), torch.zeros(fan_out, requires_grad=True)))
    return layers


# One rank.


@dataclass(frozen=True)
class Settings:
    ways: tuple[str, ...]
    num_ranks: int
    num_steps: int
    folder: str
    started: float

    def progress(self, text: str) -> None:
        say(f"{time.time() - self.started:5.1f} s  {text}")


class Rank:
    def __init__(self, rank: int, settings: Settings) -> None:
        self.rank = rank
        self.settings = settings
        self.digits = torch.load(f"{settings.folder}/digits.pt")

    def progress(self, text: str) -> None:
        if self.rank == 0:
            self.settings.progress(text)

    def train(self, way: str) -> dict[str, Any]:
        """Trains from the initial weights; the last steps are profiled."""
        layers = initial_layers()
        step = self.make_step(way, layers)
        batches = torch.Generator().manual_seed(1)
        losses, times = [], []
        counted = funcol._C.async_counters()
        for i in range(self.settings.num_steps):
            begin = time.perf_counter()
            losses.append(step(*self.batch(batches)))
            times.append(time.perf_counter() - begin)
            if i == 0 and way == "compiled":
                self.progress(f"compiled in {times[0]:.0f} s")
        per_step = [
            (now - before) / self.settings.num_steps
            for now, before in zip(funcol._C.async_counters(), counted, strict=True)
        ]
        self.profile(way, lambda: step(*self.batch(batches)))
        mean_losses = torch.stack(losses)
        dist.all_reduce(mean_losses)
        return {
            "losses": (mean_losses / self.settings.num_ranks).tolist(),
            "accuracy": self.accuracy(layers),
            "step_ms": statistics.median(times[NUM_WARM_UP:]) * 1000,
            "waits": per_step[0],
            "views": per_step[1],
        }

    def make_step(self, way: str, layers: list[Layer]) -> Step:
        group, num_ranks = dist.group.WORLD, self.settings.num_ranks
        collectives = stock if way == "stock" else funcol
        momenta = [(torch.zeros_like(weight), torch.zeros_like(bias)) for weight, bias in layers]

        def all_reduce(tensor: Tensor) -> Tensor:
            return collectives.all_reduce(tensor, "sum", group)

        def step(images: Tensor, labels: Tensor) -> Tensor:
            return train_step(layers, momenta, images, labels, all_reduce, num_ranks)

        return torch.compile(step, fullgraph=True, options=OVERLAP) if way == "compiled" else step

    def batch(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """This rank's part of a batch that all ranks draw alike."""
        num_images = self.settings.num_ranks * BATCH_PER_RANK
        chosen = torch.randint(len(self.digits["labels"]), (num_images,), generator=generator)
        mine = chosen[self.rank :: self.settings.num_ranks]
        return self.digits["images"][mine], self.digits["labels"][mine]

    def profile(self, way: str, run_step: Callable[[], object]) -> None:
        dist.barrier()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(NUM_PROFILED):
                with record_function("step"):
                    run_step()
        profiler.export_chrome_trace(trace_path(self.settings.folder, way, self.rank))

    def accuracy(self, layers: list[Layer]) -> float:
        hidden = self.digits["test_images"]
        with torch.no_grad():
            for i in range(len(layers)):
                hidden = forward_layer(layers, i, hidden)
        return (hidden.argmax(1) == self.digits["test_labels"]).float().mean().item()


def trace_path(folder: str, way: str, rank: int) -> str:
    return f"{folder}/trace-{way}-{rank}.json"


def run_rank(rank: int, settings: Settings) -> dict[str, dict[str, Any]]:
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # reports missing GPUs
    torch._dynamo.config.trace_autograd_ops = True  # off by default: autograd.grad would break the graph
    this_rank = Rank(rank, settings)
    results = {}
    for way in settings.ways:
        first = "compiles (half a minute), then " if way == "compiled" else ""
        this_rank.progress(f"{way}: {first}{settings.num_steps} steps")
        results[way] = this_rank.train(way)
    return results


# What came out.


def print_results(results: dict[str, dict[str, Any]], num_steps: int) -> None:
    line = "  {:<26}" + "{:>12}" * len(results)
    print()
    print(line.format("", *results))
    for i in sorted({0, num_steps // 4, num_steps // 2, 3 * num_steps // 4, num_steps - 1}):
        print(line.format(f"loss at step {i + 1}", *(f"{results[way]['losses'][i]:.6f}" for way in results)))
    for title, key, form in (
        ("test accuracy", "accuracy", "{:.1%}"),
        ("time per step (median, ms)", "step_ms", "{:.1f}"),
        ("funcol: waits per step", "waits", "{:g}"),
        ("funcol: views not waited for", "views", "{:g}"),
    ):
        print(line.format(title, *(form.format(of_way[key]) for of_way in results.values())))
    print()


def check_losses(results: dict[str, dict[str, Any]]) -> None:
    all_losses = {way: torch.tensor(of_way["losses"]) for way, of_way in results.items()}
    expected = all_losses.pop("stock")
    for way, losses in all_losses.items():
        different = ~torch.isclose(losses, expected, **LOSS_TOLERANCE)
        if different.any():
            i = int(different.nonzero()[0])
            sys.exit(
                f"[demo] FAILED: the loss of '{way}' leaves that of stock at step {i + 1}: {losses[i]:.6f}, "
                f"expected {expected[i]:.6f} within {LOSS_TOLERANCE}"
            )
    difference = max((losses - expected).abs().max().item() for losses in all_losses.values())
    say(f"losses agree over all steps (largest difference {difference:.1e})")


# The picture.

TITLES = {
    "stock": "stock functional collectives",
    "funcol": "funcol, eager",
    "compiled": "funcol under torch.compile",
}
KINDS = {
    "forward": ("forward", "#9ecae1"),
    "backward": ("backward", "#3182bd"),
    "start": ("copies gradients, starts to reduce them", "#bdbdbd"),
    "update": ("optimizer", "#31a354"),
    "wait": ("waits", "#de2d26"),
    "communication": ("gloo all_reduce (number: layer)", "#fd8d3c"),
}


@dataclass
class Timeline:
    """One rank's steps. Waits lie over the other spans of ``compute``; gloo runs on threads of its own."""

    compute: list[Span]
    waits: list[Span]
    communication: list[Span]

    @property
    def start(self) -> float:
        return min(span.start for span in self.compute)

    def hidden_share(self) -> float:
        """How much of the communication ran while this rank computed."""
        busy = [(span.start, span.end) for span in self.compute]
        idle = [(span.start, span.end) for span in self.waits]
        total = sum(span.end - span.start for span in self.communication)
        hidden = sum(
            common((span.start, span.end), busy) - common((span.start, span.end), idle)
            for span in self.communication
        )
        return hidden / total if total else 1.0


UPDATE_OPS = ("aten::split_with_sizes", "aten::view_as", "aten::mul_", "aten::add_", "aten::sub_")


def kind_of(op: str) -> str:
    """Which part of the step an op belongs to; Inductor names a kernel after the ops in it."""
    if "wait_tensor" in op:
        return "wait"
    if "allreduce" in op or "all_reduce" in op or op in ("aten::flatten", "aten::cat", "aten::clone"):
        return "start"
    if op in UPDATE_OPS or "_sub_" in op:
        return "update"
    is_backward = op.startswith("autograd::") or "_backward_" in op or "_cat_" in op or op == "aten::mm"
    return "backward" if is_backward else "forward"


def read_trace(path: str) -> Timeline:
    """The profiled steps but the first."""
    trace = read_spans(path)
    steps = [span for span in trace if span.name == "step"][1:]

    def is_op(span: Span) -> bool:
        is_wrapper = span.name.startswith(("Torch-Compiled Region", "## Call"))
        return span.kind == "cpu_op" and span.thread == steps[0].thread and not is_wrapper

    def in_steps(of_trace: list[Span]) -> list[Span]:
        return [span for span in of_trace if any(span.starts_in(step) for step in steps)]

    ops = in_steps([span for span in trace if is_op(span)])
    for op in ops:
        op.kind = kind_of(op.name)
    sent = in_steps([span for span in trace if span.name.startswith("gloo:")])
    compute: list[Span] = []
    for op in ops:
        if not compute or op.start >= compute[-1].end:
            compute.append(op)
    for step in steps:
        for k, span in enumerate(span for span in sent if span.starts_in(step)):
            span.name = str(len(WIDTHS) - 1 - k)
    waits = [op for op in ops if op.kind == "wait"] or waits_inside_ops(steps, compute, sent)
    return Timeline(compute, waits, sent)


def waits_inside_ops(steps: list[Span], compute: list[Span], sent: list[Span]) -> list[Span]:
    """Where an op on a pending tensor waits inside itself, which no event of the trace tells: until its
    layer's reduction ends, in the first add_ of each layer."""
    waits = []
    for step in steps:
        adds = [op for op in compute if op.name == "aten::add_" and op.starts_in(step)]
        reductions = [span for span in sent if span.starts_in(step)]
        for add, reduction in zip(adds[::2], reductions, strict=False):
            if reduction.end > add.start:
                waits.append(Span("wait", add.start, min(add.end, reduction.end)))
    return waits


def draw(timelines: dict[str, list[Timeline]], results: dict[str, dict[str, Any]], path: Path) -> None:
    """Writes the picture: a panel a way, for each rank a lane of compute and one of communication."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    num_ranks = min(len(timelines["stock"]), MAX_RANKS_DRAWN)
    figure, axes = plt.subplots(
        len(timelines),
        1,
        figsize=(16, 2 + len(timelines) * (0.9 + 0.75 * num_ranks)),
        sharex=True,
        layout="constrained",
    )
    for ax, (way, of_all_ranks) in zip(axes, timelines.items(), strict=True):
        of_ranks = of_all_ranks[:num_ranks]
        origin = min(timeline.start for timeline in of_ranks)
        for rank, timeline in enumerate(of_ranks):
            draw_rank(ax, timeline, origin, 2.3 * rank)
        hidden = statistics.mean(timeline.hidden_share() for timeline in of_ranks)
        ax.set_title(
            f"{TITLES[way]}: {results[way]['step_ms']:.1f} ms a step, "
            f"{hidden:.0%} of the communication beside compute",
            loc="left",
        )
        label_lanes(ax, range(num_ranks), "gloo")
    axes[-1].set_xlim(left=0)  # after all panels: it ends the fitting of the axis that they share
    axes[-1].set_xlabel("ms")
    figure.suptitle(
        f"{NUM_PROFILED - 1} steps of training on {len(timelines['stock'])} ranks, as torch.profiler saw them"
    )
    add_legend(figure, dict(KINDS.values()))
    figure.savefig(path, dpi=110)


def draw_rank(ax: Any, timeline: Timeline, origin: float, top: float) -> None:
    for span in timeline.compute + timeline.waits:
        draw_bar(ax, span, origin, top - 0.45, 0.9, KINDS[span.kind][1], edge="none")
    draw_communication(ax, timeline.communication, origin, top + 0.57, KINDS["communication"][1])


def ways_here() -> tuple[str, ...]:
    """All ways, but the compiled one where Inductor has no C++ compiler."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is not None:
        return ALL_WAYS
    say(f"'compiled' is left out, since there is no C++ compiler '{compiler}'")
    return tuple(way for way in ALL_WAYS if way != "compiled")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default %(default)s)")
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="a way (default %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("demo_timeline.png"), metavar="PATH")
    args = parser.parse_args()
    if args.ranks < 1 or args.steps <= NUM_WARM_UP:
        parser.error(f"needs at least 1 rank and {NUM_WARM_UP + 1} steps")
    if not args.picture.resolve().parent.is_dir():
        parser.error(f"there is no folder {args.picture.resolve().parent} to write the picture to")

    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(ways_here(), args.ranks, args.steps, folder, time.time())
        settings.progress(
            f"number of ranks: {args.ranks} (gloo, one thread each, PyTorch {torch.__version__})"
        )
        torch.save(load_digits(), f"{folder}/digits.pt")
        results = run_on_ranks(run_rank, args.ranks, settings, limit_s=DEADLINE_S)
        settings.progress("drawing")
        timelines = {
            way: [read_trace(trace_path(folder, way, rank)) for rank in range(args.ranks)]
            for way in settings.ways
        }
    print_results(results, args.steps)
    draw(timelines, results, args.picture)
    say(f"timeline of {NUM_PROFILED - 1} steps: {args.picture.resolve()}")
    check_losses(results)


if __name__ == "__main__":
    main()
