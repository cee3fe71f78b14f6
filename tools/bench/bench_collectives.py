"""Times functional collectives of PyTorch (stock), the bare ones of torch.distributed (raw) and funcol's.

Table 1: the cost of a call, in microseconds, where no byte is sent. Table 2: the cost of a gather along dim 1
on two gloo ranks, and how much independent work it overlaps. See docs/performance.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from gloo_ranks import run_on_ranks
from measure import (
    SIDES,
    Call,
    Case,
    add_outcomes,
    cell,
    check_same,
    conclude,
    default_num_ranks,
    describe,
    device_named,
    each,
    lone_group,
    mark,
    measure,
    say,
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


class Cases:
    """Builds the cases for tensors on ``device`` over the default group, which has ``num_ranks`` ranks."""

    def __init__(self, device: torch.device, num_ranks: int) -> None:
        self.is_on_cuda = device.type == "cuda"
        self.group = dist.group.WORLD
        self.num_ranks = num_ranks
        self.small = torch.ones(4, 8, device=device)
        num_rows = num_ranks * max(1, 8 // num_ranks)
        self.square = torch.ones(num_rows, num_rows, device=device)

    def all(self) -> list[Case]:
        return [
            *([self.all_reduce_and_wait()] if self.is_on_cuda else []),
            self.all_reduce(),
            self.all_reduce_through_views(),
            self.settled(),
            self.all_gather(0),
            self.all_gather(1),
            self.reduce_scatter(0),
            self.reduce_scatter(1),
            self.all_to_all(),
            self.broadcast(),
            self.all_reduce_coalesced(),
        ]

    def limits(self, **of_cpu: float) -> dict[str, float]:
        """Limits that hold on CPU alone: an op on a device costs more, which makes ratios of lines milder."""
        return {} if self.is_on_cuda else of_cpu

    def all_reduce_and_wait(self) -> Case:
        x, group = self.small, self.group

        def raw() -> Tensor:
            dist.all_reduce(x, async_op=True).wait()
            return x

        return Case(
            "all_reduce + wait",
            lambda: stock.wait_tensor(stock.all_reduce(x, "sum", group)),
            raw,
            lambda: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
            limits={"stock": 0.15, "raw": 0.9},
        )

    def all_reduce(self) -> Case:
        x, group = self.small, self.group

        def raw() -> Tensor:
            dist.all_reduce(x, async_op=True).wait()
            return x + 1

        return Case(
            "all_reduce + use",
            lambda: stock.all_reduce(x, "sum", group) + 1,
            raw,
            lambda: funcol.all_reduce(x, "sum", group) + 1,
            limits=self.limits(stock=0.08, raw=0.75),
        )

    def all_reduce_through_views(self) -> Case:
        x, group = self.small, self.group

        def raw() -> Tensor:
            work = dist.all_reduce(x, async_op=True)
            y = x.view(8, 4).t()
            work.wait()
            return y + 1

        return Case(
            "all_reduce + view + t + use",
            lambda: stock.all_reduce(x, "sum", group).view(8, 4).t() + 1,
            raw,
            lambda: funcol.all_reduce(x, "sum", group).view(8, 4).t() + 1,
            limits=self.limits(stock=0.08),
        )

    def settled(self) -> Case:
        plain = self.small.clone()
        by_stock = stock.all_reduce(plain, "sum", self.group)
        by_funcol = funcol.all_reduce(plain, "sum", self.group)
        torch.add(by_stock, 1)
        torch.add(by_funcol, 1)
        return Case(
            "op on settled (raw: on plain)",
            lambda: by_stock + 1,
            lambda: plain + 1,
            lambda: by_funcol + 1,
            limits={"raw": 1.05},
        )

    def all_gather(self, dim: int) -> Case:
        x, group, num_ranks = self.small, self.group, self.num_ranks

        def raw() -> Tensor:
            out = x.new_empty(num_ranks * 4, 8)
            dist.all_gather_into_tensor(out, x, async_op=True).wait()
            return (torch.cat(out.chunk(num_ranks), 1) if dim else out) + 1

        return Case(
            f"all_gather dim {dim} + use",
            lambda: stock_all_gather(x, dim, group) + 1,
            raw,
            lambda: funcol.all_gather_tensor(x, dim, group) + 1,
            limits=self.limits(stock=0.15) if dim == 1 else {},
        )

    def reduce_scatter(self, dim: int) -> Case:
        x, group, num_ranks = self.square, self.group, self.num_ranks

        def raw() -> Tensor:
            rank_major = torch.cat(x.chunk(num_ranks, 1)) if dim else x
            sizes = list(x.shape)
            sizes[dim] //= num_ranks
            out = x.new_empty(sizes)
            dist.reduce_scatter_tensor(out, rank_major, async_op=True).wait()
            return out + 1

        return Case(
            f"reduce_scatter dim {dim} + use",
            lambda: stock_reduce_scatter(x, "sum", dim, group) + 1,
            raw,
            lambda: funcol.reduce_scatter_tensor(x, "sum", dim, group) + 1,
        )

    def all_to_all(self) -> Case:
        x, group = self.square, self.group

        def raw() -> Tensor:
            out = torch.empty_like(x)
            dist.all_to_all_single(out, x, async_op=True).wait()
            return out + 1

        return Case(
            "all_to_all + use",
            lambda: stock.all_to_all_single(x, None, None, group) + 1,
            raw,
            lambda: funcol.all_to_all_single(x, None, None, group) + 1,
        )

    def broadcast(self) -> Case:
        x, group = self.small, self.group

        def raw() -> Tensor:
            dist.broadcast(x, 0, async_op=True).wait()
            return x + 1

        return Case(
            "broadcast + use",
            lambda: stock.broadcast(x, 0, group) + 1,
            raw,
            lambda: funcol.broadcast(x, 0, group) + 1,
        )

    def all_reduce_coalesced(self) -> Case:
        group = self.group
        xs = [self.small.clone() for _ in range(8)]

        def raw() -> list[Tensor]:
            # dist.all_reduce_coalesced warns on each call.
            group.allreduce_coalesced(xs).wait()
            return [x + 1 for x in xs]

        return Case(
            "all_reduce_coalesced of 8 + uses",
            lambda: [y + 1 for y in stock.all_reduce_coalesced(xs, "sum", group)],
            raw,
            lambda: [y + 1 for y in funcol.all_reduce_coalesced(xs, "sum", group)],
        )


def bench_calls(device: torch.device, num_ranks: int, repeat: int) -> dict[str, Any]:
    """Table 1, in this process, with a group of its own."""
    records = []
    with lone_group(device, num_ranks) as lone:
        for case in each("calls", Cases(device, lone.num_ranks).all()):
            check_same(case, compare_values=lone.backend == "nccl" and lone.num_ranks == 1)
            records.append(measure(case, repeat, lone.clock))
    return {"backend": lone.backend, "num_ranks": lone.num_ranks, "repeat": repeat, "cases": records}


def print_calls(result: dict[str, Any]) -> None:
    say(
        f"\nCost of a call in us, median (best) of {result['repeat']} rounds; '{result['backend']}' group of "
        f"{result['num_ranks']} ranks, one thread, tensors of 32 to 64 float32"
    )
    line = "{:<33}{:>15}{:>15}{:>15}{:>9}{:>8}  {}"
    say(line.format("", *SIDES, "/ stock", "/ raw", "target"))
    for record in result["cases"]:
        times = (cell(record["us"][side], 2) for side in SIDES)
        ratios = (f"{record['ratio'][side]['median']:.3f}" for side in ("stock", "raw"))
        targets = (f"{mark(t['met'])} (<= {t['limit']} of {t['against']})" for t in record["targets"])
        say(line.format(record["name"], *times, *ratios, ", ".join(targets)))


# Table 2: two gloo ranks.


def use(tensor: Tensor) -> Tensor:
    """``tensor``, after an op that needs its data but costs next to nothing."""
    tensor[:1, :1] + 1
    return tensor


def gather_starters(x: Tensor, num_ranks: int) -> dict[str, Callable[[int], Call]]:
    """For each side, a function that starts a gather of ``x`` along a dim and returns how to end it."""

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
        """A gather, work that takes about as long, and both. With ``late_ms``, rank 0 works and waits for the
        others, which come that late and do no work."""
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
        """Matrix products that take about ``target_ms``, as many on each rank."""

        def multiply(count: int) -> None:
            for _ in range(count):
                torch.mm(self.factor, self.factor)

        dist.barrier()
        for_20 = min(time_ms(lambda: multiply(20)) for _ in range(10))
        count = torch.tensor(max(1.0, 20 * target_ms / for_20))
        dist.broadcast(count, 0)
        return lambda: multiply(int(count))


def gloo_rank(rank: int, repeat: int, megabytes: int) -> list[dict[str, list[float]]]:
    """The times that each rank kept."""
    times = GlooBench(rank, repeat, megabytes).run()
    of_ranks: list[Any] = [None] * NUM_GLOO_RANKS
    dist.all_gather_object(of_ranks, times)
    return of_ranks


def bench_gloo(repeat: int, megabytes: int) -> dict[str, Any]:
    """Table 2: medians in ms, of the slower rank; of the rank that waits where a peer is late."""
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
    say(
        f"\nall_gather of {result['megabytes']} MB a rank on {result['num_ranks']} gloo ranks in ms, "
        f"median (best) of {result['repeat']}"
    )
    line = "{:<10}{:>18}{:>18}{:>14}{:>22}"
    say(line.format("", "along dim 1", "along dim 0", "difference", "layout change alone"))
    for side, row in result["gather_ms"].items():
        across, along, copy = (cell(row[key], 1) for key in ("dim_1", "dim_0", "copy"))
        say(line.format(side, across, along, f"{row['extra']:.1f}", copy))
    copies = result["gather_ms"]
    met = copies["funcol"]["copy"]["median"] < copies["stock"]["copy"]["median"]
    say(f"target: the layout change alone takes less than stock's chunk + cat: {mark(met)}")

    titles = {
        "on_time": f"{result['megabytes'] / 4:g} MB a rank, all ranks at once",
        "peer_late": f"1 MB a rank, the peer {PEER_LATE_MS:.0f} ms late",
    }
    line = "{:<10}{:>14}{:>14}{:>14}{:>14}"
    for name, rows in result["overlap_ms"].items():
        say(f"\nall_gather dim 1 + independent compute, {titles[name]}, in ms, median (1.0: full overlap)")
        say(line.format("", "collective", "compute", "both", "both / max"))
        for side, row in rows.items():
            times = (f"{row[key]['median']:.1f}" for key in ("alone", "compute", "both"))
            say(line.format(side, *times, f"{row['ratio']:.2f}"))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", default=41, help="rounds of table 1 (default %(default)s)", **number)
    parser.add_argument("--ranks", help="of the group (default: 1 on a GPU, else 2)", **number)
    parser.add_argument("--gloo-repeat", default=7, help="rounds of table 2 (default %(default)s)", **number)
    parser.add_argument(
        "--megabytes", default=64, help="a rank's part in table 2 (default %(default)s)", **number
    )
    parser.add_argument("--no-gloo", action="store_true", help="leave out table 2, as --device cuda does")
    add_outcomes(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = device_named(args.device)
    result = describe(device)
    result["calls"] = bench_calls(device, args.ranks or default_num_ranks(device), args.repeat)
    print_calls(result["calls"])
    if device.type == "cpu" and not args.no_gloo:
        result["gloo"] = bench_gloo(args.gloo_repeat, args.megabytes)
        print_gloo(result["gloo"])
    conclude(result, args)


if __name__ == "__main__":
    main()
