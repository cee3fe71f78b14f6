"""The recorded graph of a function on local tensors and its gradient, parted into one graph for each."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import Graph, GraphModule, Node

from .recording import CLOSED_OVER, TANGENT, Recording
from .regions import (
    Placements,
    Region,
    Sizes,
    average_of,
    check_differentiable,
    gradient_placements,
    key_of,
    text_of,
    uneven_dims,
)
from .traced_functions import Function, Traced


class PartedGraph:
    """The graph of a function and its gradient, as one graph for each."""

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

    def traced(self) -> Traced:
        function, operands = self._function, self._operands
        replicated = (Replicate(),) * function.mesh.ndim
        closed_over = len(operands) - len(function.placements)
        inputs = [*function.placements, *([replicated] * closed_over)]
        outputs = list(function.body.placements)
        full = dataclasses.replace(
            function,
            placements=tuple(inputs),
            labels=[*function.labels, *(["a tensor it closes over"] * closed_over)],
        )
        results = [node.meta["val"] if isinstance(node, Node) else node for node in self._results]
        wholes = full.result_specs(operands, results[: self._num_results])
        region = Region(
            function.name,
            function.are_whole,
            key_of(function.mesh),
            tuple(map(text_of, inputs)),
            tuple(map(text_of, outputs)),
            tuple(map(_uneven_sizes, wholes)),
        )
        if not self._recording.differentiable:
            forward = self._graph(self._primals, self._results)
            return Traced(operands, forward, region, self._num_results)
        return self._with_gradients(full, region, inputs, outputs)

    def _with_gradients(
        self,
        function: Function,
        region: Region,
        inputs: list[Placements | None],
        outputs: list[Placements | None],
    ) -> Traced:
        results, gradients = self._results[: self._num_results], self._results[self._num_results :]
        wrt = self._recording.requires_gradient
        with_gradients = [i for i, gradient in zip(wrt, gradients, strict=True) if gradient is not None]
        gradients = [gradient for gradient in gradients if gradient is not None]
        ahead = self._ahead(results)
        needed = self._needed(gradients, ahead)
        saved_operands = [i for i, node in enumerate(self._primals) if node in needed]
        left = [node for node in self._joint.graph.nodes if node in needed and node in ahead]
        left.sort(key=lambda node: not isinstance(node.meta["val"], Tensor))  # tensors, then sizes
        forward = self._graph(self._primals, [*results, *left])
        backward = self._graph(
            [*(self._primals[i] for i in saved_operands), *left, *self._tangents], gradients
        )
        gradients_in, gradients_out = gradient_placements(inputs, outputs)
        for i, stated in enumerate(function.gradients or ()):
            gradients_in[i] = stated or gradients_in[i]
        differentiable = self._recording.differentiable
        specs = function.operand_specs(self._operands)
        self._check_partials(inputs, outputs, with_gradients, differentiable)
        given = tuple(text_of(gradients_out[i]) for i in differentiable)
        backward_region = Region(
            f"{region.name}, backward",
            region.are_whole,
            region.mesh,
            (
                *(region.inputs[i] for i in saved_operands),
                *(None for _ in left),
                *given,
            ),
            tuple(text_of(gradients_in[i]) for i in with_gradients),
            tuple(_uneven_sizes(specs[i]) for i in with_gradients),
        )
        return Traced(
            self._operands,
            forward,
            region._replace(
                outputs=(*region.outputs, *(None for _ in left)), sizes=(*region.sizes, *(None for _ in left))
            ),
            self._num_results,
            backward,
            backward_region,
            saved_operands,
            differentiable,
            with_gradients,
            self._graph([*self._primals, *self._tangents], gradients),
            backward_region._replace(inputs=(*region.inputs, *given)),
        )

    def _check_partials(
        self,
        inputs: Sequence[Placements | None],
        outputs: Sequence[Placements | None],
        with_gradients: Sequence[int],
        differentiable: Sequence[int],
    ) -> None:
        """The gradient of an average is not that of its parts, and a body has no place for the factor."""
        name, mesh = self._function.name, self._function.mesh
        for indices, placements, what in (
            (with_gradients, inputs, "operand"),
            (differentiable, outputs, "result"),
        ):
            for i in indices:
                check_differentiable(placements[i] or (), f"{what} {i}", name)
                if average_of(placements[i], mesh) > 1:
                    raise NotImplementedError(
                        f"funcol.apply_local_map: {name}: {what} {i} is a partial average and requires a "
                        "gradient, which a traced region does not have. Make it a partial sum."
                    )

    def _ahead(self, results: Sequence[Any]) -> set[Node]:
        """What the results are computed from, without the inputs; of operators with several results all."""
        ahead: set[Node] = set()
        pending = [node for node in results if isinstance(node, Node)]
        while pending:
            node = pending.pop()
            if node not in ahead and node not in self._inputs and node.op != "get_attr":
                ahead.add(node)
                pending.extend(node.all_input_nodes)
        for node in self._joint.graph.nodes:
            if _is_part_of_tuple(node) and node.args[0] in ahead:
                ahead.add(node)
        return ahead

    def _needed(self, gradients: Sequence[Any], ahead: set[Node]) -> set[Node]:
        """What the gradients are computed from that is an input or known ahead."""
        needed: set[Node] = set()
        seen: set[Node] = set()
        pending = list(gradients)
        while pending:
            node = pending.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._inputs or node in ahead:
                needed.add(node)
            else:
                pending.extend(node.all_input_nodes)
        return needed

    def _graph(self, inputs: Sequence[Node], results: Sequence[Any]) -> GraphModule:
        """From the nodes of ``inputs`` to ``results``."""
        graph = Graph()
        new: dict[Node, Node] = {}
        for i, node in enumerate(inputs):
            new[node] = graph.placeholder(f"operand_{i}")
            new[node].meta = dict(node.meta)
        wanted: set[Node] = set()
        pending = [node for node in results if isinstance(node, Node)]
        while pending:
            node = pending.pop()
            if node not in wanted and node not in new:
                wanted.add(node)
                pending.extend(node.all_input_nodes)
        for node in self._joint.graph.nodes:
            if node in wanted:
                new[node] = graph.node_copy(node, new.__getitem__)
        graph.output(tuple(new[node] if isinstance(node, Node) else node for node in results))
        return GraphModule(self._joint, graph)


def _is_part_of_tuple(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _uneven_sizes(spec: DTensorSpec | None) -> Sizes | None:
    """The whole sizes, if not all ranks have as much, so that a rank cannot tell."""
    if spec is None or not uneven_dims([spec]):
        return None
    return tuple(int(size) for size in spec.shape)
