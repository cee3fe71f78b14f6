"""Handlers of operators, entered in the table of DTensor's dispatcher and taken out again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor

from .patching import entered

Handler = Callable[[OpOverload, tuple[Any, ...], dict[str, Any]], Any]


def handlers() -> dict[OpOverload, Handler]:
    """The table of DTensor's dispatcher, whose handlers run operators in the place of the dispatcher."""
    table: Any = DTensor._op_dispatcher._custom_op_handlers
    return table  # type: ignore[no-any-return]


def enter(ours: Mapping[OpOverload, Handler]) -> Callable[[], None]:
    """Enters ``ours`` in the table. Returns the function that undoes it."""
    return entered(handlers(), ours)
