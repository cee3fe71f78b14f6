"""Functions on local tensors, recorded once together with their gradients, and the partition of the joint
graph into a graph for each."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx

from .. import _compat
from .recording import (
    CLOSED_OVER,
    TANGENT,
    Function,
    Recording,
    is_foreign_to,
    local_fakes,
    mode_of,
    only_mode,
)
from .regions import (
    Placements,
    Region,
    Sizes,
    check_differentiable,
    gradient_placements,
    key_of,
    num_averaged,
    text_of,
    uneven_dims,
)


class RegionGraph(NamedTuple):
    """The contents of a node of :data:`funcol.local_map.local_map_hop`."""

    body: GraphModule
    region: Region


@dataclasses.dataclass
class GradientGraphs:
    """The gradient of a function, for the operands ``with_gradients`` and the results ``differentiable``.

    ``backward`` takes the operands ``saved_operands``, the activations of the forward graph, and gradients of
    the results. ``from_operands`` computes the same from all operands and these gradients, and so can be
    differentiated in turn.
    """

    backward: RegionGraph
    from_operands: RegionGraph
    saved_operands: Sequence[int]
    differentiable: Sequence[int]
    with_gradients: Sequence[int]


@dataclasses.dataclass
class PartitionedGraphs:
    """A recorded function as a forward graph and, if a result requires a gradient, graphs of the gradient.

    ``operands`` are those of the call, and after them the tensors that the function closed over. The results
    of ``forward`` are the function's ``num_results`` and then the activations that the backward graph takes.
    """

    operands: list[Any]
    forward: RegionGraph
    num_results: int
    gradients: GradientGraphs | None = None


def trace(function: Function, operands: Sequence[Any]) -> PartitionedGraphs:
    """Records ``function`` and, if a result requires a gradient, the gradients of the operands."""
    mode = mode_of(operands)
    is_foreign = is_foreign_to(is_functional=True)
    decompositions = _compat.decompositions_of(get_proxy_mode())
    with only_mode(mode):
        recording = Recording(function, mode, is_foreign)
        primals = local_fakes(function, operands, mode)
        run = dispatch_functionalize(recording.run, FunctionalTensorMode())
        joint = make_fx(run, decomposition_table=decompositions)(*primals)
    return _JointGraph(function, [*operands, *recording.foreign], recording, joint).partition()


class _JointGraph:
    """The recorded graph of a function and its gradient, to be partitioned."""

    def __init__(
        self, function: Function, operands: list[Any], recording: Recording, joint: GraphModule
    ) -> None:
        self._function, self._operands, self._recording, self._joint = function, operands, recording, joint
        nodes = list(joint.graph.nodes)
        (self._results,) = nodes[-1].args
        self._num_results = recording.num_results
        for node in nodes:
            constant = getattr(joint, node.target, None) if node.op == "get_attr" else None
            if isinstance(constant, FakeTensor):
                raise ValueError(
                    f"funcol.apply_local_map: {function.name} uses a tensor of shape {tuple(constant.shape)} "
                    "from outside in a way that cannot be followed. Pass it as an argument."
                )
        placeholders = {node.target: node for node in nodes if node.op == "placeholder"}
        self._tangents = [placeholders.pop(f"{TANGENT}{k}") for k in range(recording.num_tangents)]
        closed_over = [placeholders.pop(f"{CLOSED_OVER}{k}") for k in range(len(recording.foreign))]
        self._primals = [*placeholders.values(), *closed_over]
        self._inputs = {*self._primals, *self._tangents}

    def partition(self) -> PartitionedGraphs:
        function, operands = self._function, self._operands
        num_closed_over = len(operands) - len(function.placements)
        replicated = (Replicate(),) * function.mesh.ndim
        inputs = [*function.placements, *([replicated] * num_closed_over)]
        outputs = list(function.body.placements)
        function = dataclasses.replace(
            function,
            placements=tuple(inputs),
            labels=[*function.labels, *(["a tensor it closes over"] * num_closed_over)],
        )
        results = self._results[: self._num_results]
        values = [node.meta["val"] if isinstance(node, Node) else node for node in results]
        region = Region(
            function.name,
            function.are_full,
            key_of(function.mesh),
            tuple(map(text_of, inputs)),
            tuple(map(text_of, outputs)),
            tuple(map(_uneven_sizes, function.result_specs(operands, values))),
        )
        if not self._recording.differentiable:
            forward = self._graph(self._primals, results)
            return PartitionedGraphs(operands, RegionGraph(forward, region), self._num_results)
        return self._with_gradients(function, region, inputs, outputs)

    def _with_gradients(
        self,
        function: Function,
        region: Region,
        inputs: list[Placements | None],
        outputs: list[Placements | None],
    ) -> PartitionedGraphs:
        results, gradients = self._results[: self._num_results], self._results[self._num_results :]
        wrt = self._recording.requires_gradient
        with_gradients = [i for i, gradient in zip(wrt, gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in gradients if gradient is not None]
        differentiable = self._recording.differentiable
        self._check_partials(inputs, outputs, with_gradients, differentiable)
        of_forward = self._nodes_of_forward(results)
        saved = self._nodes_to_save(gradients, of_forward)
        saved_operands = [i for i, node in enumerate(self._primals) if node in saved]
        activations = [node for node in self._joint.graph.nodes if node in saved and node in of_forward]
        activations.sort(key=lambda node: not isinstance(node.meta["val"], Tensor))  # tensors, then sizes
        nothing = (None,) * len(activations)
        gradients_in, gradients_out = gradient_placements(inputs, outputs, function.gradients)
        given = tuple(text_of(gradients_out[i]) for i in differentiable)
        specs = function.operand_specs(self._operands)
        backward_region = region._replace(
            name=f"{region.name}, backward",
            inputs=(*(region.inputs[i] for i in saved_operands), *nothing, *given),
            outputs=tuple(text_of(gradients_in[i]) for i in with_gradients),
            sizes=tuple(_uneven_sizes(specs[i]) for i in with_gradients),
        )
        backward = self._graph(
            [*(self._primals[i] for i in saved_operands), *activations, *self._tangents], gradients
        )
        return PartitionedGraphs(
            self._operands,
            RegionGraph(
                self._graph(self._primals, [*results, *activations]),
                region._replace(outputs=(*region.outputs, *nothing), sizes=(*region.sizes, *nothing)),
            ),
            self._num_results,
            GradientGraphs(
                RegionGraph(backward, backward_region),
                RegionGraph(
                    self._graph([*self._primals, *self._tangents], gradients),
                    backward_region._replace(inputs=(*region.inputs, *given)),
                ),
                saved_operands,
                differentiable,
                with_gradients,
            ),
        )

    def _check_partials(
        self,
        inputs: Sequence[Placements | None],
        outputs: Sequence[Placements | None],
        with_gradients: Sequence[int],
        differentiable: Sequence[int],
    ) -> None:
        """Raises for partials other than sums: a body has no place for the factor of average gradients."""
        name, mesh = self._function.name, self._function.mesh
        for indices, placements, what in (
            (with_gradients, inputs, "operand"),
            (differentiable, outputs, "result"),
        ):
            for i in indices:
                check_differentiable(placements[i] or (), f"{what} {i}", name)
                if num_averaged(placements[i], mesh) > 1:
                    raise NotImplementedError(
                        f"funcol.apply_local_map: {name}: {what} {i} is a partial average and requires a "
                        "gradient, which a traced region does not have. Make it a partial sum."
                    )

    def _nodes_of_forward(self, results: Sequence[Any]) -> set[Node]:
        """Returns the nodes from which ``results`` are computed, without inputs, with all items of tuples."""
        nodes = {node for node in _sources(results, self._inputs) if node.op != "get_attr"}
        for node in self._joint.graph.nodes:
            if node.target is operator.getitem and node.args[0] in nodes:
                nodes.add(node)
        return nodes

    def _nodes_to_save(self, gradients: Sequence[Any], of_forward: set[Node]) -> set[Node]:
        """Returns the inputs and nodes of the forward graph from which ``gradients`` are computed."""
        known = self._inputs | of_forward
        computed = _sources(gradients, known)
        return known & {*gradients}.union(*(node.all_input_nodes for node in computed))

    def _graph(self, inputs: Sequence[Node], results: Sequence[Any]) -> GraphModule:
        """Returns the part of the joint graph from the nodes ``inputs`` to ``results``."""
        graph = Graph()
        new: dict[Node, Node] = {}
        for i, node in enumerate(inputs):
            new[node] = graph.placeholder(f"operand_{i}")
            new[node].meta = dict(node.meta)
        wanted = _sources(results, new)
        for node in self._joint.graph.nodes:
            if node in wanted:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] if isinstance(node, Node) else node for node in results))
        return GraphModule(self._joint, graph)


def _sources(results: Sequence[Any], known: Container[Node]) -> set[Node]:
    """Returns the nodes from which ``results`` are computed, including these, back to ``known`` nodes."""
    sources: set[Node] = set()
    pending = [node for node in results if isinstance(node, Node)]
    while pending:
        node = pending.pop()
        if node not in sources and node not in known:
            sources.add(node)
            pending.extend(node.all_input_nodes)
    return sources


def _uneven_sizes(spec: DTensorSpec | None) -> Sizes | None:
    """Returns the full sizes of a tensor whose shards are uneven, so that a rank cannot know them."""
    if spec is None or not uneven_dims([spec]):
        return None
    return tuple(int(size) for size in spec.shape)
