"""Op strategies of local maps, for solvers that choose the placements of an entire graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSpec, OpStrategy

from ..redistribution.specs import spec_of, with_placements
from ..sharding.propagation import redistribute_cost_table
from .regions import Placements, checked_placements


def get_local_map_placement_option(
    mesh: DeviceMesh,
    op: Any,
    specs: Sequence[OpStrategy | None],
    user_args: Sequence[Any],
    user_kwargs: Mapping[str, Any],
    output_val: Tensor | Sequence[Any] | None,
    in_placements: Sequence[Sequence[Placement] | None],
    out_placements: Sequence[Sequence[Placement] | None],
) -> OpStrategy:
    """Returns the single strategy of a function on local tensors, as a PyTorch ``OpStrategy``.

    ``specs`` has an ``OpStrategy`` for each of the node's operands, ``None`` for those that are not tensors;
    ``user_args`` are the operands, or all arguments of a node of :data:`~funcol.local_map.local_map_hop`;
    both in the order of ``in_placements``. ``output_val`` is the node's result. ``in_placements`` and
    ``out_placements`` are those of ``node.meta["custom"]["dtensor_local_map_kwargs"]``, of a forward or a
    backward node; an operand or result with ``None`` there has a replicated spec and costs nothing.

    The strategy's single ``OpSpec`` has the specs of results and operands, and for each operand the costs of
    redistributing it from each strategy in ``specs``: those of
    :func:`funcol.sharding.redistribute_cost_table`, in microseconds.

    Raises ``ValueError`` if the sequences differ in length or if placements do not fit the tensors.
    """
    name = str(op)
    if user_kwargs:
        raise ValueError(
            f"funcol.get_local_map_placement_option: {name} has the keyword arguments {sorted(user_kwargs)}, "
            "which have no placements. Pass operands by position."
        )
    operands = list(user_args)[len(user_args) - len(in_placements) :]
    if not len(operands) == len(in_placements) == len(specs):
        raise ValueError(
            f"funcol.get_local_map_placement_option: {name} has {len(user_args)} arguments, "
            f"{len(specs)} specs and {len(in_placements)} in_placements. Give one of each for every operand."
        )
    values = [output_val] if isinstance(output_val, Tensor) or output_val is None else list(output_val)
    if len(values) != len(out_placements):
        raise ValueError(
            f"funcol.get_local_map_placement_option: {name} has {len(values)} results and "
            f"{len(out_placements)} out_placements. Give one for each result."
        )
    inputs: list[DTensorSpec] = []
    costs: list[list[float]] = []
    for i, (operand, wanted, strategy) in enumerate(zip(operands, in_placements, specs, strict=True)):
        value = operand.meta.get("val") if isinstance(operand, torch.fx.Node) else operand
        if not isinstance(value, Tensor):
            continue
        spec = _spec(mesh, wanted, value, f"operand {i}", name)
        inputs.append(spec)
        if strategy is None:
            raise ValueError(
                f"funcol.get_local_map_placement_option: {name}: operand {i} is a tensor of shape "
                f"{tuple(value.shape)} without a strategy. Give one in specs."
            )
        costs.append(_costs(strategy, spec, is_moved=wanted is not None))
    outputs = [
        _spec(mesh, wanted, value, f"result {i}", name) if isinstance(value, Tensor) else None
        for i, (value, wanted) in enumerate(zip(values, out_placements, strict=True))
    ]
    is_single = isinstance(output_val, Tensor)
    return OpStrategy(
        [
            OpSpec(
                output_specs=outputs[0] if is_single else tuple(outputs),
                input_specs=tuple(inputs),
                redistribute_cost=costs,
            )
        ]
    )


def _spec(
    mesh: DeviceMesh, placements: Sequence[Placement] | None, value: Tensor, what: str, name: str
) -> DTensorSpec:
    wanted: Placements = (Replicate(),) * mesh.ndim if placements is None else tuple(placements)
    if len(wanted) != mesh.ndim:
        raise ValueError(
            f"funcol.get_local_map_placement_option: {name}: {what} has {len(wanted)} placements for the "
            f"{mesh.ndim} axes of {mesh}. Give one for each axis."
        )
    wanted = checked_placements(wanted, value.dim(), what, name)
    return spec_of(mesh, wanted, value)


def _costs(strategy: OpStrategy, target: DTensorSpec, is_moved: bool) -> list[float]:
    sources = [way.output_spec for way in strategy.strategies]
    if not is_moved:
        return [0.0] * len(sources)
    known = [with_placements(target, source.mesh, source.placements) for source in sources]
    return [row[0] for row in redistribute_cost_table(known, [target])]
