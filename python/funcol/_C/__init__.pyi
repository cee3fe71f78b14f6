"""The C++ side: one stub for each part of it."""

from .async_tensors import *
from .callbacks import *
from .collectives import *
from .dtensor import *
from .fsdp import *
from .in_flight import *
from .installation import *
from .mesh_changes import *
from .planner import *
from .propagation import *
