"""Collectives, redistributions and local maps in compiled regions."""

from .remaps import (
    REDUCE_OP_TO_STR,
    all_gather_inplace,
    all_gather_tensor_inplace,
    all_reduce_inplace,
    all_to_all_inplace,
    batch_p2p_ops_inplace,
    broadcast_inplace,
    irecv_inplace,
    isend_inplace,
    reduce_scatter_inplace,
    reduce_scatter_tensor_inplace,
    traceable_collective_remaps,
)

__all__ = [
    "REDUCE_OP_TO_STR",
    "all_gather_inplace",
    "all_gather_tensor_inplace",
    "all_reduce_inplace",
    "all_to_all_inplace",
    "batch_p2p_ops_inplace",
    "broadcast_inplace",
    "irecv_inplace",
    "isend_inplace",
    "reduce_scatter_inplace",
    "reduce_scatter_tensor_inplace",
    "remap_collectives",
    "traceable_collective_remaps",
]


def remap_collectives(enabled: bool) -> None:
    """Makes Dynamo, which has to be imported, trace collectives as :mod:`.remaps` has them, or as PyTorch."""
    from . import dynamo  # imports Dynamo, which takes longer than all of funcol

    dynamo.remap_collectives(enabled)
