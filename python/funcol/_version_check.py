"""Finds the C++ side for the running PyTorch, and refuses to load one that was built for another."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from pathlib import Path
from typing import NoReturn

# In a wheel for several PyTorch releases, the libraries for 2.15 lie in the package's folder torch_2_15.
_FOLDER = "torch_"

_REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps <path to funcol's source>"


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def add_libraries(package_path: MutableSequence[str], running: str) -> None:
    """Adds the folder with the libraries for the running PyTorch to a package's ``__path__``.

    Changes nothing if the libraries lie in the package itself: it was built for one PyTorch. Raises
    ``ImportError`` if the package has folders only for other PyTorch releases.
    """
    minors = _minors_of(package_path[0])
    if not minors:
        return
    if _minor(running) not in minors:
        raise ImportError(
            f"This funcol has libraries for PyTorch {', '.join(minors)}, but PyTorch {running} is running. "
            f"Install one of these PyTorch releases, or build funcol for this one from its source: {_REBUILD}"
        )
    package_path.append(str(Path(package_path[0], _FOLDER + _minor(running).replace(".", "_"))))


def _minors_of(package: str) -> list[str]:
    """Returns the PyTorch releases that the package has folders for, ascending."""
    names = (path.name.removeprefix(_FOLDER) for path in Path(package).glob(f"{_FOLDER}*"))
    return [".".join(map(str, numbers)) for numbers in sorted([*map(int, name.split("_"))] for name in names)]


def refuse_build(package_path: Sequence[str], built_for: str, running: str, error: ImportError) -> NoReturn:
    """Raises ``ImportError`` for libraries that do not load although the minor version is right: ``error``
    says why.

    Builds of one version differ if they were made from other sources or with other options.
    """
    minors = _minors_of(package_path[0])
    has = f"libraries for PyTorch {', '.join(minors)}" if minors else f"libraries for PyTorch {built_for}"
    raise ImportError(
        f"This funcol has {has}, and those for {_minor(running)} do not load in PyTorch {running}, which is "
        f"another build of it than the release {built_for}: {error}. Install that release, or build funcol "
        f"for this PyTorch from its source: {_REBUILD}"
    ) from error


def check_torch(built_for: str, running: str, has_distributed: bool) -> None:
    """Raises ``ImportError`` unless the running PyTorch has the minor version built for, and has distributed.

    C++ classes of PyTorch change with the minor version, so that a library built for another one would crash.
    """
    if _minor(built_for) != _minor(running):
        raise ImportError(
            f"funcol was built for PyTorch {built_for}, but PyTorch {running} is running. "
            f"Rebuild it in this environment: {_REBUILD}"
        )
    if not has_distributed:
        raise ImportError(
            f"funcol needs torch.distributed, which this PyTorch {running} was built without. Install a "
            f"PyTorch with distributed support, such as the one on PyPI, and rebuild: {_REBUILD}"
        )
