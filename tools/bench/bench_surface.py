"""Times every public function of the functional collectives: PyTorch's (stock), the bare one (raw), funcol's.

One table, forward and forward + backward, of the cost of a call in microseconds, where no byte is sent. See
docs/performance.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import raw_collectives as raw
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from collective_cases import Collective, CollectiveCases, of_stock
from measure import (
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
)
from torch import Tensor
from torch.distributed import ReduceOp

import funcol

NUM_COALESCED = 8
PEER = 1

stock_all_gather = of_stock("all_gather_single", "all_gather_tensor")
stock_reduce_scatter = of_stock("reduce_scatter_single", "reduce_scatter_tensor")
stock_all_gather_coalesced = of_stock("all_gather_single_coalesced", "all_gather_into_tensor_coalesced")
stock_reduce_scatter_coalesced = of_stock(
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"
)


class Rows(CollectiveCases):
    """All lines of the table."""

    def all(self) -> Iterator[Case]:
        yield from self.reductions()
        yield from self.gathers()
        yield from self.scatters()
        yield from self.exchanges()
        yield from self.rooted()
        yield from self.coalesced()
        yield from self.waits()
        yield from self.into_one_tensor()
        yield from self.into_or_from_lists()
        if self.num_ranks > PEER:
            yield from self.point_to_point()

    def reductions(self) -> Iterator[Case]:
        group = self.group
        for name, op in (("sum", ReduceOp.SUM), ("avg", ReduceOp.AVG)):
            yield from self.cases(
                f"all_reduce {name}",
                [self.small],
                lambda x, name=name: stock.all_reduce(x, name, group),
                lambda x, op=op: raw.all_reduce(x, op),
                lambda x, name=name: funcol.all_reduce(x, name, group),
                lambda x, op=op: raw.AllReduce.apply(x, op),
            )
        yield from self.cases(
            "all_reduce max",
            [self.small],
            lambda x: stock.all_reduce(x, "max", group),
            lambda x: raw.all_reduce(x, ReduceOp.MAX),
            lambda x: funcol.all_reduce(x, "max", group),
            lambda x: raw.AllReduceMax.apply(x),
        )

    def gathers(self) -> Iterator[Case]:
        group, num_ranks = self.group, self.num_ranks
        for dim in (0, 1):
            yield from self.cases(
                f"all_gather_tensor dim {dim}",
                [self.small],
                lambda x, dim=dim: stock_all_gather(x, dim, group),
                lambda x, dim=dim: raw.all_gather(x, num_ranks, dim),
                lambda x, dim=dim: funcol.all_gather_tensor(x, dim, group),
                lambda x, dim=dim: raw.AllGather.apply(x, num_ranks, dim),
            )
        sizes = [self.small.shape[0], *(self.small.shape[0] + 1 for _ in range(1, num_ranks))]
        yield from self.cases(
            "all_gather_tensor uneven",
            [self.small],
            None,
            lambda x: raw.uneven_all_gather(x, sizes),
            lambda x: funcol.all_gather_tensor(x, 0, group, split_sizes=sizes),
            lambda x: raw.UnevenAllGather.apply(x, sizes),
        )

    def scatters(self) -> Iterator[Case]:
        group, num_ranks = self.group, self.num_ranks
        for dim in (0, 1):
            yield from self.cases(
                f"reduce_scatter_tensor dim {dim}",
                [self.square],
                lambda x, dim=dim: stock_reduce_scatter(x, "sum", dim, group),
                lambda x, dim=dim: raw.reduce_scatter(x, num_ranks, dim),
                lambda x, dim=dim: funcol.reduce_scatter_tensor(x, "sum", dim, group),
                lambda x, dim=dim: raw.ReduceScatter.apply(x, num_ranks, dim),
            )
        sizes = self.uneven_sizes()
        yield from self.cases(
            "reduce_scatter_tensor uneven",
            [self.square],
            None,
            lambda x: raw.uneven_reduce_scatter(x, sizes),
            lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, group, split_sizes=sizes),
            lambda x: raw.UnevenReduceScatter.apply(x, sizes),
        )

    def uneven_sizes(self) -> list[int]:
        """Parts of the rows of the square, not all equal if there are several."""
        sizes = [self.square.shape[0] // self.num_ranks] * self.num_ranks
        sizes[0] -= 1
        sizes[-1] += 1
        return sizes

    def exchanges(self) -> Iterator[Case]:
        group, num_ranks = self.group, self.num_ranks
        yield from self.cases(
            "all_to_all_single",
            [self.square],
            lambda x: stock.all_to_all_single(x, None, None, group),
            lambda x: raw.all_to_all(x),
            lambda x: funcol.all_to_all_single(x, None, None, group),
            lambda x: raw.AllToAll.apply(x, None, None),
        )
        sent = self.uneven_sizes()
        received = [sent[0]] * num_ranks
        yield from self.cases(
            "all_to_all_single uneven",
            [self.square],
            lambda x: stock.all_to_all_single(x, received, sent, group),
            lambda x: raw.all_to_all(x, received, sent),
            lambda x: funcol.all_to_all_single(x, received, sent, group),
            lambda x: raw.AllToAll.apply(x, received, sent),
        )
        rows = [self.small.size(0)] * num_ranks
        yield from self.cases(
            "all_to_all of a list",
            [self.small.clone() for _ in range(num_ranks)],
            None,
            lambda *xs: list(raw.all_to_all(torch.cat(xs), rows, rows).split(rows)),
            lambda *xs: funcol.all_to_all(list(xs), rows, group),
            lambda *xs: list(raw.AllToAll.apply(torch.cat(xs), rows, rows).split(rows)),
        )
        # Of one dim, since stock knows no other.
        line = self.small.reshape(-1)
        destinations = [(rank + 1) % num_ranks for rank in range(num_ranks)]
        to = [line.numel() if rank == destinations[0] else 0 for rank in range(num_ranks)]
        come = [line.numel() if destination == 0 else 0 for destination in destinations]
        yield from self.cases(
            "permute_tensor",
            [line],
            lambda x: stock.permute_tensor(x, destinations, group),
            lambda x: raw.all_to_all(x, come, to),
            lambda x: funcol.permute_tensor(x, destinations, group),
            lambda x: raw.AllToAll.apply(x, come, to),
        )

    def rooted(self) -> Iterator[Case]:
        group, num_ranks = self.group, self.num_ranks
        yield from self.cases(
            "broadcast",
            [self.small],
            lambda x: stock.broadcast(x, 0, group),
            raw.broadcast,
            lambda x: funcol.broadcast(x, 0, group),
            raw.Broadcast.apply,
            stock_differentiates=False,
        )
        yield from self.cases(
            "reduce",
            [self.small],
            None,
            raw.reduce,
            lambda x: funcol.reduce(x, "sum", 0, group),
            raw.Reduce.apply,
        )
        yield from self.cases(
            "scatter",
            [self.square],
            None,
            lambda x: raw.scatter(x, num_ranks),
            lambda x: funcol.scatter(x, 0, 0, group),
            lambda x: raw.Scatter.apply(x, num_ranks),
        )
        yield from self.cases(
            "gather",
            [self.small],
            None,
            lambda x: raw.gather(x, num_ranks),
            lambda x: funcol.gather(x, 0, 0, group),
            lambda x: raw.Gather.apply(x, num_ranks),
        )

    def coalesced(self) -> Iterator[Case]:
        group, num_ranks = self.group, self.num_ranks
        smalls = [self.small.clone() for _ in range(NUM_COALESCED)]
        squares = [self.square.clone() for _ in range(NUM_COALESCED)]
        dims = [0] * NUM_COALESCED
        yield from self.cases(
            "all_reduce_coalesced",
            smalls,
            lambda *xs: stock.all_reduce_coalesced(list(xs), "sum", group),
            lambda *xs: raw.all_reduce_coalesced(list(xs)),
            lambda *xs: funcol.all_reduce_coalesced(list(xs), "sum", group),
            raw.AllReduceCoalesced.apply,
        )
        yield from self.cases(
            "all_gather_into_tensor_coalesced",
            smalls,
            lambda *xs: stock_all_gather_coalesced(list(xs), group),
            lambda *xs: raw.all_gather_coalesced(list(xs), num_ranks),
            lambda *xs: funcol.all_gather_into_tensor_coalesced(list(xs), group),
            lambda *xs: raw.AllGatherCoalesced.apply(num_ranks, *xs),
        )
        yield from self.cases(
            "reduce_scatter_tensor_coalesced",
            squares,
            lambda *xs: stock_reduce_scatter_coalesced(list(xs), "sum", dims, group),
            lambda *xs: raw.reduce_scatter_coalesced(list(xs), num_ranks),
            lambda *xs: funcol.reduce_scatter_tensor_coalesced(list(xs), "sum", dims, group),
            lambda *xs: raw.ReduceScatterCoalesced.apply(num_ranks, *xs),
        )

    def waits(self) -> Iterator[Case]:
        group = self.group
        yield from self.cases(
            "all_reduce, wait_tensor",
            [self.small],
            lambda x: stock.wait_tensor(stock.all_reduce(x, "sum", group)),
            raw.all_reduce,
            lambda x: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
            lambda x: raw.AllReduce.apply(x, ReduceOp.SUM),
        )
        smalls = [self.small.clone() for _ in range(NUM_COALESCED)]
        stock_wait_tensors = of_stock("wait_tensors")
        yield from self.cases(
            "all_reduce_coalesced, wait_tensors",
            smalls,
            stock_wait_tensors
            and (lambda *xs: stock_wait_tensors(stock.all_reduce_coalesced(list(xs), "sum", group))),
            lambda *xs: raw.all_reduce_coalesced(list(xs)),
            lambda *xs: funcol.wait_tensors(funcol.all_reduce_coalesced(list(xs), "sum", group)),
            raw.AllReduceCoalesced.apply,
        )

    def into_one_tensor(self) -> Iterator[Case]:
        """Into a fresh tensor each time, as a gradient cannot go through one that was written to before."""
        num_ranks = self.num_ranks

        def gathered(x: Tensor) -> Tensor:
            return x.new_empty(num_ranks * x.shape[0], *x.shape[1:])

        def scattered(x: Tensor) -> Tensor:
            return x.new_empty(x.shape[0] // num_ranks, *x.shape[1:])

        yield from self.cases(
            "all_reduce_inplace",
            [self.small],
            lambda x: stock.all_reduce_inplace(x.clone()),
            raw.all_reduce,
            lambda x: funcol.all_reduce_inplace(x.clone()),
            lambda x: raw.AllReduceInto.apply(x.clone()),
            prepare=Tensor.clone,
        )
        yield from self.cases(
            "broadcast_inplace",
            [self.small],
            None,
            raw.broadcast,
            lambda x: funcol.broadcast_inplace(x.clone(), 0),
            lambda x: raw.BroadcastInto.apply(x.clone()),
            prepare=Tensor.clone,
        )
        yield from self.cases(
            "all_gather_tensor_inplace",
            [self.small],
            lambda x: stock.all_gather_tensor_inplace(gathered(x), x),
            lambda x: raw.all_gather_into(gathered(x), x),
            lambda x: funcol.all_gather_tensor_inplace(gathered(x), x),
            lambda x: raw.AllGatherInto.apply(gathered(x), x, num_ranks),
            prepare=gathered,
        )
        yield from self.cases(
            "reduce_scatter_tensor_inplace",
            [self.square],
            lambda x: stock.reduce_scatter_tensor_inplace(scattered(x), x),
            lambda x: raw.reduce_scatter_into(scattered(x), x),
            lambda x: funcol.reduce_scatter_tensor_inplace(scattered(x), x),
            lambda x: raw.ReduceScatterInto.apply(scattered(x), x, num_ranks),
            prepare=scattered,
        )
        yield from self.cases(
            "all_to_all_inplace",
            [self.square],
            lambda x: stock.all_to_all_inplace(torch.empty_like(x), x),
            lambda x: raw.all_to_all_into(torch.empty_like(x), x),
            lambda x: funcol.all_to_all_inplace(torch.empty_like(x), x),
            lambda x: raw.AllToAllInto.apply(torch.empty_like(x), x),
            prepare=torch.empty_like,
        )

    def into_or_from_lists(self) -> Iterator[Case]:
        num_ranks = self.num_ranks

        def for_all(x: Tensor) -> list[Tensor]:
            return [torch.empty_like(x) for _ in range(num_ranks)]

        yield from self.cases(
            "all_gather_inplace",
            [self.small],
            lambda x: stock.all_gather_inplace(for_all(x), x),
            lambda x: raw.all_gather_into_list(for_all(x), x),
            lambda x: funcol.all_gather_inplace(for_all(x), x),
            lambda x: raw.AllGatherIntoList.apply(x, *for_all(x)),
            prepare=for_all,
        )
        stock_reduce_scatter_inplace = of_stock("reduce_scatter_inplace")
        yield from self.cases(
            "reduce_scatter_inplace",
            [self.small.clone() for _ in range(num_ranks)],
            stock_reduce_scatter_inplace
            and (lambda *xs: stock_reduce_scatter_inplace(torch.empty_like(xs[0]), list(xs))),
            lambda *xs: raw.reduce_scatter_list_into(torch.empty_like(xs[0]), list(xs)),
            lambda *xs: funcol.reduce_scatter_inplace(torch.empty_like(xs[0]), list(xs)),
            lambda *xs: raw.ReduceScatterListInto.apply(torch.empty_like(xs[0]), *xs),
            prepare=torch.empty_like,
        )

    def point_to_point(self) -> Iterator[Case]:
        """Between this rank and another, without gradients. What was sent counts as the result of a send."""
        group_name = self.group.group_name
        stock_isend = of_stock("isend_inplace")
        stock_irecv = of_stock("irecv_inplace")
        stock_batch = of_stock("batch_p2p_ops_inplace")
        exchange = ["isend", "irecv"], [PEER, PEER], [0, 0]

        def wait_for(wait: Collective, sent: Tensor, pending: Tensor) -> Tensor:
            wait(pending)
            return sent

        def raw_isend(x: Tensor) -> Tensor:
            dist.isend(x, PEER).wait()
            return x

        def raw_irecv(x: Tensor) -> Tensor:
            dist.irecv(x, PEER).wait()
            return x

        def raw_batch(x: Tensor, y: Tensor) -> Tensor:
            operations = [dist.P2POp(dist.isend, x, PEER), dist.P2POp(dist.irecv, y, PEER)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            return y

        def by_batch(batch: Collective, wait: Collective, x: Tensor, y: Tensor) -> Tensor:
            sent, received = batch(*exchange, [x, y], group_name)
            wait(sent)
            return received

        yield from self.cases(
            "irecv_inplace",
            [self.small.clone()],
            stock_irecv and (lambda x: stock_irecv(x, PEER)),
            raw_irecv,
            lambda x: funcol.irecv_inplace(x, PEER),
        )
        yield from self.cases(
            "batch_p2p_ops_inplace",
            [self.small, self.small.clone()],
            stock_batch and (lambda x, y: by_batch(stock_batch, stock.wait_tensor, x, y)),
            raw_batch,
            lambda x, y: by_batch(funcol.batch_p2p_ops_inplace, funcol.wait_tensor, x, y),
        )
        # Last, since stock leaves works of sends in its registry, which slow down later waits of others.
        yield from self.cases(
            "isend_inplace",
            [self.small],
            stock_isend and (lambda x: wait_for(stock.wait_tensor, x, stock_isend(x, PEER))),
            raw_isend,
            lambda x: wait_for(funcol.wait_tensor, x, funcol.isend_inplace(x, PEER)),
        )


def bench_surface(device: torch.device, num_ranks: int, repeat: int, only: str) -> dict[str, Any]:
    """The table, in this process, with a group of its own."""
    records = []
    with lone_group(device, num_ranks) as lone:
        rows = [case for case in Rows(device, lone.num_ranks).all() if only in case.name]
        for case in each("surface", rows):
            check_same(case, compare_values=lone.backend == "nccl")
            records.append(measure(case, repeat, lone.clock))
    return {"backend": lone.backend, "num_ranks": lone.num_ranks, "repeat": repeat, "cases": records}


def print_table(result: dict[str, Any]) -> None:
    say(
        f"\nCost of a call with use in us, median (best) of {result['repeat']} rounds; '{result['backend']}' "
        f"group of {result['num_ranks']} ranks, one thread, tensors of 32 to 64 float32, "
        f"{NUM_COALESCED} coalesced"
    )
    line = "{:<44}{:>17}{:>19}{:>19}{:>19}{:>9}{:>10}{:>8}  {}"
    say(line.format("", "use alone", "stock", "raw", "funcol", "/ stock", "overhead", "/ raw", ""))
    for record in result["cases"]:
        times = (
            cell(record["us"][side], 2) if side in record["us"] else "-"
            for side in ("use", "stock", "raw", "funcol")
        )
        ratios = (
            f"{record['ratio'][name]['median']:.3f}" if name in record["ratio"] else "-"
            for name in ("stock", "stock overhead", "raw")
        )
        missed = [
            f"{mark(False)} {t['limit']} of {t['against']}" for t in record["targets"] if t["met"] is False
        ]
        say(line.format(record["name"], *times, *ratios, ", ".join(missed)))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = {"type": int, "metavar": "N"}
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeat", default=41, help="rounds (default %(default)s)", **number)
    parser.add_argument("--ranks", help="of the group (default: 1 on a GPU, else 2)", **number)
    parser.add_argument("--only", default="", metavar="TEXT", help="only the lines whose name holds TEXT")
    add_outcomes(parser)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    device = device_named(args.device)
    result = describe(device)
    result["surface"] = bench_surface(device, args.ranks or default_num_ranks(device), args.repeat, args.only)
    print_table(result["surface"])
    conclude(result, args)


if __name__ == "__main__":
    main()
