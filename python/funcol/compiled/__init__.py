"""What Dynamo makes of collectives, redistributions and local maps in the regions that it compiles."""


def remap_collectives(enabled: bool) -> None:
    """Whether Dynamo, which has to be imported, traces collectives as :mod:`.remaps` has them."""
    from . import dynamo  # imports Dynamo, which would cost more than all of funcol if it came first

    dynamo.remap_collectives(enabled)
