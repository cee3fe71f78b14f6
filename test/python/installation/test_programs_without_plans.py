"""Programs of DTensor that use what funcol has no plans or rules for: they run under it as on PyTorch."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from programs import computes_the_same, mesh_of
from ranks import device_type, on_ranks
from torch import Tensor
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _redistribute as redistribution_of_pytorch
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops.single_dim_strategy import register_single_dim_strategy
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.fx.experimental.proxy_tensor import make_fx

import funcol
from funcol import _compat

ON_DEVICES = True

# Local tensors of another shape than their spec gives them


def spec_of(shape: Sequence[int], placement: Placement, world: int) -> DTensorSpec:
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(
        mesh_of(world), (placement,), tensor_meta=TensorMeta(torch.Size(shape), stride, torch.float32)
    )


def numbered(rank: int, shape: Sequence[int]) -> Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(tuple(shape)) + 100 * rank


@pytest.mark.parametrize(
    ("local", "source", "target"),
    [
        ([2, 4], Shard(0), Replicate()),
        ([4, 2], Shard(0), Shard(1)),
        ([4, 4], Replicate(), Shard(0)),
        ([4, 4], Partial(), Shard(0)),
        ([4, 4], Partial(), Replicate()),
    ],
    ids=str,
)
@computes_the_same(2, pends=False, counts=False)
def test_local_tensors_that_another_mesh_cuts_too(
    rank: int, world: int, local: Sequence[int], source: Placement, target: Placement
) -> list[Tensor]:
    whole = [4, 8]
    sizes = [spec_of(whole, one, world) for one in (source, target)]
    return [redistribute_local_tensor(numbered(rank, local), *sizes)]


@computes_the_same(4, counts=False)
def test_specs_of_one_axis_of_two(rank: int, world: int) -> list[Tensor]:
    """Data parallelism on top of tensor parallelism: the spec of one axis has the shape of the whole."""
    mesh = mesh_of(2, 2)
    axis = mesh[(mesh.mesh_dim_names or ())[0]]
    weight = distribute_tensor(numbered(0, [8, 6]), mesh, [Shard(0), Shard(1)])
    meta = weight._spec.tensor_meta
    ends = [DTensorSpec(axis, (one,), tensor_meta=meta) for one in (Shard(0), Replicate())]
    return [redistribute_local_tensor(weight.to_local(), *ends)]


@pytest.mark.parametrize("target", [Replicate(), Shard(1)], ids=str)
@computes_the_same(2, counts=False)
def test_dtensors_of_other_shapes(rank: int, world: int, target: Placement) -> list[Tensor]:
    x = numbered(rank, [2, 4]).requires_grad_()
    said = DTensor.from_local(x, mesh_of(world), [Shard(0)], shape=torch.Size([4, 8]), stride=(8, 1))
    moved = said.redistribute(placements=[target])
    local = moved.to_local()
    (local * 3).sum().backward()
    assert x.grad is not None
    return [local.detach(), said.full_tensor().detach(), x.grad]


@on_ranks(2)
def test_what_pytorch_would_cut_wrongly_stays_refused(rank: int, world: int) -> None:
    """PyTorch would cut off rows that are there, by the shape of the whole tensor."""
    ends = [spec_of([7, 8], one, world) for one in (Shard(0), Replicate())]
    with funcol.installed(), pytest.raises(ValueError, match="Pass the shard that belongs"):
        redistribute_local_tensor(numbered(rank, [2, 8]), *ends)


# Placements of kinds of the program's own


class Rows(Shard):
    pass


class Everywhere(Replicate):
    pass


class Summed(Partial):
    pass


KINDS: dict[str, Placement] = {"rows": Rows(0), "everywhere": Everywhere(), "summed": Summed()}


@pytest.mark.parametrize("target", ["S0", "S1", "R", "rows", "everywhere"])
@pytest.mark.parametrize("kind", KINDS)
@computes_the_same(2, pends=False, counts=False)
def test_subclasses_of_placements(rank: int, world: int, kind: str, target: str) -> list[Tensor]:
    targets: dict[str, Placement] = {"S0": Shard(0), "S1": Shard(1), "R": Replicate(), **KINDS}
    x = numbered(rank, [4, 4]).requires_grad_()
    held = DTensor.from_local(x, mesh_of(world), [KINDS[kind]])
    moved = held.redistribute(placements=[targets[target]])
    whole = (held * 2).full_tensor()
    (moved.to_local().sum() + whole.sum()).backward()
    assert x.grad is not None
    return [moved.detach(), whole.detach(), x.grad]


@pytest.mark.parametrize("kind", ["rows", "everywhere"])
@computes_the_same(2, pends=False, counts=False)
def test_to_subclasses_of_placements(rank: int, world: int, kind: str) -> list[Tensor]:
    x = distribute_tensor(numbered(0, [4, 4]), mesh_of(world), [Shard(1)]).requires_grad_()
    y = x.redistribute(placements=[KINDS[kind]])
    y.to_local(grad_placements=[KINDS[kind]]).sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, distribute_tensor(numbered(0, [4, 4]), mesh_of(world), [KINDS[kind]])]


# Reductions that no collective has


@computes_the_same(2, pends=False, counts=False)
def test_partials_of_reductions_that_no_collective_has(rank: int, world: int) -> list[Tensor]:
    x = numbered(rank, [2, 3]).requires_grad_()
    held = DTensor.from_local(x, mesh_of(world), [Partial("prod")])
    assert held.placements == (Partial("prod"),)
    local = held.to_local()
    local.sum().backward()
    assert x.grad is not None
    return [local.detach(), x.grad]


@computes_the_same(4, pends=False, counts=False)
def test_what_does_not_touch_their_axis(rank: int, world: int) -> list[Tensor]:
    held = DTensor.from_local(numbered(rank, [2, 4]), mesh_of(2, 2), [Partial("prod"), Shard(0)])
    targets = [Replicate(), Shard(1)]
    return [held.redistribute(placements=[Partial("prod"), one]).to_local() for one in targets]


# Rules that programs registered before


TABLES = (
    "op_to_rules",
    "op_strategy_funcs",
    "op_single_dim_strategy_funcs",
    "op_to_schema_info",
    "op_to_schema_info_for_single_dim_strategy",
)


@torch.library.custom_op("funcol_test::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@contextlib.contextmanager
def registered_rules() -> Iterator[list[str]]:
    """Rules for operators that C++ has some for, and for one without, as PyTorch's documentation has them; a
    list of those that were asked."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = [getattr(propagator, name) for name in TABLES if hasattr(propagator, name)]
    before = [dict(table) for table in tables]
    asked: list[str] = []

    @register_sharding(torch.ops.aten._softmax.default)
    def softmax(x: DTensorSpec, dim: int, half_to_float: bool) -> Any:
        asked.append("softmax")
        cut = [one for one in range(x.ndim) if one != dim % x.ndim]
        rows = [([Shard(one)], [Shard(one), None, None]) for one in cut]
        return [([Replicate()], [Replicate(), None, None]), *rows]

    @register_sharding([torch.ops.aten.cos.default, torch.ops.aten.view.default])
    def whole_only(x: DTensorSpec, *args: Any) -> Any:
        asked.append("whole")
        return [([Replicate()], [Replicate(), *(None for _ in args)])]

    @register_sharding(torch.ops.funcol_test.twice.default)
    def own(x: DTensorSpec) -> Any:
        asked.append("own")
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]

    @register_single_dim_strategy(torch.ops.aten.sin.default)
    def of_one_axis(op: Any, args: Any, kwargs: Any) -> Any:
        asked.append("of one axis")
        return [[Shard(1), Shard(1)]]

    try:
        yield asked
    finally:
        for table, held in zip(tables, before, strict=True):
            table.clear()
            table.update(held)
        propagator.propagate_op_sharding.cache_clear()
        _compat.forget_decisions()


