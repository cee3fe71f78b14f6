"""``dtensor.data = other``, which under PyTorch changes the sizes of ``dtensor`` and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .._compat import fully_shard as _compat
from . import patching

_data: Any = Tensor.data


def _get(self: DTensor) -> Tensor:
    return _data.__get__(self)  # type: ignore[no-any-return]


def _set(self: DTensor, value: Any) -> None:
    """Gives ``self`` the local tensor and the spec of ``value``. The two then share memory, as plain tensors
    do."""
    if not isinstance(value, DTensor):
        raise TypeError(
            f"DTensor.data: the value is a {type(value).__name__}, expected a DTensor. Distribute it with "
            f"distribute_tensor(value, dtensor.device_mesh, {list(self.placements)}), or call "
            "DTensor.from_local."
        )
    fsdp_param = _fsdp_param_of(self)
    if fsdp_param is not None and self._spec != value._spec:
        raise ValueError(
            f"DTensor.data: the value is {value._spec}, but fully_shard manages this parameter as "
            f"{self._spec}. Redistribute the value, or assign before fully_shard is called."
        )
    local, spec = value._local_tensor.detach(), value._spec
    _data.__set__(self, value)
    self._local_tensor, self._spec = local, spec
    if fsdp_param is not None:
        fsdp_param.reset_sharded_param()


def _fsdp_param_of(dtensor: DTensor) -> Any:
    """Returns the ``FSDPParam`` that gathers ``dtensor``, and keeps its memory beside the tensor; ``None`` if
    ``fully_shard`` does not manage the parameter."""
    if "torch.distributed.fsdp._fully_shard._fsdp_state" not in sys.modules:
        return None
    from torch.distributed import _composable_state
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    for reference in list(_composable_state._module_state_mapping.values()):
        state = reference()
        if isinstance(state, FSDPState):
            for group in _compat.param_groups(state):
                for param in group.fsdp_params:
                    if param.sharded_param is dtensor:
                        return param
    return None


def install() -> Callable[[], None]:
    """Makes assignments to ``DTensor.data`` move the local tensor, too, unless a program has replaced the
    attribute. Returns the function that undoes it."""
    if DTensor.data is not _data:
        return lambda: None
    return patching.set_attribute(DTensor, "data", property(_get, _set))
