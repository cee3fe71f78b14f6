"""Texts that come from outside: meshes, shard orders and cost files are read as meant, or refused with
ValueError, whatever they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis_settings import checked
from plans import axis_cost, model

import funcol
from funcol.redistribution import AlphaBeta

MODEL = model(dp=axis_cost(2, 1.5), tp=axis_cost(4, 2.5))


def unless_refused(read: Callable[[], Any]) -> Any:
    """Returns the result of ``read``, or the text of its ValueError."""
    try:
        return read()
    except ValueError as refused:
        return str(refused)


@checked(300)
@given(st.text(alphabet="dtp=,0123459 x²٣-+_.", max_size=20))
@example("dp=" + "9" * 30)
@example("dp=" + "9" * 5000)
@example(",".join(f"a{axis}=1" for axis in range(40)))
@example(",".join(f"a{axis}=2" for axis in range(40)))
def test_a_mesh_is_read_or_refused(text: str) -> None:
    plan = unless_refused(lambda: funcol.plan_redistribution("R", "R", text, (4,), "float32"))
    if not isinstance(plan, str):
        [size] = plan.mesh.sizes
        assert size == int(text.rpartition("=")[2])


@checked(300)
@given(st.text(alphabet="0123:;,dtp ²٣-", max_size=16))
@example("0:" + "tp," * 40 + "dp")
@example("9" * 30 + ":tp,dp")
@example("9" * 5000 + ":tp,dp")
def test_a_shard_order_is_read_or_refused(text: str) -> None:
    plan = unless_refused(
        lambda: funcol.plan_redistribution("S0,S0", "R,R", "dp=2,tp=4", (8,), "float32", src_shard_order=text)
    )
    if not isinstance(plan, str):
        first = text.strip(" ;").partition(":")[2].split(",")[0].strip()
        assert (str(plan.src) == "S(0)[1]S(0)[0]") == (first == "tp")


def saved() -> dict[str, Any]:
    """Returns the contents of a file of ``MODEL``."""
    axes: dict[str, Any] = {
        name: {"size": axis.size, **{key: vars(getattr(axis, key)) for key in vars(axis) if key != "size"}}
        for name, axis in MODEL.axes.items()
    }
    return json.loads(json.dumps({"axes": axes, "copy": vars(MODEL.copy)}))


def load(path: Path, text: str | bytes) -> AlphaBeta | None:
    """Returns the model, or ``None`` if the file is refused by name."""
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    loaded = unless_refused(lambda: AlphaBeta.load(path))
    if isinstance(loaded, AlphaBeta):
        return loaded
    assert f"AlphaBeta.load: {path}" in loaded
    return None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@checked(300)
@given(value=VALUES, place=st.integers(0, 99))
@example(value=10**400, place=0)
@example(value=5e-324, place=1)
@example(value=1e308, place=2)
def test_a_cost_file_with_any_value_is_read_or_refused(value: Any, place: int, tmp_path: Path) -> None:
    content = saved()
    places: list[tuple[dict[str, Any], str]] = []

    def visit(object_: dict[str, Any]) -> None:
        for key, inner in object_.items():
            places.append((object_, key))
            if isinstance(inner, dict):
                visit(inner)

    visit(content)
    places.sort(key=lambda at: isinstance(at[0][at[1]], dict))  # numbers first
    inside, key = places[place % len(places)]
    inside[key] = value
    loaded = load(tmp_path / "costs.json", json.dumps(content))
    if loaded is not None:
        assert_plans(loaded)


def assert_plans(loaded: AlphaBeta) -> None:
    """A model that was loaded gives plans with costs."""
    sizes = {name: axis.size for name, axis in loaded.axes.items()}
    words = ",".join("S0" for _ in sizes)
    plan = funcol.plan_redistribution(
        words, ",".join("R" for _ in sizes), sizes, (1 << 20,), "float32", cost_model=loaded
    )
    assert 0 <= plan.cost < float("inf")


@pytest.mark.parametrize("text", [b"\xff\xfe", b"", b"[" * 100_000, b'{"axes": NaN}', b"\x00", b"1" * 5000])
def test_a_cost_file_that_is_no_json_is_refused(text: bytes, tmp_path: Path) -> None:
    assert load(tmp_path / "costs.json", text) is None


@checked(100)
@given(st.binary(max_size=40))
def test_a_cost_file_of_any_bytes_is_refused(tmp_path: Path, text: bytes) -> None:
    assert load(tmp_path / "costs.json", text) is None
