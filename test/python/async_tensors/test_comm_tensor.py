"""A CommTensor handed to an in-place collective waits by itself, whatever reads it."""

from __future__ import annotations

import ctypes
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from differential import world_group
from slow_collectives import SlowCollective, garbage_like, same, values
from tensor_reads import READS, READS_OF_A_VIEW, VIEWS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.testing._internal.two_tensor import TwoTensor

import funcol


@pytest.fixture(scope="module")
def fake_world() -> Iterator[None]:
    """Yields a default group of two ranks that starts collectives and sends nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class SlowInPlace:
    """A CommTensor with a collective on it that fills in ``values`` when it is waited for."""

    def __init__(self, values: Tensor) -> None:
        self.num_waits = 0
        self._values = values.detach().clone()
        self._buffer = garbage_like(self._values)
        self.tensor = funcol.collectives.CommTensor(self._buffer)
        funcol._C.make_pending_in_place([self.tensor], self._finish, "all_reduce", "dp")

    def _finish(self) -> None:
        self.num_waits += 1
        # No operator, so that no mode sees the data arrive: it comes as from a network.
        ctypes.memmove(self._buffer.data_ptr(), self._values.data_ptr(), self._values.nbytes)


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_read_sees_finished_data(read: Callable[[Tensor], Any]) -> None:
    assert same(read(SlowInPlace(values()).tensor), read(values()))


@pytest.mark.parametrize("read", READS_OF_A_VIEW.values(), ids=READS_OF_A_VIEW.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_read_of_a_view_sees_finished_data(read: Callable[[Tensor], Any]) -> None:
    collective = SlowInPlace(torch.stack([values(), values() + 100]).transpose(1, 2))
    assert same(read(collective.tensor.transpose(1, 2)[0]), read(values()))


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_reads_before_any_collective_see_what_is_there(read: Callable[[Tensor], Any]) -> None:
    assert same(read(funcol.collectives.CommTensor(values())), read(values()))


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_reads_after_the_wait_are_those_of_a_plain_tensor(read: Callable[[Tensor], Any]) -> None:
    collective = SlowInPlace(values())
    funcol.wait_tensor(collective.tensor)
    assert same(read(collective.tensor), read(values()))
    assert collective.num_waits == 1


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_of_a_pending_one_does_not_wait(view: Callable[[Tensor], Tensor]) -> None:
    collective = SlowInPlace(values())
    viewed = view(collective.tensor)
    assert funcol.is_pending(viewed)
    assert collective.num_waits == 0
    assert same(viewed, view(values()))


def test_the_result_is_an_alias_that_shares_storage_metadata_and_version() -> None:
    x = torch.zeros(3, 4).t()
    tensor = funcol.collectives.CommTensor(x)
    tensor.add_(1)
    assert type(tensor) is Tensor
    assert tensor.data_ptr() == x.data_ptr()
    assert (tensor.shape, tensor.stride(), tensor._version) == (x.shape, x.stride(), x._version)
    assert same(x, torch.ones(4, 3))


def test_to_autograd_it_is_a_view() -> None:
    x = values().requires_grad_()
    tensor = funcol.collectives.CommTensor(x)
    assert tensor._is_view()
    (tensor * tensor).sum().backward()
    assert same(x.grad, 2 * values())


def test_no_collective_means_not_pending() -> None:
    assert not funcol.is_pending(funcol.collectives.CommTensor(values()))


def test_nested_wrapping_gives_the_same_tensor() -> None:
    tensor = funcol.collectives.CommTensor(values())
    assert funcol.collectives.CommTensor(tensor) is tensor


def test_a_pending_tensor_is_waited_for_before_it_is_wrapped() -> None:
    collective = SlowCollective(values())
    assert same(funcol.collectives.CommTensor(collective.tensor), values())
    assert collective.num_waits == 1


def follows(tensor: Tensor) -> bool:
    """Returns true if an in-place collective on ``tensor`` makes it pending."""
    dist.all_reduce(tensor, async_op=True)
    return funcol.is_pending(tensor)


MAKERS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "result_of_an_operator": lambda t: t + 1,
    "result_of_a_result": lambda t: (t + 1).relu(),
    "list_of_results": lambda t: torch.ops.aten.split_copy(t, 1)[0],
    "in_place": lambda t: t.add_(1),
    "view": lambda t: t.view(-1),
    "detach": lambda t: t.detach(),
    "composite": lambda t: t.reshape(12) @ t.reshape(12, 1),
}


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_before_any_collective_what_comes_of_it_follows_collectives_too(
    make: Callable[[Tensor], Tensor],
) -> None:
    assert follows(make(funcol.collectives.CommTensor(values())))


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("make", [lambda t: t + 1, lambda t: t.clone()], ids=["add", "clone"])
def test_after_a_wait_results_of_operators_are_plain(make: Callable[[Tensor], Tensor]) -> None:
    assert not follows(make(SlowInPlace(values()).tensor))


@pytest.mark.usefixtures("fake_world")
def test_a_plain_tensor_is_left_alone() -> None:
    assert not follows(values())


@pytest.mark.usefixtures("fake_world")
def test_what_is_written_into_a_plain_tensor_does_not_mark_it() -> None:
    assert not follows(values().copy_(funcol.collectives.CommTensor(values())))


@pytest.mark.usefixtures("fake_world")
def test_outputs_follow_where_the_inputs_are_plain() -> None:
    outputs = [funcol.collectives.CommTensor(torch.zeros(2)) for _ in range(2)]
    dist.all_gather(outputs, torch.ones(2), async_op=True)
    assert all(map(funcol.is_pending, outputs))


@pytest.mark.usefixtures("fake_world")
def test_inputs_do_not_follow() -> None:
    given = funcol.collectives.CommTensor(torch.ones(2))
    dist.all_gather([torch.zeros(2), torch.zeros(2)], given, async_op=True)
    assert not funcol.is_pending(given)


@pytest.mark.usefixtures("fake_world")
def test_collectives_are_followed_while_the_wake_key_is_hidden() -> None:
    before = funcol._C.exclude_wake_key(True)
    try:
        assert follows(funcol.collectives.CommTensor(values()))
    finally:
        funcol._C.exclude_wake_key(before)


@pytest.mark.usefixtures("fake_world")
def test_collectives_are_followed_under_a_dispatch_mode() -> None:
    with CommDebugMode() as mode:
        assert follows(funcol.collectives.CommTensor(values()))
    assert mode.get_total_counts() == 1


@pytest.mark.usefixtures("fake_world")
def test_the_operator_returns_its_outputs() -> None:
    tensor = funcol.collectives.CommTensor(values())
    outputs, _ = torch.ops.c10d.broadcast_([tensor], world_group().boxed(), 0, 0)
    assert outputs[0] is tensor


def test_using_a_view_waits_for_a_collective_on_its_base() -> None:
    base = funcol.collectives.CommTensor(torch.zeros(4))
    view = base[1:3]
    funcol._C.make_pending_in_place([base], lambda: None)
    assert funcol.is_pending(view)
    view.sum()
    assert not funcol.is_pending(base)


def test_using_the_base_waits_for_collectives_on_its_views() -> None:
    waits: list[str] = []
    base = funcol.collectives.CommTensor(torch.zeros(4))
    funcol._C.make_pending_in_place([base[:2]], lambda: waits.append("left"))
    funcol._C.make_pending_in_place([base[2:]], lambda: waits.append("right"))
    base.sum()
    assert waits == ["left", "right"]


def test_using_a_view_does_not_wait_for_collectives_on_other_parts() -> None:
    base = funcol.collectives.CommTensor(torch.zeros(4))
    left, right = base.chunk(2)
    funcol._C.make_pending_in_place([left], lambda: None)
    funcol._C.make_pending_in_place([right], lambda: None)
    left.sum()
    assert (funcol.is_pending(left), funcol.is_pending(right)) == (False, True)


@pytest.mark.usefixtures("fake_world")
def test_the_next_collective_waits_for_the_one_before() -> None:
    collective = SlowInPlace(values())
    dist.all_reduce(collective.tensor, async_op=True)
    assert collective.num_waits == 1
    assert funcol.is_pending(collective.tensor)


@pytest.mark.usefixtures("fake_world")
def test_a_view_made_after_a_wait_follows_collectives() -> None:
    collective = SlowInPlace(values())
    collective.tensor.sum()
    assert follows(collective.tensor[0])
    assert funcol.is_pending(collective.tensor)


def failing() -> Tensor:
    def fail() -> None:
        raise RuntimeError("connection lost")

    tensor = funcol.collectives.CommTensor(torch.zeros(2, 3))
    funcol._C.make_pending_in_place([tensor], fail, "allreduce_", "dp")
    return tensor


@pytest.mark.parametrize("read", [lambda t: t + 1, Tensor.numpy, lambda t: t.view(-1).tolist()])
def test_a_failure_is_raised_at_each_use(read: Callable[[Tensor], Any]) -> None:
    tensor = failing()
    message = "connection lost(?s:.)*allreduce_ failed on group 'dp'; result of shape \\[2, 3\\]"
    with pytest.raises(RuntimeError, match=message):
        read(tensor)
    with pytest.raises(RuntimeError, match=message):
        read(tensor)
    assert funcol.is_pending(tensor)


@pytest.mark.usefixtures("fake_world")
def test_after_a_failure_no_further_collective_is_started() -> None:
    with pytest.raises(RuntimeError, match="connection lost"):
        dist.all_reduce(failing(), async_op=True)


def test_many_threads_wait_once() -> None:
    collective = SlowInPlace(values())
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: same(collective.tensor.view(-1) + 0, values().view(-1)), range(32)))
    assert all(results)
    assert collective.num_waits == 1


def test_one_that_is_dropped_unused_does_not_wait_and_is_let_go_once_the_collective_is_done() -> None:
    gc.collect()
    before = funcol._C.num_orphans()
    collective = SlowInPlace(values())
    held = weakref.ref(collective)
    del collective.tensor
    assert funcol._C.num_orphans() == before
    assert collective.num_waits == 0
    del collective
    assert held() is None


REFUSED: dict[str, Callable[[], Any]] = {
    "list": lambda: [torch.ones(1)],
    "number": lambda: 1.5,
    "none": lambda: None,
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(1)]),
    "subclass": lambda: TwoTensor(torch.ones(2), torch.ones(2)),
}


@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.filterwarnings("ignore")
def test_what_no_collective_can_write_is_a_type_error(make: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="CommTensor"):
        funcol.collectives.CommTensor(make())


def test_a_fake_tensor_has_nothing_to_wait_for() -> None:
    with FakeTensorMode():
        fake = torch.empty(3)
    assert funcol.collectives.CommTensor(fake) is fake
