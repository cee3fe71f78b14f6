"""Calls of operators on tensors that the caller puts on a device: results are compared between devices.

A case takes ``new(*sizes)``, which gives the same numbers for the same sequence of calls on every device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

New = Callable[..., Tensor]
Case = Callable[[New], Any]


def fused(new: New, kernel: SDPBackend, dtype: torch.dtype) -> list[Tensor]:
    """Causal attention and its gradients; by ``kernel`` on a device, else by the CPU's own fused kernel."""
    inputs = [new(2, 2, 5, 8).to(dtype).requires_grad_() for _ in range(3)]
    chosen = kernel if inputs[0].is_cuda else SDPBackend.FLASH_ATTENTION
    with sdpa_kernel(chosen):
        result = F.scaled_dot_product_attention(*inputs, is_causal=True)
    result.backward(new(2, 2, 5, 8).to(dtype))
    # The layouts in memory are each kernel's own.
    return [t.contiguous() for t in (result.detach(), *(one.grad for one in inputs if one.grad is not None))]


def updated(tensor: Tensor, update: Callable[[Tensor], Any]) -> Tensor:
    update(tensor)
    return tensor


def all_updated(tensors: list[Tensor], update: Callable[[list[Tensor]], Any]) -> list[Tensor]:
    update(tensors)
    return tensors


def indices(new: New, *values: int) -> Tensor:
    return torch.tensor(values, device=new(1).device)


def written_out(new: New, *sizes: int, call: Callable[[Tensor], Any]) -> Tensor:
    return updated(new(*sizes), call)


