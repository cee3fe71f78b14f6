"""Times programs on DTensor with PyTorch's own layers (stock) and with funcol under them.

Table 1, a training step of small programs, in milliseconds; table 2, the redistribution costs with which a
solver lays out a whole block; table 3, compiling a block. See docs/performance.md.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from bench_propagation import forget_native
from measure import CPU, Clock, Overhead, fake_ranks, lone_group
from parallel_steps import (
    BATCH,
    LENGTH,
    NUM_HEADS,
    NUM_RANKS,
    PROGRAMS,
    WIDTH,
    Block,
    Program,
    attend,
    cut_as_megatron,
)
from runner import (
    Call,
    Table,
    cells,
    device,
    each,
    is_on_cpu,
    mark,
    median_ratio,
    only,
    repeat,
    run,
    say,
    show,
    summaries,
    turns,
    with_side,
    without_gc,
)
from sharded_by_hand import (
    expert_parallel_by_hand,
    muon_by_hand,
    sharded_by_hand,
    tensor_parallel_by_hand,
)
from solver_costs import Row, SolverCosts, traced_block
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor._op_schema import OpStrategy
from torch.distributed.tensor._ops import utils as stock_ops

import funcol

STEP_SIDES = ("plain", "stock", "funcol")
# The least that a program's collectives and copies take; on the CPU.
BY_HAND = {
    "tensor parallel 8": tensor_parallel_by_hand,
    "FSDP2": sharded_by_hand,
    "experts, all_to_all": expert_parallel_by_hand,
    "Muon, 200 weights": muon_by_hand,
}
CHUNK_MS = 60.0
# Steps after funcol came or went, in which decisions are made that are remembered then, and the interpreter
# specializes the functions that were replaced.
NUM_WARM_UP = 12

SOLVER_MESH = (8, 8, 4)
SOLVER_LIMIT = 0.05
NUM_ROWS, NUM_STOCK_COSTS = 40, 15

COMPILE_LIMIT = 0.1


# Table 1


def time_steps(program: Program, repeat: int, device: torch.device, clock: Clock) -> dict[str, list[float]]:
    """Returns milliseconds a step for each side, once a round, the order turning from round to round."""
    with device:
        steps: dict[str, Call] = {"plain": program.plain(), "stock": program.parallel(device.type)}
        with funcol.installed():
            steps["funcol"] = program.parallel(device.type)
        if program.name in BY_HAND and device.type == "cpu":
            steps["by hand"] = BY_HAND[program.name](device.type)
    times: dict[str, list[float]] = {side: [] for side in steps}
    for side in turns(steps, range(repeat)):
        with with_side(side):
            for _ in range(NUM_WARM_UP):
                steps[side]()
            num_steps = clock.calls_in(steps[side], 1e3 * CHUNK_MS, sample=1)
            with without_gc():
                times[side].append(clock.time_calls(steps[side], num_steps) / 1000)
    return times


def refusal_of_stock(program: Program, device: torch.device) -> str | None:
    """Returns the first line of the error with which this release of PyTorch refuses a step, or None."""
    with device:
        try:
            program.parallel(device.type)()
        except RuntimeError as error:
            return str(error).splitlines()[0]
    return None


def bench_steps(device: torch.device, repeat: int, only: str) -> list[dict[str, Any]]:
    records = []
    with lone_group(device, NUM_RANKS, whole_steps=True) as lone:
        for program in each("steps", [program for program in PROGRAMS if only in program.name]):
            if (refusal := refusal_of_stock(program, device)) is not None:
                say(f"{program.name}: left out, stock PyTorch {torch.__version__} refuses it: {refusal}")
                continue
            times = time_steps(program, repeat, device, lone.clock)
            plain, stock, ours = (times[side] for side in STEP_SIDES)
            overhead = Overhead.of(plain, stock, ours)
            by_hand = Overhead.of(plain, stock, times["by hand"]).ratio if "by hand" in times else None
            records.append(
                {
                    "name": program.name,
                    "ms": summaries(times),
                    "overhead": overhead.ratio,
                    "overhead_by_hand": by_hand,
                    "ratio": median_ratio(ours, stock),
                    "of_plain": median_ratio(ours, plain),
                    "limit_of_plain": program.limit_of_plain,
                    "limit": program.limit,
                    "met": overhead.is_within(program.limit),
                }
            )
    return records


def print_steps(records: list[dict[str, Any]]) -> None:
    def rows() -> Iterator[list[str]]:
        for record in records:
            limit = f"{record['limit']:.2f} {mark(record['met'])}"
            ratios = (f"{record[name]:.3f}" for name in ("ratio", "overhead"))
            yield [record["name"], *cells(record["ms"], STEP_SIDES, 2), *ratios, limit]
            if record["limit_of_plain"] < math.inf:
                met = record["of_plain"] <= record["limit_of_plain"]
                limit = f"limit {record['limit_of_plain']} {mark(met)}"
                yield [f"  of plain: {record['of_plain']:.2f}, {limit}", *[""] * 6]
            if record["overhead_by_hand"] is not None:
                (ms,) = cells(record["ms"], ["by hand"], 2)
                text = f"  its collectives and copies by hand: {ms} ms, overhead"
                yield [f"{text} {record['overhead_by_hand']:.3f}", *[""] * 6]

    show(
        "A step in ms, median (best); overhead: what funcol takes above plain, of what stock takes above it",
        "{:<22}{:>16}{:>16}{:>16}{:>10}{:>10}   {}",
        ("", *STEP_SIDES, "/ stock", "overhead", "limit"),
        rows(),
    )


# Table 2


def some_of(row: Row) -> Row:
    """Returns ``row`` with few of the layouts in which the operand may be made."""
    made = row.made.strategies
    return Row(OpStrategy(random.sample(made, min(NUM_STOCK_COSTS, len(made)))), row.used)


def time_costs(rows: list[Row]) -> tuple[int, float]:
    """Returns the number of costs, and microseconds for each."""
    begin = time.thread_time()
    num_costs = sum(len(stock_ops.generate_redistribute_costs(*row)) for row in rows)
    return num_costs, (time.thread_time() - begin) / num_costs * 1e6


def bench_solver() -> dict[str, Any]:
    """Times rows drawn by their lengths, so that a mean over them is one over all costs."""
    random.seed(0)
    with fake_ranks(math.prod(SOLVER_MESH)):
        costs = SolverCosts(traced_block(), init_device_mesh("cpu", SOLVER_MESH))
        lengths = [len(row.made.strategies) for row in costs.rows]
        rows = random.choices(costs.rows, weights=lengths, k=NUM_ROWS)
        stock_rows = [some_of(row) for row in rows]
        forget_stock()
        num_stock, stock_us = time_costs(stock_rows)
        with funcol.installed():
            num_ours, ours_us = time_costs(rows)
    return {
        "num_nodes": costs.num_nodes,
        "num_rows": len(costs.rows),
        "num_costs": costs.num_costs(),
        "num_timed": {"stock": num_stock, "funcol": num_ours},
        "us": {"stock": stock_us, "funcol": ours_us},
        "ratio": ours_us / stock_us,
        "limit": SOLVER_LIMIT,
        "met": ours_us / stock_us <= SOLVER_LIMIT,
    }


def print_solver(record: dict[str, Any]) -> None:
    mesh = "x".join(map(str, SOLVER_MESH))
    say(
        f"\nCosts for a solver, a block forward and backward on {mesh} ranks: "
        f"{record['num_nodes']} operators, {record['num_rows']:,} rows, {record['num_costs']:,} costs"
    )
    for side in ("stock", "funcol"):
        us, timed = record["us"][side], record["num_timed"][side]
        whole = us * record["num_costs"] / 1e6
        say(f"{side:<8}{us:>10.1f} us a cost, {timed:>7,} timed; all would take {whole:,.0f} s")
    say(f"/ stock {record['ratio']:.4f}, limit {record['limit']} {mark(record['met'])}")


# Table 3


class Stopwatch:
    """Seconds within calls, by purpose; a call within another counts for the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.num_calls: Counter[str] = Counter()
        self._is_running = False

    def timed(self, purpose: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed_call(*args: Any, **kwargs: Any) -> Any:
            if self._is_running:
                return call(*args, **kwargs)
            self._is_running = True
            self.num_calls[purpose] += 1
            begin = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[purpose] += time.thread_time() - begin
                self._is_running = False

        return timed_call


class TimedPropagator:
    """Times the decisions of the dispatcher's propagator, which it replaces."""

    def __init__(self, propagator: Any, watch: Stopwatch) -> None:
        self._propagator = propagator
        for name in ("propagate", "propagate_op_sharding", "propagate_op_sharding_non_cached"):
            setattr(self, name, watch.timed("propagation", getattr(propagator, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._propagator, name)


def forget_stock() -> None:
    """Clears PyTorch's caches of decisions, and of steps and costs of redistributions."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    stock_redistribute._gen_transform_infos.cache_clear()
    stock_redistribute.clear_redistribute_planner_cache()
    forget_native()


@contextmanager
def watched(side: str) -> Iterator[Stopwatch]:
    """Times propagation, and stock's planning of redistributions."""
    watch = Stopwatch()
    with ExitStack() as stack:
        stack.enter_context(with_side(side))
        dispatcher = DTensor._op_dispatcher
        timed = TimedPropagator(dispatcher.sharding_propagator, watch)
        stack.enter_context(mock.patch.object(dispatcher, "sharding_propagator", timed))
        if side == "stock":
            for name in ("_gen_transform_infos", "_gen_transform_infos_non_cached"):
                watched_call = watch.timed("planning", getattr(stock_redistribute, name))
                stack.enter_context(mock.patch.object(stock_redistribute, name, watched_call))
        yield watch


def lay_out_explicitly(block: Block, x: DTensor) -> None:
    """Keeps views from merging two sharded dims, which stock cannot compile."""

    def attend_locally(*projected: DTensor) -> DTensor:
        mixed = attend(*(tensor.to_local() for tensor in projected))
        return DTensor.from_local(mixed, x.device_mesh, (Shard(0), Shard(1)), run_check=False)

    def as_x(tensor: DTensor) -> DTensor:
        return tensor.redistribute(placements=x.placements)

    block.attention.attend = attend_locally
    for part in (block.attention, block.feed_forward):
        part.register_forward_pre_hook(lambda _, inputs: as_x(*inputs))
        part.register_forward_hook(lambda _, inputs, output: as_x(output))


def time_compile(side: str, mesh: DeviceMesh) -> dict[str, float]:
    """Returns seconds of compiling a block, forward and backward, and of them in decisions and in plans.

    funcol plans in C++ within the call that also puts the collectives into the graph, so what it was asked
    for is planned again afterwards, on its own.
    """
    torch.manual_seed(0)
    block = Block(WIDTH, NUM_HEADS)
    cut_as_megatron(block, mesh)
    x = distribute_tensor(torch.randn(BATCH, LENGTH, WIDTH), mesh, [Shard(0), Replicate()])
    lay_out_explicitly(block, x)
    torch._dynamo.reset()
    forget_stock()
    funcol._C.clear_tables()
    redistribute = funcol._C.redistribute_local_tensor
    asked = []

    def noted(local: torch.Tensor, source: Any, target: Any, *how: Any) -> torch.Tensor:
        asked.append((source, target))
        return redistribute(local, source, target, *how)

    with (
        watched(side) as watch,
        mock.patch.object(funcol._C, "redistribute_local_tensor", noted),
    ):
        begin = time.perf_counter()
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        compiled(x).sum().backward()
        whole = time.perf_counter() - begin
    plan = watch.timed("planning", funcol.plan_redistribution)
    for source, target in asked:
        plan(source.placements, target.placements, mesh, source.shape, source.tensor_meta.dtype)
    return {
        "whole": whole,
        "propagation": watch.seconds["propagation"],
        "planning": watch.seconds["planning"],
        "num_decisions": watch.num_calls["propagation"],
        "num_plans": watch.num_calls["planning"],
    }


def bench_compile(repeat: int) -> dict[str, Any]:
    """Returns the best of some rounds, the first of which is not counted: it imports."""
    sides = STEP_SIDES[1:]
    with lone_group(CPU, NUM_RANKS):
        mesh = init_device_mesh("cpu", (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
        rounds = [{side: time_compile(side, mesh) for side in sides} for _ in range(repeat + 1)][1:]
    best = {
        side: {name: min(of_round[side][name] for of_round in rounds) for name in rounds[0][side]}
        for side in sides
    }
    in_layouts = {side: of_side["propagation"] + of_side["planning"] for side, of_side in best.items()}
    ratio = in_layouts["funcol"] / in_layouts["stock"]
    return {"best": best, "ratio": ratio, "limit": COMPILE_LIMIT, "met": ratio <= COMPILE_LIMIT}


def print_compile(record: dict[str, Any]) -> None:
    show(
        'torch.compile(backend="aot_eager", fullgraph=True) of a block on 2x4 ranks, ms, best',
        "{:<8}{:>10}{:>14}{:>14}{:>12}{:>8}",
        ("", "whole", "propagation", "planning", "decisions", "plans"),
        (
            (
                *(side, *(f"{1e3 * of_side[name]:.1f}" for name in ("whole", "propagation", "planning"))),
                *(of_side["num_decisions"], of_side["num_plans"]),
            )
            for side, of_side in record["best"].items()
        ),
    )
    limit = f"limit {record['limit']} {mark(record['met'])}"
    say(f"propagation and planning / stock {record['ratio']:.4f}, {limit}")


TABLES = [
    Table("steps", lambda args: bench_steps(args.device, args.repeat, args.only), print_steps),
    Table("solver", lambda args: bench_solver(), print_solver, is_on_cpu),
    Table("compile", lambda args: bench_compile(max(2, args.repeat // 3)), print_compile, is_on_cpu),
]

if __name__ == "__main__":
    run(__doc__, TABLES, repeat(9), only("programs"), device("cuda: table 1 alone"), chooses=True)
