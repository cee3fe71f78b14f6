"""Autograd cannot tell a pending tensor from a plain one: views, gradients, hooks, in-place writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as fn
from plain_and_pending import Make, Program, autograd_metadata, check_alike
from slow_collectives import SlowCollective, dispatch_keys, same, values
from tensor_reads import VIEWS
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import funcol


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_view_has_the_autograd_metadata_of_a_plain_one(
    view: Callable[[Tensor], Tensor], requires_grad: bool
) -> None:
    plain = values().requires_grad_(requires_grad)
    collective = SlowCollective(values())
    collective.tensor.requires_grad_(requires_grad)
    expected, actual = view(plain), view(collective.tensor)
    assert collective.num_waits == 0
    assert autograd_metadata(actual) == autograd_metadata(expected)
    assert (actual._base is collective.tensor) == (expected._base is plain)


DIFFERENTIABLE_VIEWS = {
    name: view for name, view in VIEWS.items() if name not in ("view_dtype", "detach", "data")
}


@pytest.mark.parametrize("view", DIFFERENTIABLE_VIEWS.values(), ids=DIFFERENTIABLE_VIEWS.keys())
def test_gradients_flow_through_views(view: Callable[[Tensor], Tensor]) -> None:
    def program(make: Make) -> Any:
        t = make().requires_grad_()
        viewed = view(t)
        (viewed * viewed).sum().abs().backward()
        return t.grad

    check_alike(program)


@pytest.mark.parametrize("view", DIFFERENTIABLE_VIEWS.values(), ids=DIFFERENTIABLE_VIEWS.keys())
@pytest.mark.parametrize(
    "where", ["of_a_leaf", "of_a_result", "of_a_plain_tensor", "in_no_grad", "in_inference_mode"]
)
def test_an_in_place_operator_on_a_view_counts_or_raises_as_on_a_plain_one(
    view: Callable[[Tensor], Tensor], where: str
) -> None:
    def program(make: Make) -> Any:
        t = make()
        source = t
        if where == "of_a_leaf":
            t.requires_grad_()
        elif where == "of_a_result":
            source = torch.ones(3, 4, requires_grad=True)
            t = PassThrough.apply(source, t)
        with (
            torch.set_grad_enabled(where != "in_no_grad"),
            torch.inference_mode(where == "in_inference_mode"),
        ):
            viewed = view(t)
        viewed.mul_(torch.full((), 3.0, requires_grad=True))
        if t.requires_grad:
            t.sum().backward()
        gradient = source.grad if source.is_leaf else None
        return (t.detach(), t._version, viewed._version, type(t.grad_fn).__name__, gradient)

    check_alike(program)


class PassThrough(torch.autograd.Function):
    """Gives ``result``, as if computed from ``source``."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, result: Tensor) -> Tensor:
        return result.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient * 2, None


class SlowBothWays(torch.autograd.Function):
    """A differentiable collective whose result and whose gradient are pending."""

    @staticmethod
    def forward(ctx: Any, source: Tensor) -> Tensor:
        return SlowCollective(source * 3).tensor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return SlowCollective(gradient * 3).tensor


class SavesItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        ctx.save_for_backward(t, t.view(-1))
        return torch.from_numpy(t.numpy() ** 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        saved, flat = ctx.saved_tensors
        return gradient * (saved + flat.view_as(saved))


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda t: t * t,
    "pow": lambda t: t**3,
    "matmul": lambda t: t @ t.t(),
    "linear_weight": lambda t: fn.linear(torch.ones(2, 4), t),
    "linear_bias": lambda t: fn.linear(torch.ones(2, 4), torch.ones(12, 4), t.view(-1)),
    "conv1d_weight": lambda t: fn.conv1d(torch.ones(1, 1, 9), t.view(3, 1, 4)),
    "layer_norm": lambda t: fn.layer_norm(t, (4,), weight=t[0]),
    "softmax": lambda t: t.softmax(dim=-1),
    "attention": lambda t: fn.scaled_dot_product_attention(t[None], t[None], t[None]),
    "cross_entropy": lambda t: fn.cross_entropy(t, torch.tensor([0, 3, 1])),
    "cumsum": lambda t: t.cumsum(1),
    "norm": lambda t: t.norm(),
    "max": lambda t: t.max(dim=0).values,
    "gather": lambda t: t.gather(1, torch.tensor([[0], [3], [3]])),
    "index": lambda t: t[torch.tensor([2, 0, 2])],
    "cat": lambda t: torch.cat([t, t * 2], dim=1),
    "stack": lambda t: torch.stack([t, t.detach()]),
    "split": lambda t: t.split([1, 3], dim=1)[1] * t[:, :1],
    "to": lambda t: t.to(torch.float64) * 2,
    "checkpoint": lambda t: checkpoint(lambda x: x.t().sin() * x.t(), t, use_reentrant=False),
    "reentrant_checkpoint": lambda t: checkpoint(lambda x: x.t().sin() * x.t(), t, use_reentrant=True),
    "custom_function": SavesItsInput.apply,
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_backward_through_an_operator_on_a_pending_leaf(operator: Callable[[Tensor], Tensor]) -> None:
    def program(make: Make) -> Any:
        t = make().requires_grad_()
        result = operator(t)
        result.square().sum().backward()
        return (result.detach(), type(result.grad_fn).__name__, t.grad)

    check_alike(program)


def test_a_function_may_return_pending_results_and_pending_gradients() -> None:
    source = values().requires_grad_()
    result = SlowBothWays.apply(source)
    assert funcol.is_pending(result)
    view = result.t()
    assert funcol.is_pending(view)
    assert type(view.grad_fn).__name__ == "TBackward0"
    (view * 2).sum().backward()
    assert same(source.grad, torch.full((3, 4), 6.0))


def test_pending_gradients_meet_and_accumulate() -> None:
    source = values().requires_grad_()
    (SlowBothWays.apply(source) + SlowBothWays.apply(source) * 2).sum().backward()
    SlowBothWays.apply(source).sum().backward()
    assert same(source.grad, torch.full((3, 4), 12.0))


def test_a_gradient_may_stay_pending_until_it_is_used() -> None:
    source = values().requires_grad_()
    SlowBothWays.apply(source).sum().backward()
    assert same(source.grad, torch.full((3, 4), 3.0))
    assert dispatch_keys(source.grad) == dispatch_keys(torch.ones(3, 4))


def leaf_hook(make: Make) -> Any:
    t = make().requires_grad_()
    seen = []
    t.register_hook(lambda g: seen.append(g.clone()))
    (t.view(-1) * 2).sum().backward()
    return seen, t.grad


def view_hook(make: Make) -> Any:
    t = make().requires_grad_()
    view = t.view(-1)
    view.retain_grad()
    view.register_hook(lambda g: g * 5)
    view.sum().backward()
    return view.grad, t.grad


def hook_that_replaces_the_gradient(make: Make) -> Any:
    t = torch.ones(3, 4, requires_grad=True)
    t.register_hook(lambda g: make())
    (t * 2).sum().backward()
    return t.grad


def accumulated_grad_hook(make: Make) -> Any:
    t = torch.ones(3, 4, requires_grad=True)

    def reduce(parameter: Tensor) -> None:
        parameter.grad = make()

    t.register_post_accumulate_grad_hook(reduce)
    (t * 2).sum().backward()
    return t.grad.t()


def assigned_grad(make: Make) -> Any:
    t = torch.ones(3, 4, requires_grad=True)
    t.grad = make()
    (t * 2).sum().backward()
    return t.grad


def step_of(optimizer: Callable[..., torch.optim.Optimizer], **options: Any) -> Program:
    def program(make: Make) -> Any:
        parameters = [torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(3, 4))]
        for parameter in parameters:
            parameter.grad = make()
        optimizer(parameters, lr=0.5, **options).step()
        return [p.detach() for p in parameters]

    return program


