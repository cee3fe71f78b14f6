"""``plan_mesh_change``: plans between meshes as data."""

from __future__ import annotations

import pytest
import torch
from plans import axis_cost, model

import funcol
from funcol.redistribution import StepCounts


def test_a_plan_is_a_value() -> None:
    plans = [
        funcol.redistribution.plan_mesh_change(
            "S0", "S1", "dp=2", "tp=2", (4, 4), torch.float32, to_ranks=[2, 3]
        )
        for _ in range(2)
    ]
    assert plans[0] == plans[1]
    assert str(plans[0]) == "S(0) => S(1)"
    assert repr(plans[0]) == "<funcol.redistribution.MeshChange S(0) => S(1)>"
    assert plans[0].ranks == (0, 1, 2, 3)
    assert plans[0].bytes == ((0, 0, 16, 16), (0, 0, 16, 16), (0, 0, 0, 0), (0, 0, 0, 0))
    assert plans[0].bound == 32


def test_a_transfer_lists_its_messages() -> None:
    change = funcol.redistribution.plan_mesh_change(
        "R", "S0", "dp=2", "tp=4", (8,), torch.int8, to_ranks=[1, 2, 3, 4]
    )
    assert change.transfer is not None
    assert str(change.transfer).splitlines() == [
        "0 -> 2: 2 B of [2:4]",
        "0 -> 3: 1 B of [4:6], from element 0",
        "1 -> 3: 1 B of [4:6], from element 1",
        "1 -> 4: 2 B of [6:8]",
    ]
    first = change.transfer.messages[0]
    assert (first.sender, first.receiver, first.begin, first.size) == (0, 2, 0, 2)
    assert first.indices == (((2, 2),),)
    assert [(kept.sender, kept.receiver, kept.indices) for kept in change.transfer.kept] == [
        (1, 1, (((0, 2),),))
    ]
    assert change.transfer.messages_of(3) == change.transfer.messages[1:3]
    assert change.transfer.total == 6
    assert (change.transfer.held(1), change.transfer.held(2)) == ((((0, 8),),), None)


def test_a_rank_of_a_large_world_plans_its_own_messages() -> None:
    num = 1 << 16
    change = funcol.redistribution.plan_mesh_change(
        "S0", "S1", {"dp": num}, {"tp": num}, (num, num), torch.int8, to_ranks=range(num, 2 * num)
    )
    assert change.transfer is not None
    assert change.transfer.total == num * num
    assert change.peak_bytes == 2 * num
    messages = change.transfer.messages_of(num + 5)
    assert len(messages) == num
    assert (messages[7].sender, messages[7].indices) == (7, (((7, 1),), ((5, 1),)))


def test_a_model_has_costs_of_both_meshes() -> None:
    ends = ("S0", "S1", "dp=2", "tp=2", (4, 4), torch.float32)
    fast, slow = axis_cost(2), axis_cost(2, latency_us=700)
    costs = {
        name: funcol.redistribution.plan_mesh_change(*ends, to_ranks=[2, 3], cost_model=given).cost
        for name, given in {
            "fast": model(dp=fast, tp=fast),
            "slow": model(dp=fast, tp=slow),
            "one each": (model(dp=slow), model(tp=fast)),
        }.items()
    }
    assert costs["fast"] < 100
    assert costs["slow"] == costs["one each"] > 700


def test_steps_may_be_counted() -> None:
    change = funcol.redistribution.plan_mesh_change(
        "P", "S0", "dp=2", "tp=2", (4, 4), torch.float32, to_ranks=[2, 3], cost_model=StepCounts()
    )
    assert change.cost == 3


def test_a_model_without_an_axis_is_refused() -> None:
    with pytest.raises(ValueError, match="the mesh is tp=2"):
        funcol.redistribution.plan_mesh_change(
            *("R", "S0", "dp=2", "tp=2", (4, 4), torch.float32), cost_model=model(dp=axis_cost(2))
        )


def test_orders_name_the_axes_of_their_mesh() -> None:
    change = funcol.redistribution.plan_mesh_change(
        *("S0,S0", "S0,S0", "a=2,b=2", "c=2,d=2", (8,), torch.int8),
        src_shard_order="0:b,a",
        dst_shard_order="0:d,c",
    )
    assert change.bound == 0
    assert (change.src, change.dst) == ("S(0)[1]S(0)[0]", "S(0)[1]S(0)[0]")
