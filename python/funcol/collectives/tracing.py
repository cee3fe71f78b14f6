"""The border between funcol and ``torch.compile``.

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
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from .. import _C, _compat
from .import_hooks import after_import

_BUILDER = "torch._dynamo.variables.builder"
_remaps_wanted = True
_remap_in_dynamo: Callable[[bool], None]


def install(remap_in_dynamo: Callable[[bool], None]) -> None:
    """Keeps funcol's operators in graphs, and hides the wake key while compiled callables run.

    Once Dynamo is imported, ``remap_in_dynamo(enabled)`` is called to set whether it traces
    ``torch.distributed``'s collectives; see :func:`remap_collectives`.
    """
    global _remap_in_dynamo
    _remap_in_dynamo = remap_in_dynamo
    _mark_side_effects()
    _settle_before_higher_order_ops()
    _compat.hide_in_compiled_regions(_C.exclude_wake_key, after_import)
    after_import(_BUILDER, lambda builder: remap_in_dynamo(_remaps_wanted))


def remap_collectives(enabled: bool) -> None:
    """Sets whether regions that Dynamo traces from now on call :mod:`funcol.remaps` where their source calls
    ``torch.distributed``'s in-place collectives. If not, PyTorch itself handles these calls."""
    global _remaps_wanted
    _remaps_wanted = enabled
    if _BUILDER in sys.modules:
        _remap_in_dynamo(enabled)


def _mark_side_effects() -> None:
    """Keeps the ops that funcol added to ``_c10d_functional`` from being removed as dead code."""
    for name in ("wait_tensor", "wait_tensors", "isend", "irecv", "batch_p2p_ops"):
        packet = getattr(torch.ops._c10d_functional, name)
        torch.fx.node.has_side_effect(packet)
        torch.fx.node.has_side_effect(packet.default)
    for name in torch.ops.funcol.__dir__():
        packet = getattr(torch.ops.funcol, name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            torch.fx.node.has_side_effect(packet.default)


def _settle_before_higher_order_ops() -> None:
    """Settles each tensor that a higher-order operator, such as ``cond``, is called with.

    Those operators are dispatched in Python, by the highest key of their tensors, past every C++ fallback.
    They do not know the wake key, which a tensor may have without being pending.
    """
    ops: Any = torch._ops
    original = ops.key_extractor
    wake_key = torch._C._dispatch_key_parse(_C.wake_key_name())

    def key_extractor(tensors: Any, key_mask: Any) -> Any:
        for tensor in tensors:
            _C.settle(tensor)
        return original(tensors, key_mask).remove(wake_key)

    ops.key_extractor = key_extractor


def are_we_tracing() -> bool:
    """Returns true if Dynamo, ``make_fx``, fake tensors or AOTAutograd record operators, not compute them."""
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
    """Lets tensors that ``torch.distributed`` is still writing to enter compiled regions, while active.

    PyTorch then records the ``Work`` of each eager collective with ``async_op=True``, so that
    :func:`~funcol.wait_tensor` inside the region waits for it. Results of funcol's own collectives may always
    enter one.
    """
    c10d = torch._C._distributed_c10d
    before = c10d._allow_inflight_collective_as_graph_input()
    c10d._set_allow_inflight_collective_as_graph_input(value)
    try:
        yield
    finally:
        c10d._set_allow_inflight_collective_as_graph_input(before)
