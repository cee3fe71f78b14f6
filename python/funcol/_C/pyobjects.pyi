"""DTensorSpecs."""

from collections.abc import Callable
from typing import Any

def spec_methods(
    type: type, equals: Callable[[Any, object], bool], hash: Callable[[Any], int]
) -> tuple[Any, Any]:
    """``__eq__`` and ``__hash__`` of DTensorSpec in C++; ``equals`` and ``hash`` do what is left."""

def placement_methods(types: list[type], equals: list[Callable[[Any, object], bool]]) -> list[Any]:
    """``__eq__`` of the classes of placements in C++; ``equals`` compare those of one class."""

def copy_spec(spec: Any) -> Any:
    """A DTensorSpec that equals this one."""

def canonical_spec(spec: Any) -> Any:
    """Returns the object that represents all DTensorSpecs equal to this one, and belongs to no tensor."""
