"""Errors of calls whose operator has no result for the shapes, as PyTorch's propagator raises them.

PyTorch finds shapes of results by running the operator on fake tensors, which logs each failure with its
traceback. No sharding rule can help such a call, so it fails at once.
"""

from __future__ import annotations

from types import TracebackType

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.distributed.tensor._op_schema import OpSchema

_NOT_FOR_FAKE_TENSORS = (
    NotImplementedError,
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
# The method of PyTorch's propagator that runs the operator on fake tensors.
_SHAPE_FUNCTION = "_propagate_tensor_meta_non_cached"
_PACKAGE = __name__.partition(".")[0]


def is_shape_error(error: Exception) -> bool:
    """Returns True if PyTorch's propagator raised ``error`` as it ran the operator on fake tensors.

    Errors of operators that cannot run on fake tensors are none: their results, or the shapes of these,
    depend on values.
    """
    if isinstance(error, _NOT_FOR_FAKE_TENSORS):
        return False
    frame = error.__traceback__
    while frame is not None and frame.tb_frame.f_code.co_name != _SHAPE_FUNCTION:
        frame = frame.tb_next
    return frame is not None


def as_pytorchs(error: Exception, op_schema: OpSchema) -> RuntimeError:
    """Returns the error that PyTorch's dispatcher raises for ``error``, without frames of funcol."""
    raised = RuntimeError(f"{error}\n\nSharding propagation failed for {op_schema}")
    raised.__cause__ = error.with_traceback(_below_funcol(error.__traceback__))
    return raised


def _below_funcol(frames: TracebackType | None) -> TracebackType | None:
    while frames is not None and _is_funcols(frames):
        frames = frames.tb_next
    return frames


def _is_funcols(frames: TracebackType) -> bool:
    module: str = frames.tb_frame.f_globals.get("__name__", "")
    return module.partition(".")[0] == _PACKAGE
