"""A transformer's attention on a dp x tp x cp mesh, with some functions written for local tensors.

Traces one training step on whole tensors, chooses where every tensor lives at the least cost of moving data,
applies the choice, and runs forward and backward. Checks that the functions on local tensors got what they
state, and that loss and gradients are those of one process. Prints the graph with the choice.

    python tools/examples/local_map.py                # 8 processes on this machine
"""

from __future__ import annotations

import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

import funcol
from funcol.sharding import ShardingPropagator, redistribute_cost_table

MESH = {"dp": 2, "tp": 2, "cp": 2}
BATCH, LENGTH, HEADS, WIDTH = 4, 8, 4, 16

R = Replicate()
SHARDED = [Shard(0), Shard(0), R]
WHOLE = [R, R, R]
QUERIES = [Shard(0), Shard(1), Shard(2)]
KEYS = [Shard(0), Shard(1), R]

seen: dict[str, list[tuple[int, ...]]] = {}


def note(name: str, *tensors: Tensor) -> None:
    seen[name] = [tuple(tensor.shape) for tensor in tensors]


# The program


def program(mesh: DeviceMesh | None) -> Any:
    """Returns the loss of a model; on ``mesh``, three of its functions state where their tensors live."""

    def sharded_pointwise(weight: Tensor) -> Tensor:
        note("sharded_pointwise", weight)
        return weight + weight.sin()

    def replicated_linear(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
        note("replicated_linear", weight, bias, x)
        return torch.nn.functional.linear(x, weight, bias)

    def context_parallel_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        note("context_parallel_attention", query, key, value)
        scores = (query @ key.transpose(-2, -1)) / query.shape[-1] ** 0.5
        return scores.softmax(-1) @ value

    pointwise: Any = sharded_pointwise
    linear: Any = replicated_linear
    attention: Any = context_parallel_attention
    if mesh is not None:

        def local(function: Any, outputs: Any, *inputs: Any) -> Any:
            return funcol.local_map.apply_local_map(
                function, outputs, inputs, None, mesh, redistribute_inputs=True
            )

        pointwise = local(pointwise, SHARDED, SHARDED)
        linear = local(linear, WHOLE, WHOLE, WHOLE, WHOLE)
        attention = local(attention, QUERIES, QUERIES, KEYS, KEYS)

    def loss(x: Tensor, first: Tensor, bias: Tensor, *projections: Tensor) -> Tensor:
        hidden = linear(pointwise(first), bias, x)
        heads = (BATCH, LENGTH, HEADS, WIDTH // HEADS)
        query, key, value = (
            torch.nn.functional.linear(hidden, weight).view(heads).transpose(1, 2)
            for weight in projections[:3]
        )
        mixed = attention(query, key, value).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        return (hidden + torch.nn.functional.linear(mixed, projections[3])).square().sum()

    return loss


def whole_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(BATCH, LENGTH, WIDTH), (WIDTH, WIDTH), (WIDTH,), *[(WIDTH, WIDTH)] * 4]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) / 4 for shape in shapes]


