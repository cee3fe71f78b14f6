"""Finds the C++ side for the running PyTorch, and refuses to load one that was built for another."""

from __future__ import annotations

from collections.abc import MutableSequence
from pathlib import Path

# In a wheel for several minors, the libraries for PyTorch 2.15 lie in the package's folder torch_2_15.
_FOLDER = "torch_"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def add_libraries(package_path: MutableSequence[str], running: str) -> None:
    """Adds the folder with the libraries for the running PyTorch to a package's ``__path__``.

    Changes nothing where the libraries lie in the package itself: it was built for one PyTorch. Raises
    ``ImportError`` where the package has folders for other minors alone.
    """
    found = {path.name: path for path in Path(package_path[0]).glob(f"{_FOLDER}*")}
    if not found:
        return
    folder = found.get(_FOLDER + _minor(running).replace(".", "_"))
    if folder is None:
        minors = sorted(name.removeprefix(_FOLDER).replace("_", ".") for name in found)
        raise ImportError(
            f"This funcol has libraries for PyTorch {', '.join(minors)}, but PyTorch {running} is running. "
            "Install one of these PyTorch minors, or build funcol for this one from its source: "
            "pip install --no-build-isolation --force-reinstall --no-deps <path to funcol's source>"
        )
    package_path.append(str(folder))


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
