"""How funcol and ``torch.compile`` meet.

Inside a compiled region collectives are PyTorch's own ``_c10d_functional`` ops. At its border, a pending
input must not look different from a plain one, or Dynamo would compile the region twice: its guards
compare dispatch keys. While a compiled callable runs, the wake key is therefore excluded on its thread, and
pending tensors are settled by raw access to their storage alone.
"""

from __future__ import annotations

from . import _C, _compat


def install() -> None:
    """Hides the wake key while compiled callables run."""
    _compat.hide_in_compiled_regions(_C.exclude_wake_key)
