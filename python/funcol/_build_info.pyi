"""The configuration of this build of funcol. The build writes this module."""

from typing import Final

VERSION: Final[str]
TORCH_VERSION: Final[str]  # "2.15.0": without the local part
TORCH_IS_SUPPORTED: Final[bool]  # false for a release that the build accepted by FUNCOL_ANY_TORCH=1 alone
CUDA: Final[bool]  # whether the CUDA kernels were built
CUDA_ARCHS: Final[str]  # "80;90;100", or empty
CUDA_TOOLKIT: Final[str | None]  # version of nvcc
NCCL: Final[str | None]  # version of the headers found
COMPILER: Final[str]
