"""funcol's kernels of PyTorch's collectives under :func:`funcol.install`; kernels of programs stay in effect.

An operator of ``_c10d_functional`` with a program's kernel keeps it, and all collectives then go through
PyTorch's operators. While an operator of ``c10d`` has a program's kernel, all operators keep PyTorch's
kernels, which call it, and funcol's own collectives go through ``c10d``, too. ``torch.library`` reports
kernels that are registered and removed while funcol is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.library

from .. import _C
from . import patching

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd")
# Dispatch keys of the devices that funcol has kernels for, as the dispatcher writes them.
_KEYS = ("CPU", "CUDA", "CompositeExplicitAutograd[alias]", "CompositeImplicitAutograd[alias]")
# Places where PyTorch and funcol register kernels.
_KNOWN_PLACES = (
    "/torch/csrc/",
    *(f"/csrc/ops/{name}.cpp" for name in ("core_kernels", "point_to_point", "results")),
)
_INACTIVE = " (inactive)"


def ops_with_program_kernels() -> list[str]:
    """Returns the operators that programs gave kernels of their own."""
    return [
        op
        for op in (*_functional_ops(), *_c10d_ops())
        if any(_is_program_kernel(line) for line in torch._C._dispatch_dump(op).splitlines())
    ]


def _functional_ops() -> list[str]:
    return [op for op in _C.ops_with_core_kernels() if op.split("::")[0] in _NAMESPACES]


@functools.cache
def _c10d_ops() -> list[str]:
    return [op for op in torch._C._dispatch_get_all_op_names() if op.startswith("c10d::")]


def _is_program_kernel(line: str) -> bool:
    key, _, place = line.partition(": registered at ")
    return key.removesuffix(_INACTIVE) in _KEYS and not any(known in place for known in _KNOWN_PLACES)


def _concerns_core_ops(args: tuple[Any, ...]) -> bool:
    """Returns true if ``args``, of a method of a ``Library`` or of its finalizer, name PyTorch's
    collectives."""
    names = getattr(args[0], "ns", None)
    if names is not None:
        return names in (*_NAMESPACES, "c10d")
    return any(key.split("/")[0] in (*_NAMESPACES, "c10d") for key in args[1])


def install() -> Callable[[], None]:
    """Installs funcol's kernels in place of PyTorch's. Returns the function that undoes it."""
    return _InstalledKernels().undo


def _forget_kernels() -> None:
    """Makes PyTorch's Python dispatcher look up again the kernels that have changed."""
    keys = torch._C.DispatchKey
    for name in _C.ops_with_core_kernels():
        packet = getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1])
        for key in (keys.CPU, keys.CUDA, keys.AutogradCPU, keys.AutogradCUDA):
            packet.default._uncache_dispatch(key)


class _InstalledKernels:
    """funcol's kernels of PyTorch's operators, except :func:`ops_with_program_kernels`; :meth:`undo` ends."""

    def __init__(self) -> None:
        self._excluded: list[str] = []
        with ExitStack() as undo:
            undo.callback(self._remove)
            self._install(ops_with_program_kernels())
            for path in ("Library.impl", "Library._destroy", "_del_library"):
                theirs = patching.find_function(torch.library, path)
                if patching.is_own(theirs):
                    ours = self._then_update(patching.copy_function(theirs))
                    undo.callback(patching.redirect(theirs, ours))
            self.undo = undo.pop_all().close

    def _then_update(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            matters = _concerns_core_ops(args)
            result = stock(*args, **kwargs)
            excluded = ops_with_program_kernels() if matters else self._excluded
            if excluded != self._excluded:
                _C.remove_core_kernels()
                self._install(excluded)
            return result

        return call

    def _install(self, excluded: list[str]) -> None:
        self._excluded = excluded
        is_below = any(op in _c10d_ops() for op in excluded)
        _C.install_core_kernels(_functional_ops() if is_below else excluded)
        _C.set_ops_are_replaced(bool(excluded))
        _C.set_c10d_ops_are_replaced(is_below)
        _forget_kernels()

    def _remove(self) -> None:
        _C.set_ops_are_replaced(False)
        _C.set_c10d_ops_are_replaced(False)
        _C.remove_core_kernels()
        _forget_kernels()
