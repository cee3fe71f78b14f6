"""State dicts of full tensors: out of a sharded model to one rank, and from one rank into it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..redistribution.agreement import memory_key
from .export import ByName, full_tensors, local_of, own_rank
from .full_sources import is_sharded
from .fusing import NameOrParts
from .loading import IncompatibleKeys, load


def check_module(op: str, model: Any) -> None:
    """Raises TypeError if ``model`` is not a module."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"funcol::{op}: the model is a {type(model).__name__}, expected a torch.nn.Module. For a mapping "
            "of names to tensors call funcol.full_tensors."
        )


def full_state_dict(
    model: nn.Module,
    to: int | None = 0,
    *,
    bucket_bytes: int = 256 << 20,
    dtype: ByName[torch.dtype | None] | torch.dtype | None = None,
    device: torch.device | str | None = None,
    names: ByName[NameOrParts | None] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Returns ``model.state_dict()`` with full tensors on global rank ``to``, an empty dict on the others.
    With ``to=None`` every rank gets it.

    All ranks must make the same call. The tensors are streamed by :func:`full_tensors`, which has the other
    arguments and the errors: with ``device="cpu"`` a device holds two buckets at a time, not the full model.
    They share no memory with the model; tied tensors are one tensor. Entries other than tensors are
    unchanged, under their own names.

    PyTorch counterpart: ``get_model_state_dict`` with ``full_state_dict=True``.
    """
    state: dict[str, Any] = {}

    def named() -> dict[str, Tensor]:
        check_module("full_state_dict", model)
        state.update(model.state_dict())
        return {name: value for name, value in state.items() if isinstance(value, Tensor)}

    full = own_full_tensors(
        named,
        names,
        to=to,
        bucket_bytes=bucket_bytes,
        dtype=dtype,
        device=device,
        group=group,
        progress=progress,
    )
    if to is not None and to != own_rank():
        return {}
    others = {name: value for name, value in state.items() if not isinstance(value, Tensor)}
    found = full | others
    return found if names is not None else {name: found[name] for name in state if name in found}


def own_full_tensors(
    named: Callable[[], Mapping[str, Tensor]], names: ByName[NameOrParts | None] | None = None, **options: Any
) -> dict[str, Tensor]:
    """Returns the tensors that :func:`funcol.full_tensors` yields on this rank for ``named()``, in memory of
    their own. Results that are the same tensor of the model remain one tensor."""
    memory: set[int] = set()

    def read() -> Mapping[str, Tensor]:
        tensors = named()
        memory.update(local_of(tensor).untyped_storage()._cdata for tensor in tensors.values())
        return tensors

    copies: dict[Any, Tensor] = {}
    full: dict[str, Tensor] = {}
    with full_tensors(read, names=names, **options) as stream:  # type: ignore[arg-type]
        for name, tensor in stream:
            if tensor is None:
                continue
            if tensor.untyped_storage()._cdata in memory:
                same = memory_key(tensor)
                if same not in copies:
                    copies[same] = tensor.clone()
                tensor = copies[same]
            full[name] = tensor
    return full


def load_full_state_dict(
    model: nn.Module,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | None,
    src: int = 0,
    *,
    strict: bool = True,
    names: ByName[NameOrParts] | None = None,
    bucket_bytes: int = 256 << 20,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> IncompatibleKeys:
    """Copies full tensors, which global rank ``src`` has, into the parameters and buffers of ``model``: each
    rank receives only its shards.

    All ranks of ``group`` (default: the world) must make the same call. On ``src``, ``tensors`` is a mapping,
    which may read each tensor on access, or pairs of names and tensors, which are read and loaded in their
    own order, a bucket at a time; other ranks may pass ``None``. ``names``: a mapping or function from names
    of the model to those that ``src`` has, or to a :class:`funcol.weights.Cat` or
    :class:`~funcol.weights.Stack` of several of them; a name that a mapping lacks is kept. With
    ``strict=False`` tensors whose names are missing keep their values, and names that the model does not have
    are ignored; both are returned, on all ranks.

    Sharded DTensors, on any mesh, are values of a ``dict`` on the ranks of their mesh. Their shards go
    straight into those of the model: no rank has a full tensor. If ``src`` has a full tensor of that name, it
    is loaded instead.

    Tensors may have any dtype and device, and replicated DTensors count as full tensors; they get the dtype
    and device of the model, whose tensors on the meta device are allocated. Consecutive tensors of
    ``bucket_bytes`` go together, by one all_to_all for each dtype and mesh, while the previous bucket is
    copied. Tied tensors are sent once; ``src`` sends to all replicas, including those on other submeshes.
    Stages of a pipeline load from ranks of their own: ranks that share neither a mesh nor ``src`` need not
    agree. ``progress``: ``src`` shows on its terminal how many tensors are sent, and how long the rest takes.

    Raises ``ValueError`` on all ranks, before the first byte is sent, if their models differ in names,
    shapes, dtypes, placements, meshes or options, if the ranks of a mesh differ in the shards that they give,
    if ``src`` is not part of a tensor's mesh, or if a parameter is partial. Raises ``ValueError`` on ``src``
    if a name of a mapping is missing or unknown, or a tensor of a ``dict`` has a wrong shape, before anything
    is sent; for other sources, before the bucket is sent, with the names that are loaded already. Raises
    ``RuntimeError`` on the others, with the rank that failed and its reason.

    PyTorch counterpart: ``set_model_state_dict`` with ``full_state_dict=True, broadcast_from_rank0=True``.
    """

    def held() -> dict[str, Tensor]:
        check_module("load_full_state_dict", model)
        _materialize(model)
        return {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}

    given = tensors if type(tensors) is dict else {}  # other mappings may read a file for each tensor
    return load(
        "load_full_state_dict",
        held,
        lambda: (tensors, None),
        src,
        strict=strict,
        names=names,
        bucket_bytes=bucket_bytes,
        group=group,
        progress=progress,
        shards={name: value for name, value in given.items() if is_sharded(value)},
    )[0]


def _materialize(model: nn.Module) -> None:
    """Allocates the tensors of ``model`` that are on the meta device."""
    held = [*model.parameters(), *model.buffers()]
    if not any(tensor.is_meta for tensor in held):
        return
    meshes = (tensor.device_mesh for tensor in held if isinstance(tensor, DTensor))
    device = next((mesh.device_type for mesh in meshes), "cpu")
    materialized: Any = model._apply
    materialized(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)
