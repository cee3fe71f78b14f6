"""Functions on local tensors under tracers: one node of the graph in the forward, one in the backward pass.

A traced call of an applied function (:func:`funcol.local_map.apply_local_map`) records the function and its
gradient once, at this rank's shapes, and adds :data:`local_map_hop` to the tracer's graph, with the
recorded body, a :class:`~funcol.local_map.regions.Region` and the operands. Called with DTensors, as when a
graph is traced again with shards in place of full tensors, the operator moves its operands to their
placements and runs its body, so that the second trace holds the operators of the body.

PyTorch counterpart: ``torch._higher_order_ops.local_map``.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import SymInt, Tensor
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_mode, track_tensor_tree
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

from ..collectives.import_hooks import after_import
from ..redistribution.conversions import from_local, to_local
from ..redistribution.functions import redistribute
from ..redistribution.specs import spec_of
from .arguments import LocalMapArguments, flatten, unflatten
from .eager import LocalMap
from .partitioning import GradientGraphs, PartitionedGraphs, RegionGraph, trace
from .recording import Function, ReplaceTensors, local_fakes, probe
from .regions import (
    Placements,
    Region,
    checked_placements,
    current_mesh,
    key_of,
    mesh_of_key,
)


class LocalMapHop(HigherOrderOperator):
    """``local_map_hop(body, region, *operands)``: ``body`` on the local tensors of ``operands``.

    ``body`` is a ``GraphModule`` on local tensors, ``region`` a packed
    :class:`~funcol.local_map.regions.Region`, ``operands`` are tensors and sizes. The result is a tuple.
    Tracers record the call as one node, except for DTensors among the operands, or with ``_inline=True`` for
    operands that are this rank's tensors already: then the call runs the body itself.
    """

    def __init__(self) -> None:
        super().__init__("funcol_local_map")  # type: ignore[no-untyped-call]

    def __call__(
        self, body: Any, region: tuple[Any, ...], *operands: Any, _inline: bool = False
    ) -> tuple[Any, ...]:
        if any(isinstance(operand, DTensor) for operand in operands):
            return _on_dtensors(body, Region.of(region), operands)
        if _inline:
            return tuple(body(*_as_contiguous_as_traced(body, operands)))
        result: tuple[Any, ...] = super().__call__(body, region, *operands)  # type: ignore[no-untyped-call]
        return result


def _as_contiguous_as_traced(body: Any, operands: Sequence[Any]) -> list[Any]:
    """Makes ``operands`` contiguous where they were when ``body``, which may contain views, was recorded."""
    if not isinstance(body, GraphModule):
        return list(operands)
    traced = [node.meta.get("val") for node in body.graph.nodes if node.op == "placeholder"]
    return [
        operand.contiguous()
        if isinstance(operand, Tensor) and isinstance(like, Tensor) and like.is_contiguous()
        else operand
        for operand, like in zip(operands, traced, strict=True)
    ]


local_map_hop = LocalMapHop()


# Calls of an applied function


class _State(threading.local):
    is_inside = False  # of a function: local maps run as in eager calls, as a part of the function
    tensors_are_local = False
    replaced: dict[int, Tensor] = {}  # noqa: RUF012


_state = _State()


@contextlib.contextmanager
def _with_state(**values: Any) -> Iterator[None]:
    before = {name: getattr(_state, name) for name in values}
    vars(_state).update(values)
    try:
        yield
    finally:
        vars(_state).update(before)


def in_compiled_region(replaced: dict[int, Tensor]) -> contextlib.AbstractContextManager[None]:
    """Treats tensors other than DTensors as this rank's, as eager calls do, while active. Local maps find the
    tensors that they close over in ``replaced``, by identity."""
    return _with_state(tensors_are_local=True, replaced={**_state.replaced, **replaced})


class _Replace(ReplaceTensors):
    def replace(self, tensor: Tensor) -> Tensor:
        return _state.replaced.get(id(tensor), tensor)


def run_traced(local_map: LocalMap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call of an applied function under a tracer."""
    flat, structure = flatten(args)

    def call(*local: Any) -> Any:
        with (
            _with_state(is_inside=True),
            _Replace() if _state.replaced else contextlib.nullcontext(),
        ):
            return local_map.call(local, structure, kwargs)

    if _state.is_inside:
        return local_map.run_flat(flat, call)
    is_recorded = get_proxy_mode() is not None
    labels = _labels(local_map, args)
    if any(isinstance(arg, DTensor) for arg in flat):
        if not is_recorded:
            return local_map.run_flat(flat, call)
        signature = local_map.signature_of(flat)
        placements = [
            None if one is None else (signature.moves and signature.moves[i]) or one.placements
            for i, one in enumerate(arg._spec if isinstance(arg, DTensor) else None for arg in flat)
        ]
        return local_map.run_flat(
            flat,
            lambda *local: _call_node(local_map, call, local, placements, signature.mesh, False, labels),
        )
    if not any(isinstance(arg, Tensor) for arg in flat):
        return call(*flat)
    mesh = local_map.arguments.device_mesh or current_mesh()
    are_full = not _state.tensors_are_local
    if not are_full and (not is_recorded or mesh is None):
        return call(*flat)
    if mesh is None:
        raise ValueError(
            f"funcol.apply_local_map: {local_map.name} is traced with tensors that are not DTensors, "
            "which stand for whole ones. Pass device_mesh, or trace under `with mesh:`."
        )
    if are_full:
        local_map.check_full_arguments(flat, mesh)
    placements = list(local_map.inputs or [None] * len(flat))
    return _call_node(local_map, call, flat, placements, mesh, are_full, labels)


