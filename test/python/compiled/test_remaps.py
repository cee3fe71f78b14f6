"""Compiled regions that call torch.distributed's own in-place collectives."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from graphs import graph_of, lines_of, targets_in
from ranks import on_ranks
from slow_collectives import same
from torch import Tensor
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounterWithBackend

import funcol

WORLD = 2
RANK = 1
pytestmark = pytest.mark.usefixtures("fake_world", "_fresh_compiler")


def reduces(x: Tensor, **options: Any) -> Any:
    return x, dist.all_reduce(x, dist.ReduceOp.MAX, **options)


def gathers(x: Tensor, **options: Any) -> Any:
    out = x.new_empty(8, 2)
    return out, dist.all_gather_into_tensor(out, x, **options)


def scatters(x: Tensor, **options: Any) -> Any:
    out = x.new_empty(2, 2)
    return out, dist.reduce_scatter_tensor(out, x, op=dist.ReduceOp.MIN, **options)


def exchanges_equally(x: Tensor, **options: Any) -> Any:
    out = torch.empty_like(x)
    return out, dist.all_to_all_single(out, x, **options)


def exchanges_splits(x: Tensor, **options: Any) -> Any:
    rank = dist.get_rank()
    splits = [3, 1] if rank == 0 else [2, 2]
    out = x.new_empty(5 if rank == 0 else 3, 2)
    return out, dist.all_to_all_single(out, x, [3, 2] if rank == 0 else [1, 2], splits, **options)


def gathers_a_list(x: Tensor, **options: Any) -> Any:
    out = [torch.empty_like(x) for _ in range(2)]
    return out, dist.all_gather(out, x, **options)


def scatters_from_a_list(x: Tensor, **options: Any) -> Any:
    out = torch.empty_like(x)
    return out, dist.reduce_scatter(out, [x, x * 3], **options)


def broadcasts_from_1(x: Tensor, **options: Any) -> Any:
    return x, dist.broadcast(x, 1, **options)


def broadcasts_from_group_0(x: Tensor, **options: Any) -> Any:
    return x, dist.broadcast(x, group_src=0, group=dist.group.WORLD, **options)


CALLS: dict[str, Callable[..., Any]] = {
    call.__name__: call
    for call in (
        reduces,
        gathers,
        scatters,
        exchanges_equally,
        exchanges_splits,
        gathers_a_list,
        scatters_from_a_list,
        broadcasts_from_1,
        broadcasts_from_group_0,
    )
}


def as_list(out: Tensor | list[Tensor]) -> list[Tensor]:
    return out if isinstance(out, list) else [out]


def synchronous(call: Callable[..., Any]) -> Callable[[Tensor], Any]:
    def program(x: Tensor) -> Any:
        out, returned = call(x)
        return [part + 1 for part in as_list(out)], returned

    return program


def asynchronous(call: Callable[..., Any]) -> Callable[[Tensor], Any]:
    def program(x: Tensor) -> Any:
        out, work = call(x, async_op=True)
        unrelated = torch.ones(3) * 2
        work.wait()
        return [part + 1 for part in as_list(out)], unrelated

    return program


STYLES = {"synchronous": synchronous, "asynchronous": asynchronous}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("call", CALLS)
@on_ranks(WORLD)
def test_a_compiled_program_computes_what_it_does_eagerly(
    rank: int, world: int, call: str, style: str, backend: str
) -> None:
    program = STYLES[style](CALLS[call])
    inputs = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for _ in range(2)]
    torch._dynamo.reset()
    actual = torch.compile(program, backend=backend, fullgraph=True)(inputs[0])
    expected = program(inputs[1])
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert same(*inputs)


def all_in_one(x: Tensor) -> Any:
    gathered = x.new_empty(8, 2)
    work = dist.all_gather_into_tensor(gathered, x * 1, async_op=True)
    dist.all_reduce(x)
    y = x * 2
    work.wait()
    dist.broadcast(y, 1, async_op=True).wait()
    part = x.new_empty(4, 2)
    dist.reduce_scatter_tensor(part, gathered + 1)
    return part @ y.t() + gathered.sum()


@on_ranks(WORLD, timeout=200)
def test_inductor_computes_what_the_program_does_eagerly(rank: int, world: int) -> None:
    inputs = [torch.arange(8.0).reshape(4, 2) * (rank + 1) for _ in range(2)]
    torch._dynamo.reset()
    actual = torch.compile(all_in_one, backend="inductor", fullgraph=True)(inputs[0])
    torch.testing.assert_close(actual, all_in_one(inputs[1]))
    torch.testing.assert_close(*inputs)


OPS = {
    "reduces": "all_reduce",
    "gathers": "all_gather_into_tensor",
    "scatters": "reduce_scatter_tensor",
    "exchanges_equally": "all_to_all_single",
    "exchanges_splits": "all_to_all_single",
    "gathers_a_list": "all_gather_into_tensor",
    "scatters_from_a_list": "reduce_scatter_tensor",
    "broadcasts_from_1": "broadcast",
    "broadcasts_from_group_0": "broadcast",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("call", CALLS)
def test_the_graph_holds_one_functional_op_and_one_wait(call: str, style: str) -> None:
    graph = graph_of(STYLES[style](CALLS[call]), torch.ones(4, 2))
    collectives = [target for target in targets_in(graph) if "c10d" in target]
    assert collectives == [f"_c10d_functional.{OPS[call]}.default", "_c10d_functional.wait_tensor.default"]


@pytest.fixture
def _without_remaps() -> Iterator[None]:
    funcol.tracing.remap_collectives(False)
    yield
    funcol.tracing.remap_collectives(True)


TRACED_BY_ALL_MINORS = [
    "reduces",
    "gathers",
    "scatters",
    "exchanges_equally",
    "exchanges_splits",
    "gathers_a_list",
]


@pytest.mark.parametrize("call", TRACED_BY_ALL_MINORS)
def test_the_graph_of_a_call_that_pytorch_can_trace_is_the_same(
    call: str, request: pytest.FixtureRequest
) -> None:
    def program(x: Tensor) -> Any:
        out, _ = CALLS[call](x)
        return [part + 1 for part in as_list(out)]

    actual = graph_of(program, torch.ones(4, 2))
    request.getfixturevalue("_without_remaps")
    expected = graph_of(program, torch.ones(4, 2))
    assert lines_of(actual.graph) == lines_of(expected.graph)


@pytest.mark.usefixtures("_without_remaps")
@pytest.mark.parametrize(
    "program", [synchronous(broadcasts_from_1), asynchronous(reduces)], ids=["broadcast", "async"]
)
def test_without_remaps_pytorch_is_as_it_was(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Unsupported):
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(4, 2))


# Forms of calls


@on_ranks(WORLD)
def test_the_source_may_be_an_argument_of_the_region(rank: int, world: int) -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def program(x: Tensor, src: int) -> Tensor:
        dist.broadcast(x, src)
        return x + 1

    torch._dynamo.reset()
    for src in (0, 1, 0):
        assert program(torch.tensor([rank]), src).item() == src + 1


def test_async_op_may_be_an_argument_of_the_region() -> None:
    def program(x: Tensor, async_op: bool) -> Any:
        work = dist.all_reduce(x, dist.ReduceOp.SUM, None, async_op)
        return work is None, x + 1

    region = torch.compile(program, backend="eager", fullgraph=True)
    assert [region(torch.ones(2), async_op)[0] for async_op in (False, True, False)] == [True, False, True]


def test_new_sizes_cost_no_recompile() -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(backend=counter, dynamic=True, fullgraph=True)
    def program(x: Tensor) -> Tensor:
        out = x.new_empty(WORLD * x.shape[0], x.shape[1])
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        work.wait()
        parts = [torch.empty_like(x) for _ in range(WORLD)]
        dist.all_gather(parts, x)
        return out.sum() + parts[0].sum()

    for rows, columns in [(3, 5), (7, 4), (2, 9)]:
        program(torch.ones(rows, columns))
    assert counter.frame_count == 1


def uses_the_future(x: Tensor) -> Any:
    return dist.all_reduce(x, async_op=True).get_future()


def multiplies_first(x: Tensor) -> Any:
    return dist.all_reduce(x, PREMUL_SUM)


def gathers_too_little(x: Tensor) -> Any:
    return dist.all_gather_into_tensor(x.new_empty(3), x)


PREMUL_SUM = torch._C._distributed_c10d._make_nccl_premul_sum(2.0)

NOT_TRACED = {
    uses_the_future: "get_future",
    multiplies_first: "without a name",
    gathers_too_little: "expected 16",
}


@pytest.mark.parametrize("program", NOT_TRACED, ids=lambda program: program.__name__)
def test_what_cannot_be_traced_says_so_under_fullgraph(program: Callable[[Tensor], Any]) -> None:
    with pytest.raises(Unsupported, match=NOT_TRACED[program]):
        torch.compile(program, backend="eager", fullgraph=True)(torch.ones(4, 2))


@on_ranks(WORLD)
def test_what_cannot_be_traced_runs_eagerly_otherwise(rank: int, world: int) -> None:
    def program(x: Tensor) -> Tensor:
        dist.all_reduce(x, async_op=True).get_future().wait()
        return x + 1

    torch._dynamo.reset()
    assert torch.compile(program, backend="eager")(torch.tensor([rank])).item() == 2


FUNCOL_FIRST = """
import funcol, sys
assert "torch._dynamo" not in sys.modules
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)

@torch.compile(backend="eager", fullgraph=True)
def region(x):
    work = dist.broadcast(x, 0, async_op=True)
    work.wait()
    return x + 1

assert region(torch.ones(2)).tolist() == [2.0, 2.0]
"""


def test_funcol_may_be_imported_before_the_compiler() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FUNCOL_FIRST], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
