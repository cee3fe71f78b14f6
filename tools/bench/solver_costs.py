"""The costs with which a solver chooses all layouts of a traced program at once: of redistributing every
operand from each layout in which it may be made to each layout in which it may be used."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from parallel_steps import Block
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.fx.experimental.proxy_tensor import make_fx

from funcol import _C
from funcol.sharding import ShardingPropagator

# Sizes that divide by the ranks of the largest mesh along every axis.
WIDTH, NUM_HEADS, BATCH, LENGTH = 1024, 32, 256, 256


class Row(NamedTuple):
    """One call: from all layouts in which an operand may be made to one in which it may be used."""

    made: OpStrategy
    used: DTensorSpec


def traced_block() -> fx.Graph:
    """Forward and backward of a block, with respect to its input and all weights, on fake tensors."""
    with torch.device("meta"):
        block = Block(WIDTH, NUM_HEADS)
        x = torch.empty(BATCH, LENGTH, WIDTH)
    names = [name for name, _ in block.named_parameters()]

    def forward_and_backward(*inputs: Tensor) -> tuple[Tensor, ...]:
        inputs = tuple(tensor.detach().requires_grad_() for tensor in inputs)
        y = torch.func.functional_call(block, dict(zip(names, inputs[1:], strict=True)), inputs[0])
        return torch.autograd.grad(y.sum(), inputs)

    weights = (parameter.detach() for parameter in block.parameters())
    return make_fx(forward_and_backward, tracing_mode="fake")(x, *weights).graph


def is_usual(strategy: OpSpec) -> bool:
    """Returns true if all tensors are replicated, plain shards or partial sums: solvers choose from these."""
    made = strategy.output_specs if isinstance(strategy.output_specs, tuple) else [strategy.output_specs]
    return all(
        placement.is_replicate() or type(placement) is Shard or placement.is_partial("sum")
        for spec in (*made, *(strategy.input_specs or ()))
        if spec is not None
        for placement in spec.placements
    )


class SolverCosts:
    """The nodes of a graph, with all strategies of each on ``mesh``, and the ``rows`` of their operands: one
    for every operand of every strategy of every node, without repetitions."""

    def __init__(self, graph: fx.Graph, mesh: DeviceMesh) -> None:
        self.num_nodes = 0
        self.num_asked = 0
        self._rows: dict[tuple[int, DTensorSpec], Row] = {}
        self._mesh = mesh
        self._numbers: dict[tuple[DTensorSpec, ...], int] = {}
        self._propagator = ShardingPropagator(cost_model=_C.DTensorCosts())
        self._made: dict[fx.Node, OpStrategy] = {}
        for node in graph.nodes:
            if node.op != "output":
                self._made[node] = self._strategies(node)
        self.rows = list(self._rows.values())

    def num_costs(self) -> int:
        return sum(len(row.made.strategies) for row in self.rows)

    def _strategies(self, node: fx.Node) -> OpStrategy:
        if not isinstance(node.target, OpOverload):
            return self._anywhere(node) if node.op == "placeholder" else self._item(*node.args)  # type: ignore[arg-type]
        operands: list[fx.Node] = []

        def replicated(operand: fx.Node) -> DTensorSpec:
            operands.append(operand)
            return self._spec(operand, (Replicate(),) * self._mesh.ndim)

        args, kwargs = fx.map_arg((node.args, node.kwargs), replicated)
        strategies = self._propagator.strategies(OpSchema(node.target, args, kwargs))
        assert isinstance(strategies, OpStrategy)
        strategies = OpStrategy([strategy for strategy in strategies.strategies if is_usual(strategy)])
        self.num_nodes += 1
        numbers = [self._number(self._made[operand]) for operand in operands]
        for strategy in strategies.strategies:
            assert strategy.input_specs is not None
            for operand, number, spec in zip(operands, numbers, strategy.input_specs, strict=True):
                self.num_asked += 1
                self._rows.setdefault((number, spec), Row(self._made[operand], spec))
        return strategies

    def _number(self, made: OpStrategy) -> int:
        """Returns the number of the set of layouts in ``made``."""
        specs = tuple(strategy.output_spec for strategy in made.strategies)
        return self._numbers.setdefault(specs, len(self._numbers))

    def _item(self, results: fx.Node, index: int) -> OpStrategy:
        """Returns the strategies of one of several results."""
        specs = (strategy.output_specs[index] for strategy in self._made[results].strategies)  # type: ignore[index]
        return OpStrategy([OpSpec(spec) for spec in specs])

    def _anywhere(self, node: fx.Node) -> OpStrategy:
        """Strategies that replicate or shard each axis, along any dim."""
        ways = [Replicate(), *(Shard(dim) for dim in range(node.meta["val"].dim()))]
        layouts = itertools.product(ways, repeat=self._mesh.ndim)
        return OpStrategy([OpSpec(self._spec(node, layout)) for layout in layouts])

    def _spec(self, node: fx.Node, layout: tuple[Placement, ...]) -> DTensorSpec:
        value = node.meta["val"]
        return DTensorSpec(
            self._mesh, layout, tensor_meta=TensorMeta(value.shape, value.stride(), value.dtype)
        )
