"""Where the C++ library looks for functions of DTensor's gradients, until they are handed to it."""

from .dropin.dtensor import redistribute_local_tensor as redistribute_local_tensor
from .redistribution.gradients import gradient_of_redistribute as _gradient_of_redistribute  # noqa: F401
from .redistribution.local_gradients import gradient_of_from_local as _gradient_from_local  # noqa: F401
from .redistribution.local_gradients import gradient_of_to_local as _gradient_to_local  # noqa: F401
