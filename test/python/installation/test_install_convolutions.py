"""Under funcol.install(), convolutions of DTensors are those of one process, however they are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ranks import device_type, on_ranks, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

import funcol

ON_DEVICES = True

CHANNELS = 6


class Convolution(NamedTuple):
    images: tuple[int, ...]
    kernel: tuple[int, ...]
    run: Callable[[Tensor, Tensor, Tensor], Tensor]


CONVOLUTIONS = {
    "1d": Convolution((4, 4, 12), (6, 4, 4), functional.conv1d),
    "1d, padded": Convolution((4, 4, 12), (6, 4, 3), lambda *given: functional.conv1d(*given, padding=1)),
    "1d, windows side by side": Convolution(
        (4, 4, 12), (6, 4, 3), lambda *given: functional.conv1d(*given, stride=3)
    ),
    "2d, padded": Convolution(
        (4, 4, 6, 8), (6, 4, 3, 3), lambda *given: functional.conv2d(*given, padding=1)
    ),
    "2d, windows side by side": Convolution(
        (4, 4, 6, 8), (6, 4, 2, 2), lambda *given: functional.conv2d(*given, stride=2)
    ),
    "2d, groups": Convolution((4, 4, 6, 8), (6, 2, 2, 3), lambda *given: functional.conv2d(*given, groups=2)),
    "2d, dilated": Convolution(
        (4, 4, 6, 8), (6, 4, 3, 3), lambda *given: functional.conv2d(*given, dilation=2)
    ),
    "3d": Convolution((4, 4, 4, 4, 6), (6, 4, 2, 2, 2), functional.conv3d),
    "1d, transposed": Convolution(
        (4, 4, 12), (4, 6, 4), lambda *given: functional.conv_transpose1d(*given, stride=2)
    ),
    "2d, transposed": Convolution(
        (4, 4, 6, 8), (4, 6, 2, 2), lambda *given: functional.conv_transpose2d(*given, stride=2, padding=1)
    ),
}


def placements_of(shape: tuple[int, ...]) -> list[Placement]:
    return [Replicate(), Partial(), *map(Shard, range(len(shape)))]


CASES = [
    (name, images, kernel, bias)
    for name, one in CONVOLUTIONS.items()
    for images, kernel, bias in [
        *[(Replicate(), kernel, Replicate()) for kernel in placements_of(one.kernel)],
        *[(images, Replicate(), Replicate()) for images in placements_of(one.images)],
        *[(Shard(0), kernel, Shard(0)) for kernel in placements_of(one.kernel)[2:]],
        (Shard(len(one.images) - 1), Shard(len(one.kernel) - 1), Replicate()),
        (Partial(), Partial(), Partial()),
    ]
]


def placed(whole: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if placement.is_partial():
        share = whole * 2 if mesh.get_local_rank() == 0 else -whole / (mesh.size() - 1)
        return DTensor.from_local(share, mesh, [placement]).requires_grad_()
    return distribute_tensor(whole, mesh, [placement]).requires_grad_()


def convolves(rank: int, world: int, name: str, *placements: Placement) -> None:
    mesh = DeviceMesh(device_type(), list(range(world)))
    convolution = CONVOLUTIONS[name]
    torch.manual_seed(0)
    shapes: list[Any] = [convolution.images, convolution.kernel, (CHANNELS,)]
    whole = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    plain = [one.clone().requires_grad_() for one in whole]
    wanted = convolution.run(*plain)
    weights = torch.randn_like(wanted)
    (wanted * weights).sum().backward()
    with funcol.installed():
        given = [placed(one, mesh, placement) for one, placement in zip(whole, placements, strict=True)]
        result = convolution.run(*given)
        assert result.shape == wanted.shape
        assert isinstance(result, DTensor)
        torch.testing.assert_close(result.full_tensor(), wanted)
        (result * distribute_tensor(weights, mesh, [Replicate()])).sum().backward()
        for one, other in zip(given, plain, strict=True):
            assert isinstance(one.grad, DTensor)
            assert other.grad is not None
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "images", "kernel", "bias"), CASES, ids=str)
def test_a_convolution_is_that_of_one_process(
    name: str, images: Placement, kernel: Placement, bias: Placement
) -> None:
    run_ranks(convolves, 2, name, images, kernel, bias)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kernel", [Replicate(), Shard(0), Shard(2)], ids=str)
@pytest.mark.parametrize("images", [Replicate(), Shard(0), Shard(2)], ids=str)
@on_ranks(2)
def test_a_compiled_convolution_is_that_of_one_process(
    rank: int, world: int, images: Placement, kernel: Placement
) -> None:
    torch._dynamo.reset()  # ranks outlive the cases
    mesh = DeviceMesh(device_type(), list(range(world)))
    torch.manual_seed(0)
    whole = [torch.randn(4, 4, 12, dtype=torch.float64), torch.randn(6, 4, 4, dtype=torch.float64)]
    plain = [one.clone().requires_grad_() for one in whole]
    wanted = functional.conv1d(*plain)
    wanted.square().sum().backward()
    with funcol.installed():
        given = [placed(one, mesh, placement) for one, placement in zip(whole, (images, kernel), strict=True)]
        result = torch.compile(functional.conv1d, backend="aot_eager", fullgraph=True)(*given)
        torch.testing.assert_close(result.full_tensor(), wanted)
        result.square().sum().backward()
        for one, other in zip(given, plain, strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_strips_of_images_have_their_neighbours_borders(rank: int, world: int) -> None:
    mesh = DeviceMesh(device_type(), list(range(world)))
    with funcol.installed():
        images = distribute_tensor(torch.randn(2, 4, 6, 12), mesh, [Shard(3)])
        kernel = distribute_tensor(torch.randn(6, 4, 3, 3), mesh, [Replicate()])
        wanted = functional.conv2d(images.full_tensor(), kernel.full_tensor(), padding=1)
        result = functional.conv2d(images, kernel, padding=1)
        assert isinstance(result, DTensor)
        torch.testing.assert_close(result.full_tensor(), wanted, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_uninstall_puts_back_pytorch_s_handlers(rank: int, world: int) -> None:
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    with funcol.installed():
        assert table != before
    assert table == before
