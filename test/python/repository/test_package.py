"""Importing funcol, and what it says about itself."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from processes import run_python

import funcol
from funcol import _C, _build_info, commands
from funcol.__main__ import main
from funcol._version_check import add_libraries, check_torch, refuse_build
from funcol.installation import kernels

ROOT = Path(__file__).resolve().parents[3]

# The check at import


@pytest.mark.parametrize(
    ("built_for", "running"),
    [("2.15.0", "2.14.1"), ("2.11.0", "2.15.0+cu130"), ("2.15.0", "3.15.0"), ("2.1.0", "2.11.0")],
)
def test_another_minor_of_pytorch_is_refused(built_for: str, running: str) -> None:
    with pytest.raises(ImportError) as refused:
        check_torch(built_for, running, has_distributed=True)
    message = str(refused.value)
    assert f"built for PyTorch {built_for}" in message
    assert f"PyTorch {running} is running" in message
    assert "pip install --no-build-isolation" in message


@pytest.mark.parametrize("running", ["2.15.0", "2.15.1", "2.15.0+cpu", "2.15.2+cu130", "2.15.0a0+git1234567"])
def test_any_release_of_the_same_minor_is_accepted(running: str) -> None:
    check_torch("2.15.0", running, has_distributed=True)


def test_a_pytorch_without_distributed_is_refused() -> None:
    with pytest.raises(ImportError) as refused:
        check_torch("2.15.0", "2.15.0", has_distributed=False)
    message = str(refused.value)
    assert "torch.distributed" in message
    assert "PyTorch 2.15.0" in message
    assert "pip install --no-build-isolation" in message


def test_this_build_is_for_the_running_pytorch() -> None:
    check_torch(_build_info.TORCH_VERSION, torch.__version__, torch.distributed.is_available())


@pytest.mark.parametrize("running", ["2.15.0", "2.15.1+cpu", "2.15.0a0+git1234567"])
def test_a_package_for_several_minors_has_the_libraries_of_the_running_one(
    tmp_path: Path, running: str
) -> None:
    for folder in ("torch_2_1", "torch_2_11", "torch_2_15"):
        (tmp_path / folder).mkdir()
    path = [str(tmp_path)]
    add_libraries(path, running)
    assert path == [str(tmp_path), str(tmp_path / "torch_2_15")]


def test_a_package_for_one_minor_has_its_libraries_in_itself(tmp_path: Path) -> None:
    (tmp_path / "_build_info.py").touch()
    path = [str(tmp_path)]
    add_libraries(path, "2.15.0")
    assert path == [str(tmp_path)]


def test_a_minor_that_the_package_has_no_libraries_for_is_refused(tmp_path: Path) -> None:
    for folder in ("torch_2_11", "torch_2_15"):
        (tmp_path / folder).mkdir()
    path = [str(tmp_path)]
    with pytest.raises(
        ImportError, match=r"PyTorch 2\.11, 2\.15, but PyTorch 2\.16\.0 is running.*pip install"
    ):
        add_libraries(path, "2.16.0")
    assert path == [str(tmp_path)]


@pytest.mark.parametrize("folders", [(), ("torch_2_15", "torch_2_9", "torch_2_11")], ids=["one", "several"])
def test_libraries_that_another_build_of_pytorch_does_not_load_are_named(
    tmp_path: Path, folders: tuple[str, ...]
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir()
    error = ImportError("undefined symbol: _ZN3c10")
    with pytest.raises(ImportError) as refused:
        refuse_build([str(tmp_path)], "2.15.0", "2.15.0a0+git1234567", error)
    message = str(refused.value)
    assert ("PyTorch 2.9, 2.11, 2.15" if folders else "PyTorch 2.15.0") in message
    assert "do not load in PyTorch 2.15.0a0+git1234567" in message
    assert "undefined symbol: _ZN3c10" in message
    assert "pip install --no-build-isolation" in message
    assert refused.value.__cause__ is error


REFUSED_IMPORT = """
import torch
torch.__version__ = "1.2.3"
try:
    import funcol
except ImportError as error:
    print(error)
