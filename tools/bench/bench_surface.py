"""Times every public function of the functional collectives: PyTorch's (stock), the bare one (raw), funcol's.

One table, forward and forward + backward, of the cost of a call in microseconds, where no byte is sent. See
docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import raw_autograd as gradients
import raw_collectives as raw
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from collective_cases import Collective, Row, of_stock
from measure import bench_cases, default_num_ranks
from runner import Table, cells, device, mark, number, only, repeat, run, show
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
stock_wait_tensors = of_stock("wait_tensors")
stock_reduce_scatter_inplace = of_stock("reduce_scatter_inplace")
stock_isend, stock_irecv = of_stock("isend_inplace"), of_stock("irecv_inplace")
stock_batch = of_stock("batch_p2p_ops_inplace")


class Rows:
    """All collectives of the table, on tensors on ``device`` over the default group of ``n`` ranks."""

    def __init__(self, device: torch.device, n: int) -> None:
        self.group: Any = dist.group.WORLD
        self.n = n
        self.small = torch.ones(4, 8, device=device)
        num_rows = n * max(1, 8 // n)
        self.square = torch.ones(num_rows, num_rows, device=device)
        # Parts of the rows of the square, not all equal if there are several.
        self.sizes = [num_rows // n] * n
        self.sizes[0] -= 1
        self.sizes[-1] += 1

    def all(self) -> Iterator[Row]:
        yield from self.reductions()
        yield from self.gathers_and_scatters()
        yield from self.exchanges()
        yield from self.rooted()
        yield from self.coalesced()
        yield from self.waits()
        yield from self.into_one_tensor()
        yield from self.into_or_from_lists()
        if self.n > PEER:
            yield from self.point_to_point()

    def reductions(self) -> Iterator[Row]:
        group = self.group
        for name, op in (("sum", ReduceOp.SUM), ("avg", ReduceOp.AVG), ("max", ReduceOp.MAX)):
            yield Row(
                f"all_reduce {name}",
                [self.small],
                lambda x, name=name: stock.all_reduce(x, name, group),
                lambda x, op=op: raw.all_reduce(x, op),
                lambda x, name=name: funcol.all_reduce(x, name, group),
                gradients.all_reduce_max if name == "max" else lambda x, op=op: gradients.all_reduce(x, op),
            )

    def gathers_and_scatters(self) -> Iterator[Row]:
        group, n, small = self.group, self.n, self.small
        for dim in (0, 1):
            yield Row(
                f"all_gather_tensor dim {dim}",
                [small],
                lambda x, dim=dim: stock_all_gather(x, dim, group),
                lambda x, dim=dim: raw.all_gather(x, n, dim),
                lambda x, dim=dim: funcol.all_gather_tensor(x, dim, group),
                lambda x, dim=dim: gradients.all_gather(x, n, dim),
            )
        gathered = [small.shape[0], *(small.shape[0] + 1 for _ in range(1, n))]
        yield Row(
            "all_gather_tensor uneven",
            [small],
            None,
            lambda x: raw.uneven_all_gather(x, gathered),
            lambda x: funcol.all_gather_tensor(x, 0, group, split_sizes=gathered),
            lambda x: gradients.uneven_all_gather(x, gathered),
        )
        for dim in (0, 1):
            yield Row(
                f"reduce_scatter_tensor dim {dim}",
                [self.square],
                lambda x, dim=dim: stock_reduce_scatter(x, "sum", dim, group),
                lambda x, dim=dim: raw.reduce_scatter(x, n, dim),
                lambda x, dim=dim: funcol.reduce_scatter_tensor(x, "sum", dim, group),
                lambda x, dim=dim: gradients.reduce_scatter(x, n, dim),
            )
        yield Row(
            "reduce_scatter_tensor uneven",
            [self.square],
            None,
            lambda x: raw.uneven_reduce_scatter(x, self.sizes),
            lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, group, split_sizes=self.sizes),
            lambda x: gradients.uneven_reduce_scatter(x, self.sizes),
        )

    def exchanges(self) -> Iterator[Row]:
        group, n, square, sent = self.group, self.n, self.square, self.sizes
        received = [sent[0]] * n
        for name, output_sizes, input_sizes in (("", None, None), (" uneven", received, sent)):
            yield Row(
                f"all_to_all_single{name}",
                [square],
                lambda x, o=output_sizes, i=input_sizes: stock.all_to_all_single(x, o, i, group),
                lambda x, o=output_sizes, i=input_sizes: raw.all_to_all(x, o, i),
                lambda x, o=output_sizes, i=input_sizes: funcol.all_to_all_single(x, o, i, group),
                lambda x, o=output_sizes, i=input_sizes: gradients.all_to_all(x, o, i),
            )
        rows = [self.small.size(0)] * n
        yield Row(
            "all_to_all of a list",
            [self.small.clone() for _ in range(n)],
            None,
            lambda *xs: list(raw.all_to_all(torch.cat(xs), rows, rows).split(rows)),
            lambda *xs: funcol.all_to_all(list(xs), rows, group),
            lambda *xs: list(gradients.all_to_all(torch.cat(xs), rows, rows).split(rows)),
        )
        # Of one dim, since stock knows no other.
        line = self.small.reshape(-1)
        destinations = [(rank + 1) % n for rank in range(n)]
        to = [line.numel() if rank == destinations[0] else 0 for rank in range(n)]
        come = [line.numel() if destination == 0 else 0 for destination in destinations]
        yield Row(
            "permute_tensor",
            [line],
            lambda x: stock.permute_tensor(x, destinations, group),
            lambda x: raw.all_to_all(x, come, to),
            lambda x: funcol.permute_tensor(x, destinations, group),
            lambda x: gradients.all_to_all(x, come, to),
        )

    def rooted(self) -> Iterator[Row]:
        group, n = self.group, self.n
        yield Row(
            "broadcast",
            [self.small],
            lambda x: stock.broadcast(x, 0, group),
            raw.broadcast,
            lambda x: funcol.broadcast(x, 0, group),
            gradients.broadcast,
            stock_differentiates=False,
        )
        for name, x, raw_side, ours, gradient in (
            ("reduce", self.small, raw.reduce, lambda x: funcol.reduce(x, "sum", 0, group), gradients.reduce),
            (
                "scatter",
                self.square,
                lambda x: raw.scatter(x, n),
                lambda x: funcol.scatter(x, 0, 0, group),
                lambda x: gradients.scatter(x, n),
            ),
            (
                "gather",
                self.small,
                lambda x: raw.gather(x, n),
                lambda x: funcol.gather(x, 0, 0, group),
                lambda x: gradients.gather(x, n),
            ),
        ):
            yield Row(name, [x], None, raw_side, ours, gradient)

    def coalesced(self) -> Iterator[Row]:
        group, n = self.group, self.n
        smalls = [self.small.clone() for _ in range(NUM_COALESCED)]
        squares = [self.square.clone() for _ in range(NUM_COALESCED)]
        dims = [0] * NUM_COALESCED
        yield Row(
            "all_reduce_coalesced",
            smalls,
            lambda *xs: stock.all_reduce_coalesced(list(xs), "sum", group),
            lambda *xs: raw.all_reduce_coalesced(list(xs)),
            lambda *xs: funcol.all_reduce_coalesced(list(xs), "sum", group),
            lambda *xs: gradients.all_reduce_coalesced((), *xs),
        )
        yield Row(
            "all_gather_into_tensor_coalesced",
            smalls,
            lambda *xs: stock_all_gather_coalesced(list(xs), group),
            lambda *xs: raw.all_gather_coalesced(list(xs), n),
            lambda *xs: funcol.all_gather_into_tensor_coalesced(list(xs), group),
            lambda *xs: gradients.all_gather_coalesced((n,), *xs),
        )
        yield Row(
            "reduce_scatter_tensor_coalesced",
            squares,
            lambda *xs: stock_reduce_scatter_coalesced(list(xs), "sum", dims, group),
            lambda *xs: raw.reduce_scatter_coalesced(list(xs), n),
            lambda *xs: funcol.reduce_scatter_tensor_coalesced(list(xs), "sum", dims, group),
            lambda *xs: gradients.reduce_scatter_coalesced((n,), *xs),
        )

    def waits(self) -> Iterator[Row]:
        group = self.group
        yield Row(
            "all_reduce, wait_tensor",
            [self.small],
            lambda x: stock.wait_tensor(stock.all_reduce(x, "sum", group)),
            raw.all_reduce,
            lambda x: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
            lambda x: gradients.all_reduce(x, ReduceOp.SUM),
        )
        yield Row(
            "all_reduce_coalesced, wait_tensors",
            [self.small.clone() for _ in range(NUM_COALESCED)],
            stock_wait_tensors
            and (lambda *xs: stock_wait_tensors(stock.all_reduce_coalesced(list(xs), "sum", group))),
            lambda *xs: raw.all_reduce_coalesced(list(xs)),
            lambda *xs: funcol.wait_tensors(funcol.all_reduce_coalesced(list(xs), "sum", group)),
            lambda *xs: gradients.all_reduce_coalesced((), *xs),
        )

    def into_one_tensor(self) -> Iterator[Row]:
        """Into a fresh tensor each time, as a gradient cannot go through one that was written to before."""
        n = self.n

        def gathered(x: Tensor) -> Tensor:
            return x.new_empty(n * x.shape[0], *x.shape[1:])

        def scattered(x: Tensor) -> Tensor:
            return x.new_empty(x.shape[0] // n, *x.shape[1:])

        yield Row(
            "all_reduce_inplace",
            [self.small],
            lambda x: stock.all_reduce_inplace(x.clone()),
            raw.all_reduce,
            lambda x: funcol.all_reduce_inplace(x.clone()),
            lambda x: gradients.all_reduce_into(x.clone()),
            prepare=Tensor.clone,
        )
        yield Row(
            "broadcast_inplace",
            [self.small],
            None,
            raw.broadcast,
            lambda x: funcol.broadcast_inplace(x.clone(), 0),
            lambda x: gradients.broadcast_into(x.clone()),
            prepare=Tensor.clone,
        )
        yield Row(
            "all_gather_tensor_inplace",
            [self.small],
            lambda x: stock.all_gather_tensor_inplace(gathered(x), x),
            lambda x: raw.all_gather_into(gathered(x), x),
            lambda x: funcol.all_gather_tensor_inplace(gathered(x), x),
            lambda x: gradients.all_gather_into(gathered(x), x, n),
            prepare=gathered,
        )
        yield Row(
            "reduce_scatter_tensor_inplace",
            [self.square],
            lambda x: stock.reduce_scatter_tensor_inplace(scattered(x), x),
            lambda x: raw.reduce_scatter_into(scattered(x), x),
            lambda x: funcol.reduce_scatter_tensor_inplace(scattered(x), x),
            lambda x: gradients.reduce_scatter_into(scattered(x), x, n),
            prepare=scattered,
        )
        yield Row(
            "all_to_all_inplace",
            [self.square],
            lambda x: stock.all_to_all_inplace(torch.empty_like(x), x),
            lambda x: raw.all_to_all_into(torch.empty_like(x), x),
            lambda x: funcol.all_to_all_inplace(torch.empty_like(x), x),
            lambda x: gradients.all_to_all_into(torch.empty_like(x), x),
            prepare=torch.empty_like,
        )

    def into_or_from_lists(self) -> Iterator[Row]:
        n = self.n

        def for_all(x: Tensor) -> list[Tensor]:
            return [torch.empty_like(x) for _ in range(n)]

        yield Row(
            "all_gather_inplace",
            [self.small],
            lambda x: stock.all_gather_inplace(for_all(x), x),
            lambda x: raw.all_gather_into_list(for_all(x), x),
            lambda x: funcol.all_gather_inplace(for_all(x), x),
            lambda x: gradients.all_gather_into_list(x, *for_all(x)),
            prepare=for_all,
        )
        yield Row(
            "reduce_scatter_inplace",
            [self.small.clone() for _ in range(n)],
            stock_reduce_scatter_inplace
            and (lambda *xs: stock_reduce_scatter_inplace(torch.empty_like(xs[0]), list(xs))),
            lambda *xs: raw.reduce_scatter_list_into(torch.empty_like(xs[0]), list(xs)),
            lambda *xs: funcol.reduce_scatter_inplace(torch.empty_like(xs[0]), list(xs)),
            lambda *xs: gradients.reduce_scatter_list_into(torch.empty_like(xs[0]), *xs),
            prepare=torch.empty_like,
        )

    def point_to_point(self) -> Iterator[Row]:
        """Between this rank and another, without gradients. What was sent counts as the result of a send."""
        exchange = ["isend", "irecv"], [PEER, PEER], [0, 0]

        def wait_for(wait: Collective, sent: Tensor, pending: Any) -> Tensor:
            wait(pending)
            return sent

        def raw_batch(x: Tensor, y: Tensor) -> Tensor:
            operations = [dist.P2POp(dist.isend, x, PEER), dist.P2POp(dist.irecv, y, PEER)]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            return y

        def by_batch(batch: Collective, wait: Collective, x: Tensor, y: Tensor) -> Tensor:
            sent, received = batch(*exchange, [x, y], self.group.group_name)
            wait(sent)
            return received

        yield Row(
            "irecv_inplace",
            [self.small.clone()],
            stock_irecv and (lambda x: stock_irecv(x, PEER)),
            lambda x: wait_for(dist.Work.wait, x, dist.irecv(x, PEER)),
            lambda x: funcol.irecv_inplace(x, PEER),
        )
        yield Row(
            "batch_p2p_ops_inplace",
            [self.small, self.small.clone()],
            stock_batch and (lambda x, y: by_batch(stock_batch, stock.wait_tensor, x, y)),
            raw_batch,
            lambda x, y: by_batch(funcol.batch_p2p_ops_inplace, funcol.wait_tensor, x, y),
        )
        # Last, since stock leaves works of sends in its registry, which slow down later waits of others.
        yield Row(
            "isend_inplace",
            [self.small],
            stock_isend and (lambda x: wait_for(stock.wait_tensor, x, stock_isend(x, PEER))),
            lambda x: wait_for(dist.Work.wait, x, dist.isend(x, PEER)),
            lambda x: wait_for(funcol.wait_tensor, x, funcol.isend_inplace(x, PEER)),
        )


def bench_surface(device: torch.device, num_ranks: int, repeat: int, only: str) -> dict[str, Any]:
    return bench_cases(
        "surface",
        lambda n: [case for row in Rows(device, n).all() for case in row.cases() if only in case.name],
        device,
        num_ranks,
        repeat,
        compares=lambda lone: lone.backend == "nccl",
    )


def print_table(result: dict[str, Any]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        ratios = (
            f"{record['ratio'][name]['median']:.3f}" if name in record["ratio"] else "-"
            for name in ("stock", "stock overhead", "raw")
        )
        missed = [
            f"{mark(False)} {t['limit']} of {t['against']}" for t in record["targets"] if t["met"] is False
        ]
        times = cells(record["us"], ("use", "stock", "raw", "funcol"), 2)
        return [record["name"], *times, *ratios, ", ".join(missed)]

    show(
        f"Cost of a call with use in us, median (best) of {result['repeat']} rounds; '{result['backend']}' "
        f"group of {result['num_ranks']} ranks, one thread, tensors of 32 to 64 float32, "
        f"{NUM_COALESCED} coalesced",
        "{:<44}{:>17}{:>19}{:>19}{:>19}{:>9}{:>10}{:>8}  {}",
        ("", "use alone", "stock", "raw", "funcol", "/ stock", "overhead", "/ raw", ""),
        map(row, result["cases"]),
    )


def surface(args: Any) -> dict[str, Any]:
    return bench_surface(args.device, args.ranks or default_num_ranks(args.device), args.repeat, args.only)


if __name__ == "__main__":
    run(
        __doc__,
        [Table("surface", surface, print_table)],
        device(),
        repeat(41),
        number("--ranks", None, "of the group (default: 1 on a GPU, else 2)"),
        only("lines"),
    )
