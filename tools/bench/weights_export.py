"""Export: whole tensors of a Llama-like model's 300 weights, a table of bench_weights.py.

A loop of DTensor.full_tensor (stock) beside funcol.full_tensors to all ranks and to one: on four gloo ranks,
wall time and bytes; and the host's time on a fake group of 64 ranks, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from measure import CPU, lone_group
from runner import each, mark, median_ratio, run_on_ranks, show, time_ranks
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
    same,
)

import funcol

SIDES = ("stock", "funcol", "to 0")
WIDTHS = {"small": 32, "medium": 96, "large": 192}
LIMITS = {"small": 0.25, "medium": 1.0, "large": 1.0}
NUM_FAKE_RANKS = 64
FAKE_WIDTH = 16  # larger weights would show the time of copies, which both sides make
FAKE_LIMIT = 0.05


def sides_of(weights: dict[str, Any]) -> dict[str, Callable[[], list[Tensor]]]:
    """Returns calls by side. Each drops a tensor before it gets the next; the last ones are compared."""

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
    return time_ranks(sides_of(weights), repeat)


def time_host(repeat: int) -> dict[str, Any]:
    """Returns microseconds a weight on a fake group, best of rounds in which the sides take turns."""
    with lone_group(CPU, NUM_FAKE_RANKS, whole_steps=True) as lone:
        mesh = init_device_mesh("cpu", (NUM_FAKE_RANKS,))
        weights = fully_sharded(llama_shapes(FAKE_WIDTH), mesh)
        calls = sides_of(weights)
        times: dict[str, list[float]] = {side: [] for side in calls}
        for call in calls.values():
            lone.clock.time_calls(call, 2)
        for _ in each("host", range(repeat)):
            for side, call in calls.items():
                times[side].append(lone.clock.time_calls(call, 1) / len(weights))
    ratios = {side: median_ratio(of_side, times["stock"]) for side, of_side in times.items()}
    return {"us": {side: min(of_side) for side, of_side in times.items()}, "ratio": ratios}


def bench(repeat: int) -> dict[str, Any]:
    ranks = {
        name: run_on_ranks(time_rank, NUM_RANKS, width, repeat, limit_s=TIMEOUT_S)
        for name, width in WIDTHS.items()
    }
    return {"ranks": ranks, "host": time_host(repeat)}


def report(results: dict[str, Any]) -> None:
    form = "{:<10}{:>12}{:>12}{:>12}{:>12}{:>12}   {}"

    def time_row(name: str, of_case: dict[str, Any]) -> list[str]:
        against = [ratio(of_case, side, "stock") for side in ("funcol", "to 0")]
        limit = f"{LIMITS[name]} {mark(against[0] <= LIMITS[name])}"
        return [name, *(median_ms(of_case[side]) for side in SIDES), *(f"{r:.3f}" for r in against), limit]

    def bytes_row(name: str, of_case: dict[str, Any]) -> list[str]:
        share = of_case["to 0"]["bytes"] / of_case["funcol"]["bytes"]
        # Headers and the ranks' comparison count in the small model.
        limit = f"1/{NUM_RANKS} {mark(share <= 1 / NUM_RANKS + 0.01)}"
        return [name, *(mebibytes(of_case[side]) for side in SIDES), "", f"{share:.3f}", limit]

    def host_row(host: dict[str, Any]) -> list[str]:
        against = [host["ratio"][side] for side in ("funcol", "to 0")]
        limit = f"{FAKE_LIMIT} {mark(max(against) <= FAKE_LIMIT)}"
        return ["", *(f"{host['us'][side]:.1f}" for side in SIDES), *(f"{r:.3f}" for r in against), limit]

    header = ("", *SIDES, "/ stock", "to 0 / st.", "limit")
    ranks = results["ranks"].items()
    title = "Export of 300 weights on four gloo ranks in ms, median of the slowest rank's"
    show(title, form, header, (time_row(*item) for item in ranks))
    header = ("", *SIDES, "", "to 0 / f.", "limit")
    show("MiB that all ranks write", form, header, (bytes_row(*item) for item in ranks))
    title = f"The host's time on {NUM_FAKE_RANKS} fake ranks, a weight in us, best"
    show(title, form, host_row(results["host"]), ())