@on_ranks(2)
def test_rules_registered_before(rank: int, world: int) -> None:
    x = distribute_tensor(numbered(0, [4, 2, 2]) / 16, mesh_of(world), [Shard(0)])

    def results() -> tuple[list[Any], list[Tensor], set[str]]:
        asked.clear()
        DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        _compat.forget_decisions()
        made = [torch.softmax(x, 1), torch.cos(x), torch.sin(x), x.view(4, 4), twice(x)]
        return [one.placements for one in made], [one.full_tensor() for one in made], set(asked)

    with registered_rules() as asked:
        placements, values, rules = results()
        with funcol.installed():
            placements_during, values_during, rules_during = results()
    assert placements_during == placements
    assert "of one axis" in rules  # PyTorch may remember what it said
    assert "own" in rules & rules_during
    torch.testing.assert_close(values_during, values)


# PyTorch's planners


@on_ranks(2)
def test_simulated_ranks_choose_a_planner(rank: int, world: int) -> None:
    chosen: list[bool | None] = []
    planned = redistribution_of_pytorch._gen_transform_infos

    def noted(source: Any, target: Any, use_graph_based_transform: bool | None = None) -> Any:
        chosen.append(use_graph_based_transform)
        return planned(source, target, use_graph_based_transform)

    ends = [spec_of([4, 8], one, world) for one in (Shard(0), Replicate())]
    choices = [True, False, None]
    redistribution_of_pytorch._gen_transform_infos = noted  # type: ignore[assignment]
    try:
        with funcol.installed(), LocalTensorMode(world):
            local = torch.ones(2, 8)
            for choice in choices:
                redistribute_local_tensor(local, *ends, use_graph_based_transform=choice)
    finally:
        redistribution_of_pytorch._gen_transform_infos = planned
    assert chosen == choices


