"""Under torch.compile, make_fx, export and FakeTensorMode: PyTorch's own graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._inductor.utils
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.distributed.distributed_c10d as c10d_python
import torch.testing._internal.distributed.fake_pg
from graphs import lines_of, targets_in
from ranks import on_ranks
from slow_collectives import SlowCollective, dispatch_keys, same, values
from tensor_reads import VIEWS
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import funcol
from funcol import _compat

WORLD = 4

RANK = 1
pytestmark = pytest.mark.usefixtures("fake_world", "_fresh_compiler")


GROUPS: dict[str, Callable[[], Any]] = {
    "name": lambda: dist.group.WORLD.group_name,
    "group": lambda: dist.group.WORLD,
    "mesh": lambda: init_device_mesh("cpu", (WORLD,)),
    "mesh_and_dim": lambda: (init_device_mesh("cpu", (WORLD,)), 0),
}


# A program is given the module whose collectives it calls, a tensor of shape (8, 4), and a group.
Program = Callable[[ModuleType, Tensor, Any], Any]

COLLECTIVES: dict[str, Program] = {
    "all_reduce": lambda m, x, g: m.all_reduce(x * 2, "sum", g),
    "all_reduce_of_transpose": lambda m, x, g: m.all_reduce(x.t(), "max", g).view(-1),
    "all_gather": lambda m, x, g: m.all_gather_tensor(x, 0, g),
    "all_gather_of_transpose": lambda m, x, g: m.all_gather_tensor(x.t(), 0, g),
    "all_gather_dim_1": lambda m, x, g: m.all_gather_tensor(x, 1, g) * 2,
    "reduce_scatter": lambda m, x, g: m.reduce_scatter_tensor(x, "sum", 0, g),
    "reduce_scatter_dim_1": lambda m, x, g: m.reduce_scatter_tensor(x, "sum", 1, g),
    "reduce_scatter_of_transpose": lambda m, x, g: m.reduce_scatter_tensor(x.t(), "sum", 0, g),
    "all_to_all": lambda m, x, g: m.all_to_all_single(x, None, None, g),
    "all_to_all_of_transpose": lambda m, x, g: m.all_to_all_single(x.t(), None, None, g),
    "all_to_all_splits": lambda m, x, g: m.all_to_all_single(x, [2, 0, 3, 1], [5, 1, 0, 2], g),
    "broadcast": lambda m, x, g: m.broadcast(x, 1, g),
    "permute_tensor": lambda m, x, g: m.permute_tensor(x.view(-1), [1, 2, 3, 0], g),
    "all_reduce_coalesced": lambda m, x, g: m.all_reduce_coalesced([x, x.t()], "sum", g),
    "all_gather_coalesced": lambda m, x, g: m.all_gather_into_tensor_coalesced([x, x[0]], g),
    "reduce_scatter_coalesced": lambda m, x, g: m.reduce_scatter_tensor_coalesced(
        [x, x + 1], "sum", [0, 1], g
    ),
    "two_in_a_row": lambda m, x, g: m.all_gather_tensor(m.reduce_scatter_tensor(x, "sum", 0, g), 0, g),
}
if not _compat.STOCK_MAKES_CONTIGUOUS:
    # Older releases: stock's graph of these holds an op that refuses its input when it runs.
    for name in ("reduce_scatter_of_transpose", "all_to_all_of_transpose"):
        del COLLECTIVES[name]

FOR_FOUR_RANKS = ("all_to_all_splits", "permute_tensor")

DIFFERENTIABLE = sorted(COLLECTIVES.keys() - {"broadcast", "all_reduce_of_transpose"})


def graphs_of(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> list[GraphModule]:
    """Returns the graphs that AOTAutograd makes of ``function``, forward graph first."""
    graphs: list[GraphModule] = []

    def record(graph: GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(function, backend=aot_autograd(fw_compiler=record), fullgraph=True, **options)
    outputs = compiled(*inputs)
    losses = [t.sum() for t in torch.utils._pytree.tree_leaves(outputs) if t.requires_grad]
    if losses:
        torch.stack(losses).sum().backward()
    return graphs


def lines_of_all(graphs: list[GraphModule]) -> list[list[str]]:
    return [lines_of(graph.graph) for graph in graphs]


def of_stock(trace: Callable[[], Any]) -> Any:
    """Runs ``trace``, which calls stock's collectives; skips the test if those cannot be traced."""
    try:
        return trace()
    except (torch._dynamo.exc.Unsupported, torch._dynamo.exc.UserError, AssertionError) as error:
        return pytest.skip(f"PyTorch itself cannot trace this: {error}".splitlines()[0])


