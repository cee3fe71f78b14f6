"""Refuses to load the C++ side into a PyTorch that it was not built for."""

from __future__ import annotations


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def check_torch(built_for: str, running: str, has_distributed: bool) -> None:
    """Raises ``ImportError`` unless the running PyTorch is of the minor built for and has distributed.

    C++ classes of PyTorch change from minor to minor, so that a library built for another one would crash.
    """
    rebuild = "pip install --no-build-isolation --force-reinstall --no-deps <path to funcol's source>"
    if _minor(built_for) != _minor(running):
        raise ImportError(
            f"funcol was built for PyTorch {built_for}, but PyTorch {running} is running. "
            f"Rebuild it in this environment: {rebuild}"
        )
    if not has_distributed:
        raise ImportError(
            f"funcol needs torch.distributed, which this PyTorch {running} was built without. Install a "
            f"PyTorch with distributed support, such as the one on PyPI, and rebuild: {rebuild}"
        )
