"""The functional collectives, the tensors that they return, and the groups that they run on.

PyTorch counterpart: ``torch.distributed._functional_collectives``.
"""

from . import functions
from .functions import *  # noqa: F403

__all__ = functions.__all__
