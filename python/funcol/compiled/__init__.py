"""Collectives, redistributions and local maps in compiled regions."""


def remap_collectives(enabled: bool) -> None:
    """Makes Dynamo, which has to be imported, trace collectives as :mod:`.remaps` has them, or as PyTorch."""
    from . import dynamo  # imports Dynamo, which takes longer than all of funcol

    dynamo.remap_collectives(enabled)
