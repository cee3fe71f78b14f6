"""Context parallelism on CUDA devices, fused attention in a ring: funcol gives stock's numbers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import (
    _cp_options,
    set_rotate_method,
)
from torch.nn import functional  # whose attention context_parallel replaces
from torch.nn.attention import SDPBackend, sdpa_kernel

import funcol

pytestmark = [pytest.mark.cuda, pytest.mark.usefixtures("on_devices")]

KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),  # which takes 16 bits alone
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
}

# Of one rank. PyTorch merges logsumexps of the efficient kernel only where they need no padding to 32 rows,
# also in the halves that balance the load.
ROWS = 64
WIDTH = 16


def drawn(seed: int, dtype: torch.dtype, *sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator("cuda").manual_seed(seed)).to(dtype) / 4


def in_a_ring(rank: int, world: int, kernel: str, is_causal: bool, installed: bool) -> list[Tensor]:
    """This rank's rows of the result, and the gradient of a weight that makes queries, keys and values."""
    backend, dtype = KERNELS[kernel]
    inputs = [drawn(i, dtype, 2, 2, ROWS * world, WIDTH) for i in range(3)]
    weight = drawn(9, dtype, WIDTH, WIDTH).requires_grad_()
    mesh = init_device_mesh("cuda", (world,))
    with (
        funcol.installed() if installed else nullcontext(),
        sdpa_kernel(backend),
        context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2, 2, 2]),
    ):
        result = functional.scaled_dot_product_attention(*(x @ weight for x in inputs), is_causal=is_causal)
        assert result.shape[2] == ROWS
        result.square().sum().backward()
    assert weight.grad is not None
    dist.all_reduce(weight.grad)
    return [result.detach(), weight.grad]


def gradient_on_one_device(world: int, kernel: str, is_causal: bool) -> Tensor:
    _, dtype = KERNELS[kernel]
    inputs = [drawn(i, dtype, 2, 2, ROWS * world, WIDTH) for i in range(3)]
    weight = drawn(9, dtype, WIDTH, WIDTH).requires_grad_()
    result = functional.scaled_dot_product_attention(*(x @ weight for x in inputs), is_causal=is_causal)
    result.square().sum().backward()
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("is_causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("rotation", ["allgather", "alltoall"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_attention_in_a_ring_gives_what_stock_gives(
    rank: int, world: int, kernel: str, rotation: str, is_causal: bool
) -> None:
    set_rotate_method(rotation)
    _cp_options.enable_load_balance = is_causal  # PyTorch balances the load of causal attention alone
    try:
        expected = in_a_ring(rank, world, kernel, is_causal, installed=False)
        actual = in_a_ring(rank, world, kernel, is_causal, installed=True)
    finally:
        _cp_options.enable_load_balance = True
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    gradient = gradient_on_one_device(world, kernel, is_causal)
    # bfloat16 has 8 bits, and gradients are sums of a thousand products.
    tolerance = (3e-2 if kernel == "flash" else 1e-4) * float(gradient.abs().max())
    torch.testing.assert_close(actual[1], gradient, rtol=0, atol=tolerance)