"""


def test_importing_under_another_pytorch_says_so() -> None:
    said = run_python("-c", REFUSED_IMPORT)
    assert "1.2.3" in said
    assert _build_info.TORCH_VERSION in said


def test_the_version_is_that_of_the_build() -> None:
    assert funcol.__version__ == _build_info.VERSION


@pytest.mark.parametrize("name", funcol.__all__)
def test_each_public_name_exists(name: str) -> None:
    assert hasattr(funcol, name)


@pytest.mark.parametrize("name", ["full_tensors", "redistribute"])
def test_what_needs_dtensor_is_looked_for_once(name: str) -> None:
    assert getattr(funcol, name) is vars(funcol)[name]


@pytest.mark.parametrize("name", ["cost_models", "groups", "planning", "remaps", "tracing"])
def test_a_module_that_is_named_without_its_package_is_the_one_in_it(name: str) -> None:
    module = importlib.import_module(f"funcol.{name}")
    assert module is getattr(funcol, name)
    assert module is importlib.import_module(module.__name__)
    assert module.__name__ != f"funcol.{name}"


# Side effects that an import must not have


NEW_MODULES = """
import json, sys
import torch, torch.distributed._functional_collectives
before = set(sys.modules)
import funcol
print(json.dumps(sorted(set(sys.modules) - before)))
"""


@pytest.fixture(scope="module")
def new_modules() -> list[str]:
    return json.loads(run_python("-c", NEW_MODULES))


@pytest.mark.parametrize("module", ["torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd"])
def test_importing_does_not_import_the_compiler(new_modules: list[str], module: str) -> None:
    assert module not in new_modules


def test_importing_imports_little_else(new_modules: list[str]) -> None:
    others = {module for module in new_modules if module.split(".")[0] not in ("funcol", "torch")}
    assert others <= set(sys.stdlib_module_names)


# The library of CUDA kernels


needs_cuda_build = pytest.mark.skipif(not _build_info.CUDA, reason="this build has no CUDA kernels")

# The libraries of a process that gathered on the CPU, and after that asked for the CUDA kernels.
LIBRARIES = """
import json, tempfile
from pathlib import Path
import torch, torch.distributed as dist
import funcol

def libraries():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split(maxsplit=5)[5] for line in maps if ".so" in line})

dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
assert funcol.all_gather_tensor(torch.ones(2, 2), 1, dist.group.WORLD).sum() == 4
on_cpu = libraries()
error = funcol._C.why_no_cuda_kernels()
print(json.dumps([on_cpu, libraries(), error]))
dist.destroy_process_group()
"""


class Libraries(NamedTuple):
    on_cpu: list[str]
    with_cuda: list[str]
    error: str | None


@pytest.fixture(scope="module")
def libraries() -> Libraries:
    return Libraries(*json.loads(run_python("-c", LIBRARIES)))


def named(name: str, libraries: list[str]) -> list[str]:
    return [library for library in libraries if f"/{name}" in library]


def test_importing_and_gathering_on_the_cpu_do_not_load_the_cuda_kernels(libraries: Libraries) -> None:
    assert len(named("libfuncol.so", libraries.on_cpu)) == 1
    assert not named("libfuncol_cuda", libraries.on_cpu)


def test_funcol_itself_needs_no_cuda_runtime(libraries: Libraries) -> None:
    [library] = named("libfuncol.so", libraries.on_cpu)
    assert b"libcudart" not in Path(library).read_bytes()


@needs_cuda_build
def test_the_cuda_kernels_share_the_runtime_of_pytorch(libraries: Libraries) -> None:
    assert libraries.error is None
    assert len(named("libfuncol_cuda.so", libraries.with_cuda)) == 1
    assert len(named("libcudart", libraries.with_cuda)) == 1
    assert named("libcudart", libraries.with_cuda) == named("libcudart", libraries.on_cpu)


# python -m funcol info


@pytest.fixture(scope="module")
def info() -> dict[str, str]:
    lines = run_python("-m", "funcol", "info").splitlines()
    return dict(re.split(r"\s{2,}", line, maxsplit=1) for line in lines)


def test_info_has_the_version_of_funcol(info: dict[str, str]) -> None:
    assert info["funcol"].startswith(funcol.__version__)


def test_info_has_both_versions_of_pytorch(info: dict[str, str]) -> None:
    assert torch.__version__ in info["PyTorch"]
    assert _build_info.TORCH_VERSION in info["PyTorch"]


def test_info_has_the_wake_key(info: dict[str, str]) -> None:
    assert info["wake key"] == "DeferredInit"


@pytest.mark.parametrize(("device", "number"), [("CPU", "28"), ("CUDA", "28"), ("Meta", "28")])
def test_info_counts_a_kernel_of_each_op_for_each_device(
    info: dict[str, str], device: str, number: str
) -> None:
    assert info[f"kernels, {device}"] == number


def test_info_has_what_is_taken_over_of_fsdp2(info: dict[str, str]) -> None:
    assert re.match(r"replaces \d+ functions; left to PyTorch: \d+", info["under FSDP2"])
    row = next(line for line in commands.info.info(verbose=True).splitlines() if "under FSDP2" in line)
    assert "FSDPParamGroup._to_unsharded" in row.split("left to PyTorch")[0]


def test_info_says_that_nothing_is_installed_in_its_process(info: dict[str, str]) -> None:
    assert info["in this process"] == "not installed"


def test_info_has_counts_and_its_lists_on_demand(info: dict[str, str]) -> None:
    number = int(re.match(r"(\d+) functions and \d+ operators of PyTorch$", info["install() replaces"])[1])  # type: ignore[index]
    assert max(map(len, info.values())) < 200
    listed = run_python("-m", "funcol", "info", "--verbose")
    row = next(line for line in listed.splitlines() if line.startswith("install() replaces"))
    names = re.search(rf"{number} \((.*?)\) functions", row)[1].split(", ")  # type: ignore[index]
    assert len(names) == number
    assert "all_reduce" in names
    assert "DTensor.redistribute" in listed


def test_info_says_whether_it_has_cuda_kernels(info: dict[str, str]) -> None:
    if _build_info.CUDA:
        assert _build_info.CUDA_ARCHS in info["CUDA"]
    else:
        assert "no kernels" in info["CUDA"]


def test_info_says_why_there_are_no_cuda_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "why_no_cuda_kernels", lambda: "the reason")
    assert "no kernels: the reason" in commands.info.info()


def test_info_has_the_version_of_nccl(info: dict[str, str]) -> None:
    assert (_build_info.NCCL or "none") in info["NCCL"]


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_a_command_that_does_not_exist_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["funcol", *arguments])
    with pytest.raises(SystemExit) as refused:
        main()
    assert refused.value.code == 2
    assert ("info" if arguments else "--help") in capsys.readouterr().err


# Another library has the wake key


WITHOUT_WAKE_KEY = """
import json, sys, tempfile
import torch, torch.distributed as dist

