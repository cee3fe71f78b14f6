"""make_fx puts collectives on CommTensors, their results and the waits for them into the graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from differential import WORLDS
from in_place import STARTS, expected, is_supported, own_input
from ranks import on_ranks, run_ranks
from slow_collectives import same
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor

import funcol

MODES = ["real", "fake", "symbolic"]


@pytest.fixture(scope="module")
def fake_world() -> Iterator[None]:
    """Yields a default group of one rank that starts collectives and sends nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def program(name: str, rank: int, world: int) -> Callable[[Tensor], list[Tensor]]:
    def start_and_use(x: Tensor) -> list[Tensor]:
        outputs, _ = STARTS[name](x, rank, world, funcol.collectives.CommTensor)
        return [output * 1 for output in outputs]

    return start_and_use


def calls(graph: torch.fx.GraphModule) -> list[str]:
    """Returns the calls of a graph in order, without overloads and the picking of items."""
    names = [
        node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else node.name
        for node in graph.graph.nodes
        if node.op == "call_function"
    ]
    return [name for name in names if not name.startswith(("getitem", "sym_size", "mul_", "floordiv"))]


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", STARTS)
def test_the_result_follows_the_collective_and_the_wait_comes_right_before_the_use(
    name: str, mode: str
) -> None:
    graph = make_fx(program(name, 0, 1), tracing_mode=mode)(torch.ones(4, 3))
    graph.graph.lint()
    traced = calls(graph)
    assert traced[traced.index(name) :] == [name, "comm_result", "wait_comm", "mul"]


def chain_to(node: torch.fx.Node) -> list[Any]:
    """Returns the target of a node, of its first argument, of that one's first argument, and so on."""
    chain = []
    while isinstance(node, torch.fx.Node):
        chain.append(node.target)
        node = node.args[0] if node.args else None
        while isinstance(node, (list, tuple)):
            node = node[0]
    return chain


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", STARTS)
def test_the_use_depends_on_the_wait_and_that_on_the_collective(name: str) -> None:
    graph = make_fx(program(name, 0, 1))(torch.ones(4, 3))
    graph.graph.eliminate_dead_code()
    use = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.mul.Tensor)
    chain = chain_to(use)
    wait = chain.index(funcol.collectives.comm_tensor._wait_comm)
    result = chain.index(funcol.collectives.comm_tensor._wrap_comm_result)
    assert wait < result
    assert chain[result + 1] is getattr(torch.ops.c10d, name).default


def runs_again(rank: int, world: int, name: str, mode: str) -> bool:
    if not is_supported(name):
        return False
    graph = make_fx(program(name, rank, world), tracing_mode=mode)(own_input(rank, world, 2))
    for seed in (0, 100, 200):
        results = graph(own_input(rank, world, 2, seed))
        assert same(results, expected(name, rank, world, 2, seed))
    return True


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("mode", ["real", "fake"])
@pytest.mark.parametrize("name", STARTS)
def test_the_graph_starts_and_waits_for_collectives_of_its_own(name: str, mode: str, world: int) -> None:
    if not all(run_ranks(runs_again, world, name, mode)):
        pytest.skip("this gloo lacks the collective")


@on_ranks(2)
def test_values_seen_while_tracing_are_finished(rank: int, world: int) -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        tensor = funcol.collectives.CommTensor(x.clone())
        dist.all_reduce(tensor, async_op=True)
        result = tensor + 1
        seen.append(result)
        return result

    make_fx(look)(torch.ones(3))
    assert same(seen[0], torch.full((3,), world + 1.0))


def reduced(x: Tensor) -> Tensor:
    dist.all_reduce(x, async_op=True)
    return x


