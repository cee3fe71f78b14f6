"""Specs of DTensors in graphs that ``torch.export`` makes, which take them for arguments of unknown kind.

They become constants of the graph. The type itself is not registered as a constant with ``pytree``: DTensor
flattens lists of specs, and would lose them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _pytree as pytree

from ..collectives.import_hooks import InstallOnImport
from . import patching


@dataclasses.dataclass(unsafe_hash=True)
class _Constant:
    """A spec in a graph. ``pytree`` flattens it to no leaves, and makes the spec of it again."""

    spec: DTensorSpec


pytree.register_pytree_node(
    _Constant, lambda constant: ([], constant), lambda _leaves, constant: constant.spec
)


def _install_into(flat_apply: Any) -> Callable[[], None]:
    theirs = vars(flat_apply).get("to_graphable")
    stock = patching.copy_function(theirs)

    def to_graphable(stuff: Any) -> Any:
        """Replaces ``torch._higher_order_ops.flat_apply.to_graphable``."""
        return stock(pytree.tree_map_only(DTensorSpec, _Constant, stuff))

    return patching.redirect(theirs, to_graphable)


install = InstallOnImport("torch._higher_order_ops.flat_apply", _install_into).install
