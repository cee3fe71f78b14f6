"""Facts about the build, and counts of calls."""

def registered_kernels() -> dict[str, list[str]]: ...
def redistribution_counts() -> tuple[int, int]:
    """The redistributions that this process has begun, and the bytes that the busiest rank of each sends."""

def why_no_cuda_kernels() -> str | None:
    """None where there are CUDA kernels, which the call loads."""
