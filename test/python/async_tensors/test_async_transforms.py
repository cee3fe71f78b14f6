"""Inference mode, functorch and modes cannot tell a pending tensor from a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.nn.functional as fn
from plain_and_pending import (
    Make,
    Program,
    autograd_metadata,
    check_alike,
    made_in_inference_mode,
    tensors_in,
)
from tensor_reads import VIEWS
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.func import functionalize, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

INFERENCE_PROGRAMS: dict[str, Program] = {
    "metadata": lambda make: autograd_metadata(made_in_inference_mode(make)),
    "view_metadata": lambda make: autograd_metadata(made_in_inference_mode(make).view(-1)),
    "used_outside": lambda make: made_in_inference_mode(make).t() + 1,
    "modified_outside": lambda make: made_in_inference_mode(make).add_(1),
    "view_modified_outside": lambda make: made_in_inference_mode(make).view(-1).add_(1),
    "requires_grad_outside": lambda make: made_in_inference_mode(make).requires_grad_(),
    "saved_outside": lambda make: made_in_inference_mode(make) * torch.ones(3, 4, requires_grad=True),
    "cloned_outside": lambda make: autograd_metadata(made_in_inference_mode(make).clone()),
    "data_outside": lambda make: autograd_metadata(made_in_inference_mode(make).data),
    "version": lambda make: made_in_inference_mode(make)._version,
}


@torch.inference_mode()
def inside(make: Make) -> Any:
    t = make()
    t.view(-1).add_(1)
    return t.t() * 2, t.is_inference(), t.view(-1).is_inference()


def normal_tensor_viewed_inside(make: Make) -> Any:
    t = make()
    with torch.inference_mode():
        view = t.view(-1)
        added = t + 1
    metadata = (view.is_inference(), added.is_inference(), view._is_view())
    view.add_(1)
    return metadata, t, t._version


@pytest.mark.parametrize(
    "program",
    [*INFERENCE_PROGRAMS.values(), inside, normal_tensor_viewed_inside],
    ids=[*INFERENCE_PROGRAMS.keys(), "inside", "normal_tensor_viewed_inside"],
)
def test_inference_mode_treats_it_as_a_plain_tensor(program: Program) -> None:
    check_alike(program)


def dual_primal(make: Make) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(make(), torch.ones(3, 4))
        return [x.clone() for x in forward_ad.unpack_dual(dual.t() * dual.t())]


def dual_tangent(make: Make) -> Any:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 4), make())
        return [x.clone() for x in forward_ad.unpack_dual(dual.t() * 3)]


def per_sample_gradients(make: Make) -> Any:
    def loss(weight: Tensor, sample: Tensor) -> Tensor:
        return (fn.linear(sample, weight) ** 2).sum()

    return vmap(grad(loss), in_dims=(None, 0))(make(), torch.ones(2, 4))


def functionalized_mutation(make: Make) -> Any:
    t = make()

    def mutate(x: Tensor) -> Tensor:
        x.view(-1).add_(1)
        return x * 2

    return functionalize(mutate)(t), t


def functionalized_closure(make: Make) -> Any:
    t = make()
    return functionalize(lambda x: (x + t.t()).view(-1).mul_(2))(torch.ones(4, 3))


def mutated_closure_in_grad(make: Make) -> Any:
    t = make()

    def loss(x: Tensor) -> Tensor:
        t.view(-1).mul_(2)
        return (x * t).sum()

    return grad(loss)(torch.ones(3, 4)), t


FUNCTORCH_PROGRAMS: dict[str, Program] = {
    "vmap": lambda make: vmap(lambda row: row * 2 + row.sum())(make()),
    "vmap_over_columns": lambda make: vmap(lambda c: c.view(3, 1) @ c.view(1, 3), in_dims=1)(make()),
    "vmap_view": lambda make: vmap(lambda row: row.view(2, 2).t())(make()),
    "vmap_closure": lambda make: (lambda t: vmap(lambda x: x + t)(torch.ones(2)))(make()),
    "vmap_view_of_closure": lambda make: (lambda t: vmap(lambda x: t.t() @ x)(torch.ones(2, 3)))(make()),
    "vmap_closure_unused": lambda make: (lambda t: vmap(lambda x: t.view(-1))(torch.ones(2)))(make()),
    "nested_vmap": lambda make: vmap(vmap(lambda x: x.sin()))(make().view(3, 2, 2)),
    "grad": lambda make: grad(lambda x: (x.t() * x.t()).sum())(make()),
    "grad_of_view": lambda make: grad(lambda x: (x.view(-1)[2:] ** 2).sum())(make().t().t()),
    "grad_closure": lambda make: (lambda t: grad(lambda x: (x * t.view(-1)).sum())(torch.ones(12)))(make()),
    "nested_grad": lambda make: grad(lambda x: grad(lambda y: (y**3).sum())(x).sum())(make()),
    "vjp": lambda make: vjp(lambda x: x.t() ** 2, make())[1](torch.ones(4, 3)),
    "vjp_cotangent": lambda make: vjp(lambda x: x**2, torch.ones(3, 4))[1](make()),
    "jvp": lambda make: jvp(lambda x: x.t() ** 2, (make(),), (torch.ones(3, 4),)),
    "jvp_tangent": lambda make: jvp(lambda x: x.t() ** 2, (torch.ones(3, 4),), (make(),)),
    "jvp_closure": lambda make: (
        lambda t: jvp(lambda x: x * t.view(-1), (torch.ones(12),), (torch.ones(12),))
    )(make()),
    "jacrev": lambda make: jacrev(lambda x: x.view(-1)[:3] ** 2)(make()),
    "jacfwd": lambda make: jacfwd(lambda x: x.view(-1)[:3] ** 2)(make()),
    "hessian": lambda make: hessian(lambda x: (x.view(-1)[:3] ** 3).sum())(make().view(-1)[:4]),
    "functionalize": lambda make: functionalize(lambda x: x.t().add(1).view(-1).mul_(2))(make()),
    "functionalize_views_removed": lambda make: functionalize(
        lambda x: x.t().unsqueeze(0) * 2, remove="mutations_and_views"
    )(make()),
    "dual_primal": dual_primal,
    "dual_tangent": dual_tangent,
    "per_sample_gradients": per_sample_gradients,
    "functionalized_mutation": functionalized_mutation,
    "functionalized_closure": functionalized_closure,
    "mutated_closure_in_grad": mutated_closure_in_grad,
}


@pytest.mark.parametrize("program", FUNCTORCH_PROGRAMS.values(), ids=FUNCTORCH_PROGRAMS.keys())
def test_a_functorch_transform_does_the_same_as_on_a_plain_tensor(program: Program) -> None:
    check_alike(program)


class ReadsValues(TorchDispatchMode):
    """Looks at the values of all tensors that pass, also while a view is being made."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen += [t.tolist() for t in tensors_in([args, result])]
        return result


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_a_dispatch_mode_that_reads_values_sees_finished_data(view: Callable[[Tensor], Tensor]) -> None:
    def program(make: Make) -> Any:
        t = make()
        with ReadsValues() as mode:
            result = view(t) * 2
        return mode.seen, result

    check_alike(program)


