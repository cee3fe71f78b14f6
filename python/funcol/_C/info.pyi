"""What was built."""

def registered_kernels() -> dict[str, list[str]]: ...
def why_no_cuda_kernels() -> str | None:
    """None where there are CUDA kernels, which the call loads."""
