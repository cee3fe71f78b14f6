"""Context parallelism on the CPU, while funcol is under DTensor.

PyTorch's ``context_parallel`` runs attention over a sharded sequence as a ring: keys and values go round,
partial results are merged. It knows the CUDA operators of attention; this module adds the CPU's to the ring.

PyTorch counterpart: ``torch.distributed.tensor.experimental._context_parallel._attention``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._library.utils import fill_defaults
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives.import_hooks import PutOnImport
from .patching import entered

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE_DIM = 2


def _start(attention: Any) -> Callable[[], None]:
    return entered(attention.custom_ops, dict.fromkeys((_FORWARD, _BACKWARD), _run))


put = PutOnImport(_MODULE, _start).put


def _module() -> Any:
    return sys.modules[_MODULE]


def _run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """DTensor's handler of both operators: a call on local tensors for each step of the ring."""
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
        results = _module()._templated_ring_attention(
            mesh.get_group(), _SEQUENCE_DIM, op, query=query, key=key, value=value, **how
        )
    else:
        grad_out, query, key, value, out, logsumexp = locals_
        results = _module()._templated_ring_attention_backward(
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
