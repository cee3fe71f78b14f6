"""Times functional collectives of PyTorch (stock), the bare ones of torch.distributed (raw) and funcol's.

Table 1: the cost of a call, in microseconds, where no byte is sent. Table 2: the cost of a gather along dim 1
on two gloo ranks, and how much independent work it overlaps. See docs/performance.md.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from measure import SIDES, Case, bench_cases, default_num_ranks
from runner import (
    Call,
    Option,
    Table,
    cells,
    device,
    mark,
    number,
    repeat,
    run,
    run_on_ranks,
    say,
    show,
    summary,
    time_ms,
)
from torch import Tensor

import funcol

NUM_GLOO_RANKS = 2
PEER_LATE_MS = 40.0
GLOO_TIMEOUT_S = 600

# PyTorch 2.15 renames these and warns on each call of the old name.
stock_all_gather = getattr(stock, "all_gather_single", stock.all_gather_tensor)
stock_reduce_scatter = getattr(stock, "reduce_scatter_single", stock.reduce_scatter_tensor)


# Table 1: the cost of a call.


def call_cases(device: torch.device, num_ranks: int) -> list[Case]:
    """Cases of tensors on ``device`` over the default group, which has ``num_ranks`` ranks."""
    group: Any = dist.group.WORLD
    x = torch.ones(4, 8, device=device)
    num_rows = num_ranks * max(1, 8 // num_ranks)
    square = torch.ones(num_rows, num_rows, device=device)
    copies = [x.clone() for _ in range(8)]
    plain = x.clone()
    settled_stock = stock.all_reduce(plain, "sum", group)
    settled_funcol = funcol.all_reduce(plain, "sum", group)
    for result in (settled_stock, settled_funcol):
        torch.add(result, 1)

    def limits(**of_cpu: float) -> dict[str, float]:
        # An op on a device costs more, which makes ratios of lines milder.
        return {} if device.type == "cuda" else of_cpu

    def reduced_in_place() -> Tensor:
        dist.all_reduce(x, async_op=True).wait()
        return x

    def reduced_and_used() -> Tensor:
        dist.all_reduce(x, async_op=True).wait()
        return x + 1

    def reduced_through_views() -> Tensor:
        work = dist.all_reduce(x, async_op=True)
        y = x.view(8, 4).t()
        work.wait()
        return y + 1

    def gathered(dim: int) -> Tensor:
        out = x.new_empty(num_ranks * 4, 8)
        dist.all_gather_into_tensor(out, x, async_op=True).wait()
        return (torch.cat(out.chunk(num_ranks), 1) if dim else out) + 1

    def scattered(dim: int) -> Tensor:
        rank_major = torch.cat(square.chunk(num_ranks, 1)) if dim else square
        sizes = list(square.shape)
        sizes[dim] //= num_ranks
        out = square.new_empty(sizes)
        dist.reduce_scatter_tensor(out, rank_major, async_op=True).wait()
        return out + 1

    def exchanged() -> Tensor:
        out = torch.empty_like(square)
        dist.all_to_all_single(out, square, async_op=True).wait()
        return out + 1

    def broadcast() -> Tensor:
        dist.broadcast(x, 0, async_op=True).wait()
        return x + 1

    def reduced_together() -> list[Tensor]:
        # dist.all_reduce_coalesced warns on each call.
        group.allreduce_coalesced(copies).wait()
        return [copy + 1 for copy in copies]

    cases = [
        Case(
            "all_reduce + wait",
            lambda: stock.wait_tensor(stock.all_reduce(x, "sum", group)),
            reduced_in_place,
            lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
            limits={"stock": 0.15, "raw": 0.9},
        ),
        Case(
            "all_reduce + use",
            lambda: stock.all_reduce(x, "sum", group) + 1,
            reduced_and_used,
            lambda: funcol.all_reduce(x, "sum", group) + 1,
            limits=limits(stock=0.08, raw=0.75),
        ),
        Case(
            "all_reduce + view + t + use",
            lambda: stock.all_reduce(x, "sum", group).view(8, 4).t() + 1,
            reduced_through_views,
            lambda: funcol.all_reduce(x, "sum", group).view(8, 4).t() + 1,
            limits=limits(stock=0.08),
        ),
        Case(
            "op on settled (raw: on plain)",
            lambda: settled_stock + 1,
            lambda: plain + 1,
            lambda: settled_funcol + 1,
            limits={"raw": 1.05},
        ),
        *(
            Case(
                f"all_gather dim {dim} + use",
                lambda dim=dim: stock_all_gather(x, dim, group) + 1,
                lambda dim=dim: gathered(dim),
                lambda dim=dim: funcol.all_gather_tensor(x, dim, group) + 1,
                limits=limits(stock=0.15) if dim == 1 else {},
            )
            for dim in (0, 1)
        ),
        *(
            Case(
                f"reduce_scatter dim {dim} + use",
                lambda dim=dim: stock_reduce_scatter(square, "sum", dim, group) + 1,
                lambda dim=dim: scattered(dim),
                lambda dim=dim: funcol.reduce_scatter_tensor(square, "sum", dim, group) + 1,
            )
            for dim in (0, 1)
        ),
        Case(
            "all_to_all + use",
            lambda: stock.all_to_all_single(square, None, None, group) + 1,
            exchanged,
            lambda: funcol.all_to_all_single(square, None, None, group) + 1,
        ),
        Case(
            "broadcast + use",
            lambda: stock.broadcast(x, 0, group) + 1,
            broadcast,
            lambda: funcol.broadcast(x, 0, group) + 1,
        ),
        Case(
            "all_reduce_coalesced of 8 + uses",
            lambda: [y + 1 for y in stock.all_reduce_coalesced(copies, "sum", group)],
            reduced_together,
            lambda: [y + 1 for y in funcol.all_reduce_coalesced(copies, "sum", group)],
        ),
    ]
    return cases if device.type == "cuda" else cases[1:]


def bench_calls(device: torch.device, num_ranks: int, repeat: int) -> dict[str, Any]:
    return bench_cases(
        "calls",
        lambda num_ranks: call_cases(device, num_ranks),
        device,
        num_ranks,
        repeat,
        compares=lambda lone: lone.backend == "nccl" and lone.num_ranks == 1,
    )


def print_calls(result: dict[str, Any]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        ratios = (f"{record['ratio'][side]['median']:.3f}" for side in ("stock", "raw"))
        targets = (f"{mark(t['met'])} (<= {t['limit']} of {t['against']})" for t in record["targets"])
        return [record["name"], *cells(record["us"], SIDES, 2), *ratios, ", ".join(targets)]

    show(
        f"Cost of a call in us, median (best) of {result['repeat']} rounds; '{result['backend']}' group of "
        f"{result['num_ranks']} ranks, one thread, tensors of 32 to 64 float32",
        "{:<33}{:>15}{:>15}{:>15}{:>9}{:>8}  {}",
        ("", *SIDES, "/ stock", "/ raw", "target"),
        map(row, result["cases"]),
    )


# Table 2: two gloo ranks.


def use(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` after an op that needs its data but costs next to nothing."""
    tensor[:1, :1] + 1
    return tensor