def _labels(local_map: LocalMap, args: tuple[Any, ...]) -> list[str]:
    """Returns the name of each flattened argument for errors."""
    try:
        parameters = list(inspect.signature(local_map.func).parameters.values())
    except (TypeError, ValueError):  # the function has no signature
        parameters = []
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters if one.kind in by_position]
    labels: list[str] = []
    for i, arg in enumerate(args):
        of_parameter = f" ('{names[i]}')" if i < len(names) else ""
        labels += [f"argument {len(labels) + k}{of_parameter}" for k in range(len(flatten(arg)[0]))]
    return labels


class _Body:
    """The function from the tensors and sizes among its flattened arguments to those among its results.

    A call remembers the other results.
    """

    def __init__(self, local_map: LocalMap, call: Callable[..., Any], flat: Sequence[Any]) -> None:
        self._local_map, self._call, self._flat = local_map, call, list(flat)
        self.places = [i for i, arg in enumerate(flat) if isinstance(arg, (Tensor, SymInt))]
        self.operands = [flat[i] for i in self.places]

    def __call__(self, *operands: Any) -> list[Any]:
        flat = list(self._flat)
        for place, operand in zip(self.places, operands, strict=True):
            flat[place] = operand
        values, self._structure = flatten(self._call(*flat))
        self._local_map.check_num_outputs(len(values))
        placements = [self._local_map.check_output(i, value) for i, value in enumerate(values)]
        self._is_operand = [isinstance(value, (Tensor, SymInt)) for value in values]
        self._constants = [None if isinstance(one, (Tensor, SymInt)) else one for one in values]
        self.placements = [one for one, is_one in zip(placements, self._is_operand, strict=True) if is_one]
        return [value for value, is_one in zip(values, self._is_operand, strict=True) if is_one]

    def result(self, values: Sequence[Any]) -> Any:
        """Returns the function's own result, with ``values`` as the tensors and sizes in it."""
        rest = iter(values)
        flat = [
            next(rest) if is_one else constant
            for is_one, constant in zip(self._is_operand, self._constants, strict=True)
        ]
        return unflatten(flat, self._structure)


def _call_node(
    local_map: LocalMap,
    call: Callable[..., Any],
    flat: Sequence[Any],
    placements: Sequence[Placements | None],
    mesh: DeviceMesh,
    are_full: bool,
    labels: Sequence[str],
) -> Any:
    body = _Body(local_map, call, flat)
    from_0 = [
        one and checked_placements(one, flat[i].dim(), labels[i], local_map.name)
        for i, one in enumerate(placements)
    ]
    num_dims = [one.dim() if isinstance(one, Tensor) else 0 for one in flat]
    stated_gradients = local_map.stated_gradients(from_0, num_dims, mesh)
    function = Function(
        local_map.name,
        body,
        mesh,
        are_full,
        tuple(from_0[place] for place in body.places),
        [labels[place] for place in body.places],
        [stated_gradients[place] for place in body.places],
    )
    if get_proxy_mode() is None:
        return body.result(probe(function, body.operands))
    return body.result(_emit_nodes(trace(function, body.operands)))


