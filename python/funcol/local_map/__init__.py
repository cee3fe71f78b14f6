"""Functions on local tensors, applied to sharded ones: eagerly, under tracers, and for solvers.

PyTorch counterpart: ``torch.distributed.tensor.experimental.local_map``.
"""

from .eager import LocalMap, apply_local_map, call_in_compiled_region

__all__ = ["LocalMap", "apply_local_map", "call_in_compiled_region"]
