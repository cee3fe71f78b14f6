"""Tensors of every kind, and the collectives that are called with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import device_type
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_map

import funcol

SIZE = 12  # of both dims: every world of the tests divides it


class ByName(torch.Tensor):
    """A subclass with PyTorch's own ``__torch_function__``: results have its class."""


class Unseen(torch.Tensor):
    """A subclass without ``__torch_function__``: results are plain tensors."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Dispatching(torch.Tensor):
    """A plain tensor whose operators call Python."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, x)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            return func(*args, **(kwargs or {}))


class Wrapping(torch.Tensor):
    """A tensor that holds another one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, x: Tensor) -> Any:
        wrapper: Any = torch.Tensor._make_wrapper_subclass(cls, x.size(), dtype=x.dtype, device=x.device)
        wrapper.inner = x
        return wrapper

    def __init__(self, x: Tensor) -> None: ...

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: x.inner if isinstance(x, Wrapping) else x, (args, kwargs or {}))
        return tree_map(lambda x: Wrapping(x) if isinstance(x, Tensor) else x, func(*args, **kwargs))


def dense() -> Tensor:
    return torch.arange(float(SIZE * SIZE)).reshape(SIZE, SIZE) + dist.get_rank()


def in_inference_mode() -> Tensor:
    with torch.inference_mode():
        return dense()


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.ones(SIZE, SIZE)


def dtensor() -> Tensor:
    return DTensor.from_local(
        dense(), init_device_mesh(device_type(), (dist.get_world_size(),)), [Replicate()]
    )


def complex_numbers() -> Tensor:
    return torch.complex(dense(), dense() + 1)


Make = Callable[[], Tensor]


def on_host() -> Tensor:
    return torch.arange(float(SIZE * SIZE), device="cpu").reshape(SIZE, SIZE) + dist.get_rank()


def quantized_by_channel() -> Tensor:
    scales, zeros = torch.ones(SIZE, device="cpu"), torch.zeros(SIZE, device="cpu")
    return torch.quantize_per_channel(on_host(), scales, zeros, 0, torch.qint8)


def nested() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(rows, 2, device="cpu") for rows in (2, 3)])


# Tensors that have no dense numbers; a backend would send their memory as if they had. They are made on the
# host: simulated devices hold them, but have no kernels for them.
NOT_DENSE: dict[str, Make] = {
    "quantized": lambda: torch.quantize_per_tensor(on_host(), 1.0, 0, torch.quint8).to(device_type()),
    "quantized by channel": lambda: quantized_by_channel().to(device_type()),
    "coo": lambda: on_host().to_sparse().to(device_type()),
    "csr": lambda: on_host().to_sparse_csr().to(device_type()),
    "csc": lambda: on_host().to_sparse_csc().to(device_type()),
    "bsr": lambda: on_host().to_sparse_bsr((2, 2)).to(device_type()),
    "nested": lambda: nested().to(device_type()),
}
if torch.backends.mkldnn.is_available():
    NOT_DENSE["mkldnn"] = lambda: on_host().to_mkldnn()

DENSE: dict[str, Make] = {
    "plain": dense,
    "transposed": lambda: dense().t(),
    "expanded": lambda: dense()[:1].expand(SIZE, SIZE),
    "zeros without memory": lambda: torch._efficientzerotensor(SIZE, SIZE),
    "conjugate": lambda: complex_numbers().conj(),
    "negative": lambda: complex_numbers().conj().imag,
    "parameter": lambda: torch.nn.Parameter(dense()),
    "frozen parameter": lambda: torch.nn.Parameter(dense(), requires_grad=False),
    "buffer": lambda: torch.nn.Buffer(dense()),
    "requires_grad": lambda: dense().requires_grad_(),
    "inference": in_inference_mode,
    "by name": lambda: dense().as_subclass(ByName),
    "unseen": lambda: dense().as_subclass(Unseen),
    "dispatching": lambda: Dispatching(dense()),
    "wrapping": lambda: Wrapping(dense()),
    "float8": lambda: dense().to(torch.float8_e4m3fn),
    "uint16": lambda: dense().to(torch.uint16),
    "complex32": lambda: complex_numbers().to(torch.complex32),
}

# Tensors that funcol leaves to PyTorch.
FOREIGN: dict[str, Make] = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 2), torch.ones(3, 2)], layout=torch.jagged),
    "masked": lambda: torch.masked.masked_tensor(dense(), dense() > 3),
    "dtensor": dtensor,
    "fake": fake,
    "meta": lambda: dense().to("meta"),
    "functional": lambda: torch._to_functional_tensor(dense()),
}

# call(module, x): of a module that has the functions of torch.distributed._functional_collectives.
Call = Callable[[Any, Tensor], Any]


def world() -> Any:
    return dist.group.WORLD


def shares() -> list[int]:
    return [SIZE // dist.get_world_size()] * dist.get_world_size()


def as_taken_by(module: Any, x: Tensor) -> Tensor:
    """Returns ``x``, made contiguous for stock PyTorch: its older releases gather no other tensors."""
    lies_otherwise = x.layout == torch.strided and not x.is_nested and not x.is_contiguous()
    return x.contiguous() if module is not funcol and lies_otherwise else x


OF_STOCK: dict[str, Call] = {
    "all_reduce": lambda m, x: m.all_reduce(x, "sum", world()),
    "all_gather_tensor": lambda m, x: m.all_gather_tensor(as_taken_by(m, x), 0, world()),
    "all_gather_tensor dim 1": lambda m, x: m.all_gather_tensor(as_taken_by(m, x), 1, world()),
    "reduce_scatter_tensor": lambda m, x: m.reduce_scatter_tensor(x, "sum", 0, world()),
    "reduce_scatter_tensor dim 1": lambda m, x: m.reduce_scatter_tensor(x, "sum", 1, world()),
    "all_to_all_single": lambda m, x: m.all_to_all_single(x, shares(), shares(), world()),
    "broadcast": lambda m, x: m.broadcast(x, 0, world()),
    "broadcast from the last": lambda m, x: m.broadcast(x, dist.get_world_size() - 1, world()),
    "all_reduce_coalesced": lambda m, x: m.all_reduce_coalesced([x, x], "sum", world())[1],
    "all_gather_into_tensor_coalesced": lambda m, x: m.all_gather_into_tensor_coalesced([x, x], world())[1],
    "reduce_scatter_tensor_coalesced": lambda m, x: m.reduce_scatter_tensor_coalesced(
        [x, x], "sum", [0, 0], world()
    )[1],
}

BEYOND_STOCK: dict[str, Call] = {
    "permute_tensor": lambda m, x: m.permute_tensor(x, list(range(dist.get_world_size())), world()),
    "all_to_all": lambda m, x: m.all_to_all([x] * dist.get_world_size(), None, world())[-1],
    "reduce": lambda m, x: m.reduce(x, "sum", 0, world()),
    "scatter": lambda m, x: m.scatter(x, 0, 0, world()),
    "scatter dim 1": lambda m, x: m.scatter(x, 0, 1, world()),
    "gather": lambda m, x: m.gather(x, 0, 0, world()),
    "gather dim 1": lambda m, x: m.gather(x, 0, 1, world()),
    "uneven all_gather_tensor": lambda m, x: m.all_gather_tensor(
        x[: SIZE - dist.get_rank()] if dist.get_rank() > 0 else x,
        0,
        world(),
        split_sizes=[SIZE - r for r in range(dist.get_world_size())],
    ),
    "uneven reduce_scatter_tensor": lambda m, x: m.reduce_scatter_tensor(
        x, "sum", 0, world(), split_sizes=[SIZE] + [0] * (dist.get_world_size() - 1)
    ),
}

# These write: in place, into `x`, or what comes from it.
OPERATORS: dict[str, Call] = {
    "all_reduce_": lambda ops, x: ops.all_reduce_(x, "sum", world().group_name),
    "all_reduce_coalesced_": lambda ops, x: ops.all_reduce_coalesced_([x], "sum", world().group_name)[0],
    "broadcast_": lambda ops, x: ops.broadcast_(x, 0, world().group_name),
    "all_gather_into_tensor_out": lambda ops, x: ops.all_gather_into_tensor_out(
        x,
        dist.get_world_size(),
        world().group_name,
        out=torch.zeros(SIZE * dist.get_world_size(), SIZE),
    ),
    "all_gather_into_tensor_out, into it": lambda ops, x: ops.all_gather_into_tensor_out(
        torch.ones(shares()[0], SIZE), dist.get_world_size(), world().group_name, out=x
    ),
    "reduce_scatter_tensor_out": lambda ops, x: ops.reduce_scatter_tensor_out(
        x, "sum", dist.get_world_size(), world().group_name, out=torch.zeros(shares()[0], SIZE)
    ),
    "reduce_scatter_tensor_out, into it": lambda ops, x: ops.reduce_scatter_tensor_out(
        torch.ones(SIZE * dist.get_world_size(), SIZE),
        "sum",
        dist.get_world_size(),
        world().group_name,
        out=x,
    ),
}

IN_PLACE: dict[str, Call] = {
    "all_reduce_inplace": lambda m, x: m.all_reduce_inplace(x),
    "broadcast_inplace": lambda m, x: m.broadcast_inplace(x, 0),
    "all_gather_tensor_inplace": lambda m, x: m.all_gather_tensor_inplace(
        torch.zeros(SIZE * dist.get_world_size(), SIZE), x
    ),
    "all_gather_tensor_inplace, into it": lambda m, x: m.all_gather_tensor_inplace(
        x, torch.ones(shares()[0], SIZE)
    ),
    "reduce_scatter_tensor_inplace": lambda m, x: m.reduce_scatter_tensor_inplace(
        torch.zeros(shares()[0], SIZE), x
    ),
    "reduce_scatter_tensor_inplace, into it": lambda m, x: m.reduce_scatter_tensor_inplace(
        x, torch.ones(SIZE * dist.get_world_size(), SIZE)
    ),
    "all_gather_inplace": lambda m, x: m.all_gather_inplace(
        [torch.zeros(SIZE, SIZE) for _ in range(dist.get_world_size())], x
    )[0],
    "reduce_scatter_inplace": lambda m, x: m.reduce_scatter_inplace(
        torch.zeros(SIZE, SIZE), [x] * dist.get_world_size()
    ),
    "all_to_all_inplace": lambda m, x: m.all_to_all_inplace(torch.zeros(SIZE, SIZE), x),
}