def _emit_nodes(graphs: PartitionedGraphs) -> list[Any]:
    """Emits the node of the forward graph, and that of the backward graph where gradients flow."""
    if graphs.gradients is None:
        return list(_emit_node(graphs.forward, *graphs.operands))
    return list(_Differentiable.apply(graphs, *graphs.operands))


def _emit_node(graph: RegionGraph, *operands: Any) -> tuple[Any, ...]:
    return local_map_hop(graph.body, graph.region.packed(), *operands)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graphs: PartitionedGraphs, *operands: Any) -> tuple[Any, ...]:
        assert graphs.gradients is not None
        with torch._C._AutoDispatchBelowAutograd():
            results = _emit_node(graphs.forward, *operands)
        outputs, activations = results[: graphs.num_results], results[graphs.num_results :]
        held = [*operands, *activations]
        ctx.gradients, ctx.num_operands = graphs.gradients, len(operands)
        ctx.save_for_backward(*(one if isinstance(one, Tensor) else None for one in held))
        ctx.sizes = [None if isinstance(one, Tensor) else one for one in held]
        ctx.mark_non_differentiable(
            *(
                output
                for i, output in enumerate(outputs)
                if isinstance(output, Tensor) and i not in graphs.gradients.differentiable
            )
        )
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        graphs: GradientGraphs = ctx.gradients
        held = [
            size if tensor is None else tensor
            for tensor, size in zip(ctx.saved_tensors, ctx.sizes, strict=True)
        ]
        operands, activations = held[: ctx.num_operands], held[ctx.num_operands :]
        given = [grads[i].contiguous() for i in graphs.differentiable]  # as they were traced
        if torch.is_grad_enabled():  # autograd does not know how activations depend on operands
            results = _emit_node(graphs.from_operands, *operands, *given)
        else:
            saved = [operands[i] for i in graphs.saved_operands]
            results = _emit_node(graphs.backward, *saved, *activations, *given)
        gradients: list[Any] = [None] * len(operands)
        for i, gradient in zip(graphs.with_gradients, results, strict=True):
            gradients[i] = gradient
        return None, *gradients


# The operator, key by key


def _function_of(body: Any, region: Region, operands: Sequence[Any]) -> Function:
    """Returns the body of a node as a function to be traced again."""
    outputs = list(region.placements_out())

    class RetracedBody:
        placements = outputs

        def __call__(self, *local: Any) -> list[Any]:
            with _with_state(is_inside=True):
                return list(body(*local))

    return Function(
        region.name,
        RetracedBody(),
        mesh_of_key(region.mesh),
        region.are_full,
        region.placements_in(),
        [f"operand {i}" for i in range(len(operands))],
        None,
        region.sizes,
    )


