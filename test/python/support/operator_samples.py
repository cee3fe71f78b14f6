"""Calls of operators that PyTorch's operator database makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from simulated import Call, Recorder
from torch.testing._internal.common_methods_invocations import op_db

SAMPLE = [
    "add", "mul", "div", "sub", "pow", "where", "clamp", "masked_fill", "mm", "bmm", "addmm", "matmul",
    "einsum", "nn.functional.linear", "sum", "mean", "amax", "argmax", "prod", "any", "std", "var",
    "linalg.vector_norm", "logsumexp", "cumsum", "softmax", "log_softmax", "nn.functional.layer_norm",
    "nn.functional.group_norm", "nn.functional.batch_norm", "nn.functional.embedding",
    "nn.functional.cross_entropy", "nn.functional.mse_loss", "nn.functional.gelu", "nn.functional.conv2d",
    "nn.functional.scaled_dot_product_attention", "cat", "stack", "split", "chunk", "unbind", "view",
    "reshape", "permute", "transpose", "expand", "squeeze", "unsqueeze", "flatten", "narrow", "select",
    "index_select", "gather", "scatter", "scatter_add", "index_put", "topk", "sort", "tril", "roll",
    "flip",
]  # fmt: skip


# Numbers that are drawn, not written yet, or the rank's own, as an item is to PyTorch.
NOT_COMPARABLE = (
    "rand", "dropout", "bernoulli", "empty", "multinomial", "normal", "uniform", "exponential", "cauchy",
    "geometric", "poisson", "rrelu", "resize_", "set_", "_cdist",
    "_local_scalar_dense",
)  # fmt: skip


# In-place views: what their tensor looks like changes.
IN_PLACE_VIEWS = {
    "squeeze_",
    "unsqueeze_",
    "t_",
    "transpose_",
    "detach_",
    "swapaxes_",
    "swapdims_",
    "as_strided_",
}

LARGEST = 2000  # elements


def samples_of(info: Any, most: int) -> Iterator[Any]:
    if not info.dtypes:  # none on the CPU
        return
    dtype = torch.float64 if torch.float64 in info.dtypes else sorted(info.dtypes, key=str)[0]
    samples = info.sample_inputs("cpu", dtype, requires_grad=False)
    yield from (sample for _, sample in zip(range(most), samples, strict=False))


def calls_of(info: Any, most: int) -> list[Call]:
    """Returns calls of operators in samples of ``info``, at most two with tensors of the same shapes."""
    calls: list[Call] = []
    seen: Counter[Any] = Counter()
    for sample in samples_of(info, most):
        recorder = Recorder()
        with suppress(Exception), torch.no_grad(), recorder:
            info.op(sample.input, *sample.args, **sample.kwargs)
        for call in recorder.calls:
            key = (call.op, *(tensor.shape for tensor in call.tensors()))
            if is_comparable(call) and seen[key] < 2:
                seen[key] += 1
                calls.append(call)
    return calls


def is_comparable(call: Call) -> bool:
    name = call.op.name().partition("::")[2].partition(".")[0]
    tensors = call.tensors()
    return (
        bool(tensors)
        and name not in IN_PLACE_VIEWS
        and not any(part in name for part in NOT_COMPARABLE)
        and all(tensor.layout is torch.strided and tensor.numel() <= LARGEST for tensor in tensors)
    )


def infos() -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for info in op_db:
        by_name.setdefault(info.name, []).append(info)
    return by_name


INFOS = infos()
