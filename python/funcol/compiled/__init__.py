"""Collectives, redistributions and local maps in compiled regions."""

from . import remaps
from .remaps import *  # noqa: F403

__all__ = [*remaps.__all__, "remap_collectives"]


def remap_collectives(enabled: bool) -> None:
    """Makes Dynamo, which has to be imported, trace collectives as :mod:`.remaps` does, or as PyTorch
    does."""
    from . import dynamo  # imports Dynamo, which takes longer than all of funcol

    dynamo.remap_collectives(enabled)
