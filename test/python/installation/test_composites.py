"""Composite operators on DTensors in one call: as the same operators one by one, which PyTorch runs."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import ExplicitRedistributionContext
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import funcol
from funcol.installation import forget_operator_counts, operator_counts

ON_DEVICES = True

WORLD = 4
ROUNDS = 4  # the first call is traced, its second backward pass, too; both run as programs then

R, P = Replicate(), Partial()
S0, S1, S2 = Shard(0), Shard(1), Shard(2)

Layout = list[Placement]


class Call(NamedTuple):
    op: Callable[..., Tensor]
    shapes: list[tuple[int, ...]]
    layouts: list[Layout]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def layer_norm(x: Tensor, *parameters: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *parameters)


def rms_norm(x: Tensor, *parameters: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], *parameters)


CALLS = {
    "linear, columns": Call(F.linear, [(4, 8, 16), (12, 16)], [[R, R], [R, S0]]),
    "linear, rows": Call(F.linear, [(4, 8, 16), (12, 16)], [[R, S2], [R, S1]]),
    "linear, batch and columns": Call(F.linear, [(4, 8, 16), (12, 16)], [[S0, R], [R, S0]]),
    "linear, batch and rows, bias": Call(
        F.linear, [(4, 8, 16), (12, 16), (12,)], [[S0, S2], [R, S1], [R, R]]
    ),
    "linear, bias, matrix": Call(F.linear, [(6, 16), (12, 16), (12,)], [[S0, R], [R, S0], [R, S0]]),
    "linear, uneven": Call(F.linear, [(5, 3, 7), (6, 7), (6,)], [[S0, R], [R, S0], [R, S0]]),
    "linear, sequence": Call(F.linear, [(4, 8, 16), (12, 16)], [[S1, R], [R, R]]),
    "linear, pending": Call(F.linear, [(4, 8, 16), (12, 16)], [[S0, P], [R, R]]),
    "linear, vector": Call(F.linear, [(16,), (12, 16)], [[R, R], [R, S0]]),
    "matmul of batches": Call(torch.matmul, [(4, 4, 6, 8), (4, 4, 8, 6)], [[S0, S1], [S0, S1]]),
    "matmul, batches of one": Call(torch.matmul, [(1, 4, 6, 8), (4, 4, 8, 6)], [[R, S1], [S0, S1]]),
    "matmul with a matrix": Call(torch.matmul, [(4, 6, 8), (8, 4)], [[S0, R], [R, S1]]),
    "matmul of matrices": Call(torch.matmul, [(6, 8), (8, 4)], [[S0, S1], [R, S0]]),
    "bmm": Call(torch.bmm, [(4, 6, 8), (4, 8, 6)], [[S0, S1], [S0, R]]),
    "layer_norm": Call(layer_norm, [(4, 8, 16), (16,), (16,)], [[S0, S1], [R, R], [R, R]]),
    "layer_norm alone": Call(layer_norm, [(4, 8, 16)], [[S0, S1]]),
    "layer_norm, cut dim": Call(layer_norm, [(4, 8, 16), (16,)], [[S0, S2], [R, R]]),
}
# PyTorch has other kernels for these on devices: DTensor has no rule for one, the simulated GPU no kernel of
# the other.
CALLS_ON_CPU = {
    "rms_norm": Call(rms_norm, [(4, 8, 16), (16,)], [[S0, S1], [R, R]]),
    "attention": Call(attention, [(4, 4, 6, 8)] * 3, [[S0, S1]] * 3),
}


def without_composites() -> AbstractContextManager[object]:
    """Hooks on saved tensors are one of the things that take PyTorch's path."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return one is other
    return (
        one.placements == other.placements
        and one.stride() == other.stride()
        and one.to_local().stride() == other.to_local().stride()
        and torch.equal(one.to_local(), other.to_local())
    )


