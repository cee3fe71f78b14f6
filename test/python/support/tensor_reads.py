"""Ways to read a tensor, and views of one: each takes a tensor of shape (3, 4)."""

from __future__ import annotations

import copy
import ctypes
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from slow_collectives import values
from torch import Tensor


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
# The operator that newer releases of Dynamo make of `x.data = y`.
if hasattr(torch.ops.aten, "shallow_copy_data_"):
    RAW["shallow_copy_data"] = given_by(torch.ops.aten.shallow_copy_data_)

KINDS = {"operator": OPERATORS, "python": PYTHON, "constructor": CONSTRUCTORS, "raw": RAW}

READS = {f"{kind}-{name}": read for kind, reads in KINDS.items() for name, read in reads.items()}


# These reads give the whole storage, not the view alone.
WHOLE_STORAGE = ("raw-untyped_storage_bytes", "raw-typed_storage")

READS_OF_A_VIEW = {name: read for name, read in READS.items() if name not in WHOLE_STORAGE}

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
