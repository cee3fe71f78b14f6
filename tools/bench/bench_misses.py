"""Times operators on DTensors whose decision is not remembered, by number of mesh axes.

Each call has sizes of its own. Stock PyTorch beside funcol under install(), and the same calls once they are
remembered.

Times are of all of a call on one thread, the operator on local tensors included; the median of the calls. The
limit is for funcol on a quiet machine. See docs/performance.md.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
from measure import fake_ranks
from runner import Table, each, mark, number, run, show, without_gc
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import funcol

LIMIT_US = 60.0
NUM_RANKS = 8
MESHES = {1: (8,), 2: (4, 2), 3: (2, 2, 2)}
NUM_STOCK = 3  # calls: stock takes up to half a second for one

Call = Callable[[], object]


def tensor(mesh: DeviceMesh, shape: tuple[int, ...], cut: int | None = None, axis: int = 0) -> DTensor:
    """Returns a tensor whose dim ``cut`` is sharded along ``axis``."""
    placements = [Shard(cut) if cut is not None and i == axis else Replicate() for i in range(mesh.ndim)]
    local = [size // mesh.size(axis) if dim == cut else size for dim, size in enumerate(shape)]
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return DTensor.from_local(
        torch.ones(local), mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def add(mesh: DeviceMesh, rows: int, columns: int) -> Call:
    x, y = tensor(mesh, (rows, columns), 0), tensor(mesh, (rows, columns), 0)
    return lambda: x + y


def add_moving(mesh: DeviceMesh, rows: int, columns: int) -> Call:
    x, y = tensor(mesh, (rows, columns), 0), tensor(mesh, (rows, columns), 1, mesh.ndim - 1)
    return lambda: x + y


def mm(mesh: DeviceMesh, rows: int, columns: int) -> Call:
    x, y = tensor(mesh, (rows, columns), 0), tensor(mesh, (columns, 32), 1, mesh.ndim - 1)
    return lambda: x @ y


def view(mesh: DeviceMesh, rows: int, columns: int) -> Call:
    x = tensor(mesh, (rows, columns), 0)
    return lambda: x.view(rows, 2, columns // 2)


def softmax(mesh: DeviceMesh, rows: int, columns: int) -> Call:
    x = tensor(mesh, (rows, columns), 0)
    return lambda: torch.softmax(x, 1)


def layer_norm(mesh: DeviceMesh, rows: int, columns: int) -> Call:
    x, weight = tensor(mesh, (rows, columns), 0), tensor(mesh, (columns,))
    return lambda: torch.layer_norm(x, (columns,), weight, weight)


CASES = {
    "add": add,
    "add, one moves": add_moving,
    "mm": mm,
    "view": view,
    "softmax": softmax,
    "layer_norm": layer_norm,
}


def us(call: Call) -> float:
    begin = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begin)


def us_of(make: Callable[..., Call], mesh: DeviceMesh, count: int) -> tuple[float, float]:
    """Returns microseconds of a call with new sizes, and of one that is remembered."""
    sizes = [(8 * (1 + i % 32), 8 * (1 + i // 32)) for i in range(count)]
    calls = [make(mesh, rows, columns) for rows, columns in sizes]
    with without_gc():
        missed = [us(call) for call in calls]
        return median(missed[len(missed) // 8 :]), median(us(call) for call in calls)


def bench(num_calls: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    with fake_ranks(NUM_RANKS), torch.no_grad():
        for axes, sizes in each("axes", MESHES.items()):
            mesh = init_device_mesh("cpu", sizes)
            for name, make in CASES.items():
                record: dict[str, Any] = {"name": name, "axes": axes}
                for side, count in (("stock", NUM_STOCK), ("funcol", num_calls)):
                    with funcol.installed() if side == "funcol" else contextlib.nullcontext():
                        record[side], record[f"{side}_known"] = us_of(make, mesh, count)
                yield record


def print_misses(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        times = [f"{record[side]:.1f}" for side in ("stock", "funcol", "stock_known", "funcol_known")]
        return [
            record["name"],
            record["axes"],
            *times,
            f"{LIMIT_US:.0f} {mark(record['funcol'] <= LIMIT_US)}",
        ]

    show(
        "A call in us: with new sizes, and remembered",
        "{:<16}{:>5}{:>12}{:>9}{:>14}{:>9}   {}",
        ("", "axes", "stock", "funcol", "stock known", "funcol", "limit"),
        map(row, records),
    )


if __name__ == "__main__":
    run(
        __doc__,
        [Table("misses", lambda args: list(bench(args.calls)), print_misses)],
        number("--calls", 256, "default: %(default)s"),
    )
