"""DTensor's own methods while funcol is under it: results, aliasing, gradients and errors are PyTorch's."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch._dynamo.compiled_autograd
from differential import sample
from programs import computes_the_same, mesh_of
from ranks import on_ranks
from sharded import full
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator as StockPropagator
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.utils._debug_mode import DebugMode

import funcol
from funcol import installation
from funcol.installation import install_dtensor, propagation
from funcol.redistribution.specs import canonical, copy_onto

ON_DEVICES = True

# Results and gradients, beside PyTorch's

LAYOUTS: dict[str, list[Placement]] = {
    "S0": [Shard(0)],
    "S1": [Shard(-1)],
    "R": [Replicate()],
    "P": [Partial()],
    "Pmax": [Partial("max")],
}


@pytest.mark.parametrize(
    ("layout", "gradient"), [*((layout, None) for layout in LAYOUTS), ("R", "R"), ("R", "P"), ("P", "P")]
)
@computes_the_same(2, pends=False)
def test_from_local_and_to_local(rank: int, world: int, layout: str, gradient: str | None) -> list[Tensor]:
    """From a local tensor to a DTensor, and back through an operator that leaves it where it is."""
    mesh, placements = mesh_of(world), LAYOUTS[layout]
    x = sample(rank, [4, 6]).requires_grad_()
    grad_placements = None if gradient is None else LAYOUTS[gradient]
    dtensor = DTensor.from_local(x, mesh, placements)
    assert dtensor.requires_grad
    local = dtensor.to_local(grad_placements=grad_placements)
    (local * sample(rank + 5, [4, 6])).sum().backward()
    assert x.grad is not None
    return [dtensor.detach(), local.detach(), x.grad]


@pytest.mark.parametrize("layout", ["S0", "S1", "R", "P"])
@on_ranks(2)
def test_second_derivatives(rank: int, world: int, layout: str) -> None:
    mesh = mesh_of(world)
    x = sample(rank, [4, 6]).double().requires_grad_()
    with funcol.installed():
        moved = DTensor.from_local(x, mesh, LAYOUTS[layout]).redistribute(placements=[Replicate()])
        (grad,) = torch.autograd.grad(moved.to_local().pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
    value = x.detach()
    if layout == "P":
        value = sum(
            (sample(i, [4, 6]).double() for i in range(world)), torch.zeros(4, 6, dtype=torch.float64)
        )
    torch.testing.assert_close(grad.detach(), 3 * value**2)
    torch.testing.assert_close(second, 36 * value**3)


@computes_the_same(2, counts=False)
def test_compiled_autograd(rank: int, world: int) -> list[Tensor]:
    mesh = mesh_of(world)
    results = []
    for step in range(3):
        x = sample(rank + step, [4, 6]).requires_grad_()
        moved = DTensor.from_local(x, mesh, [Shard(0)]).redistribute(placements=[Replicate()])
        loss = (moved.to_local() * (step + 1)).square().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        assert x.grad is not None
        results.append(x.grad)
    return results


@pytest.mark.parametrize("target", ["S0", "S1", "R"])
@pytest.mark.parametrize("source", ["S0", "S1", "R", "P"])
@computes_the_same(2, pends=False)
def test_redistribute_and_its_gradient(rank: int, world: int, source: str, target: str) -> list[Tensor]:
    mesh = mesh_of(world)
    x = sample(rank, [4, 6]).requires_grad_()
    moved = DTensor.from_local(x, mesh, LAYOUTS[source]).redistribute(placements=LAYOUTS[target])
    (moved.to_local() * 2).sum().backward()
    assert x.grad is not None
    return [moved.detach(), x.grad]


@computes_the_same(2)
def test_redistribute_in_other_dtypes(rank: int, world: int) -> list[Tensor]:
    x = distribute_tensor(sample(0, [4, 6]), mesh_of(world), [Shard(0)]).requires_grad_()
    moved = x.redistribute(
        placements=[Replicate()], forward_dtype=torch.bfloat16, backward_dtype=torch.float64
    )
    moved.to_local().float().square().sum().backward()
    assert x.grad is not None
    return [moved.detach(), x.grad]


@on_ranks(2)
def test_specs_that_differ_stay_different(rank: int, world: int) -> None:
    mesh = mesh_of(world)

    def spec(placement: Placement, dtype: torch.dtype = torch.float32, rows: int = 4) -> DTensorSpec:
        meta = TensorMeta(torch.Size([rows, 6]), (6, 1), dtype)
        return DTensorSpec(mesh, (placement,), tensor_meta=meta)

    first = canonical(spec(Shard(0)))
    assert copy_onto(first, mesh) == spec(Shard(0))
    assert canonical(spec(Shard(0))) is first
    for other in (spec(Shard(1)), spec(Partial()), spec(Shard(0), torch.float64), spec(Shard(0), rows=5)):
        assert copy_onto(canonical(other), mesh) == other != copy_onto(first, mesh)


@computes_the_same(2)
def test_uneven_shards_with_a_shape(rank: int, world: int) -> list[Tensor]:
    mesh = mesh_of(world)
    x = sample(rank, [3 - rank, 4]).requires_grad_()
    dtensor = DTensor.from_local(x, mesh, [Shard(0)], shape=torch.Size([5, 4]), stride=(4, 1))
    result = dtensor.full_tensor()
    result.square().sum().backward()
    assert x.grad is not None
    return [result.detach(), x.grad]


@computes_the_same(2, pends=False)
def test_from_local_that_checks_the_ranks(rank: int, world: int) -> list[Tensor]:
    return [DTensor.from_local(sample(rank, [2, 3]), mesh_of(world), [Replicate()], run_check=True)]


# Memory and autograd as seen by callers


@pytest.mark.usefixtures("_installed")
class TestAliasing:
    def test_to_local_without_gradients_is_the_local_tensor(self, mesh_2x2: DeviceMesh) -> None:
        dtensor = DTensor.from_local(torch.ones(2, 3), mesh_2x2)
        with torch.no_grad():
            assert dtensor.to_local() is dtensor._local_tensor

    def test_to_local_shares_memory(self, mesh_2x2: DeviceMesh) -> None:
        dtensor = DTensor.from_local(torch.ones(2, 3), mesh_2x2)
        assert dtensor.to_local().data_ptr() == dtensor._local_tensor.data_ptr()

    def test_a_local_tensor_of_a_graph_cannot_be_written_to(self, mesh_2x2: DeviceMesh) -> None:
        local = DTensor.from_local(torch.ones(2, 3).requires_grad_(), mesh_2x2).to_local()
        with pytest.raises(RuntimeError, match="view"):
            local.add_(1)

    def test_from_local_shares_memory(self, mesh_2x2: DeviceMesh) -> None:
        x = torch.ones(2, 3)
        DTensor.from_local(x, mesh_2x2)._local_tensor.fill_(2)
        assert x.tolist() == [[2.0] * 3] * 2

    def test_from_local_without_gradients_records_none(self, mesh_2x2: DeviceMesh) -> None:
        with torch.no_grad():
            dtensor = DTensor.from_local(torch.ones(2, 3).requires_grad_(), mesh_2x2)
        assert not dtensor.requires_grad

    def test_full_tensor_is_a_tensor_of_its_own(self, mesh_2x2: DeviceMesh) -> None:
        dtensor = DTensor.from_local(torch.ones(2, 3), mesh_2x2)
        with torch.no_grad():
            assert dtensor.full_tensor() is not dtensor._local_tensor

    @pytest.mark.parametrize("with_gradients", [True, False])
    def test_the_local_tensor_of_a_parameter_is_one(self, mesh_2x2: DeviceMesh, with_gradients: bool) -> None:
        shards = distribute_tensor(torch.ones(4, 3), mesh_2x2, [Shard(0), Replicate()], src_data_rank=None)
        parameter = nn.Parameter(shards)
        with torch.set_grad_enabled(with_gradients):
            local = parameter.to_local()
        assert isinstance(local, nn.Parameter)
        assert not isinstance(parameter._local_tensor, nn.Parameter)

    def test_same_placements_are_the_same_local_tensor(self, mesh_2x2: DeviceMesh) -> None:
        dtensor = DTensor.from_local(torch.ones(2, 3), mesh_2x2)
        assert dtensor.redistribute(placements=dtensor.placements)._local_tensor is dtensor._local_tensor

    def test_a_gradient_that_is_not_used_is_none(self, mesh_2x2: DeviceMesh) -> None:
        x = torch.ones(2, 3).requires_grad_()
        y = torch.ones(2, 3).requires_grad_()
        local = DTensor.from_local(x, mesh_2x2).to_local()
        (grad,) = torch.autograd.grad(y.sum() + local.detach().sum(), x, allow_unused=True)
        assert grad is None

    def test_threads_convert_at_once(self, mesh_2x2: DeviceMesh) -> None:
        x = torch.ones(2, 3)
        sums: list[float] = []

        def convert() -> None:
            total = sum(DTensor.from_local(x, mesh_2x2).to_local().sum().item() for _ in range(200))
            sums.append(total)

        threads = [threading.Thread(target=convert) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sums == [1200.0] * 4


# Errors


def _calls(mesh: DeviceMesh) -> dict[str, Callable[[], Any]]:
    dtensor = DTensor.from_local(torch.ones(2, 3), mesh)
    return {
        "shape without stride": lambda: DTensor.from_local(torch.ones(2, 3), mesh, shape=torch.Size([2, 3])),
        "mixed partials": lambda: DTensor.from_local(torch.ones(2, 3), mesh, [Partial(), Partial("max")]),
        "a DTensor": lambda: DTensor.from_local(dtensor, mesh),
        "no mesh": lambda: DTensor.from_local(torch.ones(2, 3), cast(Any, "cpu"), [Shard(0)]),
        "no placements": dtensor.redistribute,
    }


@pytest.mark.parametrize(
    "case", ["shape without stride", "mixed partials", "a DTensor", "no mesh", "no placements"]
)
def test_errors_are_pytorchs(mesh_2x2: DeviceMesh, case: str) -> None:
    with pytest.raises((RuntimeError, ValueError, AttributeError)) as theirs:
        _calls(mesh_2x2)[case]()
    with funcol.installed(), pytest.raises(type(theirs.value)) as ours:
        _calls(mesh_2x2)[case]()
    assert str(ours.value) == str(theirs.value)


def test_a_context_that_forbids_redistribution_sees_that_of_gradients(mesh_2x2: DeviceMesh) -> None:
    with funcol.installed():
        x = torch.ones(2, 3).requires_grad_()
        result = DTensor.from_local(x, mesh_2x2, [Shard(0), Replicate()])
        local = result.to_local(grad_placements=[Replicate(), Shard(1)])
        with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="Implicit redistribution"):
            local.sum().backward()


# In place, and taken away

FUNCTIONS = [theirs for theirs, _ in install_dtensor._FUNCTIONS]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__qualname__)
def test_a_function_stays_the_same_object_with_the_same_signature(function: Any) -> None:
    code, defaults, signature = function.__code__, function.__kwdefaults__, inspect.signature(function)
    with funcol.installed():
        assert function.__code__ is not code
        assert inspect.signature(function) == signature
    assert function.__code__ is code
    assert function.__kwdefaults__ == defaults
    assert inspect.signature(function) == signature


def test_install_without_dtensor_leaves_it_alone() -> None:
    code = DTensor.to_local.__code__
    with funcol.installed(dtensor=False):
        assert DTensor.to_local.__code__ is code
        assert installation.is_installed()
        assert not installation.is_under_dtensor()


def test_the_inner_context_does_not_take_dtensor_from_the_outer_one() -> None:
    with funcol.installed():
        with funcol.installed(dtensor=False):
            assert installation.is_under_dtensor()
        assert installation.is_under_dtensor()
    assert not installation.is_under_dtensor()


def test_a_propagator_of_another_class_stays() -> None:
    class Mine(StockPropagator):
        pass

    dispatcher = DTensor._op_dispatcher
    before, mine = dispatcher.sharding_propagator, Mine()
    dispatcher.sharding_propagator = mine
    try:
        with funcol.installed():
            assert dispatcher.sharding_propagator is mine
        assert dispatcher.sharding_propagator is mine
    finally:
        dispatcher.sharding_propagator = before


def test_a_propagator_that_is_put_in_meanwhile_stays() -> None:
    dispatcher = DTensor._op_dispatcher
    before = dispatcher.sharding_propagator
    try:
        with funcol.installed():
            mine = StockPropagator()
            dispatcher.sharding_propagator = mine
        assert dispatcher.sharding_propagator is mine
    finally:
        dispatcher.sharding_propagator = before


def test_the_propagator_is_pytorchs_again_after_uninstalling() -> None:
    before = DTensor._op_dispatcher.sharding_propagator
    with funcol.installed():
        assert isinstance(DTensor._op_dispatcher.sharding_propagator, propagation.InstalledPropagator)
    assert DTensor._op_dispatcher.sharding_propagator is before


def test_a_rule_registered_meanwhile_is_followed_and_kept(mesh_2x2: DeviceMesh) -> None:
    library = torch.library.Library("funcol_test", "FRAGMENT")
    library.define("same(Tensor x) -> Tensor")
    library.impl("same", lambda x: x.clone(), "CPU")
    library.impl("same", torch.empty_like, "Meta")
    op = torch.ops.funcol_test.same.default
    x = DTensor.from_local(torch.ones(4, 4), mesh_2x2, [Shard(0), Replicate()])
    stock = DTensor._op_dispatcher.sharding_propagator

    def rule(op_schema: OpSchema) -> OutputSharding:
        return OutputSharding(op_schema.args_schema[0])

    with funcol.installed():
        DTensor._op_dispatcher.sharding_propagator.register_sharding_prop_rule(op, rule)
        assert op(x).placements == x.placements
    assert stock.op_to_rules.pop(op) is rule


# Costs

COST_LAYOUTS = [
    [Replicate(), Replicate()],
    [Shard(0), Replicate()],
    [Shard(0), Shard(0)],
    [Shard(1), Shard(0)],
    [Partial(), Replicate()],
    [Partial(), Shard(1)],
]


@pytest.mark.parametrize("target", COST_LAYOUTS, ids=str)
@pytest.mark.parametrize("source", COST_LAYOUTS, ids=str)
def test_costs_are_pytorchs(mesh_2x2: DeviceMesh, source: list[Placement], target: list[Placement]) -> None:
    meta = TensorMeta(torch.Size([8, 6]), (6, 1), torch.float32)
    specs = [DTensorSpec(mesh_2x2, tuple(placements), tensor_meta=meta) for placements in (source, target)]
    expected = redistribute_cost(*specs)
    with funcol.installed():
        assert redistribute_cost(*specs) == pytest.approx(expected)


def test_those_who_imported_a_function_before_get_funcols(mesh_2x2: DeviceMesh) -> None:
    meta = TensorMeta(torch.Size([4, 6]), (6, 1), torch.float32)
    source = DTensorSpec(mesh_2x2, (Partial(), Replicate()), tensor_meta=meta)
    target = DTensorSpec(mesh_2x2, (Replicate(), Replicate()), tensor_meta=meta)
    with funcol.installed():
        waits = funcol._C.async_counters()[0]
        redistribute_local_tensor(torch.ones(4, 6), source, target)
        assert funcol._C.async_counters()[0] > waits


def test_a_result_is_wrapped_whoever_ran_operators_before(mesh_2x2: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(2, 3), mesh_2x2)
    before = full(x + 1)
    with funcol.installed():
        during = full(x + 1)
    assert torch.equal(before, during)


# Modes that watch


def _redistributed(mesh: DeviceMesh) -> DTensor:
    x = DTensor.from_local(torch.ones(2, 6), mesh, [Shard(0), Replicate()])
    return (x.redistribute(placements=[Replicate(), Shard(1)]) * 2).redistribute(placements=x.placements)


def test_fake_tensors_go_through(mesh_2x2: DeviceMesh) -> None:
    with funcol.installed(), FakeTensorMode():
        result = _redistributed(mesh_2x2)
    assert isinstance(result._local_tensor, FakeTensor)
    assert result.placements == (Shard(0), Replicate())
    assert result._local_tensor.shape == (2, 6)


def test_a_debug_mode_notes_redistributions_and_operators(mesh_2x2: DeviceMesh) -> None:
    with funcol.installed(), DebugMode(record_torchfunction=False) as mode:
        _redistributed(mesh_2x2)
    text = mode.debug_string()
    assert "redistribute_input" in text
    assert "aten::mul" in text


def test_simulated_ranks_are_pytorchs(mesh_2x2: DeviceMesh) -> None:
    with funcol.installed(), LocalTensorMode(frozenset(range(4))):
        whole_tensor = torch.arange(12.0).view(4, 3)
        x = distribute_tensor(whole_tensor, mesh_2x2, [Shard(0), Replicate()], src_data_rank=None)
        result = (x + 1).full_tensor()
    assert isinstance(result, LocalTensor)
    for local in result._local_tensors.values():
        assert torch.equal(local, torch.arange(12.0).view(4, 3) + 1)
