"""Times every public function of the functional collectives: PyTorch's (stock), the bare one (raw), funcol's.

One table, forward and forward + backward, of the cost of a call in microseconds, where no byte is sent. See
docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import raw_autograd as gradients
import raw_collectives as raw
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from collective_cases import Collective, Row, into, of_list, of_stock, on_clone, with_arguments
from measure import bench_cases, default_num_ranks
from runner import Table, cells, device, mark, number, only, repeat, run, show
from torch import Tensor
from torch.distributed import ReduceOp

import funcol

NUM_COALESCED = 8
PEER = 1

Rows = Iterator[Row]


def rows(device: torch.device, n: int) -> Rows:
    """Yields all collectives of the table, on tensors on ``device`` over the default group of ``n`` ranks."""
    group: Any = dist.group.WORLD
    small = torch.ones(4, 8, device=device)
    num_rows = n * max(1, 8 // n)
    square = torch.ones(num_rows, num_rows, device=device)
    # Parts of the rows of the square, not all equal if there are several.
    sizes = [num_rows // n] * n
    sizes[0] -= 1
    sizes[-1] += 1
    yield from of_one_tensor(group, n, small, square, sizes)
    yield from of_lists(group, n, small, square)
    yield from in_place(n, small, square)
    if n > PEER:
        yield from point_to_point(group, small)


def of_one_tensor(group: Any, n: int, small: Tensor, square: Tensor, sizes: list[int]) -> Rows:
    line = small.reshape(-1)  # of one dim, since stock knows no other
    destinations = [(rank + 1) % n for rank in range(n)]
    to = [line.numel() if rank == destinations[0] else 0 for rank in range(n)]
    come = [line.numel() if destination == 0 else 0 for destination in destinations]
    gathered = [small.shape[0], *(small.shape[0] + 1 for _ in range(1, n))]
    received = [sizes[0]] * n
    scatter = "reduce_scatter_tensor"
    # Name, input, function and arguments of stock and funcol, the same of raw.
    table: list[tuple[str, Tensor, str, tuple[Any, ...], str, tuple[Any, ...]]] = [
        ("all_reduce sum", small, "all_reduce", ("sum", group), "all_reduce", (ReduceOp.SUM,)),
        ("all_reduce avg", small, "all_reduce", ("avg", group), "all_reduce", (ReduceOp.AVG,)),
        ("all_reduce max", small, "all_reduce", ("max", group), "all_reduce_max", ()),
        ("all_gather_tensor dim 0", small, "all_gather_tensor", (0, group), "all_gather", (n, 0)),
        ("all_gather_tensor dim 1", small, "all_gather_tensor", (1, group), "all_gather", (n, 1)),
        ("all_gather_tensor uneven", small, "", (gathered,), "uneven_all_gather", (gathered,)),
        *(
            (f"{scatter} dim {dim}", square, scatter, ("sum", dim, group), "reduce_scatter", (n, dim))
            for dim in (0, 1)
        ),
        ("reduce_scatter_tensor uneven", square, "", (sizes,), "uneven_reduce_scatter", (sizes,)),
        *(
            (f"all_to_all_single{name}", square, "all_to_all_single", (*splits, group), "all_to_all", splits)
            for name, splits in (("", (None, None)), (" uneven", (received, sizes)))
        ),
        ("permute_tensor", line, "permute_tensor", (destinations, group), "all_to_all", (come, to)),
        ("broadcast", small, "broadcast", (0, group), "broadcast", ()),
        ("reduce", small, "reduce", ("sum", 0, group), "reduce", ()),
        ("scatter", square, "scatter", (0, 0, group), "scatter", (n,)),
        ("gather", small, "gather", (0, 0, group), "gather", (n,)),
    ]
    uneven = {
        "all_gather_tensor uneven": lambda x: funcol.all_gather_tensor(x, 0, group, split_sizes=gathered),
        "reduce_scatter_tensor uneven": lambda x: funcol.reduce_scatter_tensor(
            x, "sum", 0, group, split_sizes=sizes
        ),
    }
    for name, x, function, arguments, raw_function, raw_arguments in table:
        yield Row(
            name,
            [x],
            with_arguments(of_stock(function), *arguments),
            with_arguments(getattr(raw, raw_function), *raw_arguments),
            uneven.get(name) or with_arguments(getattr(funcol, function), *arguments),
            with_arguments(getattr(gradients, raw_function), *raw_arguments),
            stock_differentiates=name != "broadcast",
        )
    yield Row(
        "all_reduce, wait_tensor",
        [small],
        lambda x: stock.wait_tensor(stock.all_reduce(x, "sum", group)),
        raw.all_reduce,
        lambda x: funcol.wait_tensor(funcol.all_reduce(x, "sum", group)),
        lambda x: gradients.all_reduce(x, ReduceOp.SUM),
    )


def of_lists(group: Any, n: int, small: Tensor, square: Tensor) -> Rows:
    rows = [small.size(0)] * n
    yield Row(
        "all_to_all of a list",
        [small.clone() for _ in range(n)],
        None,
        lambda *xs: list(raw.all_to_all(torch.cat(xs), rows, rows).split(rows)),
        lambda *xs: funcol.all_to_all(list(xs), rows, group),
        lambda *xs: list(gradients.all_to_all(torch.cat(xs), rows, rows).split(rows)),
    )
    smalls = [small.clone() for _ in range(NUM_COALESCED)]
    squares = [square.clone() for _ in range(NUM_COALESCED)]
    dims = [0] * NUM_COALESCED
    table: list[tuple[str, list[Tensor], tuple[Any, ...], str, tuple[Any, ...]]] = [
        ("all_reduce_coalesced", smalls, ("sum", group), "all_reduce_coalesced", ()),
        ("all_gather_into_tensor_coalesced", smalls, (group,), "all_gather_coalesced", (n,)),
        ("reduce_scatter_tensor_coalesced", squares, ("sum", dims, group), "reduce_scatter_coalesced", (n,)),
    ]
    for function, xs, arguments, raw_function, raw_arguments in table:
        gradient = getattr(gradients, raw_function)
        yield Row(
            function,
            xs,
            of_list(of_stock(function), *arguments),
            of_list(getattr(raw, raw_function), *raw_arguments),
            of_list(getattr(funcol, function), *arguments),
            lambda *xs, gradient=gradient, arguments=raw_arguments: gradient(arguments, *xs),
        )
    stock_wait = of_stock("wait_tensors")
    yield Row(
        "all_reduce_coalesced, wait_tensors",
        smalls,
        stock_wait and (lambda *xs: stock_wait(stock.all_reduce_coalesced(list(xs), "sum", group))),
        lambda *xs: raw.all_reduce_coalesced(list(xs)),
        lambda *xs: funcol.wait_tensors(funcol.all_reduce_coalesced(list(xs), "sum", group)),
        lambda *xs: gradients.all_reduce_coalesced((), *xs),
    )


def in_place(n: int, small: Tensor, square: Tensor) -> Rows:
    """Into a fresh tensor each time, as a gradient cannot go through one that was written to before."""

    def gathered(x: Tensor) -> Tensor:
        return x.new_empty(n * x.shape[0], *x.shape[1:])

    def scattered(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[0] // n, *x.shape[1:])

    def for_all(x: Tensor) -> list[Tensor]:
        return [torch.empty_like(x) for _ in range(n)]

    for name, raw_side, ours, gradient in (
        ("all_reduce_inplace", raw.all_reduce, funcol.all_reduce_inplace, gradients.all_reduce_into),
        (
            "broadcast_inplace",
            raw.broadcast,
            lambda x: funcol.broadcast_inplace(x, 0),
            gradients.broadcast_into,
        ),
    ):
        theirs = of_stock(name) if name == "all_reduce_inplace" else None
        sides = on_clone(theirs), raw_side, on_clone(ours), on_clone(gradient)
        yield Row(name, [small], *sides, prepare=Tensor.clone)
    table: list[tuple[str, Tensor, Callable[[Tensor], Any], str, tuple[Any, ...]]] = [
        ("all_gather_tensor_inplace", small, gathered, "all_gather_into", (n,)),
        ("reduce_scatter_tensor_inplace", square, scattered, "reduce_scatter_into", (n,)),
        ("all_to_all_inplace", square, torch.empty_like, "all_to_all_into", ()),
    ]
    for name, x, prepare, raw_function, more in table:
        gradient = getattr(gradients, raw_function)
        yield Row(
            name,
            [x],
            into(prepare, of_stock(name)),
            into(prepare, getattr(raw, raw_function)),
            into(prepare, getattr(funcol, name)),
            lambda x, prepare=prepare, gradient=gradient, more=more: gradient(prepare(x), x, *more),
            prepare=prepare,
        )
    yield Row(
        "all_gather_inplace",
        [small],
        into(for_all, of_stock("all_gather_inplace")),
        into(for_all, raw.all_gather_into_list),
        into(for_all, funcol.all_gather_inplace),
        lambda x: gradients.all_gather_into_list(x, *for_all(x)),
        prepare=for_all,
    )
    theirs = of_stock("reduce_scatter_inplace")
    yield Row(
        "reduce_scatter_inplace",
        [small.clone() for _ in range(n)],
        theirs and (lambda *xs: theirs(torch.empty_like(xs[0]), list(xs))),
        lambda *xs: raw.reduce_scatter_list_into(torch.empty_like(xs[0]), list(xs)),
        lambda *xs: funcol.reduce_scatter_inplace(torch.empty_like(xs[0]), list(xs)),
        lambda *xs: gradients.reduce_scatter_list_into(torch.empty_like(xs[0]), *xs),
        prepare=torch.empty_like,
    )


def point_to_point(group: Any, small: Tensor) -> Rows:
    """Between this rank and another, without gradients. What was sent counts as the result of a send."""
    stock_isend, stock_irecv = of_stock("isend_inplace"), of_stock("irecv_inplace")
    stock_batch = of_stock("batch_p2p_ops_inplace")
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
        sent, received = batch(*exchange, [x, y], group.group_name)
        wait(sent)
        return received

    yield Row(
        "irecv_inplace",
        [small.clone()],
        stock_irecv and (lambda x: stock_irecv(x, PEER)),
        lambda x: wait_for(dist.Work.wait, x, dist.irecv(x, PEER)),
        lambda x: funcol.irecv_inplace(x, PEER),
    )
    yield Row(
        "batch_p2p_ops_inplace",
        [small, small.clone()],
        stock_batch and (lambda x, y: by_batch(stock_batch, stock.wait_tensor, x, y)),
        raw_batch,
        lambda x, y: by_batch(funcol.batch_p2p_ops_inplace, funcol.wait_tensor, x, y),
    )
    # Last, since stock leaves works of sends in its registry, which slow down later waits of others.
    yield Row(
        "isend_inplace",
        [small],
        stock_isend and (lambda x: wait_for(stock.wait_tensor, x, stock_isend(x, PEER))),
        lambda x: wait_for(dist.Work.wait, x, dist.isend(x, PEER)),
        lambda x: wait_for(funcol.wait_tensor, x, funcol.isend_inplace(x, PEER)),
    )


def bench_surface(device: torch.device, num_ranks: int, repeat: int, only: str) -> dict[str, Any]:
    return bench_cases(
        "surface",
        lambda n: [case for row in rows(device, n) for case in row.cases() if only in case.name],
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