def gather_starters(x: Tensor, num_ranks: int) -> dict[str, Callable[[int], Call]]:
    """Returns, by side, a function that starts a gather of ``x`` along a dim and returns how to end it."""

    def start_raw(dim: int) -> Call:
        out = x.new_empty(num_ranks * x.shape[0], *x.shape[1:])
        work = dist.all_gather_into_tensor(out, x, async_op=True)

        def end() -> Tensor:
            work.wait()
            return use(torch.cat(out.chunk(num_ranks), dim) if dim else out)

        return end

    def start_with(gather: Callable[..., Tensor]) -> Callable[[int], Call]:
        def start(dim: int) -> Call:
            out = gather(x, dim, dist.group.WORLD)
            return lambda: use(out)

        return start

    return {
        "stock": start_with(stock_all_gather),
        "raw": start_raw,
        "funcol": start_with(funcol.all_gather_tensor),
    }


class GlooBench:
    """The timings of one rank. A timing starts together on all ranks; each name has one a round."""

    def __init__(self, rank: int, repeat: int, megabytes: int) -> None:
        self.rank = rank
        self.repeat = repeat
        num_columns = 2048
        num_rows = max(1, megabytes * 2**20 // (num_columns * 4))
        self.large = torch.full((num_rows, num_columns), float(rank))
        self.medium = self.large[: -(-num_rows // 4)]
        self.small = torch.full((128, num_columns), float(rank))
        self.factor = torch.rand(256, 256)
        self.times: dict[str, list[float]] = {}

    def run(self) -> dict[str, list[float]]:
        self.check()
        self.gathers()
        self.copies()
        self.overlap("on_time", self.medium, late_ms=0)
        self.overlap("peer_late", self.small, late_ms=PEER_LATE_MS)
        return self.times

    def check(self) -> None:
        by_stock = stock_all_gather(self.small, 1, dist.group.WORLD)
        if not torch.equal(by_stock, funcol.all_gather_tensor(self.small, 1, dist.group.WORLD)):
            raise RuntimeError("all_gather along dim 1: stock and funcol differ")

    def keep(self, name: str, call: Call, now: Callable[[], float] = time.perf_counter) -> None:
        dist.barrier()
        self.times.setdefault(name, []).append(time_ms(call, now))

    def gathers(self) -> None:
        starters = gather_starters(self.large, NUM_GLOO_RANKS)
        for side in SIDES:
            starters[side](1)()
        for _ in range(self.repeat):
            for dim in (0, 1):
                for side in SIDES:
                    self.keep(f"gather/{side}/{dim}", lambda side=side, dim=dim: starters[side](dim)())

    def copies(self) -> None:
        """The layout change alone, from a fresh buffer to be given back: funcol's wait on a fake group."""
        group = dist.new_group(backend="fake")
        for _ in range(self.repeat):
            gathered = [torch.cat([self.large] * NUM_GLOO_RANKS)]

            def chunk_and_cat(gathered: list[Tensor] = gathered) -> Tensor:
                return torch.cat(gathered.pop().chunk(NUM_GLOO_RANKS), 1)

            self.keep("copy/stock", chunk_and_cat, time.thread_time)
            pending = funcol.all_gather_tensor(self.large, 1, group)
            self.keep("copy/funcol", lambda pending=pending: funcol.wait_tensor(pending), time.thread_time)
            del pending

    def overlap(self, name: str, x: Tensor, late_ms: float) -> None:
        """Times a gather, work that takes about as long, and both.

        With ``late_ms``, rank 0 works and waits for the others, which come that late and do no work.
        """
        starters = gather_starters(x, NUM_GLOO_RANKS)
        is_late = late_ms > 0 and self.rank > 0
        multiply = self.compute_for(late_ms or time_ms(lambda: starters["raw"](1)()))
        compute: Call = (lambda: None) if is_late else multiply

        def gather(side: str, work: Call) -> Tensor:
            if is_late:
                time.sleep(late_ms / 1000)
            end = starters[side](1)
            work()
            return end()

        for _ in range(self.repeat):
            self.keep(f"{name}/compute", compute)
            for side in SIDES:
                self.keep(f"{name}/{side}/alone", lambda side=side: gather(side, lambda: None))
                self.keep(f"{name}/{side}/both", lambda side=side: gather(side, compute))

    def compute_for(self, target_ms: float) -> Call:
        """Returns matrix products that take about ``target_ms``, as many on each rank."""

        def multiply(count: int) -> None:
            for _ in range(count):
                torch.mm(self.factor, self.factor)

        dist.barrier()
        for_20 = min(time_ms(lambda: multiply(20)) for _ in range(10))
        count = torch.tensor(max(1.0, 20 * target_ms / for_20))
        dist.broadcast(count, 0)
        return lambda: multiply(int(count))


def gloo_rank(rank: int, repeat: int, megabytes: int) -> list[dict[str, list[float]]]:
    """Returns the times of each rank."""
    times = GlooBench(rank, repeat, megabytes).run()
    of_ranks: list[Any] = [None] * NUM_GLOO_RANKS
    dist.all_gather_object(of_ranks, times)
    return of_ranks


def bench_gloo(repeat: int, megabytes: int) -> dict[str, Any]:
    """Returns medians in ms, of the slower rank; of the rank that waits where a peer is late."""
    of_ranks = run_on_ranks(gloo_rank, NUM_GLOO_RANKS, repeat, megabytes, limit_s=GLOO_TIMEOUT_S)

    def rounds(name: str) -> list[float]:
        counted = of_ranks[:1] if name.startswith("peer_late") else of_ranks
        return [max(values) for values in zip(*(times[name] for times in counted), strict=True)]

    def gather(side: str) -> dict[str, Any]:
        across, along = rounds(f"gather/{side}/1"), rounds(f"gather/{side}/0")
        direct = rounds("copy/funcol" if side == "funcol" else "copy/stock")
        extra = statistics.median(a - b for a, b in zip(across, along, strict=True))
        return {"dim_1": summary(across), "dim_0": summary(along), "extra": extra, "copy": summary(direct)}

    def overlap(name: str, side: str) -> dict[str, Any]:
        alone, both = summary(rounds(f"{name}/{side}/alone")), summary(rounds(f"{name}/{side}/both"))
        compute = summary(rounds(f"{name}/compute"))
        ratio = both["median"] / max(alone["median"], compute["median"])
        return {"alone": alone, "compute": compute, "both": both, "ratio": ratio}

    return {
        "megabytes": megabytes,
        "num_ranks": NUM_GLOO_RANKS,
        "repeat": repeat,
        "gather_ms": {side: gather(side) for side in SIDES},
        "overlap_ms": {
            name: {side: overlap(name, side) for side in SIDES} for name in ("on_time", "peer_late")
        },
    }


def print_gloo(result: dict[str, Any]) -> None:
    gathers = result["gather_ms"]
    show(
        f"all_gather of {result['megabytes']} MB a rank on {result['num_ranks']} gloo ranks in ms, "
        f"median (best) of {result['repeat']}",
        "{:<10}{:>18}{:>18}{:>14}{:>22}",
        ("", "along dim 1", "along dim 0", "difference", "layout change alone"),
        (
            (side, *cells(row, ("dim_1", "dim_0"), 1), f"{row['extra']:.1f}", *cells(row, ["copy"], 1))
            for side, row in gathers.items()
        ),
    )
    met = gathers["funcol"]["copy"]["median"] < gathers["stock"]["copy"]["median"]
    say(f"target: the layout change alone takes less than stock's chunk + cat: {mark(met)}")
    titles = {
        "on_time": f"{result['megabytes'] / 4:g} MB a rank, all ranks at once",
        "peer_late": f"1 MB a rank, the peer {PEER_LATE_MS:.0f} ms late",
    }
    parts = ("alone", "compute", "both")
    for name, rows in result["overlap_ms"].items():
        show(
            f"all_gather dim 1 + independent compute, {titles[name]}, in ms, median (1.0: full overlap)",
            "{:<10}{:>14}{:>14}{:>14}{:>14}",
            ("", "collective", "compute", "both", "both / max"),
            (
                (side, *(f"{row[part]['median']:.1f}" for part in parts), f"{row['ratio']:.2f}")
                for side, row in rows.items()
            ),
        )


TABLES = [
    Table(
        "calls",
        lambda args: bench_calls(args.device, args.ranks or default_num_ranks(args.device), args.repeat),
        print_calls,
    ),
    Table(
        "gloo",
        lambda args: bench_gloo(args.gloo_repeat, args.megabytes),
        print_gloo,
        lambda args: args.device.type == "cpu" and not args.no_gloo,
    ),
]

if __name__ == "__main__":
    run(
        __doc__,
        TABLES,
        device(),
        repeat(41, "rounds of table 1"),
        number("--ranks", None, "of the group (default: 1 on a GPU, else 2)"),
        number("--gloo-repeat", 7, "rounds of table 2 (default %(default)s)"),
        number("--megabytes", 64, "a rank's part in table 2 (default %(default)s)"),
        Option("--no-gloo", {"action": "store_true", "help": "leave out table 2, as --device cuda does"}),
    )