@local_map_hop.py_autograd_impl
def _with_gradients(body: Any, region: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    if get_proxy_mode() is not None:
        return tuple(_emit_nodes(trace(_function_of(body, Region.of(region), operands), operands)))
    return _on_data(body, region, *operands)


@local_map_hop.py_functionalize_impl
def _functionalize(ctx: Any, body: Any, region: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    plain = ctx.unwrap_tensors(operands)
    with ctx.redispatch_to_next():
        results: tuple[Any, ...] = ctx.wrap_tensors(local_map_hop(body, region, *plain))
    return results


@local_map_hop.py_impl(ProxyTorchDispatchMode)
def _record_node(
    mode: ProxyTorchDispatchMode, body: Any, region: tuple[Any, ...], *operands: Any
) -> tuple[Any, ...]:
    example = local_map_hop(body, region, *operands)
    tracer: Any = mode.tracer
    known = Region.of(region)
    name = _node_name(known.name)
    if all(body is not module for module in tracer.root.children()):
        tracer.root.register_module(tracer.get_fresh_qualname(f"{name}_body_"), body)
    args = tuple(map(tracer.unwrap_proxy, (body, *operands)))
    proxy = tracer.create_proxy("call_function", local_map_hop, (args[0], region, *args[1:]), {}, name=name)
    # With this number AOTAutograd would give the backward node the metadata of the forward node.
    proxy.node.meta.pop("seq_nr", None)
    proxy.node.meta["custom"] = {
        **proxy.node.meta.get("custom", {}),
        "dtensor_local_map_kwargs": {  # the arguments of apply_local_map()
            "out_placements": known.placements_out(),
            "in_placements": known.placements_in(),
            "in_grad_placements": None,
            "device_mesh": mesh_of_key(known.mesh),
            "redistribute_inputs": True,
        },
    }
    results: tuple[Any, ...] = track_tensor_tree(example, proxy, constant=None, tracer=tracer)
    return results


def _node_name(name: str) -> str:
    """Returns ``"attention_model_py_L41"``: FX would increment a bare number at the end for the next one."""
    return re.sub(r"\W+", "_", re.sub(r":(\d+)", r"_L\1", name.replace(" at ", " ")))


@local_map_hop.py_impl(FakeTensorMode)
def _on_fakes(mode: FakeTensorMode, body: Any, region: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    known = Region.of(region)
    with mode:
        if not known.are_full:
            return tuple(body(*operands))
        function = _function_of(body, known, operands)
        results = body(*local_fakes(function, operands, mode))
        return tuple(function.full_fakes(operands, results))


@local_map_hop.py_impl(DispatchKey.CompositeExplicitAutograd)
def _on_data(body: Any, region: tuple[Any, ...], *operands: Any) -> tuple[Any, ...]:
    """Runs the call on data. A rank takes its shards of full tensors; every rank gets the full results."""
    known = Region.of(region)
    if not known.are_full:
        return tuple(body(*operands))
    mesh = mesh_of_key(known.mesh)
    replicated = (Replicate(),) * mesh.ndim

    def as_dtensor(full: Tensor) -> DTensor:
        spec = spec_of(mesh, replicated, full)
        return from_local(full, spec, spec, mesh)

    def as_tensor(result: DTensor) -> Tensor:
        full = redistribute(result, placements=replicated)
        return to_local(full, full._spec)

    sharded = [
        as_dtensor(operand) if isinstance(operand, Tensor) and placements is not None else operand
        for operand, placements in zip(operands, known.placements_in(), strict=True)
    ]
    return tuple(
        as_tensor(result) if isinstance(result, DTensor) else result
        for result in _on_dtensors(body, known, sharded)
    )


def _on_dtensors(body: Any, region: Region, operands: Sequence[Any]) -> tuple[Any, ...]:
    mesh = next((operand.device_mesh for operand in operands if isinstance(operand, DTensor)), None)
    if mesh is not None and key_of(mesh) != region.mesh:
        raise ValueError(
            f"funcol.local_map_hop: {region.name} is for a {region.mesh}, but the operands are on a "
            f"{key_of(mesh)}. Trace it on that mesh."
        )
    if mesh is None:
        mesh = mesh_of_key(region.mesh)
    placements = list(region.placements_out()), list(region.placements_in())
    local_map = LocalMap(body, LocalMapArguments(*placements, None, mesh, True), region.name)
    local_map.sizes = region.sizes
    return local_map.run_node(operands, lambda *local: body(*_as_contiguous_as_traced(body, local)))


for _mode in (_CachingTorchDispatchMode, _CachedTorchDispatchMode):  # selective checkpointing

    @local_map_hop.py_impl(_mode)
    def _checkpointed(mode: Any, *args: Any, **kwargs: Any) -> Any:
        return mode.__torch_dispatch__(local_map_hop, [], args, kwargs)


def _lower_in_inductor(lowering: Any) -> None:
    """Makes Inductor compile the body in place of the node."""

    def lower(body: Any, region: Any, *operands: Any) -> Any:
        return lowering.process_subgraph_nodes(body.graph_module, list(operands))

    lowering.register_lowering(local_map_hop, type_promotion_kind=None)(lower)


after_import("torch._inductor.lowering", _lower_in_inductor)
