"""A pending tensor differs from a plain one in when its data arrives alone: no access path reads it early."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from slow_collectives import SlowCollective, dispatch_keys, same, values
from tensor_reads import READS, READS_OF_A_VIEW, VIEWS
from torch import Tensor

import funcol


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_completed", [False, True], ids=["running", "over"])
def test_every_read_sees_finished_data(read: Callable[[Tensor], Any], is_completed: bool) -> None:
    collective = SlowCollective(values(), is_completed=is_completed)
    expected = read(values())
    assert same(read(collective.tensor), expected)


@pytest.mark.parametrize("read", READS_OF_A_VIEW.values(), ids=READS_OF_A_VIEW.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_read_of_a_view_sees_finished_data(read: Callable[[Tensor], Any]) -> None:
    collective = SlowCollective(torch.stack([values(), values() + 100]).transpose(1, 2))
    assert same(read(collective.tensor.transpose(1, 2)[0]), read(values()))


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
def test_every_read_sees_finished_data_while_the_wake_key_is_hidden(read: Callable[[Tensor], Any]) -> None:
    collective = SlowCollective(values())
    expected = read(values())
    before = funcol._C.exclude_wake_key(True)
    try:
        actual = read(collective.tensor)
    finally:
        funcol._C.exclude_wake_key(before)
    assert same(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_the_data_is_right_in_every_dtype(dtype: torch.dtype) -> None:
    collective = SlowCollective(values(dtype))
    assert same(collective.tensor.t(), values(dtype).t())
    assert collective.num_waits == 1


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (5, 7)])
def test_any_shape_can_be_pending(shape: tuple[int, ...]) -> None:
    collective = SlowCollective(torch.full(shape, 7.0))
    assert collective.tensor.shape == shape
    assert funcol.is_pending(collective.tensor)
    assert same(collective.tensor + 1, torch.full(shape, 8.0))


METADATA: dict[str, Callable[[Tensor], Any]] = {
    "shape": lambda t: t.shape,
    "size": lambda t: (t.size(), t.size(1)),
    "stride": lambda t: (t.stride(), t.stride(0)),
    "storage_offset": lambda t: t.storage_offset(),
    "dim": lambda t: (t.dim(), t.ndim, t.ndimension()),
    "numel": lambda t: (t.numel(), t.nelement(), torch.numel(t)),
    "len": len,
    "nbytes": lambda t: (t.nbytes, t.element_size(), t.itemsize),
    "dtype": lambda t: (t.dtype, t.type(), t.is_floating_point(), t.is_complex(), t.is_signed()),
    "device": lambda t: (t.device, t.get_device(), t.is_cpu, t.is_cuda, t.is_meta),
    "layout": lambda t: (t.layout, t.is_sparse, t.is_quantized, t.is_nested, t.is_mkldnn),
    "is_contiguous": lambda t: (t.is_contiguous(), t.is_contiguous(memory_format=torch.channels_last)),
    "autograd": lambda t: (t.requires_grad, t.grad_fn, t.is_leaf, t.grad, t.output_nr, t._version),
    "is_view": lambda t: (t._is_view(), t._base),
    "bits": lambda t: (t.is_conj(), t.is_neg(), t.is_inference()),
    "type": lambda t: (type(t), torch.is_tensor(t), isinstance(t, Tensor)),
    "hash_is_usable": lambda t: t in {t: 0},
    "dim_order": lambda t: t.dim_order(),
}


@pytest.mark.parametrize("ask", METADATA.values(), ids=METADATA.keys())
def test_metadata_is_that_of_a_plain_tensor_and_does_not_wait(ask: Callable[[Tensor], Any]) -> None:
    collective = SlowCollective(values())
    assert ask(collective.tensor) == ask(values())
    assert collective.num_waits == 0
    assert funcol.is_pending(collective.tensor)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_does_not_wait_and_its_use_waits_once(view: Callable[[Tensor], Tensor]) -> None:
    collective = SlowCollective(values())
    expected = view(values())
    actual = view(collective.tensor)
    assert collective.num_waits == 0
    assert funcol.is_pending(actual)
    for ask in (METADATA["shape"], METADATA["stride"], METADATA["storage_offset"], METADATA["type"]):
        assert ask(actual) == ask(expected)
    assert same(actual * 1, expected * 1)
    assert collective.num_waits == 1
    assert not funcol.is_pending(collective.tensor)
    assert same(collective.tensor, values())
    assert dispatch_keys(actual) == dispatch_keys(expected)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_view_stays_right_when_its_base_is_settled_first(view: Callable[[Tensor], Tensor]) -> None:
    collective = SlowCollective(values())
    actual = view(collective.tensor)
    funcol.wait_tensor(collective.tensor)
    assert not funcol.is_pending(actual)
    assert same(actual, view(values()))
    assert collective.num_waits == 1


COMPLEX_VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view_as_real": torch.view_as_real,
    "real": lambda t: t.real,
    "imag": lambda t: t.imag,
    "conj": lambda t: t.conj(),
    "adjoint": lambda t: t.mH,
    "neg_view": lambda t: t.conj().imag,
}


@pytest.mark.parametrize("view", COMPLEX_VIEWS.values(), ids=COMPLEX_VIEWS.keys())
def test_a_view_of_a_complex_tensor_does_not_wait(view: Callable[[Tensor], Tensor]) -> None:
    plain = values(torch.complex64) * (1 + 2j)
    collective = SlowCollective(plain)
    actual = view(collective.tensor)
    assert collective.num_waits == 0
    assert funcol.is_pending(actual)
    assert same(actual, view(plain))
    assert dispatch_keys(actual) == dispatch_keys(view(plain))


SHARES_STORAGE = [
    name for name in VIEWS if name not in ("expand", "expand_as", "view_dtype", "view_as_complex")
]


@pytest.mark.parametrize("name", SHARES_STORAGE)
def test_an_in_place_operator_on_a_view_reaches_the_base_after_the_data(name: str) -> None:
    plain = values()
    VIEWS[name](plain).mul_(10)
    collective = SlowCollective(values())
    view = VIEWS[name](collective.tensor)
    view.mul_(10)
    assert same(collective.tensor, plain)
    assert collective.num_waits == 1


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "add_": lambda t: t.add_(1),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(3),
    "copy_": lambda t: t.copy_(torch.ones(3, 4)),
    "setitem": lambda t: t.__setitem__(1, 5.0),
    "setitem_mask": lambda t: t.__setitem__(t > 3, 0.0),
    "index_put_": lambda t: t.index_put_((torch.tensor([1]),), torch.tensor(9.0)),
    "scatter_": lambda t: t.scatter_(0, torch.tensor([[0, 1, 2, 0]]), 0.0),
    "t_": lambda t: t.t_(),
    "squeeze_": lambda t: t.unsqueeze_(0),
    "detach_": lambda t: t.detach_(),
    "out": lambda t: torch.add(torch.ones(3, 4), 1, out=t),
    "set_data": lambda t: setattr(t, "data", torch.ones(2)),
    "set_": lambda t: t.set_(torch.ones(2)),
    "resize_": lambda t: t.resize_(2, 2),
    "numpy": lambda t: t.numpy().fill(4),
    "data": lambda t: t.data.fill_(4),
    "foreach": lambda t: torch._foreach_mul_([torch.ones(2), t], 2.0),
    "no_grad_init": lambda t: torch.nn.init.constant_(t, 2.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_is_not_overwritten_by_data_that_arrives_later(write: Callable[[Tensor], Any]) -> None:
    plain = values()
    write(plain)
    collective = SlowCollective(values())
    write(collective.tensor)
    funcol.wait_tensor(collective.tensor)
    assert same(collective.tensor, plain)
    assert collective.tensor.stride() == plain.stride()


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_the_base_is_seen_by_a_view_that_was_pending(write: Callable[[Tensor], Any]) -> None:
    plain = values()
    plain_view = plain[1:]
    write(plain)
    collective = SlowCollective(values())
    view = collective.tensor[1:]
    write(collective.tensor)
    assert same(view, plain_view)


def test_one_collective_with_several_results_is_waited_for_once() -> None:
    collective = SlowCollective(values(), values() + 20, torch.zeros(0))
    first, second, empty = collective.tensors
    assert same(second.sum() + first.t().sum() + empty.sum(), (2 * values() + 20).sum())
    assert collective.num_waits == 1
    assert not any(map(funcol.is_pending, collective.tensors))


def test_an_operator_waits_for_all_its_pending_arguments() -> None:
    collectives = [SlowCollective(values() + i) for i in range(3)]
    stacked = torch.stack([c.tensor for c in collectives])
    assert same(stacked, torch.stack([values() + i for i in range(3)]))
    assert [c.num_waits for c in collectives] == [1, 1, 1]


def test_a_settled_tensor_is_plain_to_the_dispatcher_and_to_python() -> None:
    collective = SlowCollective(values())
    assert type(collective.tensor) is Tensor
    assert dispatch_keys(collective.tensor) != dispatch_keys(values())
    collective.tensor.add(1)
    assert type(collective.tensor) is Tensor
    assert dispatch_keys(collective.tensor) == dispatch_keys(values())
    assert dispatch_keys(collective.tensor.view(-1)) == dispatch_keys(values())
    assert dispatch_keys(collective.tensor.detach()) == dispatch_keys(values())


def test_isinstance_is_true_exactly_while_pending() -> None:
    collective = SlowCollective(values())
    view = collective.tensor.view(-1)
    assert isinstance(collective.tensor, funcol.AsyncCollectiveTensor)
    assert isinstance(view, funcol.AsyncCollectiveTensor)
    view.sum()
    assert not isinstance(view, funcol.AsyncCollectiveTensor)
    assert not isinstance(collective.tensor, funcol.AsyncCollectiveTensor)


@pytest.mark.parametrize(
    "other", [torch.ones(2), torch.nn.Parameter(torch.ones(2)), None, 3, "x", [torch.ones(1)]]
)
def test_nothing_else_is_pending(other: Any) -> None:
    assert not funcol.is_pending(other)
    assert not isinstance(other, funcol.AsyncCollectiveTensor)


@pytest.mark.parametrize(
    "wait",
    [
        funcol.wait_tensor,
        funcol.AsyncCollectiveTensor.wait,
        funcol.AsyncCollectiveTensor.trigger_wait,
        torch.ops.funcol.wait_tensor,
        torch.ops._c10d_functional.wait_tensor,
        lambda t: funcol.wait_tensors([t])[0],
        lambda t: torch.ops.funcol.wait_tensors([t])[0],
        lambda t: torch.ops._c10d_functional.wait_tensors([t])[0],
    ],
    ids=["wait_tensor", "wait", "trigger_wait", "op", "core_op", "wait_tensors", "list_op", "core_list_op"],
)
def test_waiting_settles_and_gives_the_tensor(wait: Callable[[Tensor], Tensor]) -> None:
    collective = SlowCollective(values())
    waited = wait(collective.tensor)
    assert collective.num_waits == 1
    assert not funcol.is_pending(collective.tensor)
    assert not funcol.is_pending(waited)
    assert waited.data_ptr() == collective.tensor.data_ptr()
    assert same(waited, values())


def test_waiting_from_python_gives_the_same_object() -> None:
    collective = SlowCollective(values())
    assert funcol.wait_tensor(collective.tensor) is collective.tensor
    assert funcol.wait_tensors([collective.tensor])[0] is collective.tensor
    plain = values()
    assert funcol.wait_tensor(plain) is plain


def test_elem_is_the_tensor_itself_and_does_not_wait() -> None:
    collective = SlowCollective(values())
    assert funcol.AsyncCollectiveTensor.elem(collective.tensor) is collective.tensor
    assert collective.num_waits == 0


def test_waits_and_views_are_counted() -> None:
    collective = SlowCollective(values())
    waits, views = funcol._C.async_counters()
    collective.tensor.view(-1).view(3, 4).unbind()
    assert funcol._C.async_counters() == (waits, views + 5)
    collective.tensor.sum()
    collective.tensor.sum()
    assert funcol._C.async_counters() == (waits + 1, views + 5)


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_class_makes_a_core_result_wait_by_itself(group: dist.ProcessGroup) -> None:
    raw = torch.ops._c10d_functional.all_reduce(values(), "sum", group.group_name)
    wrapped = funcol.AsyncCollectiveTensor(raw)
    assert isinstance(wrapped, funcol.AsyncCollectiveTensor)
    assert type(wrapped) is Tensor
    assert same(wrapped.t() + 1, values().t() + 1)
    assert not funcol.is_pending(wrapped)


def test_the_class_leaves_a_pending_tensor_as_it_is(group: dist.ProcessGroup) -> None:
    pending = funcol.all_reduce(values(), "sum", group)
    assert funcol.AsyncCollectiveTensor(pending) is pending
    assert funcol.is_pending(pending)


def test_a_collective_of_a_pending_tensor_reads_finished_data(group: dist.ProcessGroup) -> None:
    collective = SlowCollective(values())
    assert same(funcol.all_reduce(collective.tensor.t(), "sum", group), values().t())
    assert collective.num_waits == 1


def test_a_c10d_collective_on_a_pending_tensor_reads_finished_data(group: dist.ProcessGroup) -> None:
    collective = SlowCollective(values())
    dist.all_reduce(collective.tensor, group=group)
    gathered = [torch.zeros(4, 3)]
    dist.all_gather(gathered, SlowCollective(values()).tensor.t().contiguous(), group=group)
    assert same(collective.tensor, values())
    assert same(gathered[0], values().t())
