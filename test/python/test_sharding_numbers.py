"""Decisions of the propagator give right numbers: PyTorch's operator database on simulated ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from simulated import Call, Recorder, Simulation, WrongResultError, all_layouts, some_layouts
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed.fake_pg import FakeStore

from funcol import _C, _compat
from funcol.sharding import ShardingPropagator

MESHES = {"2": [0, 1], "2x2": [[0, 1], [2, 3]]}

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

# Numbers that are drawn, or that nobody has written yet.
NOT_COMPARABLE = (
    "rand", "dropout", "bernoulli", "empty", "multinomial", "normal", "uniform", "exponential", "cauchy",
    "geometric", "poisson", "rrelu", "resize_", "set_", "_cdist",
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


@pytest.fixture(scope="module", autouse=True)
def _fake_world() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def propagator() -> ShardingPropagator:
    return ShardingPropagator()


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    return DeviceMesh("cpu", MESHES[request.param])


def samples_of(info: Any, most: int) -> Iterator[Any]:
    if not info.dtypes:  # none on the CPU
        return
    dtype = torch.float64 if torch.float64 in info.dtypes else sorted(info.dtypes, key=str)[0]
    samples = info.sample_inputs("cpu", dtype, requires_grad=False)
    yield from (sample for _, sample in zip(range(most), samples, strict=False))


def calls_of(info: Any, most: int) -> list[Call]:
    """The operators that samples of ``info`` call, at most two calls with tensors of the same shapes."""
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


def has_rule(propagator: ShardingPropagator, call: Call) -> bool:
    tables = (getattr(propagator, name, ()) for name in _compat.TABLES_OF_RULES)
    return _C.has_rule(call.op.name()) or any(call.op in table for table in tables)


def infos() -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for info in op_db:
        by_name.setdefault(info.name, []).append(info)
    return by_name


INFOS = infos()


def judged(propagator: ShardingPropagator, mesh: DeviceMesh, calls: list[Call], layouts: Any) -> Counter[str]:
    """How many decisions were right, and how many calls were refused; raises for a wrong one."""
    counts: Counter[str] = Counter()
    for call in calls:
        for chosen in layouts(call, mesh.ndim):
            try:
                Simulation(propagator, mesh, call, chosen).check()
                counts["right"] += 1
            except WrongResultError:
                raise
            except (NotImplementedError, ValueError, RuntimeError):
                counts["refused"] += 1
    return counts


@pytest.mark.parametrize("name", SAMPLE)
def test_an_operator_gives_the_same_on_shards(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str
) -> None:
    calls = [call for info in INFOS[name][:1] for call in calls_of(info, 6)]
    counts = judged(propagator, mesh, calls, lambda call, axes: some_layouts(call, axes, 3, seed=0))
    assert counts["right"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(INFOS))
def test_every_operator_gives_the_same_on_shards(
    propagator: ShardingPropagator, mesh: DeviceMesh, name: str, record_property: Any
) -> None:
    # Those that PyTorch decomposes are left out: it tries all combinations of what they are made of.
    calls = [call for info in INFOS[name] for call in calls_of(info, 12) if has_rule(propagator, call)][:12]
    counts = judged(propagator, mesh, calls, lambda call, axes: all_layouts(call, axes, most=12))
    for outcome, count in counts.items():
        record_property(outcome, count)
