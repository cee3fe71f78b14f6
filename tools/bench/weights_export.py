"""Export: whole tensors of a Llama-like model's 300 weights, a table of bench_weights.py.

A loop of DTensor.full_tensor (stock) beside funcol.full_tensors to all ranks and to one: on four gloo ranks,
wall time and bytes; and the host's time on a fake group of 64 ranks, which sends nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from measure import each, lone_group, mark, say
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from weights_ranks import (
    NUM_RANKS,
    TIMEOUT_S,
    fully_sharded,
    llama_shapes,
    mebibytes,
    median_ms,
    ratio,
    run_on_ranks,
    same,
    time_sides,
)

import funcol

WIDTHS = {"small": 32, "medium": 96, "large": 192}
LIMITS = {"small": 0.25, "medium": 1.0, "large": 1.0}
NUM_FAKE_RANKS = 64
FAKE_WIDTH = 16  # larger weights would show the time of copies, which both sides make
FAKE_LIMIT = 0.05


def sides_of(weights: dict[str, Any]) -> dict[str, Callable[[], list[Tensor]]]:
    """Each drops a tensor before it gets the next, but for those that are compared."""

    def stock() -> list[Tensor]:
        for weight in weights.values():
            last = weight.full_tensor()
        return [last]

    def everywhere() -> list[Tensor]:
        for _, whole in funcol.full_tensors(weights):
            last = whole
        assert last is not None
        return [last]

    def to_one() -> list[Tensor]:
        for _, whole in funcol.full_tensors(weights, to=0):
            last = whole
        return [] if last is None else [last]

    return {"stock": stock, "funcol": everywhere, "to 0": to_one}


def time_rank(rank: int, width: int, repeat: int) -> dict[str, dict[str, Any]]:
    mesh = init_device_mesh("cpu", (NUM_RANKS,))
    weights = fully_sharded(llama_shapes(width), mesh)
    expected = [weight.full_tensor() for weight in weights.values()]
    wholes = [whole for _, whole in funcol.full_tensors(weights) if whole is not None]
    if not same(expected, wholes):
        raise RuntimeError("stock and funcol differ")
    del expected, wholes
    return time_sides(sides_of(weights), repeat)


def time_host(repeat: int) -> dict[str, Any]:
    """Microseconds a weight on a fake group, best of rounds in which the sides take turns."""
    with lone_group(torch.device("cpu"), NUM_FAKE_RANKS, whole_steps=True) as lone:
        mesh = init_device_mesh("cpu", (NUM_FAKE_RANKS,))
        weights = fully_sharded(llama_shapes(FAKE_WIDTH), mesh)
        calls = sides_of(weights)
        times: dict[str, list[float]] = {side: [] for side in calls}
        for call in calls.values():
            lone.clock.time_calls(call, 2)
        for _ in each("host", range(repeat)):
            for side, call in calls.items():
                times[side].append(lone.clock.time_calls(call, 1) / len(weights))
    ratios = {
        side: statistics.median(a / b for a, b in zip(times[side], times["stock"], strict=True))
        for side in calls
    }
    return {"us": {side: min(of_side) for side, of_side in times.items()}, "ratio": ratios}


def bench(repeat: int) -> dict[str, Any]:
    ranks = {
        name: run_on_ranks(time_rank, NUM_RANKS, width, repeat, limit_s=TIMEOUT_S)
        for name, width in WIDTHS.items()
    }
    return {"ranks": ranks, "host": time_host(repeat)}


def report(results: dict[str, Any]) -> None:
    line = "{:<10}{:>12}{:>12}{:>12}{:>12}{:>12}   {}"
    say("\nExport of 300 weights on four gloo ranks in ms, median of the slowest rank's")
    say(line.format("", "stock", "funcol", "to 0", "/ stock", "to 0 / st.", "limit"))
    for name, of_case in results["ranks"].items():
        times = [median_ms(of_case[side]) for side in ("stock", "funcol", "to 0")]
        against = [ratio(of_case, side, "stock") for side in ("funcol", "to 0")]
        met = mark(against[0] <= LIMITS[name])
        say(line.format(name, *times, *(f"{one:.3f}" for one in against), f"{LIMITS[name]} {met}"))
    say("\nMiB that all ranks write")
    say(line.format("", "stock", "funcol", "to 0", "", "to 0 / f.", "limit"))
    for name, of_case in results["ranks"].items():
        sizes = [mebibytes(of_case[side]) for side in ("stock", "funcol", "to 0")]
        share = of_case["to 0"]["bytes"] / of_case["funcol"]["bytes"]
        # Headers and the ranks' comparison count in the small model.
        met = mark(share <= 1 / NUM_RANKS + 0.01)
        say(line.format(name, *sizes, "", f"{share:.3f}", f"1/{NUM_RANKS} {met}"))
    say(f"\nThe host's time on {NUM_FAKE_RANKS} fake ranks, a weight in us, best")
    host = results["host"]
    times = [f"{host['us'][side]:.1f}" for side in ("stock", "funcol", "to 0")]
    against = [host["ratio"][side] for side in ("funcol", "to 0")]
    met = mark(max(against) <= FAKE_LIMIT)
    say(line.format("", *times, *(f"{one:.3f}" for one in against), f"{FAKE_LIMIT} {met}"))
