"""Records a function on local tensors together with its gradient, once, and parts the two.

The function runs at this rank's shapes, on fake tensors, outside of the tracer that its caller is in. Tensors
that it closes over become operands of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode, dispatch_functionalize
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx, track_tensor_tree
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from .. import _compat
from .regions import (
    Placements,
    Region,
    Sizes,
    average_of,
    check_differentiable,
    counted_from_0,
    dense_strides,
    gradient_placements,
    key_of,
    local_shape,
    spec_of,
    text_of,
    uneven_dims,
    whole_spec,
)

# Names of inputs that a recording gets on its way.
_CLOSED_OVER = "local_map_closed_over_"
_TANGENT = "local_map_tangent_"


class Body(Protocol):
    """A function of tensors and sizes; knows the placements of its results once it was called."""

    @property
    def placements(self) -> Sequence[Placements | None]: ...

    def __call__(self, *operands: Any) -> list[Any]: ...


@dataclasses.dataclass
class Function:
    """A function on local tensors, and where its operands live.

    ``labels`` name the operands in errors. ``gradients``: where those of operands live, ``None`` for what
    follows from the placements. ``sizes``: of results as a whole, where they are known.
    """

    name: str
    body: Body
    mesh: DeviceMesh
    are_whole: bool
    placements: tuple[Placements | None, ...]
    labels: Sequence[str]
    gradients: Sequence[Placements | None] | None = None
    sizes: Sequence[Sizes | None] | None = None

    def operand_specs(self, operands: Sequence[Any]) -> list[DTensorSpec | None]:
        """Of whole operands."""
        return [
            spec_of(
                self.mesh,
                counted_from_0(placements, operand.dim(), label, self.name),
                operand.shape,
                operand.stride(),
                operand.dtype,
            )
            if isinstance(operand, Tensor) and placements is not None and self.are_whole
            else None
            for operand, placements, label in zip(operands, self.placements, self.labels, strict=True)
        ]

    def result_specs(self, operands: Sequence[Any], results: Sequence[Any]) -> list[DTensorSpec | None]:
        """Of local results as a whole."""
        uneven = uneven_dims(self.operand_specs(operands))
        specs: list[DTensorSpec | None] = []
        for i, (result, placements) in enumerate(zip(results, self.body.placements, strict=True)):
            if not isinstance(result, Tensor) or placements is None or not self.are_whole:
                specs.append(None)
            elif self.sizes is not None and self.sizes[i] is not None:
                sizes = self.sizes[i] or ()
                specs.append(
                    spec_of(self.mesh, placements, sizes, dense_strides(result, sizes), result.dtype)
                )
            else:
                specs.append(whole_spec(result, self.mesh, placements, uneven, f"result {i}", self.name))
        return specs

    def whole_fakes(self, operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        """``results``, local tensors, as a whole; a fake mode has to be active."""
        return [
            result if spec is None else _empty(spec.shape, spec.stride, result)
            for result, spec in zip(results, self.result_specs(operands, results), strict=True)
        ]


@dataclasses.dataclass
class Traced:
    """A recorded function: what its two nodes hold, and how their operands and results belong together.

    ``operands`` are those of the call and after them the tensors that the function closed over. The results
    of ``forward`` are the function's ``num_results`` and then what ``backward`` needs. Its operands are those
    of ``saved_operands``, what ``forward`` left for it, and gradients of the results in ``differentiable``;
    its results the gradients of the operands in ``with_gradients``. ``from_operands`` computes the same
    from all operands and these gradients, and so can be differentiated in turn.
    """

    operands: list[Any]
    forward: GraphModule
    region: Region
    num_results: int
    backward: GraphModule | None = None
    backward_region: Region | None = None
    saved_operands: Sequence[int] = ()
    differentiable: Sequence[int] = ()
    with_gradients: Sequence[int] = ()
    from_operands: GraphModule | None = None
    from_operands_region: Region | None = None


def local_fakes(function: Function, operands: Sequence[Any], mode: FakeTensorMode) -> list[Any]:
    """Fake tensors of this rank's shapes, leaves that require gradients where ``operands`` do."""
    fakes = []
    with mode:
        for operand, spec, label in zip(
            operands, function.operand_specs(operands), function.labels, strict=True
        ):
            if not isinstance(operand, Tensor):
                fakes.append(operand)
                continue
            shape = operand.shape if spec is None else local_shape(spec, label, function.name)
            strides = operand.stride() if spec is None else dense_strides(operand, shape)
            fakes.append(_empty(shape, strides, operand).requires_grad_(operand.requires_grad))
    return fakes


