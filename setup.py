"""Builds funcol's C++ with CMake; everything else about the package is in pyproject.toml.

The build folder, build/torch-<version>-py<version>, is kept: the next build redoes what changed. An editable
install links to the libraries there, so that `ninja -C <build folder>` updates it.

Environment:
  MAX_JOBS            parallel compiler runs (default: one a core, and one for each 2 GB of free memory)
  FUNCOL_UNITY        1: compile up to forty files at once, the fastest full build; 0: each file by itself,
                      the fastest build after a change (default: 0 for an editable install, else 1)
  FUNCOL_CUDA         0 or 1 (default: 1 if nvcc and a CUDA build of PyTorch are found)
  FUNCOL_CUDA_ARCHS   such as "80;90"
  FUNCOL_BUILD_TESTS  ON, or AUTO: if GoogleTest is found (default: tests are not built)
  FUNCOL_ANY_TORCH    1: accept PyTorch releases that are not supported, too (see tools/next_torch)
  FUNCOL_LIBRARIES    nothing is built: the package gets the libraries in this folder, of one
                      or several PyTorch releases (see tools/wheel)
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
            sys.exit(f"error: {_hidden_torch() or error}")
        if shutil.which("cmake") is None:
            sys.exit("error: funcol is built with CMake 3.22 or newer, which was not found. Install cmake.")
        build_dir = ROOT / torch_info.build_folder(torch_version)
        self._configure(build_dir)
        target = "all" if os.environ.get("FUNCOL_BUILD_TESTS") else "package_libraries"
        jobs = os.environ.get("MAX_JOBS") or str(_num_jobs())
        finds_all_errors = torch_info.takes_any_torch() and (build_dir / "build.ninja").is_file()
        keep_going = ["--", "-k", "0"] if finds_all_errors else []
        self._cmake("--build", build_dir, "--target", target, "--parallel", jobs, *keep_going)
        if self._is_in_source():
            self._link(build_dir)
        else:
            self._cmake("--install", build_dir, "--prefix", self._package())

    def get_outputs(self) -> list[str]:
        package = Path(self.build_lib) / "funcol"
        if os.environ.get("FUNCOL_LIBRARIES"):
            libraries = Path(os.environ["FUNCOL_LIBRARIES"])
            return [str(package / file.relative_to(libraries)) for file in libraries.rglob("*.*")]
        return [str(package / name) for name in self._built_files() if (self._package() / name).is_file()]

    def get_output_mapping(self) -> dict[str, str]:
        if not self._is_in_source():
            return {}
        return {output: str(SOURCE_PACKAGE / Path(output).name) for output in self.get_outputs()}

    def _built_files(self) -> list[str]:
        return [self.get_ext_filename("_C"), "libfuncol.so", CUDA_LIBRARY, "_build_info.py"]

    def _link(self, build_dir: Path) -> None:
        """Makes the source's package refer to the files in the build folder."""
        for name in self._built_files():
            link = self._package() / name
            link.unlink(missing_ok=True)
            if (build_dir / name).is_file():
                link.symlink_to(build_dir / name)

    def _is_in_source(self) -> bool:
        return self.inplace or self.editable_mode

    def _package(self) -> Path:
        return SOURCE_PACKAGE if self._is_in_source() else Path(self.build_lib).resolve() / "funcol"

    def _configure(self, build_dir: Path) -> None:
        cache = build_dir / "CMakeCache.txt"
        if cache.is_file() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text():
            shutil.rmtree(build_dir)  # The source tree was moved or copied, and CMake refuses that.
        unity = os.environ.get("FUNCOL_UNITY") or ("0" if self._is_in_source() else "1")
        options = [f"-DPython_EXECUTABLE={sys.executable}", f"-DFUNCOL_UNITY={unity}"]
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


def _hidden_torch() -> str | None:
    """Returns the advice for a build in which pip's isolation hides the environment's PyTorch."""
    is_isolated = any("pip-build-env-" in path for path in sys.path)
    if not is_isolated or importlib.util.find_spec("torch") is not None:
        return None
    return (
        "funcol is built against an installed PyTorch, and pip's build isolation hides it. "
        "In an environment that has PyTorch, run: pip install --no-build-isolation ."
    )


def _num_jobs() -> int:
    """One job a core, as long as each has 2 GB of the memory that is available."""
    num_cores = len(os.sched_getaffinity(0))
    try:
        with open("/proc/meminfo") as file:
            sizes = dict(line.split(":", 1) for line in file)
        available = int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return num_cores
    return max(1, min(num_cores, available // (2 * 10**9)))


if all(importlib.util.find_spec(name) is None for name in ("wheel", "setuptools.command.bdist_wheel")):
    sys.exit("error: this setuptools cannot make a wheel. Install wheel first: pip install wheel")

setup(
    license="BSD-3-Clause",
    ext_modules=[Extension("funcol._C", sources=[])],
    cmdclass={"build": Build, "build_ext": CMakeBuild},
)