def step(loss: Any) -> Any:
    """Loss and gradients of all but the first input."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        result = loss(*inputs)
        return (result, *torch.autograd.grad(result, inputs[1:]))

    return run


# Choosing placements


class Way(NamedTuple):
    """A way to run a node: specs of its results, and of its tensor operands."""

    outputs: Sequence[DTensorSpec | None]
    inputs: Sequence[DTensorSpec]


def spec_of(mesh: DeviceMesh, placements: Sequence[Placement], value: Tensor) -> DTensorSpec:
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta)


def is_tensor(node: Any) -> bool:
    return isinstance(node, Node) and isinstance(node.meta.get("val"), Tensor)


def operands(node: Node) -> list[Node]:
    """Returns the tensors among its arguments, in order."""
    return [arg for arg in torch.utils._pytree.tree_leaves((node.args, node.kwargs)) if is_tensor(arg)]


class Chooser:
    """The cheapest ways to run all nodes of ``graph`` together, by all combinations of them.

    Combinations are not listed: one node after the other is eliminated, and of its ways the best is kept for
    each combination of ways of its neighbours. That is exact.
    """

    def __init__(self, graph: GraphModule, mesh: DeviceMesh, placed: dict[str, list[Placement]]) -> None:
        self.mesh = mesh
        self._placed = placed
        self._propagator = ShardingPropagator()
        self._tables: dict[Any, Tensor] = {}
        self.nodes = [node for node in graph.graph.nodes if is_tensor(node) or self._is_region(node)]
        self.nodes = [node for node in self.nodes if not self._is_part(node)]
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        self.nodes.append(output)
        self.ways = {node: self._ways(node) for node in self.nodes}

    @staticmethod
    def _is_region(node: Node) -> bool:
        return node.target is funcol.local_map.local_map_hop

    @staticmethod
    def _is_part(node: Node) -> bool:
        return "getitem" in str(node.target) and isinstance(node.args[0], Node)

    def _source(self, operand: Node) -> tuple[Node, int]:
        if self._is_part(operand):
            return operand.args[0], operand.args[1]  # type: ignore[return-value]
        return operand, 0

    def _ways(self, node: Node) -> list[Way]:
        if node.op == "output":
            specs = [
                spec_of(self.mesh, self._placed[f"out{i}"], operand.meta["val"])
                for i, operand in enumerate(operands(node))
            ]
            return [Way([], specs)]
        value = node.meta["val"]
        if node.op == "placeholder":
            return [Way([spec_of(self.mesh, self._placed[node.name], value)], [])]
        if self._is_region(node):
            return [self._way_of_region(node)]
        if not operands(node):
            return [Way([spec_of(self.mesh, WHOLE, value)], [])]
        return self._ways_of_operator(node)

    def _way_of_region(self, node: Node) -> Way:
        stated = node.meta["custom"]["dtensor_local_map_kwargs"]
        given = [OpStrategy([OpSpec(spec_of(self.mesh, WHOLE, one.meta["val"]))]) for one in operands(node)]
        strategy = funcol.local_map.get_local_map_placement_option(
            self.mesh, node.target, given, node.args, node.kwargs, node.meta["val"],
            stated["in_placements"], stated["out_placements"],
        )  # fmt: skip
        (way,) = strategy.strategies
        return Way(way.output_specs, way.input_specs or ())  # type: ignore[arg-type]

    def _ways_of_operator(self, node: Node) -> list[Way]:
        def as_spec(argument: Any) -> Any:
            if not isinstance(argument, Node):
                return argument
            return spec_of(self.mesh, WHOLE, argument.meta["val"])

        args, kwargs = tree_map_only(Node, as_spec, (node.args, node.kwargs))
        strategies = self._propagator.strategies(OpSchema(node.target, args, kwargs)).strategies  # type: ignore[union-attr, arg-type]
        ways = []
        for one in strategies:
            outputs = one.output_specs if isinstance(one.output_specs, tuple) else (one.output_specs,)
            way = Way(outputs, one.input_specs or ())
            if all(self._is_even(spec) for spec in (*way.outputs, *way.inputs)) and not any(
                placement.is_partial() for spec in way.inputs for placement in spec.placements
            ):
                ways.append(way)
        return ways

    @staticmethod
    def _is_even(spec: DTensorSpec | None) -> bool:
        sizes = list(spec.shape) if spec is not None else []
        for axis, placement in enumerate(spec.placements if spec is not None else ()):
            if type(placement) is Shard:
                if sizes[placement.dim] % spec.mesh.size(axis):  # type: ignore[union-attr]
                    return False
                sizes[placement.dim] //= spec.mesh.size(axis)  # type: ignore[union-attr]
            elif not (placement.is_replicate() or placement.is_partial("sum")):
                return False
        return True

    def _costs(self, producer: Node, index: int, consumer: Node, place: int) -> Tensor:
        """Returns microseconds to move an operand from each way of ``producer`` to each of ``consumer``."""
        sources = [way.outputs[index] for way in self.ways[producer]]
        targets = [way.inputs[place] for way in self.ways[consumer]]
        key = (
            tuple(one.placements for one in sources),  # type: ignore[union-attr]
            tuple(one.placements for one in targets),
            tuple(targets[0].shape),
        )
        if key not in self._tables:
            self._tables[key] = torch.tensor(redistribute_cost_table(sources, targets))  # type: ignore[arg-type]
        return self._tables[key]

    def choose(self) -> dict[Node, int]:
        """Returns the way of each node."""
        factors: list[tuple[tuple[Node, ...], Tensor]] = []
        for node in self.nodes:
            for place, operand in enumerate(operands(node)):
                producer, index = self._source(operand)
                if not self._is_left_by_region(producer, index):
                    factors.append(((producer, node), self._costs(producer, index, node, place)))
        eliminated: list[tuple[Node, tuple[Node, ...], Tensor]] = []
        left = set(self.nodes)
        while left:
            node = min(left, key=lambda one: (_num_combinations(one, factors, self.ways), one.name))
            left.remove(node)
            own = [factor for factor in factors if node in factor[0]]
            factors = [factor for factor in factors if node not in factor[0]]
            neighbours = tuple(dict.fromkeys(n for scope, _ in own for n in scope if n is not node))
            total = sum(
                (_aligned(scope, table, (*neighbours, node), self.ways) for scope, table in own),
                torch.zeros([len(self.ways[n]) for n in (*neighbours, node)]),
            )
            eliminated.append((node, neighbours, total))
            factors.append((neighbours, total.amin(-1)))
        chosen: dict[Node, int] = {}
        for node, neighbours, total in reversed(eliminated):
            chosen[node] = int(total[tuple(chosen[n] for n in neighbours)].argmin())
        return chosen

    def _is_left_by_region(self, producer: Node, index: int) -> bool:
        """Returns a local tensor that the forward graph of a region keeps for its backward graph."""
        if not self._is_region(producer):
            return False
        return producer.meta["custom"]["dtensor_local_map_kwargs"]["out_placements"][index] is None

    def costs_of(self, node: Node, chosen: dict[Node, int]) -> list[float]:
        costs = []
        for place, operand in enumerate(operands(node)):
            producer, index = self._source(operand)
            is_free = self._is_left_by_region(producer, index)
            table = None if is_free else self._costs(producer, index, node, place)
            costs.append(0.0 if table is None else float(table[chosen[producer], chosen[node]]))
        return costs


def _num_combinations(node: Node, factors: Any, ways: dict[Node, list[Way]]) -> int:
    scope = {n for other, _ in factors if node in other for n in other} | {node}
    count = 1
    for one in scope:
        count *= len(ways[one])
    return count


def _aligned(
    scope: Sequence[Node], table: Tensor, order: Sequence[Node], ways: dict[Node, list[Way]]
) -> Tensor:
    """Returns ``table`` over ``scope`` as one over ``order``, with dims of size 1 for the others."""
    if len(scope) == 2 and scope[0] is scope[1]:
        return _aligned(scope[:1], table.diagonal(), order, ways)
    places = [order.index(node) for node in scope]
    ordered = table.permute(sorted(range(len(places)), key=places.__getitem__))
    return ordered.reshape([len(ways[n]) if n in scope else 1 for n in order])


# Applying the choice

VIEWS = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)


Choice = dict[str, tuple[list[Any], list[Any]]]
"""For the name of a node, placements of its results and of its operands."""


def choice_of(chooser: Chooser, chosen: dict[Node, int]) -> Choice:
    ways = {node: chooser.ways[node][way] for node, way in chosen.items()}
    return {
        node.name: (
            [spec.placements if spec is not None else None for spec in way.outputs],
            [spec.placements for spec in way.inputs],
        )
        for node, way in ways.items()
    }


class Sharded(Interpreter):
    """Runs the graph on DTensors; redistributes each operand to the placements that its node takes."""

    def __init__(self, graph: GraphModule, mesh: DeviceMesh, choice: Choice) -> None:
        super().__init__(graph)
        self._mesh, self._choice = mesh, choice

    def run_node(self, node: Node) -> Any:
        if node.name not in self._choice:
            return super().run_node(node)
        outputs, inputs = self._choice[node.name]
        kept = dict(self.env)
        for operand, placements in zip(operands(node), inputs, strict=True):
            if isinstance(self.env[operand], DTensor):
                self.env[operand] = self._moved(self.env[operand], placements, node)
        if node.target is funcol.local_map.local_map_hop:
            self._check_operands(node)
        result = super().run_node(node)
        self.env.update({operand: kept[operand] for operand in operands(node)})
        if node.op == "call_function" and isinstance(result, Tensor):
            if not isinstance(result, DTensor):
                result = DTensor.from_local(result, self._mesh, WHOLE, run_check=False)
            result = funcol.redistribute(result, placements=outputs[0])
        return result

    def _check_operands(self, node: Node) -> None:
        """Checks that the function gets tensors of the shapes that it was recorded with."""
        body: Any = self.fetch_attr(node.args[0].target)  # type: ignore[union-attr, arg-type]
        recorded = [one.meta["val"] for one in body.graph.nodes if one.op == "placeholder"]
        for operand, like in zip(operands(node), recorded, strict=True):
            held = self.env[operand]
            local = held.to_local() if isinstance(held, DTensor) else held
            if local.shape != like.shape:
                raise AssertionError(
                    f"{node.name} got {tuple(local.shape)} for {operand}, expected {tuple(like.shape)}"
                )

    def _moved(self, operand: DTensor, placements: Any, node: Node) -> DTensor:
        moved = funcol.redistribute(operand, placements=placements)
        if node.target in VIEWS and not moved.to_local().is_contiguous():
            # The shard's memory need not be laid out as the whole tensor's was when the view was traced.
            return DTensor.from_local(moved.to_local().contiguous(), self._mesh, placements, run_check=False)
        return moved


def show(chooser: Chooser, chosen: dict[Node, int]) -> None:
    for node in chooser.nodes[:-1]:
        way = chooser.ways[node][chosen[node]]
        inputs = ", ".join(text(spec) for spec in way.inputs)
        outputs = ", ".join(text(spec) for spec in way.outputs if spec is not None)
        costs = ", ".join(f"{cost:.2f}" for cost in chooser.costs_of(node, chosen))
        arguments = ", ".join(str(operand) for operand in operands(node))
        print(
            f"{node.name} = {node.target}({arguments})  # placement=({inputs}) -> {outputs}, cost=[{costs}]"
        )
    total = sum(itertools.chain.from_iterable(chooser.costs_of(node, chosen) for node in chooser.nodes))
    print(f"total cost of moving data: {total:.2f} us")


def text(spec: DTensorSpec) -> str:
    def word(placement: Any) -> str:
        return "R" if placement.is_replicate() else "P" if placement.is_partial() else f"S({placement.dim})"

    return "".join(map(word, spec.placements))


# One rank


def run(rank: int, world: int) -> None:
    """Traces, chooses, applies, runs and checks; every rank of the default group calls it."""
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    inputs = whole_inputs()
    leaves = [one.requires_grad_() for one in whole_inputs()]
    want = step(program(None))(*leaves)

    graph = make_fx(step(program(mesh)), tracing_mode="fake")(*leaves)
    check_shapes()

    names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    placed: dict[str, list[Placement]] = {name: [Shard(0), R, R] for name in names}
    placed |= {"out0": WHOLE} | {f"out{i}": [Shard(0), R, R] for i in range(1, len(names))}
    choice: list[Any] = [None]
    if rank == 0:
        chooser = Chooser(graph, mesh, placed)
        chosen = chooser.choose()
        show(chooser, chosen)
        choice = [choice_of(chooser, chosen)]
    dist.broadcast_object_list(choice)

    shards = [distribute_tensor(one, mesh, [Shard(0), R, R]) for one in inputs]

    def sharded_step(*local: Tensor) -> list[Tensor]:
        held = [DTensor.from_local(one, mesh, [Shard(0), R, R], run_check=False) for one in local]
        results = Sharded(graph, mesh, choice[0]).run(*held)
        return [
            funcol.redistribute(one, placements=placed[f"out{i}"]).to_local() for i, one in enumerate(results)
        ]

    local = [shard.to_local() for shard in shards]
    applied = make_fx(sharded_step)(*local)
    assert all(node.target is not funcol.local_map.local_map_hop for node in applied.graph.nodes)
    loss, *gradients = applied(*local)
    check("loss", loss, want[0])
    for name, gradient, whole in zip(names[1:], gradients, want[1:], strict=True):
        check(
            f"the gradient of {name}", gradient, distribute_tensor(whole, mesh, [Shard(0), R, R]).to_local()
        )
    if rank == 0:
        print(f"loss {float(loss):.6f} and {len(gradients)} gradients are those of one process")


def check_shapes() -> None:
    """Checks that the functions were recorded with tensors of the local shapes of their placements."""
    stated = {
        "sharded_pointwise": [(WIDTH // 4, WIDTH)],
        "replicated_linear": [(WIDTH, WIDTH), (WIDTH,), (BATCH, LENGTH, WIDTH)],
        "context_parallel_attention": [
            (BATCH // 2, HEADS // 2, LENGTH // 2, WIDTH // HEADS),
            (BATCH // 2, HEADS // 2, LENGTH, WIDTH // HEADS),
            (BATCH // 2, HEADS // 2, LENGTH, WIDTH // HEADS),
        ],
    }
    if seen != stated:
        raise AssertionError(f"the functions got {seen}, expected {stated}")


def check(what: str, got: Tensor, want: Tensor) -> None:
    if not torch.allclose(got, want, rtol=1e-10, atol=1e-10):
        raise AssertionError(f"{what} is {got}, expected {want}")


def _process(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    run(rank, world)
    dist.destroy_process_group()


def main() -> None:
    world = 8
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.get_context("fork")
        processes = [
            context.Process(target=_process, args=(rank, world, f"{folder}/store")) for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    sys.exit(int(any(process.exitcode for process in processes)))


if __name__ == "__main__":
    main()