@pytest.mark.sampled(5)
@pytest.mark.parametrize("group", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("program", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_fullgraph_captures_the_collective(program: Program, group: Callable[[], Any]) -> None:
    ranks = group()
    (graph,) = graphs_of(lambda x: program(funcol, x, ranks), torch.ones(8, 4))
    targets = targets_in(graph)
    assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets)
    assert not any("funcol" in target for target in targets)


def trace_with_grad(program: Program, collectives: ModuleType, requires_grad: bool) -> list[list[str]]:
    group = dist.group.WORLD
    x = torch.ones(8, 4, requires_grad=requires_grad)
    return lines_of_all(graphs_of(lambda x: program(collectives, x, group), x))


@pytest.mark.parametrize("program", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_the_graph_is_that_of_stock(program: Program) -> None:
    expected = of_stock(lambda: trace_with_grad(program, stock, False))
    assert trace_with_grad(program, funcol, False) == expected


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_forward_and_backward_graphs_are_those_of_stock(name: str) -> None:
    expected = of_stock(lambda: trace_with_grad(COLLECTIVES[name], stock, True))
    assert trace_with_grad(COLLECTIVES[name], funcol, True) == expected
    assert len(expected) == 2


def trace_with_symbols(program: Program, collectives: ModuleType) -> list[list[str]]:
    group = dist.group.WORLD
    x = torch.ones(8, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return lines_of_all(graphs_of(lambda x: program(collectives, x, group), x))


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name != "all_to_all_splits"])
def test_the_graph_with_symbolic_sizes_is_that_of_stock(name: str) -> None:
    expected = of_stock(lambda: trace_with_symbols(COLLECTIVES[name], stock))
    assert trace_with_symbols(COLLECTIVES[name], funcol) == expected


TAG = "for tests"


# Arguments for funcol, and the one list that stock traces.
LISTS_OF_RANKS: dict[str, tuple[list[Any], list[int], str]] = {
    "ranks": ([0, 1, 2, 3], [0, 1, 2, 3], ""),
    "ranks_and_tag": ([0, 1, 2, 3], [0, 1, 2, 3], TAG),
    "lists_and_tag": ([[0, 1, 2, 3]], [0, 1, 2, 3], TAG),
    "half": ([0, 1], [0, 1], ""),
    "halves": ([[2, 3], [0, 1]], [0, 1], ""),
}


@pytest.fixture(scope="module")
def _groups_of_listed_ranks(fake_world: None) -> None:
    dist.new_group([0, 1])
    dist.new_group([2, 3])
    c10d_python._new_group_with_tag(list(range(WORLD)), pg_tag=TAG)


@pytest.mark.usefixtures("_groups_of_listed_ranks")
@pytest.mark.parametrize("how", ["compile", "make_fx", "export"])
@pytest.mark.parametrize("ranks", LISTS_OF_RANKS.values(), ids=LISTS_OF_RANKS.keys())
def test_the_graph_over_listed_ranks_is_that_of_stock(ranks: tuple[Any, list[int], str], how: str) -> None:
    given, of_this_rank, tag = ranks

    class Module(torch.nn.Module):
        def __init__(self, collectives: ModuleType, group: list[Any]) -> None:
            super().__init__()
            self.collectives, self.group = collectives, group

        def forward(self, x: Tensor) -> Tensor:
            x = self.collectives.all_reduce(x, "sum", self.group, tag)
            x = self.collectives.all_to_all_single(x, None, None, self.group, tag)
            return self.collectives.reduce_scatter_tensor(x, "sum", 0, self.group, tag)

    def lines(collectives: ModuleType, group: list[Any]) -> list[list[str]]:
        module, x = Module(collectives, group), torch.ones(8, 4)
        if how == "compile":
            return lines_of_all(graphs_of(module, x))
        if how == "make_fx":
            return lines_of_all([make_fx(module, tracing_mode="fake")(x)])
        return lines_of_all([torch.export.export(module, (x,)).graph_module])

    assert lines(funcol, given) == lines(stock, of_this_rank)


@pytest.mark.usefixtures("_groups_of_listed_ranks")
def test_lists_without_this_rank_are_refused_when_they_are_traced() -> None:
    with pytest.raises(ValueError, match=r"rank 1 is not in \[\[2, 3\]\]"):
        make_fx(lambda x: funcol.all_reduce(x, "sum", [[2, 3]]), tracing_mode="fake")(torch.ones(8, 4))


WRONG: dict[str, tuple[Callable[[Tensor, Any], Any], str]] = {
    "reduce_scatter_rest": (
        lambda x, g: funcol.reduce_scatter_tensor(x[:7], "sum", 0, g),
        "reduce_scatter_tensor: dim 0 has size 7, not divisible by the 4 ranks",
    ),
    "all_to_all_rest": (
        lambda x, g: funcol.all_to_all_single(x[:7], None, None, g),
        "all_to_all_single: dim 0 has size 7, not divisible by the 4 ranks .* output_split_sizes",
    ),
    "permute_to_nobody": (lambda x, g: funcol.permute_tensor(x, [4], g), r"src_dst is \[4\].* ranks 0 to 3"),
    "permute_of_too_many": (lambda x, g: funcol.permute_tensor(x, [0] * 5, g), "src_dst is .* ranks 0 to 3"),
}


@pytest.mark.parametrize(("call", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_arguments_are_refused_when_they_are_traced(
    call: Callable[[Tensor, Any], Any], message: str
) -> None:
    group = dist.group.WORLD
    with pytest.raises(ValueError, match=message):
        make_fx(lambda x: call(x, group), tracing_mode="fake")(torch.ones(8, 4))


ALIASES = {
    "all_gather_single": lambda x, g: funcol.all_gather_single(x, -1, g),
    "reduce_scatter_single": lambda x, g: funcol.reduce_scatter_single(x, "sum", 0, g),
    "all_gather_single_coalesced": lambda x, g: funcol.all_gather_single_coalesced([x], g),
    "reduce_scatter_single_coalesced": lambda x, g: funcol.reduce_scatter_single_coalesced(
        [x], "sum", [0], g
    ),
    "wait_tensor": lambda x, g: funcol.wait_tensor(x * 2),
    "wait_tensors": lambda x, g: funcol.wait_tensors([x * 2, x + 1]),
}
if hasattr(stock, "all_gather_single"):  # older releases take names only
    ALIASES["with_a_reduce_op_object"] = lambda x, g: funcol.all_reduce(x, dist.ReduceOp.SUM, g)


@pytest.mark.parametrize("function", ALIASES.values(), ids=ALIASES.keys())
def test_fullgraph_captures_every_other_way_to_call(function: Callable[[Tensor, Any], Any]) -> None:
    group = dist.group.WORLD
    (graph,) = graphs_of(lambda x: function(x, group), torch.ones(8, 4))
    assert any("_c10d_functional.wait_tensor" in target for target in targets_in(graph))


QUESTIONS = {
    "is_pending": (funcol.is_pending, True),
    # Dynamo breaks the graph at isinstance with any class that decides itself what its instances are.
    "isinstance": (lambda t: isinstance(t, funcol.AsyncCollectiveTensor), False),
}


@pytest.mark.parametrize(("question", "fullgraph"), QUESTIONS.values(), ids=QUESTIONS.keys())
def test_nothing_is_pending_inside_a_compiled_region(
    question: Callable[[Tensor], bool], fullgraph: bool
) -> None:
    group = dist.group.WORLD

    @torch.compile(backend="eager", fullgraph=fullgraph)
    def ask(x: Tensor) -> tuple[Tensor, bool]:
        y = funcol.all_reduce(x, "sum", group)
        return y + 1, question(y)

    assert same(ask(SlowCollective(values()).tensor), (values() + 1, False))


c10d = torch.ops.funcol

OPS: dict[str, Callable[[Tensor, str], Any]] = {
    "all_reduce": lambda x, g: c10d.all_reduce(x, "sum", g),
    "all_reduce_coalesced": lambda x, g: c10d.all_reduce_coalesced([x, x], "sum", g),
    "all_gather_into_tensor": lambda x, g: c10d.all_gather_into_tensor(x, WORLD, g),
    "all_gather_into_tensor_coalesced": lambda x, g: c10d.all_gather_into_tensor_coalesced([x, x], WORLD, g),
    "reduce_scatter_tensor": lambda x, g: c10d.reduce_scatter_tensor(x, "avg", WORLD, g),
    "reduce_scatter_tensor_coalesced": lambda x, g: c10d.reduce_scatter_tensor_coalesced(
        [x, x], "sum", WORLD, g
    ),
    "all_to_all_single": lambda x, g: c10d.all_to_all_single(x, [2] * WORLD, [2] * WORLD, g),
    "broadcast": lambda x, g: c10d.broadcast(x, 1, g),
    "irecv": lambda x, g: c10d.irecv(x * 2, 0, 0, g),
    "batch_p2p_ops": lambda x, g: c10d.batch_p2p_ops(["isend", "irecv"], [0, 0], [0, 0], [x, x * 2], g),
}


# Functionalization, and so AOTAutograd, knows no operator of core that gives its argument back; and core
# keeps the Work of an isend that is really run for good.
ONLY_TRACED: dict[str, Callable[[Tensor, str], Any]] = {
    "isend": lambda x, g: c10d.wait_tensor(c10d.isend(x, 0, 0, g)),
    "all_reduce_": lambda x, g: c10d.wait_tensor(c10d.all_reduce_(x * 2, "sum", g)),
    "all_reduce_coalesced_": lambda x, g: c10d.wait_tensors(c10d.all_reduce_coalesced_([x * 2], "sum", g)),
    "broadcast_": lambda x, g: c10d.wait_tensor(c10d.broadcast_(x * 2, 1, g)),
    "all_gather_into_tensor_out": lambda x, g: c10d.wait_tensor(
        c10d.all_gather_into_tensor_out(x, WORLD, g, out=torch.zeros(32, 4))
    ),
    "reduce_scatter_tensor_out": lambda x, g: c10d.wait_tensor(
        c10d.reduce_scatter_tensor_out(x, "sum", WORLD, g, out=torch.zeros(2, 4))
    ),
}


def check_core_graph(graph: GraphModule, op: str) -> None:
    targets = targets_in(graph)
    assert any(target.startswith(f"_c10d_functional.{op}.") for target in targets), targets
    assert any(target.startswith("_c10d_functional.wait_tensor") for target in targets), targets
    assert not any("funcol" in target for target in targets), targets


@pytest.mark.parametrize("op", OPS)
def test_an_operator_of_funcol_is_one_of_core_in_a_compiled_graph(op: str) -> None:
    name = dist.group.WORLD.group_name
    (graph,) = graphs_of(lambda x: OPS[op](x, name), torch.ones(8, 4))
    check_core_graph(graph, op)


@pytest.mark.parametrize("op", [*OPS, *ONLY_TRACED])
def test_an_operator_of_funcol_is_one_of_core_in_a_traced_graph(op: str) -> None:
    name = dist.group.WORLD.group_name
    call = (OPS | ONLY_TRACED)[op]
    check_core_graph(make_fx(lambda x: call(x, name), tracing_mode="fake")(torch.ones(8, 4)), op)


MAKE_FX = {
    "real": {"tracing_mode": "real"},
    "fake": {"tracing_mode": "fake"},
    "symbolic": {"tracing_mode": "symbolic"},
    "pre_dispatch": {"pre_dispatch": True},
}


@pytest.mark.parametrize("options", MAKE_FX.values(), ids=MAKE_FX.keys())
@pytest.mark.parametrize("program", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_make_fx_gives_the_graph_of_stock(program: Program, options: dict[str, Any]) -> None:
    group = dist.group.WORLD
    expected = of_stock(lambda: make_fx(lambda x: program(stock, x, group), **options)(torch.ones(8, 4)))
    actual = make_fx(lambda x: program(funcol, x, group), **options)(torch.ones(8, 4))
    assert lines_of(actual.graph) == lines_of(expected.graph)


@pytest.mark.parametrize("program", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_functionalization_gives_the_graph_of_stock(program: Program) -> None:
    group = dist.group.WORLD

    def mutates(m: ModuleType) -> Callable[[Tensor], Any]:
        def function(x: Tensor) -> Any:
            y = x.clone()
            y.view(-1).mul_(2)
            return program(m, y, group)

        return torch.func.functionalize(function)

    expected = of_stock(lambda: make_fx(mutates(stock))(torch.ones(8, 4)))
    assert lines_of(make_fx(mutates(funcol))(torch.ones(8, 4)).graph) == lines_of(expected.graph)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strict", [True, False], ids=["strict", "non_strict"])
@pytest.mark.parametrize("program", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_export_gives_the_graph_of_stock(program: Program, strict: bool) -> None:
    class Module(torch.nn.Module):
        def __init__(self, collectives: ModuleType) -> None:
            super().__init__()
            self.collectives = collectives

        def forward(self, x: Tensor) -> Any:
            return program(self.collectives, x, dist.group.WORLD)

    def exported(collectives: ModuleType) -> list[str]:
        return lines_of(torch.export.export(Module(collectives), (torch.ones(8, 4),), strict=strict).graph)

    assert exported(funcol) == of_stock(lambda: exported(stock))


def test_an_exported_program_keeps_a_gradient_that_pytorch_has_none_for() -> None:
    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3, 4))

        def forward(self, x: Tensor) -> Tensor:
            return funcol.broadcast(self.weight * x, 1, dist.group.WORLD)  # from this rank

    program = torch.export.export(Module(), (values(),)).module()
    program(values()).sum().backward()
    assert same(program.weight.grad, values())


@pytest.mark.parametrize("program", COLLECTIVES.values(), ids=COLLECTIVES.keys())
def test_under_fake_tensor_mode_results_are_fake_and_shaped_as_stock_has_them(program: Program) -> None:
    def run(m: ModuleType) -> list[Any]:
        with FakeTensorMode():
            results = torch.utils._pytree.tree_leaves(program(m, torch.ones(8, 4), dist.group.WORLD))
        assert all(isinstance(result, FakeTensor) for result in results)
        return [(t.shape, t.stride(), t.dtype, t.device) for t in results]

    assert run(funcol) == of_stock(lambda: run(stock))


# PyTorch cannot make a fake tensor of the complex view of a plain one either.
FAKEABLE_VIEWS = {name: view for name, view in VIEWS.items() if name != "view_as_complex"}


@pytest.mark.parametrize("view", FAKEABLE_VIEWS.values(), ids=FAKEABLE_VIEWS.keys())
def test_a_fake_tensor_made_from_a_pending_one_is_plain(view: Callable[[Tensor], Tensor]) -> None:
    plain = FakeTensorMode().from_tensor(view(values()))
    collective = SlowCollective(values())
    fake = FakeTensorMode().from_tensor(view(collective.tensor))
    assert isinstance(fake, FakeTensor)
    assert (fake.shape, fake.stride(), fake.dtype) == (plain.shape, plain.stride(), plain.dtype)
    assert dispatch_keys(fake) == dispatch_keys(plain)
    assert not funcol.is_pending(fake)
    assert same(view(collective.tensor), view(values()))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_make_fx_traces_a_pending_input_as_a_plain_one(view: Callable[[Tensor], Tensor], mode: str) -> None:
    def function(x: Tensor) -> Tensor:
        return view(x) * 2

    expected = make_fx(function, tracing_mode=mode)(values())
    actual = make_fx(function, tracing_mode=mode)(SlowCollective(values()).tensor)
    assert lines_of(actual.graph) == lines_of(expected.graph)
    assert same(actual(SlowCollective(values()).tensor), view(values()) * 2)


@pytest.mark.filterwarnings("ignore")
def test_jit_trace_follows_a_pending_input() -> None:
    traced = torch.jit.trace(lambda x: x.t() * 2 + x.view(-1)[0], (SlowCollective(values()).tensor,))
    assert same(traced(torch.ones(3, 4)), torch.full((4, 3), 3.0))
    assert same(traced(SlowCollective(values()).tensor), values().t() * 2 + 1)


def reductions(m: ModuleType, x: Tensor, g: Any) -> Any:
    reduced = m.all_reduce(x * 2, "sum", g)
    gathered = m.all_gather_tensor(x + 1, 0, g)
    scattered = m.reduce_scatter_tensor(gathered * reduced.sum(), "sum", 1, g)
    parts = m.all_reduce_coalesced([x, scattered], "avg", g)
    return m.all_to_all_single(parts[1] + parts[0].sum(), None, None, g)


def movements(m: ModuleType, x: Tensor, g: Any) -> Any:
    shared = m.broadcast(x * 2, 1, g)
    rows = m.all_gather_tensor(shared + 1, 0, g)
    first, second = m.all_gather_into_tensor_coalesced([rows * 2, x[0]], g)
    third, fourth = m.reduce_scatter_tensor_coalesced([first, rows + second.sum()], "sum", [0, 1], g)
    return m.permute_tensor((third.sum() + fourth).view(-1), [1, 2, 3, 0], g)


def inductor_calls(program: Program, collectives: ModuleType) -> tuple[list[list[str]], list[str]]:
    """Inductor's last graph for a program of many collectives, and the calls in the code it writes."""
    group = dist.group.WORLD
    graphs: list[list[str]] = []
    torch._dynamo.reset()
    with torch._inductor.config.patch(
        post_grad_custom_post_pass=lambda graph: graphs.append(lines_of(graph)), fx_graph_cache=False
    ):
        _, code = torch._inductor.utils.run_and_get_code(
            torch.compile(lambda x: program(collectives, x, group), fullgraph=True), torch.ones(8, 4)
        )
    return graphs, re.findall(r"torch\.ops\._c10d_functional\.\w+\.default\(.*", "\n".join(code))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "program",
    [reductions, movements, COLLECTIVES["all_gather_dim_1"]],
    ids=["reductions", "movements", "all_gather_dim_1"],
)
def test_inductor_is_given_and_writes_what_it_does_for_stock(program: Program) -> None:
    expected_graphs, expected_calls = of_stock(lambda: inductor_calls(program, stock))
    graphs, calls = inductor_calls(program, funcol)
    assert len(calls) >= 2
    assert graphs == expected_graphs
    assert calls == expected_calls


@pytest.mark.parametrize("name", [name for name in COLLECTIVES if name not in FOR_FOUR_RANKS])
@on_ranks(2)
def test_a_compiled_collective_computes_what_it_does_eagerly(rank: int, world: int, name: str) -> None:
    def region(x: Tensor) -> Any:
        return COLLECTIVES[name](funcol, x, dist.group.WORLD)

    x = torch.arange(8.0 * 4).reshape(8, 4) * (rank + 1)
    eager = region(x)
    for backend in ("eager", "aot_eager"):
        assert same(torch.compile(region, backend=backend)(SlowCollective(x).tensor), eager)
