"""``torchrun ... -m funcol calibrate``: measures the costs of collectives on a mesh, for ``AlphaBeta``."""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .. import collectives
from .._progress import Progress
from ..collectives.async_tensor import wait_tensor
from ..redistribution.cost_models import COLLECTIVES, AlphaBeta, AxisCost, LinkCost, axis_names
from ..redistribution.planning import mesh_of
from .arguments import writing

SIZES = tuple(1 << power for power in range(10, 25, 2))  # bytes, 1 KiB to 16 MiB
QUICK_SIZES = (1 << 10, 1 << 14, 1 << 18)
NUM_RUNS = 15
NUM_QUICK_RUNS = 3
NUM_WARMUPS = 2

# The bandwidth, more than any link has, where larger messages took no longer than small ones.
MOST_GIGABYTES_PER_S = 1e6


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "calibrate",
        help="measure the collectives of a running mesh, for `plan --cost-model`",
        description="Measures every collective along every axis of the mesh at several sizes, fits latency "
        "and bandwidth, and writes the file that AlphaBeta.load reads. Run it on all ranks.",
        epilog="example: torchrun --nproc-per-node 4 -m funcol calibrate --mesh dp=2,tp=2 --out costs.json",
    )
    command.add_argument("--mesh", required=True, metavar="NAME=RANKS,...", help="the axes: dp=2,tp=2")
    command.add_argument("--out", required=True, type=Path, metavar="FILE", help="written by rank 0")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--quick", action="store_true", help="fewer sizes, up to 256 KiB, and fewer runs")
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    axes = mesh_of(arguments.mesh)
    num_ranks = math.prod(axes.sizes)
    if os.environ.get("WORLD_SIZE") != str(num_ranks):
        raise ValueError(
            f"the mesh {arguments.mesh} has {num_ranks} ranks, WORLD_SIZE is "
            f"{os.environ.get('WORLD_SIZE', 'not set')}. Start as many ranks as the mesh has: "
            f"torchrun --nproc-per-node {num_ranks} -m funcol calibrate ..."
        )
    folder = arguments.out.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder} to write {arguments.out.name} to. Make it first.")
    if arguments.out.is_dir():
        raise ValueError(f"{arguments.out} is a folder. Pass the name of a file in it.")
    if arguments.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if arguments.device == "cuda" else "gloo")
    try:
        mesh = init_device_mesh(arguments.device, axes.sizes, mesh_dim_names=axis_names(axes))
        report = _print_line if dist.get_rank() == 0 else _ignore_line
        sizes, num_runs = (QUICK_SIZES, NUM_QUICK_RUNS) if arguments.quick else (SIZES, NUM_RUNS)
        model = measure(mesh, sizes, num_runs, report)
        if dist.get_rank() == 0:
            with writing(arguments.out):
                model.save(arguments.out)
            report(f"written to {arguments.out}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _print_line(line: str) -> None:
    """Prints at once, also into a pipe."""
    print(line, flush=True)


def _ignore_line(line: str) -> None:
    """Does nothing: only one rank reports."""


def measure(
    mesh: DeviceMesh, sizes: Sequence[int], num_runs: int, report: Callable[[str], None]
) -> AlphaBeta:
    """Fits latency and bandwidth of each axis and collective of ``mesh`` to messages of ``sizes`` bytes.

    Every rank calls it. A time is the median of ``num_runs`` runs on the slowest rank, so all ranks get the
    same model. ``report`` gets a line for each figure.
    """
    assert mesh.mesh_dim_names is not None
    num_links = len(COLLECTIVES) * sum(mesh.size(axis) > 1 for axis in range(mesh.ndim))
    with Progress("calibrate", num_links + 1, is_on=dist.get_rank() == 0) as progress:
        axes = {
            name: AxisCost(mesh.size(axis), **_measure_axis(mesh, axis, sizes, num_runs, report, progress))
            for axis, name in enumerate(mesh.mesh_dim_names)
        }
        progress.show("copy")
        copy = fit(_slowest_times([(size, _copy_time(mesh, size, num_runs)) for size in sizes], mesh))
        progress.advance()
    report(f"copy: {_link_text(copy)}")
    return AlphaBeta(axes, copy)


def fit(samples: Sequence[tuple[float, float]]) -> LinkCost:
    """Returns latency and bandwidth, neither negative, with the least relative errors on ``samples``: (bytes,
    microseconds). Small messages determine the latency, large ones the bandwidth."""
    weights = [1 / max(us, 1e-3) ** 2 for _, us in samples]
    total = sum(weights)
    mean_bytes = sum(w * size for w, (size, _) in zip(weights, samples, strict=True)) / total
    mean_us = sum(w * us for w, (_, us) in zip(weights, samples, strict=True)) / total
    squares = sum(w * (size - mean_bytes) ** 2 for w, (size, _) in zip(weights, samples, strict=True))
    products = sum(
        w * (size - mean_bytes) * (us - mean_us) for w, (size, us) in zip(weights, samples, strict=True)
    )
    us_per_byte = max(products / squares, 0.0) if squares > 0 else 0.0
    latency_us = mean_us - us_per_byte * mean_bytes
    if latency_us < 0:
        latency_us = 0.0
        us_per_byte = sum(w * size * us for w, (size, us) in zip(weights, samples, strict=True)) / sum(
            w * size**2 for w, (size, _) in zip(weights, samples, strict=True)
        )
    slowest = 1 / (1e3 * MOST_GIGABYTES_PER_S)
    return LinkCost(latency_us, 1 / (1e3 * max(us_per_byte, slowest)))


def _measure_axis(
    mesh: DeviceMesh,
    axis: int,
    sizes: Sequence[int],
    num_runs: int,
    report: Callable[[str], None],
    progress: Progress,
) -> dict[str, LinkCost]:
    assert mesh.mesh_dim_names is not None
    name = mesh.mesh_dim_names[axis]
    if mesh.size(axis) == 1:
        report(f"{name}: one rank, no plan sends along it")
        return dict.fromkeys(COLLECTIVES, LinkCost(0.0, MOST_GIGABYTES_PER_S))
    links = {}
    for kind in COLLECTIVES:
        progress.show(f"{name} {kind}")
        links[kind] = _measure_link(mesh, axis, kind, sizes, num_runs)
        progress.advance()
        report(f"{name} {kind}: {_link_text(links[kind])}")
    return links


def _measure_link(mesh: DeviceMesh, axis: int, kind: str, sizes: Sequence[int], num_runs: int) -> LinkCost:
    num_ranks = mesh.size(axis)
    group = mesh.get_group(axis)
    samples = []
    for size in sizes:
        num_elements = max(size // 4 // num_ranks, 1) * num_ranks
        start, sent = _collective(kind, num_elements, num_ranks, group, mesh.device_type)
        samples.append((sent, _median_us(start, mesh, num_runs, group)))
    return fit(_slowest_times(samples, mesh))


def _collective(
    kind: str, num_elements: int, num_ranks: int, group: dist.ProcessGroup, device: str
) -> tuple[Callable[[], Tensor], float]:
    """Returns the collective on ``num_elements`` float32 elements, and the bytes that a rank sends in it."""
    share = 4.0 * num_elements * (num_ranks - 1) / num_ranks
    tensor = torch.ones(num_elements // num_ranks if kind == "all_gather" else num_elements, device=device)
    ring = [(rank + 1) % num_ranks for rank in range(num_ranks)]
    return {
        "all_gather": (lambda: collectives.all_gather_tensor(tensor, 0, group), share),
        "reduce_scatter": (lambda: collectives.reduce_scatter_tensor(tensor, "sum", 0, group), share),
        "all_reduce": (lambda: collectives.all_reduce(tensor, "sum", group), 2 * share),
        "all_to_all": (lambda: collectives.all_to_all_single(tensor, None, None, group), share),
        "permute": (lambda: collectives.permute_tensor(tensor, ring, group), 4.0 * num_elements),
    }[kind]


def _copy_time(mesh: DeviceMesh, size: int, num_runs: int) -> float:
    source = torch.ones(max(size // 4, 1), device=mesh.device_type)
    target = torch.empty_like(source)
    return _median_us(lambda: target.copy_(source), mesh, num_runs, None)


def _median_us(
    run: Callable[[], Tensor], mesh: DeviceMesh, num_runs: int, group: dist.ProcessGroup | None
) -> float:
    def times() -> Iterator[float]:
        for _ in range(NUM_WARMUPS + num_runs):
            if group is not None:
                dist.barrier(group)
            _finish_device(mesh)
            begin = time.perf_counter()
            wait_tensor(run())
            _finish_device(mesh)
            yield 1e6 * (time.perf_counter() - begin)

    return statistics.median(list(times())[NUM_WARMUPS:])


def _finish_device(mesh: DeviceMesh) -> None:
    if mesh.device_type == "cuda":
        torch.cuda.synchronize()


def _slowest_times(samples: list[tuple[float, float]], mesh: DeviceMesh) -> list[tuple[float, float]]:
    """Returns ``samples`` with the times of the slowest rank."""
    times = torch.tensor([us for _, us in samples], dtype=torch.float64, device=mesh.device_type)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return [(size, us) for (size, _), us in zip(samples, times.tolist(), strict=True)]


def _link_text(link: LinkCost) -> str:
    return f"{link.latency_us:.1f} us + bytes at {link.gigabytes_per_s:.3g} GB/s"
