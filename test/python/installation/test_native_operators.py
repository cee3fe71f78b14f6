"""DTensor's operators under funcol.install(): the fast path in C++, and calls that fall back to PyTorch."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _dispatch as stock_dispatch
from torch.distributed.tensor import _random as stock_random
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication, register_sharding
from torch.utils._python_dispatch import TorchDispatchMode

import funcol
from funcol.installation import forget_operator_counts, operator_counts

aten = torch.ops.aten
WORLD = 4

fake = pytest.mark.usefixtures("fake_world")


@pytest.fixture
def mesh(fake_world: None) -> Iterator[DeviceMesh]:
    with funcol.installed():
        yield init_device_mesh("cpu", (dist.get_world_size(),))


def cut(mesh: DeviceMesh, *shape: int, dim: int = 0) -> DTensor:
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return DTensor.from_local(whole.chunk(WORLD, dim)[0].clone(), mesh, [Shard(dim)])


def counts_of(op: Any, call: Callable[[], object], times: int = 3) -> dict[str, int]:
    forget_operator_counts()
    for _ in range(times):
        call()
    return operator_counts().get(str(op), {})


# Calls on the fast path


@fake
def test_numbers_that_change_are_one_decision_and_each_has_its_effect(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    for factor in (2.0, 3.0, -1.5, 0.0):
        assert torch.equal((x * factor).to_local(), x.to_local() * factor)
        assert torch.equal(torch.add(x, x, alpha=factor).to_local(), x.to_local() * (1 + factor))


@fake
def test_views_share_memory_with_their_base(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    for _ in range(3):
        view = x.t()
        assert view._is_view() is x.t()._is_view()
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
    x.t().mul_(2)
    assert torch.equal(x.to_local(), cut(mesh, 8, 4).to_local() * 2)


@fake
def test_a_write_to_a_view_reaches_the_gradient(mesh: DeviceMesh) -> None:
    for _ in range(3):
        x = cut(mesh, 8, 4).requires_grad_()
        y = x * 1
        y.t().mul_(3)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.full_tensor(), torch.full((8, 4), 3.0))


@fake
def test_inference_tensors(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    for _ in range(3):
        with torch.inference_mode():
            assert (x + x).is_inference()
            assert (x + x).t().is_inference()
        assert not (x + x).is_inference()


@fake
def test_the_profiler_sees_as_many_events_as_without_funcol(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)

    def events() -> int:
        _ = x + x
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            _ = x + x
        return sum(event.name == "aten::add" for event in profile.events())

    served = events()
    funcol.uninstall()
    assert served == events()


@fake
def test_an_equal_spec_of_another_object_is_the_same_decision(mesh: DeviceMesh) -> None:
    def call() -> object:
        return DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]) + 1.0

    assert counts_of(aten.add.Tensor, call, 20) == {"served": 20}


@fake
def test_a_changed_spec_is_another_decision(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(4, 4), mesh, [Replicate()])
    assert x.neg().placements == (Replicate(),)
    x._spec.placements = (Partial(),)
    assert x.neg().placements == (Partial(),)
    x._spec.placements = (Replicate(),)
    assert x.neg().placements == (Replicate(),)


@fake
def test_threads_and_backward_passes_of_them(mesh: DeviceMesh) -> None:
    errors: list[BaseException] = []

    def work(factor: float) -> None:
        try:
            for step in range(50):
                x = DTensor.from_local(torch.ones(2 + step % 5, 4), mesh, [Shard(0)]).requires_grad_()
                (x * factor).t().sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad.full_tensor(), torch.full(x.shape, factor))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(float(k + 2),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


@fake
def test_other_threads_run_while_an_operator_computes(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.rand(1500, 1500), mesh, [Replicate()])
    _ = x @ x
    turns = 0
    is_over = threading.Event()

    def take_turns() -> None:
        nonlocal turns
        while not is_over.is_set():
            turns += 1
            time.sleep(0)

    thread = threading.Thread(target=take_turns)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # so that the thread has turns only while the GIL is given up
    try:
        thread.start()
        before = turns
        _ = x @ x
        taken = turns - before
    finally:
        is_over.set()
        sys.setswitchinterval(interval)
        thread.join()
    assert taken > 100


# Calls that fall back to PyTorch


@fake
def test_handlers_of_programs_keep_their_effect(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    _ = x.neg()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    handled = torch.ones(3)
    handlers[aten.neg.default] = lambda op, args, kwargs: handled
    try:
        assert counts_of(aten.neg.default, lambda: x.neg()) == {"handler": 3}
        assert torch.equal(x.neg(), handled)
    finally:
        del handlers[aten.neg.default]
    assert isinstance(x.neg(), DTensor)


@fake
def test_methods_of_the_dispatcher_that_a_program_replaces_are_called(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    _ = x.neg()
    dispatcher = type(DTensor._op_dispatcher)
    for place in (dispatcher, DTensor._op_dispatcher):
        with mock.patch.object(place, "unwrap_to_op_info", wraps=DTensor._op_dispatcher.unwrap_to_op_info):
            assert counts_of(aten.neg.default, lambda: x.neg()) == {}
        assert counts_of(aten.neg.default, lambda: x.neg()) == {"served": 3}


@fake
def test_another_propagator_keeps_its_effect(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = cut(mesh, 8, 4)
    assert (x + x).placements == (Shard(0),)
    dispatcher = DTensor._op_dispatcher
    seen = []

    class Watching(type(dispatcher.sharding_propagator)):  # type: ignore[misc]
        def __init__(self) -> None:
            pass

        def __getattr__(self, name: str) -> Any:
            return getattr(theirs, name)

        def propagate_op_sharding_non_cached(self, op_schema: Any) -> Any:
            seen.append(op_schema.op)
            return theirs.propagate_op_sharding_non_cached(op_schema)

        propagate_op_sharding = propagate_op_sharding_non_cached

    theirs = dispatcher.sharding_propagator
    monkeypatch.setattr(dispatcher, "sharding_propagator", Watching())
    y = cut(mesh, 16, 4)
    _ = y + y
    assert aten.add.Tensor in seen


@fake
def test_registered_shardings_take_effect_after_calls(mesh: DeviceMesh) -> None:
    @torch.library.custom_op("funcol_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    @doubled.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    op = torch.ops.funcol_test.doubled.default
    x = cut(mesh, 8, 4)
    with pytest.warns(UserWarning, match=r"doubled.default has no sharding rule"):
        assert op(x).placements == (Replicate(),)

    @register_sharding(op)
    def by_rows(x: Any) -> Any:
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]

    for _ in range(3):
        assert op(x).placements == (Shard(0),)
        assert torch.equal(op(x).to_local(), x.to_local() * 2)


@fake
def test_modes_see_operators(mesh: DeviceMesh) -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.ops: list[Any] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.ops.append((func, any(issubclass(one, DTensor) for one in types)))
            return func(*args, **(kwargs or {}))

    x = cut(mesh, 8, 4)
    _ = x + x
    with Seen() as seen:
        _ = x + x
    assert (aten.add.Tensor, True) in seen.ops


@fake
def test_the_collectives_of_a_served_call_are_counted_by_comm_debug_mode(mesh: DeviceMesh) -> None:
    x, y = cut(mesh, 8, 8), cut(mesh, 8, 8, dim=1)
    for _ in range(3):
        _ = x + y
    with CommDebugMode() as counted:
        _ = x + y
    assert counted.get_total_counts() == 1


@fake
def test_a_forbidden_redistribution_still_raises(mesh: DeviceMesh) -> None:
    x, y = cut(mesh, 8, 8), cut(mesh, 8, 8, dim=1)
    for _ in range(3):
        _ = x + y
    with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match=r"[Ii]mplicit"):
        _ = x + y
    _ = x + y


@fake
def test_subclasses_are_left_to_pytorch(mesh: DeviceMesh) -> None:
    class Mine(DTensor):
        pass

    x = cut(mesh, 8, 4)
    mine = Mine(x._local_tensor, x._spec, requires_grad=False)
    assert counts_of(aten.add.Tensor, lambda: x + mine) == {"argument": 3}


@fake
def test_plain_tensors_raise_and_are_replicated_where_the_program_says_so(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        _ = x + torch.ones(4)
    with implicit_replication():
        assert torch.equal((x + torch.ones(4)).to_local(), x.to_local() + 1)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        _ = x + torch.ones(4)


@fake
def test_a_log_of_decisions_gets_all(mesh: DeviceMesh, caplog: pytest.LogCaptureFixture) -> None:
    x = cut(mesh, 8, 4)
    for _ in range(2):
        _ = x.neg()
    stock_dispatch.logger.addHandler(caplog.handler)
    try:
        assert counts_of(aten.neg.default, lambda: x.neg()) == {"watched": 3}
    finally:
        stock_dispatch.logger.removeHandler(caplog.handler)
    assert stock_dispatch.logger.getEffectiveLevel() > logging.DEBUG


@fake
def test_trackers_of_random_numbers_of_programs_are_asked(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = cut(mesh, 8, 4)
    tracker = mock.MagicMock(distribute_region_enabled=True)
    monkeypatch.setattr(stock_random, "_rng_tracker", tracker)
    assert counts_of(aten.uniform_.default, lambda: x.detach().uniform_()) == {"served": 3}
    assert tracker._distribute_region.mock_calls.count(mock.call(x._spec)) == 3
    tracker.distribute_region_enabled = False
    x.detach().uniform_()
    assert tracker._distribute_region.mock_calls.count(mock.call(x._spec)) == 3


@fake
def test_operators_that_pytorch_rewrites_are_left_to_it(mesh: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)])
    assert counts_of(aten.squeeze.default, lambda: x.squeeze()) == {"decision": 3}
    assert x.squeeze().shape == (WORLD, 4)


@fake
def test_a_saved_result_that_is_written_to_is_an_error(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4).requires_grad_()
    for _ in range(3):
        y = x.softmax(-1)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@fake
def test_errors_are_pytorchs_own(mesh: DeviceMesh) -> None:
    x, y = cut(mesh, 8, 4), cut(mesh, 8, 3)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"size of tensor|shape"):
            _ = x + y
        with pytest.raises(RuntimeError, match="Dimension out of range"):
            x.sum(dim=5)


# Life of the table


@fake
def test_nothing_is_served_after_uninstall(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)
    _ = x + x
    funcol.uninstall()
    assert counts_of(aten.add.Tensor, lambda: x + x) == {}
    with funcol.installed():
        assert counts_of(aten.add.Tensor, lambda: x + x) == {"served": 3}


@fake
def test_calls_are_served_while_funcol_is_installed_twice(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4)

    def use() -> None:
        y = x.detach().requires_grad_()
        (y.softmax(-1) @ y.t()).sum().backward()
        assert isinstance(y.grad, DTensor)
        assert y.grad.placements == x.placements

    forget_operator_counts()
    funcol.install()
    use()
    with funcol.installed():
        use()
    use()
    funcol.uninstall()
    use()
    assert operator_counts()["aten._softmax.default"] == {"served": 3}


@fake
def test_uninstall_in_a_backward_pass(mesh: DeviceMesh) -> None:
    x = cut(mesh, 8, 4).requires_grad_()
    y = x * 2
    y.register_hook(lambda gradient: funcol.uninstall())
    (y * 3).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad.full_tensor(), torch.full((8, 4), 6.0))


@pytest.mark.long
@fake
def test_decisions_and_specs_that_are_remembered_are_bounded(mesh: DeviceMesh) -> None:
    tracked = []
    for rows in range(1, 9000):
        x = DTensor.from_local(torch.ones(rows, 1, device="meta"), mesh, [Shard(0)])
        _ = x.neg()
        if rows % 1000 == 0:
            gc.collect()
            tracked.append(len(gc.get_objects()))
    assert tracked[-1] < 1.2 * tracked[-2]


@fake
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial(), Replicate()])
def test_calls_with_other_arguments_are_other_decisions(placement: Placement) -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    x = DTensor.from_local(torch.ones(4, 4), mesh, [placement])
    for dim in (0, 1, 0, 1):
        with funcol.installed():
            result = x.sum(dim)
        assert result._spec == x.sum(dim)._spec
