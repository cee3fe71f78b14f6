"""Functions on local tensors, applied to sharded ones: eagerly, under tracers, and for solvers.

PyTorch counterpart: ``torch.distributed.tensor.experimental.local_map``.
"""

import torch.distributed.tensor  # noqa: F401 (first: install() may wait for it)

from .application import TraceableLocalMap, apply_local_map, call_in_compiled_region

__all__ = ["TraceableLocalMap", "apply_local_map", "call_in_compiled_region"]