def clipped(make: Make) -> Any:
    t = torch.nn.Parameter(torch.ones(3, 4))
    t.grad = make()
    norm = torch.nn.utils.clip_grad_norm_([t], 1.0)
    return norm, t.grad


def grad_outputs(make: Make) -> Any:
    t = torch.ones(4, 3, requires_grad=True)
    return torch.autograd.grad(t * 2, t, grad_outputs=make().t())


def double_backward(make: Make) -> Any:
    t = make().requires_grad_()
    (first,) = torch.autograd.grad((t.view(-1) ** 3).sum(), t, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), t)
    return first.detach(), second


def modified_after_it_was_saved(make: Make) -> Any:
    t = make()
    product = t * torch.ones(3, 4, requires_grad=True)
    t.view(-1).add_(1)
    product.sum().backward()


def leaf_modified_in_no_grad(make: Make) -> Any:
    t = make().requires_grad_()
    with torch.no_grad():
        t.add_(1)
        t.view(-1).mul_(2)
    t.sum().backward()
    return t.detach(), t._version, t.grad


def shared_version_counter(make: Make) -> Any:
    t = make()
    view, detached, data = t.view(-1), t.detach(), t.data
    versions = [x._version for x in (t, view, detached, data)]
    view.add_(1)
    detached.add_(1)
    data.add_(1)
    return versions, [x._version for x in (t, view, detached, data)], t


def detach_in_place(make: Make) -> Any:
    t = make().requires_grad_()
    t.detach_()
    return t.requires_grad, t


def saved_tensor_hooks(make: Make) -> Any:
    packed: list[Any] = []

    def pack(t: Tensor) -> Any:
        packed.append(t.tolist())
        return t.tolist()

    t = make().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.tensor):
        result = (t.t().sin() * t.t()).sum()
    result.backward()
    return packed, t.grad


def allowed_mutation_of_saved(make: Make) -> Any:
    t = make().requires_grad_()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        clone = t.clone()
        result = (clone.view(-1) ** 2).sum()
        clone.view(-1).zero_()
        result.backward()
    return t.grad


AUTOGRAD_PROGRAMS: dict[str, Program] = {
    f.__name__: f
    for f in [
        leaf_hook, view_hook, hook_that_replaces_the_gradient, accumulated_grad_hook, assigned_grad, clipped,
        grad_outputs, double_backward, modified_after_it_was_saved,
        leaf_modified_in_no_grad,
        shared_version_counter, detach_in_place,
        saved_tensor_hooks, allowed_mutation_of_saved,
    ]
}  # fmt: skip
AUTOGRAD_PROGRAMS |= {
    "leaf_modified_in_place": lambda make: make().requires_grad_().add_(1),
    "detach_of_a_view_in_place": lambda make: make().requires_grad_().view(-1).detach_(),
    "detach_of_a_multi_view_in_place": lambda make: make().requires_grad_().unbind()[0].detach_(),
    "numpy_of_a_leaf": lambda make: make().requires_grad_().numpy(),
    "deepcopy_of_a_view": lambda make: copy.deepcopy(make().requires_grad_().view(-1)),
    "integer_requires_grad": lambda make: make().long().requires_grad_(),
    "sgd": step_of(torch.optim.SGD, momentum=0.9, foreach=False),
    "sgd_foreach": step_of(torch.optim.SGD, momentum=0.9, foreach=True),
    "sgd_fused": step_of(torch.optim.SGD, momentum=0.9, fused=True),
    "adam_foreach": step_of(torch.optim.Adam, foreach=True),
    "adam_fused": step_of(torch.optim.Adam, fused=True),
}


@pytest.mark.parametrize("program", AUTOGRAD_PROGRAMS.values(), ids=AUTOGRAD_PROGRAMS.keys())
def test_an_autograd_program_does_the_same_as_on_a_plain_tensor(program: Program) -> None:
    check_alike(program)