# Symbolic sizes


MOVES: list[tuple[Placement, Placement]] = [
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Replicate(), Shard(0)),
    (Replicate(), Shard(1)),
    (Partial(), Replicate()),
    (Partial(), Shard(1)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("source", "target"), MOVES, ids=str)
@on_ranks(2, timeout=180)
def test_compiled_for_all_sizes(rank: int, world: int, source: Placement, target: Placement) -> None:
    mesh = mesh_of(world)

    def program(x: Tensor) -> Tensor:
        moved = DTensor.from_local(x * 1, mesh, [source]).redistribute(mesh, [target])
        return moved.to_local() + moved.full_tensor().sum()

    def num_compiles() -> int:
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(program, backend=counter, fullgraph=True)
        for size in range(4, 24, 2):
            x = numbered(rank, [size, 4])
            assert torch.equal(compiled(x), program(x))
        return counter.frame_count

    before = num_compiles()
    with funcol.installed():
        assert num_compiles() <= min(before, 3)


@pytest.mark.parametrize(("source", "target"), MOVES, ids=str)
@on_ranks(2)
def test_symbols_stay_symbols(rank: int, world: int, source: Placement, target: Placement) -> None:
    mesh = mesh_of(world)

    def program(x: Tensor) -> Tensor:
        return DTensor.from_local(x * 1, mesh, [source]).redistribute(mesh, [target]).to_local() * 2

    def own(x: Tensor) -> Tensor:
        held = DTensor.from_local(x * 1, mesh, [source])
        return funcol.redistribute(held, placements=[target]).to_local() * 2

    x, other = numbered(rank, [6, 4]), numbered(rank, [8, 4])
    expected = program(other)
    graphs = [make_fx(own, tracing_mode="symbolic")(x)]
    with funcol.installed():
        graphs.append(make_fx(program, tracing_mode="symbolic")(x))
    for graph in graphs:
        assert torch.equal(graph(other), expected)


@pytest.mark.parametrize(
    ("source", "target"),
    [(Shard(0), Replicate()), (Partial(), Shard(0)), (Partial(), Replicate()), (Replicate(), Shard(0))],
    ids=str,
)
@on_ranks(2)
def test_symbols_of_a_local_tensor_stay_symbols_if_its_spec_has_numbers(
    rank: int, world: int, source: Placement, target: Placement
) -> None:
    mesh = mesh_of(world)

    def program(x: Tensor, num_columns: int = 4) -> Tensor:
        shape = torch.Size([6 * world if source.is_shard(0) else 6, num_columns])
        held = DTensor.from_local(x, mesh, [source], shape=shape, stride=(num_columns, 1))
        return held.redistribute(mesh, [target]).to_local() * 2

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    with funcol.installed():
        compiled = torch.compile(program, backend=counter, fullgraph=True)
        for num_columns in (4, 6, 10):
            x = numbered(rank, [6, num_columns])
            torch._dynamo.mark_dynamic(x, 1)
            assert torch.equal(compiled(x), program(x, num_columns))
    assert counter.frame_count == 1


# Strides of dims of one element


def strides(rank: int, world: int) -> list[tuple[int, ...]]:
    mesh = mesh_of(world)
    found = []
    for shape in ([2, 1, 4, 4], [2, 3, 1, 4], [1, 1, 4, 4], [2, 3, 1, 1]):
        local = torch.ones(shape).contiguous(memory_format=torch.channels_last)
        for placement in (Shard(0), Replicate(), Partial()):
            found.append(DTensor.from_local(local, mesh, [placement]).stride())
    return found


@on_ranks(2)
def test_strides_of_dims_of_one_element(rank: int, world: int) -> None:
    before = strides(rank, world)
    with funcol.installed():
        assert strides(rank, world) == before


# Meshes that the program dropped


@on_ranks(2)
def test_dropped_meshes_go(rank: int, world: int) -> None:
    def alive_of(count: int) -> int:
        references = []
        for _ in range(count):
            mesh = DeviceMesh(device_type(), list(range(world)))
            references.append(weakref.ref(mesh))
            x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
            y = DTensor.from_local(torch.ones(4 // world, 4), mesh, [Shard(0)])
            ((x @ x.redistribute(placements=[Replicate()])).relu() + y).full_tensor()
            del mesh, x, y
        gc.collect()
        return sum(reference() is not None for reference in references)

    with funcol.installed():
        assert alive_of(6) <= 1
