"""install() in a process of its own: what it imports, and when DTensor gets funcol's functions."""

from __future__ import annotations

import subprocess
import sys

import pytest


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_imported() -> None:
    run("""
import sys
import funcol
before = set(sys.modules)
funcol.install()
assert set(sys.modules) == before, set(sys.modules) - before
""")


IS_UNDER_BOTH = """
from funcol import installation
from torch.distributed.tensor import DTensor
import torch.distributed.fsdp
import funcol.installation.dtensor, funcol.installation.fully_shard
assert installation.is_under_dtensor()
assert DTensor.to_local.__code__.co_filename == funcol.installation.dtensor.__file__
assert installation.fully_shard._replaced_now
funcol.uninstall()
assert not installation.is_under_dtensor()
assert DTensor.to_local.__code__.co_filename != funcol.installation.dtensor.__file__
assert not installation.fully_shard._replaced_now
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "first",
    [
        "import torch.distributed.tensor",
        "import torch.distributed.fsdp",
        "funcol.redistribute",
        "import funcol.sharding",
        "import funcol.local_map",
        "import funcol.weights; funcol.weights.full_state_dict",
    ],
)
def test_dtensor_and_fsdp2_get_funcols_functions_when_they_are_imported(first: str) -> None:
    run(f"""
import funcol
funcol.install()
assert not funcol.installation.is_under_dtensor()
{first}
{IS_UNDER_BOTH}""")


def test_what_is_not_wanted_any_more_stays_as_it_is() -> None:
    run("""
import funcol
funcol.install()
funcol.uninstall()
import torch.distributed.fsdp
from torch.distributed.tensor import DTensor
assert "torch" in DTensor.to_local.__code__.co_filename
assert not funcol.installation.is_under_dtensor()
with funcol.installed():
    assert funcol.installation.is_under_dtensor()
assert not funcol.installation.is_under_dtensor()
""")
