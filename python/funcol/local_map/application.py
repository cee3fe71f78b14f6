"""Functions on local tensors, applied to sharded ones.

:func:`apply_local_map` wraps a function that is written for the tensors one rank holds: DTensors come in and
go out. Eager calls run it at once; under tracers it becomes one node of the graph, see
:mod:`funcol.local_map.tracing`.

PyTorch counterpart: ``torch.distributed.tensor.experimental.local_map``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, overload

from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh

from ..collectives.tracing import are_we_tracing
from .arguments import LocalMapArguments, PlacementsLike, check_keywords
from .eager import LocalMap, num_modes

Applied: TypeAlias = Callable[..., Any]


@overload
def apply_local_map(
    func: Callable[..., Any],
    out_placements: PlacementsLike | Sequence[PlacementsLike],
    in_placements: Sequence[PlacementsLike] | None = None,
    in_grad_placements: Sequence[PlacementsLike] | None = None,
    device_mesh: DeviceMesh | None = None,
    redistribute_inputs: bool = False,
) -> Applied: ...


@overload
def apply_local_map(
    out_placements: PlacementsLike | Sequence[PlacementsLike],
    in_placements: Sequence[PlacementsLike] | None = None,
    in_grad_placements: Sequence[PlacementsLike] | None = None,
    device_mesh: DeviceMesh | None = None,
    redistribute_inputs: bool = False,
) -> Callable[[Callable[..., Any]], Applied]: ...


def apply_local_map(*args: Any, **kwargs: Any) -> Any:
    """Returns a function of DTensors from ``func``, which takes and returns this rank's tensors.

    ``apply_local_map(func, out_placements, ...)`` returns it; ``@apply_local_map(out_placements, ...)``
    decorates.

    - ``out_placements``: placements of the result (a list, one placement for each mesh axis), or a sequence
      of such lists, one for each value of the flattened result; ``None`` for values that are not tensors.
    - ``in_placements``: for each flattened positional argument the placements that it must have; ``None`` for
      arguments that are not tensors. By default DTensors may have any. Plain tensors are passed as they are.
    - ``in_grad_placements``: for each flattened positional argument the placements of the gradient that
      ``func``'s backward pass computes. By default, and for entries that are ``None``, they follow from the
      placements: see :func:`funcol.local_map.regions.gradient_placements`.
    - ``device_mesh``: the mesh of the results (default: that of the first DTensor).
    - ``redistribute_inputs``: redistributes arguments with other placements; otherwise they are an error.

    Without DTensors, a call is a call of ``func`` itself. Under a tracer (``make_fx``, ``aot_export_joint``)
    tensors that are not DTensors are taken as full tensors: they need ``device_mesh``, or a current mesh
    (``with mesh:``), and the graph gets one node :data:`~funcol.local_map.local_map_hop`. ``torch.compile``
    passes them unchanged, as eager calls do.

    Raises ``ValueError`` for placements that are too few or too many, that the arguments do not have, or that
    contradict a shape; for another mesh; and under tracers for results that share memory with arguments and
    for arguments that are modified in place. Raises ``NotImplementedError`` where a gradient is not known,
    such as that of a partial maximum.

    PyTorch counterpart: ``local_map``. Differences: the gradient of a tensor that is replicated along an axis
    on which others are not is partial there, so that it is summed, where PyTorch assumes it to be replicated;
    shards may be uneven; calls are differentiable any number of times.
    """
    func = kwargs.pop("func", None)
    if func is None and args and (args[0] is None or callable(args[0])):
        func, *args = args  # type: ignore[assignment]
    arguments = LocalMapArguments(*args, **kwargs)
    if func is None:
        return lambda decorated: _applied(TraceableLocalMap(decorated, arguments))
    return _applied(TraceableLocalMap(func, arguments))


def _applied(local_map: TraceableLocalMap) -> Applied:
    run = local_map.run

    def applied(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return call_in_compiled_region(local_map, args, kwargs)
        return run(args, kwargs)

    return functools.update_wrapper(applied, local_map.func, updated=())


def call_in_compiled_region(local_map: LocalMap, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Marks a call that Dynamo traces: :mod:`funcol.compiled.dynamo` puts another one into the graph."""
    raise AssertionError("funcol.apply_local_map: called outside of a region that Dynamo traces")


class TraceableLocalMap(LocalMap):
    """A function on local tensors that tracers record as one node of their graph."""

    def run_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if num_modes() and are_we_tracing():
            from .tracing import run_traced

            check_keywords(kwargs, self.name)
            return run_traced(self, args, kwargs)
        return super().run_nested(args, kwargs)
