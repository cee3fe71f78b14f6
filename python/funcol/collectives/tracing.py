"""How funcol and ``torch.compile`` meet.

Inside a compiled region collectives are PyTorch's own ``_c10d_functional`` ops. At its border, a pending
input must not look different from a plain one, or Dynamo would compile the region twice: its guards
compare dispatch keys. While a compiled callable runs, the wake key is therefore excluded on its thread, and
pending tensors are settled by raw access to their storage alone.

Calls of ``torch.distributed``'s own in-place collectives in a region are traced too: see
:mod:`funcol.remaps` for which.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import _C, _compat

_BUILDER = "torch._dynamo.variables.builder"
_remaps_wanted = True


def install() -> None:
    """Hides the wake key while compiled callables run; traces ``torch.distributed``'s collectives."""
    _compat.hide_in_compiled_regions(_C.exclude_wake_key)
    _compat.after_import(_BUILDER, lambda builder: _apply_remaps())


def remap_collectives(enabled: bool) -> None:
    """Whether regions that Dynamo traces from now on call :mod:`funcol.remaps` where their source calls
    ``torch.distributed``'s in-place collectives. If not, they do what PyTorch itself makes of them."""
    global _remaps_wanted
    _remaps_wanted = enabled
    if _BUILDER in sys.modules:
        _apply_remaps()


def _apply_remaps() -> None:
    from ..compiled import dynamo

    dynamo.remap_collectives(_remaps_wanted)


def _are_we_tracing() -> bool:
    """True if what runs is recorded, not computed: by Dynamo, ``make_fx``, fake tensors, AOTAutograd."""
    if is_dynamo_compiling():
        return True
    modes = torch._C._TorchDispatchModeKey
    return (
        torch._C._get_dispatch_mode(modes.FAKE) is not None
        or torch._C._get_dispatch_mode(modes.FUNCTIONAL) is not None
        or torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.PythonDispatcher)
        or get_proxy_mode() is not None
    )


@contextlib.contextmanager
def allow_inflight_collective_as_graph_input_ctx(value: bool = True) -> Iterator[None]:
    """While active, a tensor that ``torch.distributed`` is still writing to may enter a compiled region.

    PyTorch then notes the ``Work`` of each eager collective with ``async_op=True``, so that
    :func:`~funcol.wait_tensor` inside the region waits for it. Results of funcol's own collectives may
    always enter one.
    """
    c10d = torch._C._distributed_c10d
    before = c10d._allow_inflight_collective_as_graph_input()
    c10d._set_allow_inflight_collective_as_graph_input(value)
    try:
        yield
    finally:
        c10d._set_allow_inflight_collective_as_graph_input(before)
