"""Plans of redistributions, from Python."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from plans import MESH, plan
from processes import run_python
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import funcol
from funcol.planning import mesh_of
from funcol.redistribution import StepCounts

# Text of a plan


def test_a_shard_to_replicate_is_one_all_gather() -> None:
    assert list(map(str, plan("S0,S1", "R,S1").steps)) == ["all_gather(dim 0, dp)"]


def test_equal_layouts_need_no_step() -> None:
    assert plan("S0,P", "S0,P").steps == ()


def test_costs_of_the_steps_add_up() -> None:
    made = plan("S0,P(max)", "R,R")
    assert len(made.steps) > 1
    assert made.cost == pytest.approx(sum(step.cost for step in made.steps))


def test_a_plan_is_at_its_peak_in_one_of_its_steps() -> None:
    made = plan("S0,S1", "R,R")
    assert made.peak_bytes == max(step.peak_bytes for step in made.steps)


def test_a_gather_sends_what_the_others_of_its_axis_lack() -> None:
    [step] = plan("R,S0", "R,R", shape=(16, 16)).steps
    assert step.bytes_sent == 16 * 16 * 4 * 3 // 4


def test_layouts_of_steps_join() -> None:
    made = plan("P,S0", "S1,R")
    layouts = [made.src, *(step.after for step in made.steps)]
    assert [step.before for step in made.steps] == layouts[:-1]
    assert layouts[-1] == made.dst


def test_the_text_of_a_plan_is_its_layouts_with_arrows() -> None:
    assert str(plan("S0,S1", "R,S1")) == "S(0)S(1)->RS(1)"


def test_axes_of_a_step_are_numbers() -> None:
    assert [step.axes for step in plan("S0,S0", "R,R", cost_model=StepCounts()).steps] == [(0, 1)]


def test_equal_arguments_give_equal_plans() -> None:
    first, second = plan("S0,R", "R,S1"), plan([Shard(0), Replicate()], [Replicate(), Shard(-1)])
    assert first == second
    assert hash(first) == hash(second)


@pytest.mark.parametrize("other", [("S0,R", "R,R"), ("S1,R", "R,S1")])
def test_plans_of_other_layouts_differ(other: tuple[str, str]) -> None:
    assert plan("S0,R", "R,S1") != plan(*other)


def test_plans_cannot_be_written_to() -> None:
    with pytest.raises(AttributeError):
        plan("S0,R", "R,R").cost = 0.0  # type: ignore[misc]


@pytest.mark.parametrize("rank", range(3))
def test_uneven_shards_are_those_of_chunk(rank: int) -> None:
    made = plan("S0", "R", mesh="x=3", shape=(7,))
    expected = torch.arange(7).chunk(3)[rank].tolist()
    assert made.local_indices(0, [rank]) == (((expected[0], len(expected)),),)


def test_the_last_rank_of_a_short_dim_holds_nothing() -> None:
    assert plan("S0", "R", mesh="x=3", shape=(2,)).local_indices(0, [2]) == ((),)


def test_after_the_last_step_ranks_hold_the_destination() -> None:
    made = plan("S0,R", "R,S1", shape=(4, 8))
    assert made.local_indices(len(made.steps), [1, 3]) == (((0, 4),), ((6, 2),))


@pytest.mark.parametrize(("num_steps", "coordinate"), [(9, [0, 0]), (0, [0]), (0, [2, 0]), (0, [0, -1])])
def test_ranks_and_steps_that_there_are_not_are_refused(num_steps: int, coordinate: list[int]) -> None:
    with pytest.raises(ValueError, match=r"Plan\.local_indices: "):
        plan("S0,R", "R,R").local_indices(num_steps, coordinate)


# Inputs of plans


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ([Shard(0), Replicate()], "S(0)R"),
        ((Shard(-1), Partial()), "S(1)P(sum)"),
        ([Partial("avg"), Partial("sum")], "P(avg)P(sum)"),
        ([Replicate(), Partial("bxor")], "RP(bxor)"),
        ([Replicate(), _StridedShard(0, split_factor=3)], "R_S(0, 3)"),
        ([_MaskPartial(offset_shape=torch.Size([8])), Replicate()], "MaskP(sum)R"),
        ("S0, P(max)", "S(0)P(max)"),
        ("_S(1, 2) ,R", "_S(1, 2)R"),
    ],
)
def test_placements_are_read(placements: Any, text: str) -> None:
    assert plan(placements, placements).src == text


def test_masks_of_two_buffers_are_two_layouts() -> None:
    first, second = _MaskPartial(), _MaskPartial()
    assert plan([first, Replicate()], [first, Replicate()]) != plan(
        [second, Replicate()], [second, Replicate()]
    )


def test_a_kind_of_placement_with_rules_of_its_own_is_not_taken_for_its_base() -> None:
    with pytest.raises(NotImplementedError, match="_NormPartial, a kind with rules of its own"):
        plan([_NormPartial(2), Replicate()], "R,R")


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ([3, Replicate()], TypeError, "got a int where a placement belongs"),
        (3, TypeError, "the placements are a int. Expected a list or tuple"),
        ("S0,X", ValueError, "'X' is not a placement"),
        ("S0,P(middle)", ValueError, "'middle' is not a reduction. Expected one of sum, avg"),
        ("S0", ValueError, "1 placements (S(0)) for a mesh of 2 axes"),
        (
            "S2,R",
            ValueError,
            "plan_redistribution: src: S(2) shards a dim that a tensor of 2 dims does not have",
        ),
        ("P(sum),P(max)", ValueError, "mix reductions"),
        ("_S(0, 9223372036854775807),R", ValueError, "has a split factor below 1, or above 2^31"),
        ("_S(0, 99999999999999999999),R", ValueError, "is not a placement"),
        ("S99999999999999999999,R", ValueError, "is not a placement"),
    ],
)
def test_wrong_placements_are_refused(placements: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        plan(placements, "R,R")
    assert message in str(refused.value)


@pytest.mark.parametrize("order", ["0:tp,dp", " 0 : tp , dp ;", ((0, (1, 0)),)])
def test_shard_orders_are_read(order: Any) -> None:
    made = plan("S0,S0", "R,R", src_shard_order=order)
    assert made.src == "S(0)[1]S(0)[0]"


def test_a_shard_order_of_several_dims_is_read() -> None:
    made = plan("S0,S1", "S0,S1", src_shard_order="1:tp; 0:dp", dst_shard_order=((0, (0,)), (1, (1,))))
    assert made.steps == ()


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ("tp,dp", ValueError, "'tp,dp' is not a shard order. Write a tensor dim"),
        ("0:tp,cp", ValueError, "names the mesh axis 'cp'. There are dp, tp."),
        ("0:tp", ValueError, "the shard order lists 1 axes, but 2 of the placements"),
        (((0, (1, 0)), (0, (1, 0))), ValueError, "names tensor dim 0 twice"),
        (((-1, (1, 0)),), ValueError, "names tensor dim -1. Count it from 0"),
        (((0,),), ValueError, "an entry of the shard order has 1 parts"),
        ((("0", (1, 0)),), TypeError, "the tensor dim of a shard order is a str"),
        (((0, (1, 5)),), ValueError, "mesh axis 5 cuts dim 0"),
        ("99999999999999999999:tp", ValueError, "is not a shard order"),
    ],
)
def test_wrong_shard_orders_are_refused(order: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        plan("S0,S0", "R,R", src_shard_order=order)
    assert message in str(refused.value)


@pytest.mark.parametrize("mesh", ["dp=2,tp=4", " dp = 2 , tp = 4 ", {"dp": 2, "tp": 4}])
def test_meshes_are_read_from_text_and_dicts(mesh: Any) -> None:
    assert (mesh_of(mesh).names, mesh_of(mesh).sizes) == (("dp", "tp"), (2, 4))


@pytest.mark.parametrize(("mesh", "merged"), [("a=2,b=1,c=3", (0b101,)), ("a=2,b=1", ()), ("a=1", ())])
def test_all_axes_of_several_ranks_are_taken_together(mesh: str, merged: tuple[int, ...]) -> None:
    assert mesh_of(mesh).merged == merged


@pytest.mark.parametrize(
    ("mesh", "error", "message"),
    [
        ("dp=2,tp", ValueError, "'tp' in the mesh 'dp=2,tp' is not an axis"),
        ("dp=2,dp=2", ValueError, "'dp=2' in the mesh 'dp=2,dp=2' is not an axis. Write each axis once"),
        ("", ValueError, "'' in the mesh '' is not an axis"),
        ("dp=0,tp=2", ValueError, "mesh axis 'dp' has size 0"),
        ({"dp": 2.5, "tp": 2}, ValueError, "mesh axis 'dp' has size 2.5"),
        ({3: 2, 4: 2}, ValueError, "mesh axis 3 has size 2, expected a name"),
        ("dp=4294967296,tp=4294967296", ValueError, "has more than 2147483647 ranks"),
        ("dp=99999999999999999999,tp=2", ValueError, "is not an axis"),
        (7, TypeError, "got a int where a mesh belongs"),
    ],
)
def test_wrong_meshes_are_refused(mesh: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as refused:
        plan("R,R", "R,R", mesh=mesh)
    assert message in str(refused.value)


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("torch.int64", 8), (torch.bool, 1)])
def test_dtypes_say_how_many_bytes_an_element_has(dtype: Any, itemsize: int) -> None:
    assert funcol.plan_redistribution("R", "R", "x=2", (1,), dtype).itemsize == itemsize


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((4, -1), "float32", ValueError, "the shape is (4, -1), expected sizes of 0 or more"),
        ((10**10, 10**10), "float32", ValueError, "(10000000000, 10000000000), expected 2^48 elements"),
        ((2**63, 0), "float32", ValueError, "expected 2^48 elements at most"),
        ((4, 4), "float33", ValueError, "'float33' is not a dtype"),
        ((4, 4), "nn", ValueError, "'nn' is not a dtype"),
        ((4, 4), 32, TypeError, "the dtype is a int"),
    ],
)
def test_wrong_shapes_and_dtypes_are_refused(
    shape: Any, dtype: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as refused:
        funcol.plan_redistribution("R,R", "R,R", MESH, shape, dtype)
    assert message in str(refused.value)


def test_a_bound_on_memory_is_kept() -> None:
    free = plan("S0,R", "S1,R", shape=(64, 64))
    bound = free.peak_bytes
    assert plan("S0,R", "S1,R", shape=(64, 64), max_bytes=bound).peak_bytes <= bound


def test_a_bound_that_no_plan_keeps_says_what_would_do() -> None:
    with pytest.raises(ValueError, match="at most 10 bytes") as refused:
        plan("S0,R", "R,R", max_bytes=10)
    least = int(str(refused.value).rpartition("max_bytes=")[2].rstrip("."))
    assert plan("S0,R", "R,R", max_bytes=least).peak_bytes <= least


def test_the_greedy_plan_costs_no_less() -> None:
    arguments = ("S0,S0", "S1,S1", MESH, (64, 64), "float32")
    assert (
        funcol.redistribution.greedy_redistribution(*arguments).cost
        > funcol.plan_redistribution(*arguments).cost
    )


def test_the_greedy_plan_is_refused_for_orders_that_the_reference_has_none_for() -> None:
    with pytest.raises(ValueError, match="greedy_redistribution: "):
        funcol.redistribution.greedy_redistribution(
            "S0,S0", "R,R", MESH, (8, 8), "float32", src_shard_order="0:tp,dp"
        )


# DeviceMeshes. A fake process group has 8 ranks of which one runs.


DEVICE_MESHES = """
import gc, json, torch, torch.distributed as dist, weakref
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
import funcol
from funcol._C import mesh_of

dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
found = {}
mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
found["axes"] = [mesh_of(mesh).sizes, mesh_of(mesh).names]
found["world"] = mesh_of(mesh).merged
flattened = mesh["a", "c"]._flatten("ac")
found["flattened"] = mesh_of(mesh).merged
part = mesh["b", "c"]
found["part"] = mesh_of(part).merged
part._flatten("bc")
found["flattened part"] = mesh_of(part).merged
found["whole of the flattened part"] = mesh_of(mesh).merged
found["groups are those of the submeshes"] = (
    funcol.redistribution.meshes.merged_groups(mesh)[0b101] == flattened.get_group().group_name
    and funcol.redistribution.meshes.merged_groups(mesh)[0b111] == dist.group.WORLD.group_name
)
found["an axis of one rank"] = mesh_of(init_device_mesh("cpu", (2, 1, 4))).merged
found["no names"] = mesh_of(init_device_mesh("cpu", (2, 4))).names
other_order = DeviceMesh("cpu", torch.tensor([[0, 2, 4, 6], [1, 3, 5, 7]]))
found["another order of ranks"] = mesh_of(other_order).merged
found["half the world"] = mesh_of(DeviceMesh("cpu", torch.tensor([[0, 1], [2, 3]]))).merged
found["one axis"] = mesh_of(init_device_mesh("cpu", (8,))).merged
found["plan"] = str(funcol.plan_redistribution("S0,R,S0", "R,R,R", mesh, (16,), "float32").steps[0])
reference = weakref.ref(other_order)
del other_order
gc.collect()
found["kept alive"] = reference() is not None
print(json.dumps(found))
"""

FOUND_IN_DEVICE_MESHES = {
    "axes": [[2, 2, 2], ["a", "b", "c"]],
    "world": [0b111],
    "flattened": [0b101, 0b111],
    "part": [],
    "flattened part": [0b11],
    "whole of the flattened part": [0b101, 0b110, 0b111],
    "groups are those of the submeshes": True,
    "an axis of one rank": [0b101],
    "no names": [],
    "another order of ranks": [],
    "half the world": [],
    "one axis": [],
    "plan": "all_gather(dim 0, a+c)",
    "kept alive": False,
}


@pytest.fixture(scope="module")
def found_in_device_meshes() -> dict[str, Any]:
    return json.loads(run_python("-c", DEVICE_MESHES))


@pytest.mark.parametrize("what", FOUND_IN_DEVICE_MESHES)
def test_device_meshes_are_read_with_the_groups_they_have(
    found_in_device_meshes: dict[str, Any], what: str
) -> None:
    assert found_in_device_meshes[what] == FOUND_IN_DEVICE_MESHES[what]
