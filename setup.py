"""Builds funcol's C++ with CMake; everything else about the package is in pyproject.toml.

The build folder, build/torch-<version>-py<version>, is kept: the next build redoes what changed.

Environment: MAX_JOBS (parallel compiler runs), FUNCOL_CUDA (0 or 1), FUNCOL_CUDA_ARCHS ("80;90"),
FUNCOL_BUILD_TESTS (ON, or AUTO: if GoogleTest is there; unset, tests are not built). With FUNCOL_LIBRARIES
nothing is built: the package gets what lies in that folder, libraries for several minors (see tools/wheel).
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
SOURCE_PACKAGE = ROOT / "python" / "funcol"
CUDA_OPTIONS = ("FUNCOL_CUDA", "FUNCOL_CUDA_ARCHS")
CUDA_LIBRARY = "libfuncol_cuda.so"  # of builds with CUDA

sys.path.insert(0, str(ROOT / "tools" / "cmake"))
import torch_info  # noqa: E402


class Build(build):
    """Starts from an empty package folder: what an earlier build left there must not be shipped."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CMakeBuild(build_ext):
    """Builds the libraries, _C and _build_info.py into the package (the source's own, if editable)."""

    def run(self) -> None:
        if os.environ.get("FUNCOL_LIBRARIES"):
            shutil.copytree(os.environ["FUNCOL_LIBRARIES"], self._package(), dirs_exist_ok=True)
            return
        try:
            torch_version = torch_info.collect()["version"]
        except torch_info.UnsuitableTorchError as error:
            sys.exit(f"error: {error}")
        if shutil.which("cmake") is None:
            sys.exit("error: funcol is built with CMake 3.22 or newer, which was not found. Install cmake.")
        build_dir = ROOT / torch_info.build_folder(torch_version)
        self._configure(build_dir)
        target = "all" if os.environ.get("FUNCOL_BUILD_TESTS") else "package_libraries"
        jobs = os.environ.get("MAX_JOBS") or str(_num_cpus())
        self._cmake("--build", build_dir, "--target", target, "--parallel", jobs)
        self._cmake("--install", build_dir, "--prefix", self._package())

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "funcol"
        if os.environ.get("FUNCOL_LIBRARIES"):
            libraries = Path(os.environ["FUNCOL_LIBRARIES"])
            return [str(package / file.relative_to(libraries)) for file in libraries.rglob("*.*")]
        names = [self.get_ext_filename("_C"), "libfuncol.so", "_build_info.py"]
        if (self._package() / CUDA_LIBRARY).is_file():
            names.append(CUDA_LIBRARY)
        return [str(package / name) for name in names]

    def get_output_mapping(self) -> dict[str, str]:
        if not self._is_in_source():
            return {}
        return {output: str(SOURCE_PACKAGE / Path(output).name) for output in self.get_outputs()}

    def _is_in_source(self) -> bool:
        return self.inplace or self.editable_mode

    def _package(self) -> Path:
        return SOURCE_PACKAGE if self._is_in_source() else Path(self.build_lib).resolve() / "funcol"

    def _configure(self, build_dir: Path) -> None:
        cache = build_dir / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(build_dir)  # The source tree was moved or copied, and CMake refuses that.
        options = [f"-DPython_EXECUTABLE={sys.executable}"]
        for name in CUDA_OPTIONS:  # Unset means the default, whatever an earlier build was told.
            options.append(f"-D{name}={os.environ[name]}" if os.environ.get(name) else f"-U{name}")
        if os.environ.get("FUNCOL_BUILD_TESTS"):
            options.append(f"-DFUNCOL_BUILD_TESTS={os.environ['FUNCOL_BUILD_TESTS']}")
        if not cache.is_file() and shutil.which("ninja"):
            options += ["-G", "Ninja"]
        self._cmake("-S", ROOT, "-B", build_dir, *options)

    def _cmake(self, *args: str | Path) -> None:
        sys.stdout.flush()
        failed = subprocess.run(["cmake", *map(str, args)], cwd=ROOT).returncode
        if failed:
            sys.exit(f"error: the C++ build failed (cmake exited with {failed}); the reason is above.")


def _num_cpus() -> int:
    return len(os.sched_getaffinity(0))


if all(importlib.util.find_spec(name) is None for name in ("wheel", "setuptools.command.bdist_wheel")):
    sys.exit("error: this setuptools cannot make a wheel. Install wheel first: pip install wheel")

setup(
    license="BSD-3-Clause",
    ext_modules=[Extension("funcol._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
)