class Records(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def function_mode(make: Make) -> Any:
    t = make()
    with Records() as mode:
        result = t.view(-1)[2:] + t.sum()
    return mode.names, result


def wrapper_subclass(make: Make) -> Any:
    wrapped = TwoTensor(make(), make())
    result = wrapped.t().reshape(2, 6) @ torch.ones(6, 2)
    return result.a, result.b


def wrapper_subclass_with_grad(make: Make) -> Any:
    t = make().requires_grad_()
    (TwoTensor(t.view(-1), t.t().t().view(-1)) * 2).sum().backward()
    return t.grad


def autocast(make: Make) -> Any:
    weight = make().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = fn.linear(make().t().t(), weight) @ make()
    result.sum().backward()
    return result.detach(), weight.grad


MODE_PROGRAMS = [function_mode, wrapper_subclass, wrapper_subclass_with_grad, autocast]


@pytest.mark.parametrize("program", MODE_PROGRAMS, ids=[f.__name__ for f in MODE_PROGRAMS])
def test_a_mode_or_a_subclass_does_the_same_as_with_a_plain_tensor(program: Program) -> None:
    check_alike(program)


@pytest.fixture(scope="module")
def mesh() -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)
def test_a_dtensor_may_be_made_from_it(mesh: dist.DeviceMesh, placement: Placement) -> None:
    def program(make: Make) -> Any:
        local = make().requires_grad_()
        distributed = DTensor.from_local(local.view(3, 4), mesh, [placement])
        result = (distributed.t() * 2).redistribute(mesh, [Replicate()]).to_local()
        result.sum().backward()
        return distributed.full_tensor().detach(), result.detach(), local.grad

    check_alike(program)
