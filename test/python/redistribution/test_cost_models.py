"""Cost models that plans are compared by, and the file that keeps a measured one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import axis_cost, model, plan
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from funcol.cost_models import CostModel
from funcol.redistribution import AlphaBeta, StepCounts, redistribute_local_tensor


def test_latency_and_bandwidth_make_the_cost() -> None:
    [step] = plan("S0", "R", mesh="x=2", shape=(1000,), cost_model=model(x=axis_cost(2, 7.0, 0.5))).steps
    assert step.cost == pytest.approx(7.0 + 2000 / (0.5 * 1000))


def test_costs_go_by_the_names_of_the_axes() -> None:
    slow_tp = {"tp": axis_cost(4, 90.0), "dp": axis_cost(2, 1.0)}
    [step] = plan("S0,R", "R,R", shape=(2, 1), cost_model=model(**slow_tp)).steps
    assert 1.0 <= step.cost < 90.0


def test_step_counts_are_those_of_the_reference() -> None:
    made = plan("P,R", "R,R", cost_model=StepCounts())
    assert ([step.kind for step in made.steps], made.cost) == (["all_reduce"], 4)


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
    """Returns a saved model with the value at ``keys`` replaced, or taken away."""
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
        ("{", "is not valid JSON"),
        ("[]", "is [], expected an object with the keys axes, copy"),
        ("[" * 200_000, "is not valid JSON of a cost model: maximum recursion depth"),
        (changed("copy", to=1)[:-1] + ', "copy": 1}', "the key 'copy' is there twice"),
        (changed("axes", "dp", "size", to=10**30), "'size' is 1000000000000000000000000000000, expected"),
        (changed("copy", "latency_us", to=10**400), "'latency_us' is 1000000000"),
        (
            changed("copy", "latency_us", to=int("9" * 4300)).replace("9" * 4300, "9" * 5000),
            "is not valid JSON of a",
        ),
        (changed("copy", "latency_us", to=float("nan")), "'latency_us' is nan, expected a number"),
        (changed("copy", "latency_us", to=float("inf")), "'latency_us' is inf, expected a number"),
        (changed("copy", "gigabytes_per_s", to=1e-320), "'gigabytes_per_s' is 1e-320, expected a number"),
        (changed("copy", to="x" * 10_000), "'copy' is 'xxxx"),
    ],
)
def test_wrong_files_are_refused_by_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"AlphaBeta\.load: ") as refused:
        AlphaBeta.load(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 400 + len(str(path))


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_bytes(b"\xff\xfe\x80\x04K\x01.")
    with pytest.raises(
        ValueError, match=r"AlphaBeta\.load: .* is not valid JSON of a cost model: 'utf-8' codec"
    ):
        AlphaBeta.load(path)


def gathers(rank: int, world: int, cost_model: CostModel) -> list[float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    whole = torch.arange(5.0)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    src, dst = (DTensorSpec(mesh, (placement,), tensor_meta=meta) for placement in (Shard(0), Replicate()))
    local = whole.chunk(world)[rank]
    return redistribute_local_tensor(local, src, dst, cost_model=cost_model).tolist()


@pytest.mark.parametrize("cost_model", [StepCounts(), model(x=axis_cost(2))], ids=["counts", "measured"])
def test_a_redistribution_takes_the_cost_models_that_plans_take(cost_model: CostModel) -> None:
    assert run_ranks(gathers, 2, cost_model) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 2
