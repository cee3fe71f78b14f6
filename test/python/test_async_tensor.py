"""A pending tensor differs from a plain one in when its data arrives alone: no access path reads it early."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import funcol

VIEW_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def make_pending(
    buffers: list[Tensor],
    finish: Callable[[], None],
    op: str = "all_reduce",
    group: str = "dp",
    is_over: bool = False,
) -> list[Tensor]:
    """Pending tensors over ``buffers`` that call ``finish`` when they are waited for.

    With the GIL if the Work says that it ``is_over``, else where waiting may block, without it.
    """
    # Results of a collective are no views; aliases of the buffers would be.
    with torch._C._ExcludeDispatchKeyGuard(VIEW_TRACKING):
        return funcol._C.make_pending(buffers, finish, op, group, is_over)


def garbage_like(values: Tensor) -> Tensor:
    if values.dtype == torch.bool:
        return ~values
    return torch.full_like(values, float("nan") if values.is_floating_point() or values.is_complex() else -99)


class SlowCollective:
    """A collective whose results hold garbage until somebody waits for it, and ``values`` from then on."""

    def __init__(self, *values: Tensor, is_over: bool = False) -> None:
        self.num_waits = 0
        self._values = [value.detach().clone() for value in values]
        self._buffers = [garbage_like(value) for value in self._values]
        self.tensors = make_pending(self._buffers, self._finish, is_over=is_over)

    def _finish(self) -> None:
        self.num_waits += 1
        for buffer, value in zip(self._buffers, self._values, strict=True):
            # As a network would: no operator, so that no mode which is active by now has a say.
            ctypes.memmove(buffer.data_ptr(), value.data_ptr(), value.nbytes)

    @property
    def tensor(self) -> Tensor:
        return self.tensors[0]


def values(dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.arange(1, 13).reshape(3, 4)
    return numbers % 2 == 0 if dtype == torch.bool else numbers.to(dtype)


def dispatch_keys(tensor: Tensor) -> str:
    return str(torch._C._dispatch_keys(tensor))


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, Tensor):
        return (
            isinstance(actual, Tensor)
            and actual.dtype == expected.dtype
            and actual.shape == expected.shape
            and actual.tolist() == expected.tolist()
        )
    if isinstance(expected, np.ndarray):
        return isinstance(actual, np.ndarray) and np.array_equal(actual, expected)
    if isinstance(expected, (list, tuple)):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return bool(actual == expected)


def reloaded(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file)


def read_by_address(address: int, count: int) -> list[float]:
    return list((ctypes.c_float * count).from_address(address))


def swapped(tensor: Tensor) -> Tensor:
    other = torch.zeros(3)
    torch.utils.swap_tensors(tensor, other)
    return other


def given_by(operator: Callable[[Tensor, Tensor], Any]) -> Callable[[Tensor], Tensor]:
    def read(tensor: Tensor) -> Tensor:
        other = torch.zeros(3, 4)
        operator(other, tensor)
        return other

    return read


def loaded_into_a_module(tensor: Tensor) -> Tensor:
    module = torch.nn.Linear(4, 3, bias=False)
    module.load_state_dict({"weight": tensor})
    return module.weight.detach()


LINEAR = torch.nn.Linear(4, 3, bias=False)


@torch.jit.script
def scripted(t: Tensor) -> Tensor:
    return torch.relu(t.t() + 1) * t.t()


@torch.library.custom_op("funcol_test::doubled", mutates_args=())
def doubled_by_a_custom_op(t: Tensor) -> Tensor:
    return torch.from_numpy(t.numpy() * 2)


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda t: t + 1,
    "matmul": lambda t: t @ torch.ones(4, 2),
    "sum": lambda t: t.sum(),
    "cat": lambda t: torch.cat([torch.zeros(1, 4), t]),
    "masked_index": lambda t: t[t > 3],
    "tensor_index": lambda t: t[torch.tensor([2, 0])],
    "as_an_index": lambda t: torch.arange(20)[t.long()],
    "index_in_an_optional_list": lambda t: torch.ops.aten.index(torch.arange(20), [t.long()]),
    "nonzero": lambda t: t.nonzero(),
    "split_copy": lambda t: torch.ops.aten.split_copy(t, 2),
    "repeat": lambda t: t.repeat(2, 1),
    "clone": lambda t: t.clone(),
    "contiguous": lambda t: t.contiguous(),
    "contiguous_of_transpose": lambda t: t.t().contiguous(),
    "reshape_that_copies": lambda t: t.t().reshape(-1),
    "to_dtype": lambda t: t.to(torch.float64),
    "to_same_dtype": lambda t: t.to(torch.float32),
    "to_device": lambda t: t.to("cpu"),
    "type_with_name": lambda t: t.type("torch.DoubleTensor"),
    "type_with_dtype": lambda t: t.type(torch.float16),
    "cpu": lambda t: t.cpu(),
    "to_sparse": lambda t: t.to_sparse().to_dense(),
    "to_mkldnn": lambda t: t.to_mkldnn().to_dense(),
    "nested": lambda t: torch.nested.as_nested_tensor([t, t]).unbind()[1],
    "quantized": lambda t: torch.quantize_per_tensor(t, 0.5, 0, torch.qint8).dequantize(),
    "equal": lambda t: torch.equal(t, values()),
    "copy_": given_by(Tensor.copy_),
    "add_": given_by(Tensor.add_),
    "setitem": given_by(lambda other, t: other.__setitem__(slice(None), t)),
    "foreach": lambda t: torch._foreach_add([torch.ones(3, 4), t], 1.0),
    "jit_script": scripted,
    "functional_call": lambda t: torch.func.functional_call(LINEAR, {"weight": t}, (torch.ones(4),)),
    "cond": lambda t: torch.cond(t.sum() > 0, lambda x: x + 1, lambda x: x - 1, (t,)),
    "higher_order_cond": lambda t: torch.ops.higher_order.cond(
        t[0, 0] > 0, lambda x: x + 1, lambda x: x - 1, (t,)
    ),
    "custom_op": doubled_by_a_custom_op,
    "new_full": lambda t: t.new_full((2,), 3.0),
    "new_empty_shape": lambda t: t.new_empty((2, 5)).shape,
    "empty_like_shape": lambda t: torch.empty_like(t).shape,
}

PYTHON: dict[str, Callable[[Tensor], Any]] = {
    "bool": lambda t: bool(t[0, 0]),
    "float": lambda t: float(t[2, 3]),
    "int": lambda t: int(t[2, 3]),
    "index": lambda t: list(range(20))[t[2, 3].long()],
    "contains": lambda t: 12.0 in t,
    "iteration": lambda t: list(t),
    "integer_index": lambda t: t[1],
    "ellipsis_index": lambda t: t[..., None, 0],
    "item": lambda t: t[2, 3].item(),
    "tolist": lambda t: t.tolist(),
    "repr": repr,
    "str": str,
    "format": lambda t: f"{t[2, 3]:.2f} {t}",
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "pickle_for_another_process": lambda t: pickle.loads(ForkingPickler.dumps(t)),
    "torch_save": reloaded,
    "apply_": lambda t: t.apply_(lambda x: x + 1),
    "map_": lambda t: torch.zeros(3, 4).map_(t, lambda x, y: x + y),
    "map_self": lambda t: t.map_(torch.ones(3, 4), lambda x, y: x + y),
    "map2_": lambda t: torch.zeros(3, 4).map2_(torch.ones(3, 4), t, lambda x, y, z: x + y + z),
    "module_state": loaded_into_a_module,
    "parameter": lambda t: torch.nn.Parameter(t).detach() + 0,
    "buffer": lambda t: torch.nn.Buffer(t) + 0,
    "as_subclass": lambda t: t.as_subclass(torch.nn.Parameter).tolist(),
    "make_subclass": lambda t: torch.Tensor._make_subclass(torch.nn.Parameter, t).tolist(),
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
}

CONSTRUCTORS: dict[str, Callable[[Tensor], Any]] = {
    "new": lambda t: t.new([[1.5]]),
    "new_of_size": lambda t: t.new(2, 3).shape,
    "new_of_itself": lambda t: t.new(t),
    "new_from_plain": lambda t: torch.ones(1).new(t),
    "new_tensor": lambda t: t.new_tensor([1.5]),
    "new_tensor_by_keyword": lambda t: t.new_tensor(data=[1], dtype=torch.int64),
    "new_tensor_from_plain": lambda t: torch.ones(1).new_tensor(t),
    "tensor": lambda t: torch.tensor(t),
    "tensor_of_scalars": lambda t: torch.tensor([t[0, 0], t[2, 3]]),
    "as_tensor_with_dtype": lambda t: torch.as_tensor(t, dtype=torch.int32),
    "asarray": lambda t: torch.asarray(t, copy=True),
    "legacy_constructor": lambda t: torch.Tensor(t),
    "legacy_typed_constructor": lambda t: torch.FloatTensor(t),
    "sparse_constructor": lambda t: torch.sparse_coo_tensor([[0, 2, 1]], t, (4, 4)).to_dense(),
    "nested_constructor": lambda t: torch.nested.nested_tensor([t]).unbind()[0],
}

RAW: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda t: t.numpy(),
    "array_protocol": lambda t: t.__array__(),
    "array_protocol_with_dtype": lambda t: t.__array__(np.float64),
    "asarray": lambda t: np.asarray(t),
    "ufunc": lambda t: np.add(t, 1).tolist(),
    "dlpack_capsule": lambda t: torch.from_dlpack(torch.utils.dlpack.to_dlpack(t)),
    "dlpack_method": lambda t: torch.utils.dlpack.from_dlpack(t.__dlpack__()),
    "from_dlpack": lambda t: torch.from_dlpack(t),
    "numpy_from_dlpack": lambda t: np.from_dlpack(t),
    "data_ptr": lambda t: read_by_address(t.data_ptr(), 12),
    "storage_data_ptr": lambda t: read_by_address(t.storage().data_ptr(), 12),
    "untyped_storage_data_ptr": lambda t: read_by_address(t.untyped_storage().data_ptr(), 12),
    "untyped_storage_bytes": lambda t: list(t.untyped_storage()),
    "typed_storage": lambda t: t.storage().tolist(),
    "set_": lambda t: torch.empty(0).set_(t),
    "set_storage": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (12,)),
    "set_storage_of_view": lambda t: torch.empty(0).set_(t[1].untyped_storage(), 4, (4,)),
    "share_memory": lambda t: t.share_memory_(),
    "swap_tensors": swapped,
    "set_data": given_by(lambda other, t: setattr(other, "data", t)),
    "set_data_operator": given_by(torch.ops.aten.set_data),
}
# What Dynamo makes of `x.data = y` in newer minors.
if hasattr(torch.ops.aten, "shallow_copy_data_"):
    RAW["shallow_copy_data"] = given_by(torch.ops.aten.shallow_copy_data_)

KINDS = {"operator": OPERATORS, "python": PYTHON, "constructor": CONSTRUCTORS, "raw": RAW}
READS = {f"{kind}-{name}": read for kind, reads in KINDS.items() for name, read in reads.items()}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_over", [False, True], ids=["running", "over"])
def test_every_read_sees_finished_data(read: Callable[[Tensor], Any], is_over: bool) -> None:
    collective = SlowCollective(values(), is_over=is_over)
    expected = read(values())
    assert same(read(collective.tensor), expected)


# These give more than the view that they are asked of.
WHOLE_STORAGE = ("raw-untyped_storage_bytes", "raw-typed_storage")
READS_OF_A_VIEW = {name: read for name, read in READS.items() if name not in WHOLE_STORAGE}


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


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda t: t.view(2, 6),
    "view_dtype": lambda t: t.view(torch.int32),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "reshape": lambda t: t.reshape(4, 3),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(1, (2, 2)),
    "unsqueeze": lambda t: t.unsqueeze(1),
    "squeeze": lambda t: t.view(3, 1, 4).squeeze(1),
    "select": lambda t: t.select(1, 2),
    "narrow": lambda t: t.narrow(1, 1, 2),
    "slice": lambda t: t[1:, ::2],
    "integer": lambda t: t[1],
    "new_axis": lambda t: t[:, None],
    "expand": lambda t: t.unsqueeze(0).expand(2, 3, 4),
    "expand_as": lambda t: t.expand_as(torch.zeros(2, 3, 4)),
    "unfold": lambda t: t.unfold(1, 2, 2),
    "as_strided": lambda t: t.as_strided((2, 2), (1, 4), 3),
    "diagonal": lambda t: t.diagonal(),
    "view_as_complex": lambda t: torch.view_as_complex(t.view(3, 2, 2)),
    "detach": lambda t: t.detach(),
    "alias": lambda t: torch.ops.aten.alias(t),
    "view_of_view": lambda t: t.view(-1)[2:10].view(2, 4).t(),
    "split": lambda t: t.split(2)[1],
    "split_sizes": lambda t: t.split([1, 3], dim=1)[1],
    "tensor_split": lambda t: t.tensor_split(3, dim=1)[1],
    "chunk": lambda t: t.chunk(2, dim=1)[0],
    "unbind": lambda t: t.unbind(1)[3],
    "atleast_3d": lambda t: torch.atleast_3d(t),
    "data": lambda t: t.data,
}


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