def same_as_one_by_one(rank: int, world: int, name: str, dtype: torch.dtype) -> None:
    call = (CALLS | CALLS_ON_CPU)[name]
    mesh = init_device_mesh(device_type(), (2, world // 2))
    torch.manual_seed(0)
    wholes = [torch.randn(shape, dtype=dtype) for shape in call.shapes]
    with funcol.installed():
        inputs = [
            distribute_tensor(whole, mesh, [R if p.is_partial() else p for p in layout]).redistribute(
                placements=layout
            )
            for whole, layout in zip(wholes, call.layouts, strict=True)
        ]
        check_each_mask(call, wholes, inputs, dtype)


def check_each_mask(call: Call, wholes: list[Tensor], inputs: list[DTensor], dtype: torch.dtype) -> None:
    """Compares results and gradients of all inputs, and of each alone."""
    mesh = inputs[0].device_mesh
    masks = [[True] * len(inputs), *([i == k for i in range(len(inputs))] for k in range(len(inputs)))]
    for mask in masks:
        plain = [whole.clone().requires_grad_(needs) for whole, needs in zip(wholes, mask, strict=True)]
        expected = call.op(*plain)
        torch.manual_seed(1)
        weight = torch.randn(expected.shape, dtype=dtype)
        expected.backward(weight)

        def one_round(
            context: Callable[[], AbstractContextManager[object]],
            mask: list[bool] = mask,
            weight: Tensor = weight,
        ) -> list[Tensor | None]:
            leaves = [x.detach().requires_grad_(needs) for x, needs in zip(inputs, mask, strict=True)]
            with context():
                result = call.op(*leaves)
            gradient = distribute_tensor(weight, mesh, [R] * mesh.ndim)
            result.backward(gradient)
            return [result.detach(), *(leaf.grad for leaf in leaves)]

        baseline = one_round(without_composites)
        for _ in range(ROUNDS):
            for found, wanted in zip(one_round(nullcontext), baseline, strict=True):
                assert is_equal(found, wanted), (mask, found, wanted)
        for found, wanted in zip(baseline, [expected, *(leaf.grad for leaf in plain)], strict=True):
            if wanted is not None:
                assert isinstance(found, DTensor)
                close = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {}
                torch.testing.assert_close(found.full_tensor(), wanted.detach(), **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_the_operators_one_by_one(name: str, dtype: torch.dtype) -> None:
    run_ranks(same_as_one_by_one, WORLD, name, dtype)


@pytest.mark.cpu_only
@pytest.mark.parametrize("name", CALLS_ON_CPU)
def test_composites_of_the_cpu(name: str) -> None:
    run_ranks(same_as_one_by_one, WORLD, name, torch.float32)


def losses_and_gradients(loss_of: Callable[[Tensor], Tensor], logits: Tensor) -> list[Tensor]:
    """Returns the loss, its gradient, and a gradient of that gradient."""
    logits = logits.detach().requires_grad_()
    loss = loss_of(logits * 1)
    (gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
    (again,) = torch.autograd.grad(loss.sum(), logits, create_graph=True)
    assert is_equal(gradient, again) or not isinstance(gradient, DTensor)
    (second,) = torch.autograd.grad(again.square().sum(), logits)
    return [loss.detach(), gradient, second]


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((5,), [R, R]), *itertools.product([(6, 5), (2, 5, 3), (2, 5, 3, 3)], [[R, R], [S0, R]])],
    ids=str,
)
@on_ranks(WORLD)
def test_cross_entropy(rank: int, world: int, shape: tuple[int, ...], layout: Layout) -> None:
    mesh = init_device_mesh(device_type(), (2, world // 2))
    torch.manual_seed(0)
    whole = torch.randn(shape)
    rows = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    wholes = [whole, torch.randint(5, rows), torch.rand(5), torch.rand(shape).softmax(min(len(shape) - 1, 1))]
    with funcol.installed():
        logits, target, weight, probabilities = (
            distribute_tensor(tensor, mesh, one)
            for tensor, one in zip(wholes, [layout, layout, [R, R], layout], strict=True)
        )
        cases: list[dict[str, Any]] = [
            *({"target": target, "reduction": reduction} for reduction in ("sum", "none", "mean")),
            {"target": target, "weight": weight, "reduction": "sum", "ignore_index": 1},
            {"target": target, "reduction": "sum", "label_smoothing": 0.1},
            {"target": probabilities, "reduction": "sum"},
        ]
        for case in cases:
            loss_of = partial(F.cross_entropy, **case)
            with without_composites():
                expected = losses_and_gradients(loss_of, logits)
            for _ in range(ROUNDS):
                assert all(map(is_equal, losses_and_gradients(loss_of, logits), expected)), case.keys()


# On a group that sends nothing


@pytest.fixture
def mesh(fake_world: None) -> Iterator[DeviceMesh]:
    with funcol.installed():
        yield init_device_mesh("cpu", (dist.get_world_size(),))


def column_linear(mesh: DeviceMesh) -> tuple[DTensor, DTensor]:
    torch.manual_seed(0)
    x = DTensor.from_local(torch.randn(4, 8), mesh, [R]).requires_grad_()
    weight = DTensor.from_local(torch.randn(3, 8), mesh, [S0]).requires_grad_()
    return x, weight


def warm(x: Tensor, weight: Tensor) -> None:
    for _ in range(ROUNDS):
        F.linear(x, weight).sum().backward()
    x.grad = weight.grad = None


def is_one_call(step: Callable[[], object]) -> bool:
    forget_operator_counts()
    step()
    counts = operator_counts()
    return "served" in counts.get("aten.linear.default", {}) and "aten.mm.default" not in counts


def test_a_remembered_call_runs_no_operator_on_dtensors_between(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    assert is_one_call(lambda: F.linear(x, weight).sum().backward())
    assert not is_one_call(lambda: F.linear(x[:2], weight))


def test_contexts_that_watch_take_pytorchs_path(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    contexts: list[Callable[[], AbstractContextManager[object]]] = [
        without_composites,
        CommDebugMode,
        partial(torch.autocast, "cpu", torch.bfloat16),
    ]
    for context in contexts:
        with context():
            assert not is_one_call(lambda: F.linear(x, weight)), context
    assert is_one_call(lambda: F.linear(x, weight))


def test_autocast_casts(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    for _ in range(ROUNDS):
        assert F.linear(x, weight).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16):
            assert F.linear(x, weight).dtype is torch.bfloat16


def test_gradients_of_gradients(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    plain_x, plain_weight = (t.to_local().detach().requires_grad_() for t in (x, weight))

    def twice(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        (first,) = torch.autograd.grad(F.linear(x, weight).square().sum(), weight, create_graph=True)
        return torch.autograd.grad(first.square().sum(), (x, weight))

    expected = twice(plain_x, plain_weight)
    for _ in range(ROUNDS):
        # The gradient of x is this rank's summand.
        of_x, of_weight = (gradient.to_local() for gradient in twice(x, weight))  # type: ignore[attr-defined]
        torch.testing.assert_close(of_x, expected[0])
        torch.testing.assert_close(of_weight, expected[1])


def test_hooks_of_inputs_run_once_a_pass(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    seen: list[torch.Size] = []
    x.register_hook(lambda gradient: seen.append(gradient.shape))
    inner = x * 1
    inner.register_hook(lambda gradient: seen.append(gradient.shape))
    for _ in range(ROUNDS):
        seen.clear()
        F.linear(x * 1, weight).sum().backward()
        assert len(seen) == 1
        seen.clear()
        F.linear(inner, weight).sum().backward(retain_graph=True, inputs=[x])
        assert len(seen) == 2


def test_a_graph_runs_twice_only_if_it_is_retained(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    loss = F.linear(x, weight).sum()
    loss.backward(retain_graph=True)
    first = x.grad
    x.grad = None
    loss.backward()
    assert is_equal(x.grad, first)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_writes_to_what_the_backward_pass_reads_are_errors(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    for _ in range(ROUNDS):
        hidden = x * 1
        loss = F.linear(hidden, weight).sum()
        hidden.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    frozen = weight.detach()
    for _ in range(ROUNDS):  # nothing reads x
        hidden = x * 1
        loss = F.linear(hidden, frozen).sum()
        hidden.mul_(2)
        loss.backward()
    scale = DTensor.from_local(torch.ones(8), mesh, [R]).requires_grad_()
    for _ in range(ROUNDS):
        hidden = x.detach() * 1
        loss = rms_norm(hidden, scale).sum()
        hidden.mul_(2)
        loss.backward()


@pytest.mark.cpu_only
def test_writes_to_a_result_never_change_the_gradient(mesh: DeviceMesh) -> None:
    query = DTensor.from_local(torch.randn(1, 2, 4, 8), mesh, [S1]).requires_grad_()
    attention(query, query, query).sum().backward()
    expected = query.grad
    errors = 0
    for _ in range(ROUNDS):
        query.grad = None
        result = attention(query, query, query)
        with torch.no_grad():
            result.mul_(2)
        try:
            result.sum().backward()
        except RuntimeError as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
            errors += 1
        else:
            assert is_equal(query.grad, expected)
        query.grad = None
        attention(query, query, query).sum().backward()
        assert is_equal(query.grad, expected)
    assert errors >= ROUNDS - 1


def test_what_is_saved_is_freed_after_the_backward_pass(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    hidden = x * 1
    local = weakref.ref(hidden.to_local())
    loss = F.linear(hidden, weight).sum()
    loss.backward()
    del hidden
    gc.collect()
    assert local() is None


def test_checkpointed_programs(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    gradients = []
    for run in (
        lambda f, *a: f(*a),
        partial(checkpoint, use_reentrant=False),
        partial(checkpoint, use_reentrant=True),
    ):
        for _ in range(ROUNDS):
            run(lambda x, w: F.gelu(F.linear(x, w)), x, weight).sum().backward()
            gradients.append(x.grad)
            x.grad = weight.grad = None
    assert all(is_equal(gradient, gradients[0]) for gradient in gradients)


def test_layouts_of_gradients_that_were_not_met_yet(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    for layout in ([S1], [R], [S1], [R]):
        results = []
        for context in (without_composites, nullcontext, nullcontext):
            with context():
                result = F.linear(x, weight)
            local = torch.ones(4, 3 if layout == [S1] else 3 * mesh.size())
            result.backward(DTensor.from_local(local, mesh, layout, run_check=False))
            results.append((x.grad, weight.grad))
            x.grad = weight.grad = None
        assert all(is_equal(a, b) for found in results for a, b in zip(found, results[0], strict=True))


def test_moves_that_a_context_forbids_raise(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    moved = x.detach().redistribute(placements=[S0]).requires_grad_()
    for _ in range(ROUNDS):
        F.linear(moved, weight).sum().backward()
        with ExplicitRedistributionContext(), pytest.raises(RuntimeError, match="Implicit redistribution"):
            F.linear(moved, weight)


def test_handlers_of_programs_keep_their_effect(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    handlers = DTensor._op_dispatcher._custom_op_handlers
    mm = torch.ops.aten.mm.default
    called: list[object] = []

    def handler(op: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        called.append(op)
        return args[0]

    handlers[mm] = handler
    square = DTensor.from_local(torch.randn(8, 8), mesh, [R])
    try:
        for number in range(1, ROUNDS):
            F.linear(x.detach(), square)
            assert len(called) == number
        F.linear(x, weight)  # which was one call before
        assert len(called) == ROUNDS
    finally:
        del handlers[mm]
    F.linear(x.detach(), square)  # is traced again
    for inputs in ((x.detach(), square), (x, weight)):
        assert is_one_call(partial(F.linear, *inputs))
    assert len(called) == ROUNDS


def test_handlers_of_other_operators_change_nothing(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    for _ in range(2):
        with loss_parallel():
            assert is_one_call(lambda: F.linear(x, weight).sum().backward())
        result = F.linear(x, weight).sum()
        with loss_parallel():
            assert is_one_call(lambda: (F.linear(x, weight), result.backward()))  # noqa: B023


def test_plain_gradients(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    bias = DTensor.from_local(torch.ones(3), mesh, [S0]).requires_grad_()
    for _ in range(ROUNDS):
        with pytest.raises(RuntimeError, match="mixed"):
            F.linear(x, weight).backward(torch.ones(4, 3 * mesh.size()))
        bias.grad = None  # nothing mixes with the gradient of a bias alone
        F.linear(x.detach(), weight.detach(), bias).backward(torch.ones(4, 3 * mesh.size()))
        assert bias.grad is not None


def classes(mesh: DeviceMesh) -> tuple[DTensor, DTensor]:
    torch.manual_seed(0)
    logits = DTensor.from_local(torch.randn(4, 5), mesh, [R]).requires_grad_()
    target = DTensor.from_local(torch.randint(5, (4,)), mesh, [R])
    for _ in range(ROUNDS):
        F.cross_entropy(logits * 1, target).backward()
    return logits, target


def test_a_loss_is_one_call_and_saves_no_logits(mesh: DeviceMesh) -> None:
    leaf, target = classes(mesh)
    forget_operator_counts()
    logits = leaf * 1
    memory = weakref.ref(logits.to_local())
    loss = F.cross_entropy(logits, target)
    del logits
    assert memory() is None
    leaf.grad = None
    loss.backward(retain_graph=True)
    first, leaf.grad = leaf.grad, None
    loss.backward()
    assert is_equal(leaf.grad, first)
    assert not {"aten._log_softmax.default", "aten._log_softmax_backward_data.default"} & set(
        operator_counts()
    )
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_compiled_autograd_of_a_loss(mesh: DeviceMesh) -> None:
    logits, target = classes(mesh)
    logits.grad = None
    F.cross_entropy(logits, target).backward()
    expected = logits.grad
    for _ in range(2):
        logits.grad = None
        loss = F.cross_entropy(logits, target)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        assert is_equal(logits.grad, expected)


def test_compiled_autograd(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    F.linear(x, weight).square().sum().backward()
    expected = x.grad, weight.grad
    for _ in range(2):
        x.grad = weight.grad = None
        loss = F.linear(x, weight).square().sum()
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
            loss.backward()
        assert all(is_equal(a, b) for a, b in zip((x.grad, weight.grad), expected, strict=True))


def test_nothing_is_left_after_uninstall(mesh: DeviceMesh) -> None:
    x, weight = column_linear(mesh)
    warm(x, weight)
    loss = F.linear(x, weight).sum()
    funcol.uninstall()
    loss.backward()
    assert x.grad is not None
    assert "funcol" not in type(F.linear(x, weight).grad_fn).__name__
