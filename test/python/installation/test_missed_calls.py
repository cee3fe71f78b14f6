"""A call under funcol.install() that is not remembered is decided in C++, with next to no Python."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from versions import needs_decisions_in_cpp

import funcol
from funcol import _C
from funcol.installation import decision_counts, forget_decision_counts

WORLD = 8
MOST_FRAMES = 10

pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    needs_decisions_in_cpp,
]

MESHES = [(8,), (4, 2), (2, 2, 2)]


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    with funcol.installed(), torch.no_grad():
        forget_decision_counts()
        yield
    forget_decision_counts()


@pytest.fixture(params=MESHES, ids=lambda sizes: f"{len(sizes)} axes")
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    return init_device_mesh("cpu", request.param)


def on(
    mesh: DeviceMesh,
    shape: tuple[int, ...],
    first: Placement | None = None,
    last: Placement | None = None,
    dtype: torch.dtype = torch.float32,
) -> DTensor:
    """Returns a tensor with these placements on the first and the last axis, replicated elsewhere."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    placements[-1] = last or placements[-1]
    placements[0] = first or placements[0]
    local = list(shape)
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local[placement.dim] //= mesh.size(axis)
    whole = torch.empty(shape, device="meta")
    return DTensor.from_local(
        torch.ones(local, dtype=dtype),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


Call = Callable[[], Any]


def add(mesh: DeviceMesh, rows: int) -> Call:
    x, y = on(mesh, (rows, 16), Shard(0)), on(mesh, (rows, 16), None, Shard(1))
    return lambda: x + y


def add_number(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x + 1


def mm(mesh: DeviceMesh, rows: int) -> Call:
    x, y = on(mesh, (rows, 16), Shard(0)), on(mesh, (16, 32), None, Shard(1))
    return lambda: x @ y


def bmm(mesh: DeviceMesh, rows: int) -> Call:
    x, y = on(mesh, (8, rows, 16), Shard(0)), on(mesh, (8, 16, 4), Shard(0))
    return lambda: torch.bmm(x, y)


def view(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x.view(rows, 4, 4)


def flatten(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 4, 4), Shard(0))
    return lambda: x.view(-1, 4)


def transpose(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x.transpose(0, 1)


def flatten_heads(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (4, 8, rows), None, Shard(1))
    return lambda: x.view(32, rows)


def split_heads(mesh: DeviceMesh, rows: int) -> Call:
    heads = on(mesh, (4, 8, rows), None, Shard(1)).view(32, rows)
    return lambda: heads.view(4, 8, rows)


def transpose_heads(mesh: DeviceMesh, rows: int) -> Call:
    heads = on(mesh, (4, 8, rows), None, Shard(1)).view(32, rows)
    return lambda: heads.transpose(0, 1)


def softmax(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: torch.softmax(x, 1)


def layer_norm(mesh: DeviceMesh, rows: int) -> Call:
    x, weight = on(mesh, (rows, 16), Shard(0)), on(mesh, (16,))
    return lambda: torch.layer_norm(x, (16,), weight, weight)


def vector_norm(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: torch.linalg.vector_norm(x, 2, dim=1)


def sum_of_rows(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x.sum(0)


def mean(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x.mean(0)


def amax(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x.amax(1)


def select(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x.select(1, 3)


def slice_of_columns(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Shard(0))
    return lambda: x[:, 2:6]


def index_select(mesh: DeviceMesh, rows: int) -> Call:
    x, index = on(mesh, (rows, 16), Shard(0)), on(mesh, (4,), dtype=torch.int64)
    return lambda: x.index_select(1, index)


def in_place(mesh: DeviceMesh, rows: int) -> Call:
    x, y = on(mesh, (rows, 16), Shard(0)), on(mesh, (rows, 16), None, Shard(1))
    return lambda: x.mul_(y)


def out(mesh: DeviceMesh, rows: int) -> Call:
    x, result = on(mesh, (rows, 16), Shard(0)), on(mesh, (rows, 16), Shard(0))
    return lambda: torch.add(x, x, out=result)


def cat(mesh: DeviceMesh, rows: int) -> Call:
    x, y = on(mesh, (rows, 16), Shard(0)), on(mesh, (rows, 8), Shard(0))
    return lambda: torch.cat([x, y], 1)


def foreach(mesh: DeviceMesh, rows: int) -> Call:
    tensors = [on(mesh, (rows + 8 * i, 16), Shard(0)) for i in range(3)]
    return lambda: torch._foreach_mul(tensors, 2.0)


def partial(mesh: DeviceMesh, rows: int) -> Call:
    x = on(mesh, (rows, 16), Partial())
    return lambda: x * 2


CALLS = [
    add,
    add_number,
    mm,
    bmm,
    view,
    flatten,
    transpose,
    flatten_heads,
    split_heads,
    transpose_heads,
    softmax,
    layer_norm,
    vector_norm,
    sum_of_rows,
    amax,
    select,
    slice_of_columns,
    index_select,
    in_place,
    cat,
    mean,
    partial,
]


def frames_of(call: Call) -> list[str]:
    """Returns the names of the functions that Python enters in a call."""
    names: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            names.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return names[1:]  # without the call itself


def specs_in(results: Any) -> list[Any]:
    listed = results if isinstance(results, (list, tuple)) else [results]
    return [result._spec for result in listed]


def num_decided_in_cpp() -> int:
    return sum(counts.get("C++", 0) for counts in decision_counts().values())


def frames_of_miss(mesh: DeviceMesh, make: Callable[[DeviceMesh, int], Call]) -> list[str]:
    for rows in (24, 32):  # the rule is asked, and layouts become known
        make(mesh, rows)()
    missed = make(mesh, 48)
    before = num_decided_in_cpp()
    frames = frames_of(missed)
    assert num_decided_in_cpp() > before
    return frames


@pytest.mark.parametrize("make", CALLS, ids=lambda make: make.__name__)
def test_a_miss_enters_few_python_frames(mesh: DeviceMesh, make: Callable[[DeviceMesh, int], Call]) -> None:
    frames = frames_of_miss(mesh, make)
    assert len(frames) <= MOST_FRAMES, frames


@pytest.mark.parametrize("make", [out, foreach], ids=lambda make: make.__name__)
def test_a_miss_enters_no_frame_of_funcol_where_meta_kernels_are_in_python(
    mesh: DeviceMesh, make: Callable[[DeviceMesh, int], Call]
) -> None:
    assert not [frame for frame in frames_of_miss(mesh, make) if "/funcol/" in frame]


@pytest.mark.parametrize("make", [*CALLS, out, foreach], ids=lambda make: make.__name__)
def test_a_remembered_rule_decides_as_pytorchs_does(
    mesh: DeviceMesh, make: Callable[[DeviceMesh, int], Call]
) -> None:
    make(mesh, 16)()
    by_remembered = specs_in(make(mesh, 40)())
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    assert _C.table_sizes()["rules"] == 0
    assert specs_in(make(mesh, 40)()) == by_remembered


@pytest.mark.parametrize(
    ("shape", "other"),
    [((8, 16), (8, 1)), ((8, 16), (1, 16)), ((8, 8), (8, 8)), ((16, 8), (8,)), ((1, 8), (8, 1))],
)
def test_a_rule_is_not_that_of_sizes_in_another_order(
    mesh: DeviceMesh, shape: tuple[int, ...], other: tuple[int, ...]
) -> None:
    on(mesh, (24, 32), Shard(0)) + on(mesh, (24, 32))
    x, y = on(mesh, shape, Shard(0) if shape[0] > 1 else None), on(mesh, other)
    found = (x + y)._spec
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    assert (x + y)._spec == found


@pytest.mark.parametrize("end", [3, 8, 16, sys.maxsize])
def test_the_end_of_a_slice_is_compared_with_each_size(mesh: DeviceMesh, end: int) -> None:
    def found(rows: int) -> DTensor:
        return torch.ops.aten.slice.Tensor(on(mesh, (rows, 8), Shard(0)), 0, 0, end)

    remembered = [found(rows)._spec for rows in (8, 16, 24, 8)]
    for rows, spec in zip((8, 16, 24), remembered, strict=False):
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
        assert found(rows)._spec == spec


def test_rules_that_a_program_registers_are_asked_for_each_size(mesh: DeviceMesh) -> None:
    asked: list[tuple[int, ...]] = []
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    table = propagator.op_single_dim_strategy_funcs
    op = torch.ops.aten.neg.default
    own = table[op]

    def rule(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        asked.append(tuple(args[0].shape))
        return getattr(own, "func", own)(op, args, kwargs)

    table[op] = type(own)(rule) if hasattr(own, "func") else rule
    try:
        for rows in (16, 24, 16):
            torch.neg(on(mesh, (rows, 16), Shard(0)))
        torch.neg(on(mesh, (24, 16), Shard(1)))
    finally:
        table[op] = own
        propagator.propagate_op_sharding.cache_clear()
    assert asked == [(16, 16), (24, 16)]


def test_hashes_of_specs_made_in_cpp_are_pytorchs(mesh: DeviceMesh) -> None:
    spec = (on(mesh, (56, 16), Shard(0)).sum(1))._spec
    assert hash(spec) == spec._hash_impl()


def test_rules_are_forgotten_beyond_their_limit(mesh: DeviceMesh) -> None:
    limits = funcol.table_limits()
    funcol.table_limits({"rules": 0})
    try:
        add(mesh, 16)()
        assert _C.table_sizes()["rules"] == 0
    finally:
        funcol.table_limits(limits)
