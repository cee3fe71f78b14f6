"""State dicts of optimizers with full tensors: out of a sharded model's optimizer to one rank, and back.

The form is that of ``torch.distributed.checkpoint.state_dict``: states and groups by the parameters' names.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from .export import ByName, own_rank
from .loading import load
from .state_dicts import check_module, own_full_tensors

_LOAD = "load_full_optimizer_state_dict"


def full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    to: int | None = 0,
    *,
    bucket_bytes: int = 256 << 20,
    dtype: ByName[torch.dtype | None] | torch.dtype | None = None,
    device: torch.device | str | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Returns the states of ``optimizer``, of the parameters of ``model``, with full tensors on global rank
    ``to``, an empty dict on the others. With ``to=None`` every rank gets it.

    All ranks must make the same call. The tensors are streamed like those of a model, by
    :func:`funcol.full_tensors`, which has the other arguments and the errors; their names are those of the
    parameter and of the state, ``"up.weight.exp_avg"``. Missing states are created, as in PyTorch.

    PyTorch counterpart: ``get_optimizer_state_dict`` with ``full_state_dict=True``.
    """
    own: dict[str, Any] = {}

    full = own_full_tensors(
        lambda: _read_state("full_optimizer_state_dict", model, optimizer, own),
        to=to,
        bucket_bytes=bucket_bytes,
        dtype=dtype,
        device=device,
        group=group,
        progress=progress,
    )
    if to is not None and to != own_rank():
        return {}
    states = {
        parameter: {
            key: full[_name_of(parameter, key)] if isinstance(value, Tensor) else value
            for key, value in values.items()
        }
        for parameter, values in own["state"].items()
    }
    return {"state": states, "param_groups": own["param_groups"]}


def load_full_optimizer_state_dict(
    model: nn.Module,
    optimizer: Optimizer,
    state: dict[str, Any] | None,
    src: int = 0,
    *,
    bucket_bytes: int = 256 << 20,
    group: dist.ProcessGroup | None = None,
    progress: bool = False,
) -> None:
    """Copies the states that global rank ``src`` has, with full tensors, into ``optimizer``, which has the
    parameters of ``model``: each rank receives only its shards, and groups the options of ``src``.

    All ranks must make the same call. ``state`` is read on ``src`` only: the result of
    :func:`funcol.full_optimizer_state_dict` or of PyTorch's ``get_optimizer_state_dict`` with
    ``full_state_dict=True``. The other arguments and the errors are those of
    :func:`funcol.load_full_state_dict`. Also raises ``ValueError`` if a parameter is in no group of
    ``state``, and ``TypeError`` if an option of a group is not a number, text, or a sequence of these.

    PyTorch counterpart: ``set_optimizer_state_dict`` with ``full_state_dict=True,
    broadcast_from_rank0=True``.
    """
    own: dict[str, Any] = {}

    def given() -> tuple[dict[str, Tensor] | None, Any]:
        if state is None:
            return None, None
        known = {parameter for one in state["param_groups"] for parameter in one["params"]}
        missing = [name for ours in own["param_groups"] for name in ours["params"] if name not in known]
        if missing:
            raise ValueError(f"funcol::{_LOAD}: {missing[0]!r} is in no group of the state. Pass all groups.")
        return _tensors_of(state), [
            _numbers_of(state),
            [_as_json(one) for one in state["param_groups"]],
        ]

    _, (numbers, groups) = load(
        _LOAD,
        lambda: _read_state(_LOAD, model, optimizer, own),
        given,
        src,
        strict=True,
        names=None,
        bucket_bytes=bucket_bytes,
        group=group,
        progress=progress,
    )
    for parameter, values in numbers.items():
        own["state"][parameter].update(values)
    group_of = {parameter: one for one in groups for parameter in one["params"]}
    for ours in own["param_groups"]:
        for key, value in group_of[ours["params"][0]].items() if ours["params"] else ():
            if key != "params":
                ours[key] = _as_type_of(value, ours.get(key))
    set_optimizer_state_dict(model, optimizer, own)


def _read_state(op: str, model: Any, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Tensor]:
    """Reads the states of ``optimizer`` into ``state``. Returns the tensors among them."""
    check_module(op, model)
    state.update(get_optimizer_state_dict(model, optimizer))
    return _tensors_of(state)


def _name_of(parameter: str, key: str) -> str:
    """Returns the name, in a stream, of the tensor ``key`` in the state of ``parameter``."""
    return f"{parameter}.{key}"


def _tensors_of(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        _name_of(parameter, key): value
        for parameter, values in state["state"].items()
        for key, value in values.items()
        if isinstance(value, Tensor)
    }


def _numbers_of(state: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the states that are not tensors."""
    return {
        parameter: {key: value for key, value in values.items() if not isinstance(value, Tensor)}
        for parameter, values in state["state"].items()
    }


def _as_json(options: dict[str, Any]) -> dict[str, Any]:
    """Returns ``options`` as JSON can represent them. Raises TypeError if it cannot."""
    found = {key: value.tolist() if isinstance(value, Tensor) else value for key, value in options.items()}
    for key, value in found.items():
        try:
            json.dumps(value)
        except TypeError:
            raise TypeError(
                f"funcol::{_LOAD}: option {key!r} of a group is a {type(value).__name__}, expected a "
                "number, a text, or a sequence of these. Set it on every rank."
            ) from None
    return found


def _as_type_of(value: Any, ours: Any) -> Any:
    """Converts ``value``, whose type JSON has not kept, to the type of ``ours``."""
    if isinstance(ours, Tensor):
        return torch.tensor(value, dtype=ours.dtype, device=ours.device)
    return tuple(value) if isinstance(ours, tuple) else value
