"""Context parallelism on the CPU, while funcol is under DTensor.

PyTorch's ``context_parallel`` runs attention over a sequence that is cut among ranks as a ring: keys and
values go round, partial results are merged. It knows the CUDA operators of attention; the CPU's is added
here, in the same ring.

PyTorch counterpart: ``torch.distributed.tensor.experimental._context_parallel._attention``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._library.utils import fill_defaults
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives.import_hooks import after_import

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE_DIM = 2

_is_wanted = False
_module: ModuleType | None = None


def put() -> None:
    """Adds the CPU's attention to what PyTorch's context parallelism takes, until :func:`take`."""
    global _is_wanted
    _is_wanted = True
    _update()


def take() -> None:
    """Undoes :func:`put`."""
    global _is_wanted
    _is_wanted = False
    _update()


def _update() -> None:
    if _module is None:
        return
    for op in (_FORWARD, _BACKWARD):
        if _is_wanted:
            _module.custom_ops[op] = _run
        else:
            _module.custom_ops.pop(op, None)


def _found(module: ModuleType) -> None:
    global _module
    _module = module
    _update()


after_import(_MODULE, _found)


def _run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """DTensor's handler of both operators: one call on local tensors a step of the ring."""
    assert _module is not None
    args, kwargs = fill_defaults(op._schema, args, kwargs)  # type: ignore[no-untyped-call]
    if kwargs["attn_mask"] is not None:
        raise NotImplementedError(
            f"funcol: {op} with an attn_mask under context_parallel. Use is_causal, or no mask."
        )
    *tensors, dropout_p, is_causal = args
    mesh = _mesh_of(op, tensors)
    locals_ = [tensor._local_tensor for tensor in tensors]
    how = {"is_causal": is_causal, "dropout_p": dropout_p, **kwargs}
    if op is _FORWARD:
        query, key, value = locals_
        results = _module._templated_ring_attention(
            mesh.get_group(), _SEQUENCE_DIM, op, query=query, key=key, value=value, **how
        )
    else:
        grad_out, query, key, value, out, logsumexp = locals_
        results = _module._templated_ring_attention_backward(
            mesh.get_group(),
            _SEQUENCE_DIM,
            op,
            grad_out=grad_out,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            **how,
        )
    return tuple(DTensor.from_local(result, mesh, [Shard(_SEQUENCE_DIM)]) for result in results)


def _mesh_of(op: OpOverload, tensors: list[Any]) -> DeviceMesh:
    placements = {tensor.placements if isinstance(tensor, DTensor) else None for tensor in tensors}
    if placements != {(Shard(_SEQUENCE_DIM),)}:
        raise NotImplementedError(
            f"funcol: {op} of tensors with {placements} under context_parallel. Expected DTensors with "
            f"(Shard({_SEQUENCE_DIM}),), all on a mesh of one axis."
        )
    mesh: DeviceMesh = tensors[0].device_mesh
    return mesh
