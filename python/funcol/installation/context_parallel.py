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
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..collectives.import_hooks import InstallOnImport
from .operators import arguments_of
from .patching import set_entries

_MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_SEQUENCE_DIM = 2


def _install_into(attention: Any) -> Callable[[], None]:
    return set_entries(attention.custom_ops, dict.fromkeys((_FORWARD, _BACKWARD), _run))


install = InstallOnImport(_MODULE, _install_into).install


def _run(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Handles both operators for DTensor: calls them on local tensors for each step of the ring."""
    call = arguments_of(op, args, kwargs)
    if call["attn_mask"] is not None:
        raise NotImplementedError(
            f"funcol: {op} with an attn_mask under context_parallel. Use is_causal, or no mask."
        )
    tensors = {name: value for name, value in call.items() if isinstance(value, Tensor)}
    mesh = _mesh_of(op, list(tensors.values()))
    for name, tensor in tensors.items():
        call[name] = tensor._local_tensor  # type: ignore[attr-defined]
    attention: Any = sys.modules[_MODULE]
    if op is _FORWARD:
        ring = attention._templated_ring_attention
    else:
        ring = attention._templated_ring_attention_backward
        call["grad_out_name"] = "grad_out"
    results = ring(mesh.get_group(), _SEQUENCE_DIM, op, **call)
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
