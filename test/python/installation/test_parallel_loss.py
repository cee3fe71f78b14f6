"""Gradients through ``loss_parallel`` under ``funcol.install()``, against those of plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from programs import computes_the_same
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F  # noqa: N812

import funcol

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

IGNORED = -100


def entropy(logits: Tensor, *_: Tensor) -> Tensor:
    log_probs = F.log_softmax(logits, 1)
    return -(log_probs.exp() * log_probs).sum()


# Of logits, target classes, weights of the classes, and probabilities.
LOSSES: dict[str, Loss] = {
    "cross entropy": lambda logits, target, _w, _p: F.cross_entropy(logits, target),
    "weighted classes": lambda logits, target, weight, _p: F.cross_entropy(logits, target, weight=weight),
    "no reduction": lambda logits, target, _w, _p: (
        F.cross_entropy(logits, target, reduction="none").square().sum()
    ),
    "smoothed": lambda logits, target, _w, _p: F.cross_entropy(logits, target, label_smoothing=0.1),
    "smoothed sum": lambda logits, target, _w, _p: F.cross_entropy(
        logits, target, label_smoothing=0.1, reduction="sum"
    ),
    "smoothed, weighted classes": lambda logits, target, weight, _p: F.cross_entropy(
        logits, target, weight=weight, label_smoothing=0.1
    ),
    "entropy": entropy,
    "KL divergence": lambda logits, _t, _w, probs: F.kl_div(
        F.log_softmax(logits, 1), probs, reduction="batchmean"
    ),
    "weighted sum": lambda logits, _t, _w, probs: (F.log_softmax(logits, 1) * probs).sum(),
    "two readers": lambda logits, target, _w, _p: (
        F.cross_entropy(logits, target) + F.log_softmax(logits, 1).square().mean()
    ),
    "class probabilities": lambda logits, _t, _w, probs: F.cross_entropy(logits, probs),
    "no log_softmax": lambda logits, target, _w, _p: F.nll_loss(logits, target),
}


def agrees_with_plain_tensors(
    rank: int, world: int, name: str, shape: list[int], mesh_shape: list[int], dtype: torch.dtype
) -> None:
    """The last axis of the mesh cuts the classes, dim 1 of ``shape``; the one before it cuts the rows."""
    loss_of = LOSSES[name]
    mesh = init_device_mesh("cpu", tuple(mesh_shape))
    torch.manual_seed(0)
    values = torch.randn(shape).to(dtype)
    target = torch.randint(shape[1], (shape[0], *shape[2:]))
    target.view(-1)[2] = IGNORED
    weight = torch.rand(shape[1]).to(dtype)
    probabilities = torch.randn(shape).softmax(1).to(dtype)

    expected = values.clone().requires_grad_()
    plain_loss = loss_of(expected, target, weight, probabilities)
    plain_loss.backward()

    rows: list[Placement] = [Shard(0)] * (mesh.ndim - 1)
    logits = distribute_tensor(values, mesh, [*rows, Shard(1)]).requires_grad_()
    with funcol.installed(), loss_parallel():
        loss = loss_of(
            logits,
            distribute_tensor(target, mesh, [*rows, Replicate()]),
            replicated(weight, mesh),
            distribute_tensor(probabilities, mesh, [*rows, Shard(1)]),
        )
        loss.backward()
    assert isinstance(loss, DTensor)
    assert isinstance(logits.grad, DTensor)
    assert logits.grad.placements == logits.placements
    torch.testing.assert_close(loss.full_tensor(), plain_loss.detach())
    # In bfloat16 the log-probabilities of both may differ in their last bit, by 2^-6 between 2 and 4; a
    # gradient has their exponentials.
    how_close = {} if dtype is torch.float32 else {"rtol": 2**-5, "atol": 1e-5}
    torch.testing.assert_close(logits.grad.full_tensor(), expected.grad, **how_close)


def replicated(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    return distribute_tensor(tensor, mesh, [Replicate()] * mesh.ndim)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [[6, 10], [6, 7], [6, 3]], ids=str)  # of 3 classes, one of 4 ranks has none
@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_plain_tensors(name: str, shape: list[int]) -> None:
    run_ranks(agrees_with_plain_tensors, 4, name, shape, [4], torch.float32)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="older PyTorch releases take meshes of one axis alone")
@pytest.mark.parametrize("name", ["no reduction", "smoothed sum", "entropy", "weighted sum"])
def test_rows_may_be_cut_by_another_axis(name: str) -> None:
    run_ranks(agrees_with_plain_tensors, 4, name, [6, 10], [2, 2], torch.float32)


@pytest.mark.parametrize("name", ["cross entropy", "no reduction", "smoothed", "entropy", "two readers"])
def test_classes_may_be_followed_by_other_dims(name: str) -> None:
    run_ranks(agrees_with_plain_tensors, 2, name, [3, 10, 5], [2], torch.float32)


@pytest.mark.parametrize("name", ["cross entropy", "smoothed"])
def test_half_precision_sums_in_single_precision(name: str) -> None:
    run_ranks(agrees_with_plain_tensors, 2, name, [6, 10], [2], torch.bfloat16)


def classes_in_shards(mesh: DeviceMesh) -> tuple[DTensor, Tensor]:
    torch.manual_seed(0)
    logits = distribute_tensor(torch.randn(6, 10), mesh, [Shard(1)]).requires_grad_()
    return logits, torch.randint(10, (6,))


@computes_the_same(2)
def test_a_loss_takes_no_more_collectives_than_stock(rank: int, world: int) -> list[Tensor]:
    logits, target = classes_in_shards(init_device_mesh("cpu", (world,)))
    with loss_parallel():
        loss = F.cross_entropy(logits, target)
        loss.backward()
    assert logits.grad is not None
    return [loss.detach(), logits.grad]


@computes_the_same(2, pends=False, counts=False)
def test_a_compiled_loss(rank: int, world: int) -> list[Tensor]:
    logits, target = classes_in_shards(init_device_mesh("cpu", (world,)))
    with loss_parallel():
        loss = torch.compile(F.cross_entropy, backend="aot_eager", fullgraph=True)(logits * 1, target)
        loss.backward()
    assert logits.grad is not None
    return [loss.detach(), logits.grad]


def triple(gradient: Tensor) -> None:
    gradient.mul_(3)


def triple_the_local_tensor(gradient: Tensor) -> None:
    triple(gradient.to_local() if isinstance(gradient, DTensor) else gradient)


@pytest.mark.parametrize("hook", [triple, triple_the_local_tensor])
@on_ranks(2)
def test_hooks_may_write_to_the_gradient_of_log_probabilities(
    rank: int, world: int, hook: Callable[[Tensor], None]
) -> None:
    logits, target = classes_in_shards(init_device_mesh("cpu", (world,)))
    expected = logits.full_tensor().detach().requires_grad_()
    for tensor in (logits, expected):
        with funcol.installed(), loss_parallel():
            log_probs = F.log_softmax(tensor, 1)
            log_probs.register_hook(hook)
            F.nll_loss(log_probs, target).backward()
    assert isinstance(logits.grad, DTensor)
    torch.testing.assert_close(logits.grad.full_tensor(), expected.grad)


@on_ranks(1)
def test_handlers_of_a_program_are_kept(rank: int, world: int) -> None:
    from torch.distributed.tensor.parallel import loss

    before = dict(loss.customized_loss_ops)
    own = {torch.ops.aten.nll_loss_backward.default: lambda op, args, kwargs: math.nan}
    loss.customized_loss_ops.update(own)
    mine = dict(loss.customized_loss_ops)
    try:
        with funcol.installed():
            assert loss.customized_loss_ops == mine
    finally:
        loss.customized_loss_ops.update(before)
    with funcol.installed():
        assert loss.customized_loss_ops != before
    assert loss.customized_loss_ops == before
