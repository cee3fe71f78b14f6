"""Plans of redistributions: from Python, from the command line, and as drawings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from test_package import run_python
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard

import funcol
from funcol import AlphaBeta, AxisCost, LinkCost, Plan, StepCounts
from funcol.__main__ import main
from funcol.plan_drawing import plan_as_svg
from funcol.planning import mesh_of

MESH = "dp=2,tp=4"


def plan(src: Any, dst: Any, mesh: Any = MESH, shape: Sequence[int] = (16, 16), **options: Any) -> Plan:
    return funcol.plan_redistribution(src, dst, mesh, shape, torch.float32, **options)


def kinds(of: Plan) -> list[str]:
    return [step.kind for step in of.steps]


# What a plan says of itself


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


# What plans are made from


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
        ("S0,X", ValueError, "'X' is no placement"),
        ("S0,P(middle)", ValueError, "'middle' is no reduction. There are sum, avg"),
        ("S0", ValueError, "1 placements (S(0)) for a mesh of 2 axes"),
        (
            "S2,R",
            ValueError,
            "plan_redistribution: src: S(2) shards a dim that a tensor of 2 dims does not have",
        ),
        ("P(sum),P(max)", ValueError, "mix reductions"),
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
        ("tp,dp", ValueError, "'tp,dp' is no shard order. Write a tensor dim"),
        ("0:tp,cp", ValueError, "names the mesh axis 'cp'. There are dp, tp."),
        ("0:tp", ValueError, "the shard order lists 1 axes, but 2 of the placements"),
        (((0, (1, 0)), (0, (1, 0))), ValueError, "names tensor dim 0 twice"),
        (((-1, (1, 0)),), ValueError, "names tensor dim -1. Count it from 0"),
        (((0,),), ValueError, "an entry of the shard order has 1 parts"),
        ((("0", (1, 0)),), TypeError, "the tensor dim of a shard order is a str"),
        (((0, (1, 5)),), ValueError, "mesh axis 5 cuts dim 0"),
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
        ("dp=2,tp", ValueError, "'tp' in the mesh 'dp=2,tp' is no axis"),
        ("dp=2,dp=2", ValueError, "'dp=2' in the mesh 'dp=2,dp=2' is no axis. Write each axis once"),
        ("", ValueError, "'' in the mesh '' is no axis"),
        ("dp=0,tp=2", ValueError, "mesh axis 'dp' has size 0"),
        ({"dp": 2.5, "tp": 2}, ValueError, "mesh axis 'dp' has size 2.5"),
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
        ((4, 4), "float33", ValueError, "'float33' is no dtype"),
        ((4, 4), "nn", ValueError, "'nn' is no dtype"),
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
    assert funcol.greedy_redistribution(*arguments).cost > funcol.plan_redistribution(*arguments).cost


def test_the_greedy_plan_is_refused_for_orders_that_the_reference_has_none_for() -> None:
    with pytest.raises(ValueError, match="greedy_redistribution: "):
        funcol.greedy_redistribution("S0,S0", "R,R", MESH, (8, 8), "float32", src_shard_order="0:tp,dp")


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
    funcol._compat.merged_groups(mesh)[0b101] == flattened.get_group().group_name
    and funcol._compat.merged_groups(mesh)[0b111] == dist.group.WORLD.group_name
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


# Cost models


def axis_cost(size: int, latency_us: float = 5.0, gigabytes_per_s: float = 100.0) -> AxisCost:
    return AxisCost(size, *[LinkCost(latency_us, gigabytes_per_s)] * 5)


def model(**axes: AxisCost) -> AlphaBeta:
    return AlphaBeta(axes or {"dp": axis_cost(2), "tp": axis_cost(4, 3.0)}, LinkCost(1.0, 200.0))


def test_latency_and_bandwidth_make_the_cost() -> None:
    [step] = plan("S0", "R", mesh="x=2", shape=(1000,), cost_model=model(x=axis_cost(2, 7.0, 0.5))).steps
    assert step.cost == pytest.approx(7.0 + 2000 / (0.5 * 1000))


def test_costs_go_by_the_names_of_the_axes() -> None:
    slow_tp = {"tp": axis_cost(4, 90.0), "dp": axis_cost(2, 1.0)}
    [step] = plan("S0,R", "R,R", shape=(2, 1), cost_model=model(**slow_tp)).steps
    assert 1.0 <= step.cost < 90.0


def test_step_counts_are_those_of_the_reference() -> None:
    made = plan("P,R", "R,R", cost_model=StepCounts())
    assert (kinds(made), made.cost) == (["all_reduce"], 4)


def test_a_saved_model_is_loaded_as_it_was(tmp_path: Path) -> None:
    saved = model(dp=axis_cost(2, 1 / 3, 7e-3), tp=axis_cost(4, 0.0, 1e6))
    saved.save(tmp_path / "costs.json")
    assert AlphaBeta.load(tmp_path / "costs.json") == saved


@pytest.mark.parametrize(
    ("mesh", "sizes"), [("dp=2", "dp=2"), ("dp=4,tp=2", "dp=4, tp=2"), ("x=2,tp=4", "x=2, tp=4")]
)
def test_a_model_of_another_mesh_is_refused(mesh: str, sizes: str) -> None:
    placements = ["R"] * len(sizes.split(", "))
    with pytest.raises(ValueError, match="AlphaBeta: the cost model is for a mesh of dp=2, tp=4") as refused:
        plan(",".join(placements), ",".join(placements), mesh=mesh, cost_model=model())
    assert f"the mesh is {sizes}." in str(refused.value)


def test_what_is_no_cost_model_is_refused() -> None:
    with pytest.raises(TypeError, match="the cost model is a str, expected AlphaBeta, StepCounts or None"):
        plan("R,R", "R,R", cost_model="fast")


def changed(*keys: str, to: Any = None) -> str:
    """A saved model with the value at ``keys`` replaced, or taken away."""
    content: Any = {
        "axes": {
            "dp": {"size": 2}
            | {
                kind: {"latency_us": 1.0, "gigabytes_per_s": 2.0}
                for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
            }
        },
        "copy": {"latency_us": 1.0, "gigabytes_per_s": 2.0},
    }
    inner = content
    for key in keys[:-1]:
        inner = inner[key]
    if to is None:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed("copy"), "the key 'copy' is missing. There are axes."),
        (
            changed("axes", "dp", "permute"),
            "axis 'dp': the key 'permute' is missing. There are size, all_gather",
        ),
        (
            changed("axes", "dp", "all_gather", "latency_us"),
            "axis 'dp': 'all_gather': the key 'latency_us' is missing. There are gigabytes_per_s.",
        ),
        (
            changed("axes", "dp", "send", to=1),
            "axis 'dp': the key 'send' is unknown. There are size, all_gather",
        ),
        (changed("axes", to=[]), "'axes' is [], expected an object"),
        (changed("axes", "dp", "size", to=0), "'size' is 0, expected a number of ranks"),
        (changed("copy", "latency_us", to=-1), "'latency_us' is -1, expected a number of 0 or more"),
        (
            changed("copy", "gigabytes_per_s", to=0),
            "'gigabytes_per_s' is 0, expected a number of more than 0",
        ),
        (changed("copy", "gigabytes_per_s", to="fast"), "'gigabytes_per_s' is 'fast', expected a number"),
        (changed("copy", to=3), "'copy' is 3, expected an object with the keys latency_us, gigabytes_per_s"),
        ("{", "is no JSON"),
        ("[]", "is [], expected an object with the keys axes, copy"),
    ],
)
def test_wrong_files_are_refused_by_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"AlphaBeta\.load: ") as refused:
        AlphaBeta.load(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)


# python -m funcol plan

ARGUMENTS = ("plan", "--mesh", MESH, "--shape", "1024x4096", "--dtype", "bfloat16")


def test_the_command_prints_both_plans_as_tables() -> None:
    lines = run_python("-m", "funcol", *ARGUMENTS, "S0,S0", "S1,S1").splitlines()
    assert lines[0] == "1024x4096 bfloat16 on dp=2, tp=4"
    assert [line for line in lines if "least cost: " in line] == [
        f"least cost: {funcol.plan_redistribution('S0,S0', 'S1,S1', MESH, (1024, 4096), 'bfloat16')}"
    ]
    assert any(line.startswith("PyTorch's greedy plan: S(0)") for line in lines)
    assert sum(line.startswith("  total ") for line in lines) == 2


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    main(list(arguments))
    return capsys.readouterr().out.splitlines()


def test_a_line_of_the_table_is_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, *ARGUMENTS, "--cost-model", "step-counts", "S0,S1", "R,S1")
    [line] = {line for line in lines if "all_gather" in line}
    made = plan("S0,S1", "R,S1", shape=(1024, 2048), cost_model=StepCounts())
    assert line.split() == [
        "all_gather(dim",
        "0,",
        "dp)",
        "S(0)S(1)",
        "RS(1)",
        "1.0",
        "MiB",
        "2",
        *peak(made),
    ]


def peak(made: Plan) -> list[str]:
    return [f"{made.peak_bytes / 2**20:.1f}", "MiB"]


def test_the_command_takes_orders_and_says_why_there_is_no_greedy_plan(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = printed(capsys, *ARGUMENTS, "S0,S0", "S0,S0", "--src-order", "0:tp,dp", "--dst-order", "0:dp,tp")
    assert any(line.startswith("least cost: S(0)[1]S(0)[0]") for line in lines)
    assert any(line.startswith("PyTorch's greedy plan: none. greedy_redistribution: ") for line in lines)


def test_the_command_takes_a_measured_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model(dp=axis_cost(2, 1e6), tp=axis_cost(4)).save(tmp_path / "costs.json")
    arguments = (*ARGUMENTS, "--cost-model", str(tmp_path / "costs.json"), "S0,S1", "R,S1")
    assert any("1e+06" in line for line in printed(capsys, *arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("X,R", "R,R"), "'X' is no placement"),
        (("S0,R", "R,R", "--max-bytes", "10"), "max_bytes="),
        (("S0,R", "R,R", "--cost-model", "no such file"), "No such file"),
        (("S0,R", "R,R", "--src-order", "0:cp"), "names the mesh axis 'cp'"),
        (("S0,R", "R,R", "--shape", "10,20"), '"10,20" is no shape'),
    ],
)
def test_wrong_arguments_of_the_command_end_it_with_the_reason(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*ARGUMENTS, *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# Drawings

SVG = "{http://www.w3.org/2000/svg}"


def groups(svg: ElementTree.Element, name: str) -> list[ElementTree.Element]:
    return [group for group in svg.iter(f"{SVG}g") if group.get("class") == name]


def blocks(cell: ElementTree.Element) -> list[ElementTree.Element]:
    return [rect for rect in cell.iter(f"{SVG}rect") if rect.get("class") == "block"]


def drawn(*arguments: Any, **options: Any) -> ElementTree.Element:
    return ElementTree.fromstring(plan_as_svg(plan(*arguments, **options)))


@pytest.mark.parametrize(
    ("src", "dst", "shape"),
    [
        ("S0,S0", "S1,S1", (16, 16)),
        ("S0,R", "R,S0", (7,)),
        ("R,R", "R,R", ()),
        ("P,S2", "S0,R", (3, 5, 9)),
        ("S0,R", "R,R", (0, 4)),
    ],
)
def test_a_drawing_has_a_panel_a_layout_and_a_cell_a_rank(src: str, dst: str, shape: tuple[int, ...]) -> None:
    made = plan(src, dst, shape=shape)
    svg = ElementTree.fromstring(plan_as_svg(made))
    panels = groups(svg, "panel")
    assert len(panels) == len(made.steps) + 1
    assert [len(groups(panel, "rank")) for panel in panels] == [8] * len(panels)


@pytest.mark.parametrize("shape", [(16, 16), (5, 3), (1, 1)])
def test_the_blocks_of_a_sharded_tensor_cover_it_once(shape: tuple[int, ...]) -> None:
    svg = drawn("S0,S1", "S0,S1", shape=shape)
    [whole, *_] = [rect for rect in svg.iter(f"{SVG}rect") if rect.get("class") == "whole"]

    def area(rect: ElementTree.Element) -> float:
        return float(rect.get("width", "0")) * float(rect.get("height", "0"))

    # Coordinates are rounded to a tenth of a pixel.
    assert sum(map(area, blocks(svg))) == pytest.approx(area(whole), rel=0.02)


def test_a_rank_that_holds_nothing_has_no_block() -> None:
    cells = groups(drawn("S0", "S0", mesh="x=3", shape=(2,)), "rank")
    assert [len(blocks(cell)) for cell in cells] == [1, 1, 0]


def test_a_strided_shard_is_drawn_in_pieces() -> None:
    cells = groups(drawn("_S(0, 2)", "_S(0, 2)", mesh="x=2", shape=(8,)), "rank")
    assert [len(blocks(cell)) for cell in cells] == [2, 2]


@pytest.mark.parametrize(("src", "hatched"), [("P", 2), ("P(max)", 2), ("R", 0), ("S0", 0)])
def test_partial_values_are_hatched(src: str, hatched: int) -> None:
    svg = drawn(src, src, mesh="x=2", shape=(4, 4))
    assert sum(block.get("fill") == "url(#partial)" for block in blocks(svg)) == hatched


@pytest.mark.parametrize(
    ("src", "dims"), [("S0,S2", "dims 0 and 2"), ("R,S1", "dims 1 and 3"), ("R,R", "dims 2 and 3")]
)
def test_of_many_dims_the_sharded_ones_are_drawn(src: str, dims: str) -> None:
    title = next(text.text for text in drawn(src, src, shape=(4, 8, 4, 4)).iter(f"{SVG}text"))
    assert title is not None
    assert title.endswith(f"drawn: {dims}")


def test_each_rank_has_a_colour_of_its_own() -> None:
    colours = {block.get("fill") for block in blocks(drawn("R,R", "R,R"))}
    assert len(colours) == math.prod((2, 4))


def test_too_many_ranks_to_read_are_refused() -> None:
    with pytest.raises(ValueError, match="a drawing of 65 ranks cannot be read; the most is 64"):
        plan_as_svg(plan("R", "R", mesh="x=65"))


def test_the_command_writes_the_drawing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.svg"
    lines = printed(capsys, *ARGUMENTS, "S0,R", "R,S1", "--svg", str(path))
    assert lines[-1] == f"drawn in {path}"
    assert groups(ElementTree.parse(path).getroot(), "rank")
