"""Every operator case gives on the simulated GPU what it gives on the CPU: values, strides and dtypes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from simulated_gpu_programs.operator_cases import FLOATING, SINGLE, Case

# 16-bit results may be rounded once more on one side: half a unit in the last place of either type, twice.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def run(case: Case, device: str, dtype: torch.dtype) -> Any:
    generator = torch.Generator().manual_seed(0)

    def new(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).to(device)

    return case(new)


def flat(result: Any) -> list[Any]:
    if isinstance(result, (tuple, list)):
        return [item for part in result for item in flat(part)]
    return [result]


def compare(case: Case, dtype: torch.dtype) -> None:
    expected, computed = flat(run(case, "cpu", dtype)), flat(run(case, "cuda", dtype))
    tolerance = TOLERANCES[dtype]
    for one, other in zip(expected, computed, strict=True):
        if not isinstance(one, Tensor):
            assert type(one) is type(other)
            torch.testing.assert_close(other, one, rtol=tolerance, atol=tolerance)
            continue
        assert other.is_cuda
        assert one.stride() == other.stride()
        torch.testing.assert_close(other.cpu(), one, rtol=tolerance, atol=tolerance)


def name_of(case: str, dtype: torch.dtype) -> str:
    return f"{case}, {str(dtype).removeprefix('torch.')}"


CHECKS = {
    **{
        name_of(name, dtype): functools.partial(compare, case, dtype)
        for name, case in FLOATING.items()
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    },
    **{
        name_of(name, torch.float32): functools.partial(compare, case, torch.float32)
        for name, case in SINGLE.items()
    },
}
