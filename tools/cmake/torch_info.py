"""Prints, as JSON, what the build needs to know about the PyTorch of the Python that runs this file.

Used by CMake (torch.cmake) and by setup.py, so both see the same PyTorch and refuse the same ones. With
FUNCOL_ANY_TORCH=1 in the environment no release is refused, and the package records that its release is
unsupported: tools/next_torch tries funcol with such releases.
"""

import importlib.util
import json
import os
import re
import sys
import sysconfig
from pathlib import Path

OLDEST, NEWEST = (2, 11), (2, 15)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]}-{NEWEST[0]}.{NEWEST[1]}"


class UnsuitableTorchError(Exception):
    """There is no PyTorch here that funcol can be built against."""


def collect() -> dict[str, str]:
    """Returns facts as strings: an empty one means absent, a list is joined with semicolons."""
    if importlib.util.find_spec("torch") is None:
        raise UnsuitableTorchError(
            f"funcol is built against an installed PyTorch, and {sys.executable} has none. "
            f"Install PyTorch {SUPPORTED} first, then: pip install --no-build-isolation ."
        )
    import torch

    version = torch.__version__.split("+")[0]
    if not is_supported(version) and not takes_any_torch():
        raise UnsuitableTorchError(
            f"funcol supports PyTorch {SUPPORTED}, and {sys.executable} has {torch.__version__}. "
            "Install a supported one, then: pip install --no-build-isolation ."
        )
    if not torch.distributed.is_available():
        raise UnsuitableTorchError(
            f"The PyTorch {torch.__version__} of {sys.executable} was built without distributed support "
            "(torch.distributed.is_available() is False), which funcol needs. Install another build of it."
        )
    root = Path(torch.__file__).parent
    include = root / "include"
    return {
        "version": version,
        "is_supported": str(is_supported(version)),
        "cuda": torch.version.cuda or "",
        "cxx11_abi": str(int(torch.compiled_with_cxx11_abi())),
        "include_dirs": f"{include};{include / 'torch' / 'csrc' / 'api' / 'include'}",
        "lib_dir": str(root / "lib"),
        "cuda_include_dir": _include_dir("nvidia.cu13", "cuda_runtime_api.h"),
        "nccl_include_dir": _include_dir("nvidia.nccl", "nccl.h"),
        "python_include_dir": sysconfig.get_path("include"),
        "python_library": _python_library(),
        "extension_suffix": sysconfig.get_config_var("EXT_SUFFIX"),
    }


def takes_any_torch() -> bool:
    """Returns true if the build tries any PyTorch release."""
    return os.environ.get("FUNCOL_ANY_TORCH") == "1"


def is_supported(version: str) -> bool:
    """Returns true if funcol supports the PyTorch `version`, such as "2.15.0" or "2.15.0a0+git123"."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST


def build_folder(version: str) -> str:
    """Returns the folder of a build against PyTorch `version`, below the source tree."""
    return f"build/torch-{version}-py{sys.version_info.major}{sys.version_info.minor}"


def _python_library() -> str:
    """Returns the shared library of this Python, which programs that start an interpreter link."""
    name = str(sysconfig.get_config_var("LDLIBRARY"))
    folders = (Path(str(sysconfig.get_config_var("LIBDIR"))), Path(sys.base_prefix) / "lib")
    found = (folder / name for folder in folders if (folder / name).is_file())
    return str(next(found, "")) if ".so" in name else ""


def _include_dir(package_name: str, header: str) -> str:
    """Returns the headers of a package of NVIDIA's, on which the CUDA builds of PyTorch depend."""
    try:
        package = importlib.util.find_spec(package_name)
    except ModuleNotFoundError:
        return ""
    folders = package.submodule_search_locations if package else None
    found = (Path(folder) / "include" for folder in folders or [])
    return next((str(folder) for folder in found if (folder / header).is_file()), "")


if __name__ == "__main__":
    try:
        print(json.dumps(collect(), indent=2))
    except UnsuitableTorchError as error:
        sys.exit(str(error))