def _empty(shape: Sequence[Any], strides: Sequence[Any], like: Tensor) -> Tensor:
    return torch.empty_strided(tuple(shape), tuple(strides), dtype=like.dtype, device=like.device)


def as_contiguous_as_traced(body: Any, operands: Sequence[Any]) -> list[Any]:
    """``operands``, made contiguous where ``body`` was recorded with tensors that are: it may hold views."""
    if not isinstance(body, GraphModule):
        return list(operands)
    traced = [node.meta.get("val") for node in body.graph.nodes if node.op == "placeholder"]
    return [
        operand.contiguous()
        if isinstance(operand, Tensor) and isinstance(like, Tensor) and like.is_contiguous()
        else operand
        for operand, like in zip(operands, traced, strict=True)
    ]


# Tensors that a function closes over


class _Lift(TorchFunctionMode):
    """Replaces tensors of the world outside by operands of our own."""

    def __init__(self, is_foreign: Callable[[Tensor], bool], make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._is_foreign, self._make = is_foreign, make
        self._ours: dict[int, Tensor] = {}
        self.foreign: list[Tensor] = []
        self.ours: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, self._replaced, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _replaced(self, tensor: Tensor) -> Tensor:
        ours = self._ours.get(id(tensor))
        if ours is None:
            if not self._is_foreign(tensor):
                return tensor
            ours = self._ours[id(tensor)] = self._make(tensor)
            self.foreign.append(tensor)
            self.ours.append(ours)
        return ours


def _is_foreign_to(mode: FakeTensorMode, is_functional: bool) -> Callable[[Tensor], bool]:
    """What to tell tensors of the world outside by: what its tracer knows, and tensors that are not fake."""
    outer = get_proxy_mode()
    known = None if outer is None else outer.tracer.tensor_tracker

    def is_foreign(tensor: Tensor) -> bool:
        if isinstance(tensor, FunctionalTensor):
            if not is_functional:
                return True
            tensor = torch._from_functional_tensor(tensor.elem)
        if known is not None and tensor in known:
            return True
        return not isinstance(tensor, FakeTensor) and not torch._is_functional_tensor(tensor)

    return is_foreign


@contextlib.contextmanager
def _alone(mode: FakeTensorMode) -> Iterator[None]:
    """Outside of all modes but ``mode``, and of the hooks by which an outer checkpoint saves its tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks(_same, _same)
    has_hooks = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    with _disable_current_modes(), mode, hooks if has_hooks else contextlib.nullcontext():
        yield


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _mode_of(operands: Sequence[Any]) -> FakeTensorMode:
    found = detect_fake_mode(list(operands))
    return FakeTensorMode() if found is None else found


# Without a tracer


def probe(function: Function, operands: Sequence[Any]) -> list[Any]:
    """Results of the right shapes, connected to ``operands`` where gradients flow; nothing is recorded."""
    mode = _mode_of(operands)
    is_foreign = _is_foreign_to(mode, is_functional=False)
    with _alone(mode):
        lift = _Lift(is_foreign, lambda tensor: _leaf(tensor, mode))
        with lift:
            results = function.body(*local_fakes(function, operands, mode))
        flags = [isinstance(result, Tensor) and result.requires_grad for result in results]
        wholes = function.whole_fakes(operands, results)
    return list(_Shapes.apply(wholes, flags, *operands, *lift.foreign))


def _leaf(like: Tensor, mode: FakeTensorMode) -> Tensor:
    with mode:
        return _empty(like.shape, like.stride(), like).requires_grad_(like.requires_grad)


class _Shapes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, wholes: list[Any], flags: list[bool], *operands: Any) -> tuple[Any, ...]:
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in operands))
        results = [_empty(one.shape, one.stride(), one) if isinstance(one, Tensor) else one for one in wholes]
        ctx.mark_non_differentiable(
            *(one for one, flag in zip(results, flags, strict=True) if not flag and isinstance(one, Tensor))
        )
        return tuple(results)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        gradients = (None if one is None else torch.empty_like(one) for one in ctx.saved_tensors)
        return None, None, *gradients


# With a tracer


def trace(function: Function, operands: Sequence[Any]) -> Traced:
    """Records ``function`` and, if a result requires a gradient, what computes gradients of the operands."""
    mode = _mode_of(operands)
    is_foreign = _is_foreign_to(mode, is_functional=True)
    decompositions = _compat.decompositions_of(get_proxy_mode())
    with _alone(mode):
        recording = _Recording(function, mode, is_foreign)
        primals = local_fakes(function, operands, mode)
        run = dispatch_functionalize(recording.run, FunctionalTensorMode())
        joint = make_fx(run, decomposition_table=decompositions)(*primals)
    return _Parted(function, [*operands, *recording.foreign], recording, joint).traced()


class _Recording:
    """A run of the function and its gradient, under a tracer and made functional."""

    def __init__(
        self, function: Function, mode: FakeTensorMode, is_foreign: Callable[[Tensor], bool]
    ) -> None:
        self._function, self._mode, self._is_foreign = function, mode, is_foreign
        self.num_tangents = 0

    def run(self, *primals: Any) -> tuple[Any, ...]:
        function = self._function
        lift = _Lift(self._is_foreign, lambda tensor: self._lifted(tensor, len(lift.ours)))
        with lift:
            results = function.body(*primals)
        self.foreign = lift.foreign
        labels = [
            *function.labels,
            *(f"the tensor of shape {tuple(t.shape)} it closes over" for t in lift.ours),
        ]
        self._check_functional([*primals, *lift.ours], labels, results)
        self.local_results = [
            (result.requires_grad, result) if isinstance(result, Tensor) else (False, result)
            for result in results
        ]
        self.differentiable = [
            i for i, one in enumerate(results) if isinstance(one, Tensor) and one.requires_grad
        ]
        self.num_results = len(results)
        self.requires_gradient = [
            i for i, one in enumerate([*primals, *lift.ours]) if isinstance(one, Tensor) and one.requires_grad
        ]
        if not self.differentiable:
            return tuple(results)
        self.num_tangents = len(self.differentiable)
        tangents = [self._tangent(results[i], k) for k, i in enumerate(self.differentiable)]
        inputs = [[*primals, *lift.ours][i] for i in self.requires_gradient]
        gradients = torch.autograd.grad(
            [results[i] for i in self.differentiable], inputs, tangents, allow_unused=True
        )
        return *results, *gradients

    def _tangent(self, result: Tensor, k: int) -> Tensor:
        with _alone(self._mode):
            fake = torch.empty(result.shape, dtype=result.dtype, device=result.device)
        return self._input(fake, f"{_TANGENT}{k}")

    def _lifted(self, tensor: Tensor, k: int) -> Tensor:
        with _alone(self._mode):
            fake = _empty(tensor.shape, tensor.stride(), tensor)
        return self._input(fake, f"{_CLOSED_OVER}{k}").requires_grad_(tensor.requires_grad)

    def _input(self, fake: Tensor, name: str) -> Tensor:
        """One more input of the graph that is being recorded."""
        recorder: Any = get_proxy_mode()
        proxy = recorder.tracer.create_proxy("placeholder", name, (), {})
        track_tensor_tree(fake, proxy, constant=None, tracer=recorder.tracer)
        result: Tensor = FunctionalTensor.to_functional(fake)
        return result

    def _check_functional(self, inputs: list[Any], labels: list[str], results: list[Any]) -> None:
        by_storage = {}
        for one, label in zip(inputs, labels, strict=True):
            if not isinstance(one, Tensor):
                continue
            if torch._functionalize_has_data_mutation(one.elem):  # type: ignore[attr-defined]
                raise ValueError(
                    f"funcol.apply_local_map: {self._function.name} changes {label} in place, which a traced "
                    "region cannot do. Change a clone of it, and return that."
                )
            by_storage[_storage_of(one)] = label
        for i, result in enumerate(results):
            if isinstance(result, Tensor):
                label = by_storage.get(_storage_of(result), "")
                if label:
                    raise ValueError(
                        f"funcol.apply_local_map: result {i} of {self._function.name} shares memory with "
                        f"{label}, which the results of a traced region cannot do. Return a clone of it."
                    )


class _Parted:
    """The graph of a function and its gradient, as one graph for each."""

    def __init__(
        self, function: Function, operands: list[Any], recording: _Recording, joint: GraphModule
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
        self._tangents = [placeholders.pop(f"{_TANGENT}{k}") for k in range(recording.num_tangents)]
        closed_over = [placeholders.pop(f"{_CLOSED_OVER}{k}") for k in range(len(recording.foreign))]
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


def _storage_of(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def _is_part_of_tuple(node: Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _uneven_sizes(spec: DTensorSpec | None) -> Sizes | None:
    """The whole sizes, if not all ranks have as much, so that a rank cannot tell."""
    if spec is None or not uneven_dims([spec]):
        return None
    return tuple(int(size) for size in spec.shape)