library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), "DeferredInit")

import funcol, funcol.__main__

dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
x = torch.arange(6.0).view(2, 3)


def pending():
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def late(value):
    data = torch.zeros(3)
    [result] = funcol._C.make_pending([data], lambda: data.fill_(value))
    return result


print(json.dumps({use: repr(eval(use)) for use in json.loads(sys.argv[1])}))
"""

USES_WITHOUT_WAKE_KEY = {
    "funcol._C.has_wake_key()": "False",
    "funcol.is_pending(pending())": "True",
    "funcol.is_pending(funcol.wait_tensor(pending()))": "False",
    "torch.equal(pending() + 1, x + 1)": "True",
    "torch.equal(pending().t().reshape(-1), x.t().reshape(-1))": "True",
    "torch.equal(pending().add_(1), x + 1)": "True",
    "pending().numpy().tolist() == pending().tolist() == x.tolist()": "True",
    "torch.equal(funcol.all_gather_tensor(x, 1, dist.group.WORLD), x)": "True",
    "torch.equal(funcol.broadcast(pending(), 0, dist.group.WORLD), x)": "True",
    "late(7.0).sum().item()": "21.0",
    "late(7.0).view(3, 1).t().tolist()": "[[7.0, 7.0, 7.0]]",
    "late(7.0).mul_(2).tolist()": "[14.0, 14.0, 14.0]",
    "torch.cat([late(7.0), late(8.0)]).tolist()": "[7.0, 7.0, 7.0, 8.0, 8.0, 8.0]",
    "late(7.0).numpy().tolist()": "[7.0, 7.0, 7.0]",
    "'none: another library' in funcol.commands.info.info()": "True",
}


@pytest.fixture(scope="module")
def results_without_wake_key() -> dict[str, str]:
    return json.loads(run_python("-c", WITHOUT_WAKE_KEY, json.dumps(list(USES_WITHOUT_WAKE_KEY))))


@pytest.mark.parametrize("use", USES_WITHOUT_WAKE_KEY)
def test_results_are_right_if_another_library_has_the_wake_key(
    results_without_wake_key: dict[str, str], use: str
) -> None:
    assert results_without_wake_key[use] == USES_WITHOUT_WAKE_KEY[use]


def test_an_isolated_build_names_the_option_that_shows_it_pytorch(tmp_path: Path) -> None:
    isolated = tmp_path / "pip-build-env-x" / "overlay"
    program = f"""
import importlib.util, runpy, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
sys.path.append({str(isolated)!r})
sys.argv = ["setup.py", "--quiet", "build_ext"]
runpy.run_path("setup.py", run_name="__main__")
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUNCOL_")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "build isolation hides it" in last
    assert last.endswith("pip install --no-build-isolation .")


def test_files_that_register_kernels_of_pytorchs_operators_are_known() -> None:
    """install() takes other kernels for those of programs, and leaves them in place."""
    registers = r'FRAGMENT\(_c10d_functional,|Library::FRAGMENT, "c10d_functional"'
    files = {f"/csrc/ops/{file.name}" for file in (ROOT / "csrc" / "ops").glob("*.cpp")}
    known = {place for place in kernels._KNOWN_PLACES if place.startswith("/csrc/")}
    assert known == {
        file for file in files if re.search(registers, (ROOT / file.removeprefix("/")).read_text())
    }
