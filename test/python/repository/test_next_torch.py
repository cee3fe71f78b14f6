"""tools/next_torch's report, PyTorch releases that the build accepts, and install() under an unknown one."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import next_torch
import pytest
import torch
import torch_facts
from processes import run_python
from versions import TORCH

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools" / "cmake"))
import torch_info  # noqa: E402

of_newest_release = pytest.mark.skipif(
    TORCH != torch_info.NEWEST,
    reason="the facts are those of the newest supported release",
)

COLLECTIVES = "torch.distributed._functional_collectives"
OWN = {"_c10d_functional::broadcast": "_c10d_functional::broadcast(Tensor input, int src) -> Tensor"}
OLD: dict[str, Any] = {
    "version": "2.15.0",
    "errors": {},
    "dispatch_keys": ["CPU", "Python", "AutogradOther", "AutocastCPU", "DeferredInit", "PythonDispatcher"],
    "wake_key": {"name": "DeferredInit", "has_fallback": False, "kernels": []},
    "schemas": OWN,
    "members": {"ProcessGroup": ["allreduce", "rank"], "Backend": ["rank"]},
    "collectives": ["all_reduce"],
    "missing_imports": {},
    "functions": {
        f"{COLLECTIVES}:all_reduce": "aaaa",
        "torch.distributed.tensor._api:DTensor.to_local": "bbbb",
    },
    "fsdp2": {"replaced": ["foreach_reduce"], "left": [], "unknown": [], "missing": []},
}


def new(**changes: Any) -> dict[str, Any]:
    return {**OLD, "version": "2.16.0", **changes}


def reported(facts: dict[str, Any], old: dict[str, Any] | None = OLD) -> str:
    return "\n".join(next_torch.report(facts, old, OWN))


# Functions


def test_equal_releases_differ_in_nothing() -> None:
    text = reported(new())
    assert "PyTorch 2.16.0 beside 2.15.0" in text
    assert "install() replaces 1 of 1 functions" in text
    assert "1 of 1 functions have the source that they have in 2.15.0" in text
    assert text.count("nothing is new, nothing is gone") == 4
    assert not any(word in text for word in ("unknown", "missing", "another", "not in funcol"))


def test_functions_of_another_source_are_listed_apart_from_missing_ones() -> None:
    digests = {f"{COLLECTIVES}:all_reduce": "cccc", "torch.distributed.tensor._api:DTensor.to_local": None}
    text = reported(new(functions=digests))
    assert "of another source (1): all_reduce" in text
    assert "missing (1): DTensor.to_local" in text


def test_fsdp2s_functions_that_are_left_are_listed_with_the_reasons() -> None:
    fsdp2 = {
        "replaced": ["foreach_reduce"],
        "left": ["FSDPParamGroup.unshard"],
        "unknown": ["FSDPParamGroup.unshard", "alloc_storage"],
        "missing": ["all_gather_single"],
    }
    text = reported(new(fsdp2=fsdp2))
    assert "install() replaces 1 of 2 functions" in text
    assert "left to PyTorch (1): FSDPParamGroup.unshard" in text
    assert "of unknown source (1): alloc_storage" in text
    assert "missing (1): all_gather_single" in text


def test_missing_names_are_listed_with_the_place_of_their_import() -> None:
    text = reported(new(missing_imports={"torch.distributed.gone": ["python/funcol/a.py:3", "b.py:4"]}))
    assert "torch.distributed.gone (python/funcol/a.py:3)" in text


# Dispatch keys


@pytest.mark.parametrize(
    ("keys", "wake", "state"),
    [
        (["Python", "AutocastCPU", "DeferredInit"], {}, "free, above Python"),
        (["DeferredInit", "Python", "Autograd"], {}, "free, but below Python"),
        (["Python"], {}, "gone"),
        (["DeferredInit"], {"has_fallback": True}, "taken, PyTorch registers a fallback for it"),
        (["DeferredInit"], {"kernels": ["aten::add"]}, "taken, PyTorch registers kernels of aten::add"),
    ],
)
def test_the_state_of_the_wake_key(keys: list[str], wake: dict[str, Any], state: str) -> None:
    text = reported(new(dispatch_keys=keys, wake_key={**OLD["wake_key"], **wake}))
    assert re.search(f"wake key DeferredInit: {state}", text)


def test_keys_that_are_new_or_gone_are_listed() -> None:
    text = "\n".join(next_torch.keys_section(new(dispatch_keys=["DeferredInit", "Fresh"]), OLD))
    assert "new (1): Fresh" in text
    assert "gone (5): CPU, Python" in text


# Operators and members


def test_operators_that_are_new_or_gone_say_whether_funcol_has_them() -> None:
    text = reported(new(schemas={"_c10d_functional::fresh": "_c10d_functional::fresh(Tensor x) -> Tensor"}))
    assert "new (1): fresh (not in funcol)" in text
    assert "gone (1): broadcast\n" in text


@pytest.mark.parametrize(
    ("after", "change"),
    [
        ("x::f(Tensor input, str group) -> Tensor", "str group, not Any group"),
        ("x::f(Tensor input) -> Tensor", "nothing, not Any group"),
        ("x::f(Tensor input, Any group, int n=1) -> Tensor", "int n=1, not nothing"),
        ("x::f(Tensor input, Any group) -> Tensor[]", "-> Tensor[], not -> Tensor"),
    ],
)
def test_a_changed_schema_names_what_changed(after: str, change: str) -> None:
    assert next_torch.schema_changes("x::f(Tensor input, Any group) -> Tensor", after) == change


def test_members_that_are_new_or_gone_are_listed_by_class() -> None:
    text = reported(new(members={"ProcessGroup": ["allreduce", "fresh"], "Backend": ["rank"]}))
    assert "ProcessGroup:\n  new (1): fresh\n  gone (1): rank\n  Backend:\n  nothing is new" in text


@of_newest_release
def test_funcols_own_schemas_are_those_of_the_running_pytorch_operators() -> None:
    own, theirs = next_torch.own_schemas(), torch_facts.schemas()
    assert {"_c10d_functional::all_reduce", "_c10d_functional::wait_tensors"} <= own.keys() & theirs.keys()
    pairs = [(own[name], theirs[name]) for name in own.keys() & theirs.keys()]
    assert len(pairs) > 10
    assert [mine.count(",") for mine, _ in pairs] == [schema.count(",") for _, schema in pairs]


# Facts that cannot be compared


@pytest.mark.parametrize("part", [name for name in OLD if name not in ("version", "errors")])
def test_a_part_that_cannot_be_collected_is_a_line_with_its_error(part: str) -> None:
    facts = new(errors={part: "ImportError: gone"})
    del facts[part]
    assert f"{part}: not known, ImportError: gone" in reported(facts)
    assert f"{part}: not known, ImportError: gone" in reported(facts, None)


def test_without_a_supported_release_operators_are_compared_with_funcols_own() -> None:
    text = reported(
        new(schemas={"_c10d_functional::broadcast": "x::broadcast(Tensor input) -> Tensor"}), None
    )
    assert "there is no .venv" in text
    assert "nothing, not int src (1): broadcast" in text


def test_a_python_without_pytorch_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Traceback' >&2\necho 'ImportError: libcudart' >&2\nexit 1\n")
    python.chmod(0o755)
    text = reported(next_torch.facts_of(str(python)))
    assert "PyTorch: not known, ImportError: libcudart" in text
    assert "Traceback" not in text


@of_newest_release
def test_this_pytorch_has_all_that_funcol_imports() -> None:
    facts = next_torch.facts_of(sys.executable)
    assert facts["errors"] == {}
    assert facts["missing_imports"] == {}
    assert facts["version"] == torch.__version__
    assert facts["wake_key"]["name"] in facts["dispatch_keys"]
    assert all(facts["functions"].values())


# The compiler's log


LOG = f"""
[1/2] Building
{ROOT}/csrc/ops/wait.cpp:12:5: error: 'wait' is not a member of 'c10d'
   12 |     c10d::wait();
{ROOT}/csrc/comm/work.h:3:10: fatal error: torch/gone.h: No such file or directory
{ROOT}/csrc/ops/wait.cpp:40:1: error: expected ';'
{ROOT}/csrc/ops/wait.cpp:12:5: error: 'wait' is not a member of 'c10d'
ninja: build stopped
"""


def test_compiler_errors_are_grouped_by_file_without_repetition() -> None:
    assert next_torch.build_errors(LOG) == [
        "  csrc/ops/wait.cpp",
        "    12: 'wait' is not a member of 'c10d'",
        "    40: expected ';'",
        "  csrc/comm/work.h",
        "    3: torch/gone.h: No such file or directory",
    ]


def test_many_compiler_errors_are_cut() -> None:
    log = "\n".join(f"a.cpp:{line}:1: error: no" for line in range(30))
    lines = next_torch.build_errors(log)
    assert len(lines) == 1 + next_torch.MAX_ERRORS + 1
    assert lines[-1] == "  and 10 more"


def test_a_log_without_compiler_errors_shows_its_end() -> None:
    assert next_torch.build_errors("one\n\nerror: cmake was not found.\n") == [
        "  one",
        "  error: cmake was not found.",
    ]


# The command


@pytest.mark.parametrize("arguments", [[], ["newest"], ["../2.16.0"], ["2.16.0", "--pre"]])
def test_a_wrong_call_is_one_line(arguments: list[str]) -> None:
    done = subprocess.run(
        [str(ROOT / "tools" / "next_torch"), *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


# Releases that the build accepts


@pytest.mark.parametrize("version", ["2.10.0", "2.16.0a0+git1234567", "unknown"])
def test_only_the_override_builds_for_an_unsupported_release(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv("FUNCOL_ANY_TORCH", raising=False)
    with pytest.raises(torch_info.UnsuitableTorchError, match="funcol supports PyTorch"):
        torch_info.collect()
    monkeypatch.setenv("FUNCOL_ANY_TORCH", "1")
    assert torch_info.collect()["is_supported"] == "False"


def test_the_override_changes_nothing_for_a_supported_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUNCOL_ANY_TORCH", "1")
    assert torch_info.collect()["is_supported"] == "True"


# install() under an unknown release


UNKNOWN = """
import tempfile
import torch, torch.distributed as dist
import funcol
from funcol import _build_info
_build_info.TORCH_IS_SUPPORTED = False
{change}
funcol.install()
funcol.install()
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo", store=dist.FileStore(tempfile.mktemp(), 1), rank=0, world_size=1)
model = fully_shard(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
print(model.weight.grad.full_tensor().tolist())
dist.destroy_process_group()
"""
UNKNOWN_DIGEST = """
from funcol.installation.fully_shard_table import FUNCTIONS
FUNCTIONS["FSDPParamGroup._to_sharded"] = FUNCTIONS["FSDPParamGroup._to_sharded"]._replace(digests=("gone",))
"""
NO_DTENSOR = "import sys; sys.modules['funcol.installation.install_dtensor'] = None"
NO_FSDP2 = "import sys; sys.modules['funcol.installation.fully_shard'] = None"


@pytest.mark.sampled(3)
@of_newest_release
@pytest.mark.parametrize(
    ("change", "left"),
    [
        (UNKNOWN_DIGEST, r"\d+ functions are"),
        (NO_DTENSOR, "all functions of DTensor and FSDP2 are"),
        (NO_FSDP2, "all functions of FSDP2 are"),
    ],
    ids=["digest", "DTensor", "FSDP2"],
)
def test_install_prints_one_line_of_what_is_left_to_an_unknown_release(change: str, left: str) -> None:
    program = [sys.executable, "-c", UNKNOWN.format(change=change)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "[[1.0, 1.0], [1.0, 1.0]]\n", done.stderr
    [line] = done.stderr.splitlines()
    pattern = rf"funcol does not know PyTorch \S+: {left} left to PyTorch \(the list: python -m funcol info\)"
    assert re.fullmatch(pattern, line)


@of_newest_release
def test_an_unknown_digest_is_counted() -> None:
    count = "len(fully_shard.replaced_and_unsupported()[1])"
    code = f"import funcol; from funcol.installation import fully_shard; a = {count}\n"
    before, after = map(int, run_python("-c", f"{code}{UNKNOWN_DIGEST}print(a, {count})").split())
    assert after > before


INFO = "import funcol.commands.info as info; print(info.info())"


@of_newest_release
def test_info_names_the_error_of_a_part_that_is_left_to_an_unknown_release() -> None:
    said = run_python("-c", f"{UNKNOWN.split('{change}')[0]}{NO_DTENSOR}\n{INFO}")
    assert "left to PyTorch: DTensor and FSDP2  ModuleNotFoundError: " in said