PROGRAMS: dict[str, tuple[Callable[[Tensor], Any], list[str]]] = {
    "returned": (
        lambda x: reduced(funcol.collectives.CommTensor(x)),
        ["allreduce_", "comm_result", "wait_comm"],
    ),
    "nested": (
        lambda x: reduced(funcol.collectives.CommTensor(funcol.collectives.CommTensor(x))) + 1,
        ["allreduce_", "comm_result", "wait_comm", "add"],
    ),
    "nested_at_the_call": (
        lambda x: (
            funcol.collectives.CommTensor(
                reduced(funcol.collectives.CommTensor(funcol.collectives.CommTensor(x)))
            )
            + 1
        ),
        ["allreduce_", "comm_result", "wait_comm", "add"],
    ),
    "result_of_operators": (
        lambda x: reduced((funcol.collectives.CommTensor(x) + 1).relu()) + 1,
        ["add", "relu", "allreduce_", "comm_result", "wait_comm", "add"],
    ),
    "work_between": (
        lambda x: (lambda y, z: y + z)(reduced(funcol.collectives.CommTensor(x.clone())), x.relu()),
        ["clone", "allreduce_", "comm_result", "relu", "wait_comm", "add"],
    ),
    "used_twice": (
        lambda x: (lambda y: (y + 1, y - 1))(reduced(funcol.collectives.CommTensor(x))),
        ["allreduce_", "comm_result", "wait_comm", "add", "sub"],
    ),
    "not_used": (
        lambda x: (reduced(funcol.collectives.CommTensor(x.clone())), x + 1)[1],
        ["clone", "allreduce_", "comm_result", "add"],
    ),
    "twice_in_a_row": (
        lambda x: reduced(reduced(funcol.collectives.CommTensor(x))) + 1,
        ["allreduce_", "comm_result", "wait_comm", "allreduce_", "comm_result_1", "wait_comm_1", "add"],
    ),
    "written_by_an_operator": (
        lambda x: reduced(funcol.collectives.CommTensor(x)).add_(1).relu(),
        ["allreduce_", "comm_result", "wait_comm", "add_", "relu"],
    ),
    "used_past_the_comm_tensor": (
        lambda x: (reduced(funcol.collectives.CommTensor(x)), x + 1)[1],
        ["allreduce_", "comm_result", "wait_comm", "add"],
    ),
    "reduced_through_a_view": (
        lambda x: (lambda y: (reduced(y.view(-1)), y + 1)[1])(funcol.collectives.CommTensor(x)),
        ["view", "allreduce_", "comm_result", "wait_comm", "add"],
    ),
}


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_each_use_of_the_memory_comes_after_the_wait(name: str, mode: str) -> None:
    traced, order = PROGRAMS[name]
    assert calls(make_fx(traced, tracing_mode=mode)(torch.ones(4))) == order


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_graph_gives_what_the_program_gives(name: str) -> None:
    traced, _ = PROGRAMS[name]
    graph = make_fx(traced)(torch.ones(4))
    x = torch.arange(4.0) - 2
    assert same(graph(x.clone()), traced(x.clone()))


@pytest.mark.usefixtures("fake_world")
def test_a_part_waits_for_its_own_collective_alone() -> None:
    def parts(x: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (reduced(part) for part in funcol.collectives.CommTensor(x).chunk(2))
        return left + 1, right - 1

    traced = calls(make_fx(parts)(torch.ones(4)))
    assert traced[-4:] == ["wait_comm", "add", "wait_comm_1", "sub"]


@pytest.mark.usefixtures("fake_world")
def test_dead_code_elimination_keeps_the_collective() -> None:
    graph = make_fx(PROGRAMS["not_used"][0])(torch.ones(4))
    graph.graph.eliminate_dead_code()
    assert "allreduce_" in calls(graph)


@pytest.mark.usefixtures("fake_world")
def test_results_are_comm_tensors_until_the_first_wait() -> None:
    kinds = []

    def look(x: Tensor) -> Tensor:
        before = funcol.collectives.CommTensor(x) + 1
        after = reduced(before) + 1
        kinds.extend(isinstance(t, funcol.collectives.CommTensor) for t in (before, after))
        return after

    make_fx(look)(torch.ones(4))
    assert kinds == [True, False]


@pytest.mark.usefixtures("fake_world")
def test_repr_shows_that_a_collective_runs_and_adds_nothing_to_the_graph() -> None:
    shown = []

    def look(x: Tensor) -> Tensor:
        tensor = funcol.collectives.CommTensor(x)
        shown.append(repr(tensor))
        shown.append(repr(reduced(tensor)))
        return tensor

    graph = make_fx(look)(torch.ones(4))
    assert shown == [
        f"CommTensor(shape=(4,), dtype=torch.float32, device=cpu, pending={pending})"
        for pending in (False, True)
    ]
    assert calls(graph) == ["allreduce_", "comm_result", "wait_comm"]


def refuses(traced: Callable[[Tensor], Any], error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        make_fx(traced, **options)(torch.ones(4))


@pytest.mark.usefixtures("fake_world")
def test_an_output_that_is_no_comm_tensor_is_refused() -> None:
    def gather(x: Tensor) -> Tensor:
        output = torch.zeros_like(x)
        dist.all_gather_into_tensor(output, funcol.collectives.CommTensor(x), async_op=True)
        return output

    refuses(gather, TypeError, "output of c10d._allgather_base_.default is a Tensor")


@pytest.mark.usefixtures("fake_world")
def test_a_subclass_is_refused() -> None:
    refuses(
        lambda x: funcol.collectives.CommTensor(TwoTensor(x, x)), TypeError, "CommTensor: got a TwoTensor"
    )


@pytest.mark.usefixtures("fake_world")
def test_what_is_no_tensor_is_refused() -> None:
    refuses(lambda x: funcol.collectives.CommTensor([x]), TypeError, "CommTensor: got a list")


@pytest.mark.usefixtures("fake_world")
def test_tracing_before_dispatch_is_refused() -> None:
    refuses(funcol.collectives.CommTensor, NotImplementedError, "pre_dispatch", pre_dispatch=True)


@pytest.mark.usefixtures("fake_world")
@pytest.mark.parametrize("mode", MODES)
def test_collectives_on_plain_tensors_are_traced_as_before(mode: str) -> None:
    assert calls(make_fx(lambda x: reduced(x) + 1, tracing_mode=mode)(torch.ones(4))) == ["allreduce_", "add"]