FLOATING: dict[str, Case] = {
    "add": lambda new: new(3, 4) + new(4),
    "sub with alpha": lambda new: torch.sub(new(3, 4), new(3, 4), alpha=2),
    "mul with a number": lambda new: new(3, 4) * 2.5,
    "div": lambda new: new(3, 4) / (new(3, 4).abs() + 1),
    "pow": lambda new: new(3, 4).abs() ** 2,
    "exp": lambda new: new(3, 4).exp(),
    "log1p": lambda new: new(3, 4).abs().log1p(),
    "rsqrt": lambda new: (new(3, 4).abs() + 1).rsqrt(),
    "tanh": lambda new: new(3, 4).tanh(),
    "sigmoid": lambda new: new(3, 4).sigmoid(),
    "gelu": lambda new: F.gelu(new(3, 4)),
    "silu": lambda new: F.silu(new(3, 4)),
    "relu": lambda new: new(3, 4).relu(),
    "clamp": lambda new: new(3, 4).clamp(-0.5, 0.5),
    "where": lambda new: torch.where(new(3, 4) > 0, new(3, 4), 0.0),
    "masked_fill": lambda new: new(3, 4).masked_fill(new(3, 4) > 0, -1),
    "lerp": lambda new: torch.lerp(new(3), new(3), 0.25),
    "addcmul": lambda new: torch.addcmul(new(3), new(3), new(3), value=0.5),
    "maximum": lambda new: torch.maximum(new(3, 4), new(3, 4)),
    "comparison": lambda new: new(3, 4) > new(3, 4),
    "sum": lambda new: new(3, 4).sum(),
    "sum of a dim": lambda new: new(3, 4).sum(1, keepdim=True),
    "mean": lambda new: new(3, 4).mean(0),
    "var": lambda new: new(3, 4).var(1),
    "norm": lambda new: new(3, 4).norm(),
    "vector norm": lambda new: torch.linalg.vector_norm(new(3, 4), float("inf")),
    "amax": lambda new: new(3, 4).amax(1),
    "max with indices": lambda new: new(3, 4).max(1),
    "argmax": lambda new: new(3, 4).argmax(1),
    "any": lambda new: (new(3, 4) > 1).any(),
    "cumsum": lambda new: new(3, 4).cumsum(1),
    "logsumexp": lambda new: new(3, 4).logsumexp(1),
    "softmax": lambda new: new(3, 4).softmax(1),
    "log_softmax": lambda new: new(3, 4).log_softmax(1),
    "sort": lambda new: new(3, 4).sort(1),
    "topk": lambda new: new(3, 8).topk(2),
    "mm": lambda new: new(3, 4) @ new(4, 5),
    "mm of a view": lambda new: new(4, 3).t() @ new(4, 5),
    "addmm": lambda new: torch.addmm(new(5), new(3, 4), new(4, 5), beta=0.5),
    "bmm": lambda new: torch.bmm(new(2, 3, 4), new(2, 4, 5)),
    "baddbmm": lambda new: torch.baddbmm(new(2, 3, 5), new(2, 3, 4), new(2, 4, 5)),
    "linear": lambda new: F.linear(new(2, 3, 4), new(5, 4), new(5)),
    "einsum": lambda new: torch.einsum("bij,bkj->bik", new(2, 3, 4), new(2, 5, 4)),
    "embedding": lambda new: F.embedding(indices(new, 1, 0, 3), new(4, 5)),
    "index_select": lambda new: new(4, 5).index_select(0, indices(new, 3, 1)),
    "gather": lambda new: new(4, 5).gather(0, indices(new, 3, 1, 0, 2, 2)[None]),
    "scatter": lambda new: new(4, 5).scatter(0, indices(new, 3, 1, 0, 2, 2)[None], 7.0),
    "index": lambda new: new(4, 5)[indices(new, 3, 1), :2],
    "index by the host": lambda new: new(4, 5)[torch.tensor([3, 1])],
    "index_put": lambda new: updated(new(4, 5), lambda x: x.__setitem__(indices(new, 2), 1.0)),
    "index_add": lambda new: new(4, 5).index_add(0, indices(new, 0, 2), new(2, 5)),
    "cat": lambda new: torch.cat([new(2, 3), new(1, 3)]),
    "stack": lambda new: torch.stack([new(2, 3), new(2, 3)], 1),
    "views": lambda new: new(2, 3, 4).transpose(0, 2).flatten(1)[1:, ::2],
    "contiguous": lambda new: new(3, 4).t().contiguous(),
    "expand": lambda new: new(3, 1).expand(3, 4) + new(3, 4),
    "split": lambda new: new(6, 2).split([1, 5]),
    "flip": lambda new: new(3, 4).flip(1),
    "roll": lambda new: new(3, 4).roll(1, 1),
    "pad": lambda new: F.pad(new(3, 4), (1, 2)),
    "tril": lambda new: new(4, 4).tril(),
    "repeat_interleave": lambda new: new(3, 2).repeat_interleave(2, 0),
    "layer_norm": lambda new: F.layer_norm(new(3, 8), (8,), new(8), new(8)),
    "rms_norm": lambda new: F.rms_norm(new(3, 8), (8,), new(8)),
    "group_norm": lambda new: F.group_norm(new(2, 4, 3), 2, new(4), new(4)),
    "conv1d": lambda new: F.conv1d(new(2, 3, 8), new(4, 3, 3)),
    "conv2d": lambda new: F.conv2d(new(2, 4, 8, 8), new(4, 2, 3, 3), new(4), stride=2, padding=1, groups=2),
    "conv_transpose2d": lambda new: F.conv_transpose2d(new(1, 3, 4, 4), new(3, 2, 3, 3)),
    "max_pool2d": lambda new: F.max_pool2d(new(1, 2, 6, 6), 2),
    "avg_pool2d": lambda new: F.avg_pool2d(new(1, 2, 6, 6), 2),
    "interpolate": lambda new: F.interpolate(new(1, 2, 4, 4), scale_factor=2, mode="bilinear"),
    "mse_loss": lambda new: F.mse_loss(new(3, 4), new(3, 4)),
    "cross_entropy": lambda new: F.cross_entropy(new(3, 4), indices(new, 0, 3, 1)),
    "attention": lambda new: F.scaled_dot_product_attention(
        new(2, 2, 5, 4), new(2, 2, 5, 4), new(2, 2, 5, 4)
    ),
    "causal attention": lambda new: F.scaled_dot_product_attention(
        new(2, 2, 5, 4), new(2, 2, 5, 4), new(2, 2, 5, 4), is_causal=True
    ),
    "flash attention": lambda new: fused(new, SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "efficient attention": lambda new: fused(new, SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "in-place add": lambda new: updated(new(3, 4), lambda x: x.add_(new(4), alpha=2)),
    "in-place on a view": lambda new: updated(new(3, 4), lambda x: x[:, 1:3].mul_(2).sub_(1)),
    "in-place fill": lambda new: updated(new(3, 4), lambda x: x[::2].fill_(2)),
    "in-place masked_fill": lambda new: updated(new(3, 4), lambda x: x.masked_fill_(x > 0, 2)),
    "in-place copy": lambda new: updated(new(3, 4), lambda x: x[:, ::2].copy_(new(3, 2))),
    "out= add": lambda new: written_out(new, 3, 4, call=lambda x: torch.add(new(3, 4), new(3, 4), out=x)),
    "out= mm on a view": lambda new: updated(
        new(3, 10), lambda x: torch.mm(new(3, 4), new(4, 5), out=x[:, ::2])
    ),
    "out= cat": lambda new: written_out(new, 0, call=lambda x: torch.cat([new(2), new(3)], out=x)),
    "out= max": lambda new: torch.max(new(3, 4), 1, out=(new(3), indices(new, 0, 0, 0))),
    "foreach add": lambda new: torch._foreach_add([new(3), new(2, 2)], 1.5),
    "foreach mul of lists": lambda new: torch._foreach_mul([new(3), new(2)], [new(3), new(2)]),
    "foreach norm": lambda new: torch._foreach_norm([new(3), new(2, 2)]),
    "in-place foreach": lambda new: all_updated([new(3), new(2)], lambda x: torch._foreach_mul_(x, 2)),
    "in-place foreach addcdiv": lambda new: all_updated(
        [new(3)], lambda x: torch._foreach_addcdiv_(x, [new(3)], [new(3).abs() + 1], [0.5])
    ),
    "foreach copy": lambda new: all_updated(
        [new(3), new(2)], lambda x: torch._foreach_copy_(x, [new(3), new(2)])
    ),
    "no elements": lambda new: (new(0, 4) + 1, new(0, 4).sum(0), torch.cat([new(0, 2), new(1, 2)])),
}


def unscaled(new: New) -> list[Tensor]:
    gradients, found_inf = [new(3), new(2)], new(1).zero_()
    torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, new(1).fill_(0.5))
    return [*gradients, found_inf]


def chunks_of_two_types(new: New) -> Tensor:
    out = new(2, 6)
    torch.ops.fsdp.chunk_cat_mixed_dtype([new(3, 2).bfloat16(), new(4)], 0, 2, out=out)
    return out


def batch_norm(new: New) -> tuple[Tensor, ...]:
    mean, variance = new(3).zero_(), new(3).fill_(1)
    return F.batch_norm(new(4, 3, 2), mean, variance, new(3), new(3), training=True), mean, variance


def dropped_gradient(new: New) -> Tensor:
    """The gradient has zeros where the result has, whatever the numbers are."""
    data = new(64).fill_(1).requires_grad_()
    dropped = F.dropout(data, 0.5)
    dropped.sum().backward()
    assert data.grad is not None
    return (dropped.detach() == data.grad).all()


def spread(matrix: Tensor) -> Tensor:
    """Returns a matrix that is far from singular."""
    return matrix * 0.1 + torch.eye(len(matrix), device=matrix.device)


# With float32 alone.
SINGLE: dict[str, Case] = {
    "batch_norm": batch_norm,
    "amp unscale": unscaled,
    "dropout's gradient": dropped_gradient,
    **(
        {"chunks of two types": chunks_of_two_types}
        if hasattr(torch.ops.fsdp, "chunk_cat_mixed_dtype")
        else {}
    ),
    "cholesky": lambda new: torch.linalg.cholesky(spread(new(4, 4)), upper=True),
    "inverse": lambda new: torch.linalg.inv(spread(new(3, 3))),
    "fft": lambda new: torch.fft.rfft(new(8)),
    "complex product": lambda new: torch.complex(new(3), new(3)) * torch.complex(new(3), new(3)).conj(),
    "unique": lambda new: torch.unique(indices(new, 3, 1, 3)),
    "bincount": lambda new: torch.bincount(indices(new, 3, 1, 3)),
    "histogram": lambda new: torch.histc(new(20), 4, -1, 1),
    "one_hot": lambda new: F.one_hot(indices(new, 1, 0)),
    "searchsorted": lambda new: torch.searchsorted(indices(new, 1, 3, 5), indices(new, 2, 5)),
    "isfinite": lambda new: torch.isfinite(new(3)),
    "equal": lambda new: torch.equal(new(3), new(3)),
    "allclose": lambda new: torch.allclose(new(1), new(1) + 5),
    "item": lambda new: new(3).sum().item(),
    "randperm is a permutation": lambda new: torch.randperm(9, device=new(1).device).sort().values,
    "float8": lambda new: new(3, 4).to(torch.float8_e4m3fn).float(),
    "float8 e5m2": lambda new: new(3, 4).to(torch.float8_e5m2).to(torch.bfloat16),
    "casts": lambda new: (
        new(3).half(),
        new(3).bfloat16(),
        new(3).double(),
        (new(3) * 9).long(),
        new(3).bool(),
    ),
    "integers": lambda new: (indices(new, 5, 7) // 2, indices(new, 5, 7) % 4, indices(new, 5, 7) & 3),
    "linspace": lambda new: torch.linspace(0, 1, 5, device=new(1).device),
    "eye": lambda new: torch.eye(3, device=new(1).device),
}
