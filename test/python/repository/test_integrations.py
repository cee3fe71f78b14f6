"""The integrations with other libraries run, with the results of stock PyTorch, and are short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "tools" / "examples"
FILES = ["accelerate_fsdp2.py", "transformers_tp.py", "trl_weights.py"]


def printed(program: Path) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, str(program)], env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FILES)
def test_an_integration_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) < 40


@pytest.mark.parametrize("library", ["accelerate", "transformers"])
def test_a_training_has_the_losses_of_stock(library: str, tmp_path: Path) -> None:
    pytest.importorskip(library)
    [program] = EXAMPLES.glob(f"{library}_*.py")
    stock = tmp_path / "stock.py"
    stock.write_text(program.read_text().replace("\nfuncol.install()\n", "\n"))
    losses = re.findall(r"^loss \S+$", printed(program), re.MULTILINE)
    assert len(losses) == 4
    assert losses == re.findall(r"^loss \S+$", printed(stock), re.MULTILINE)


def test_trl_gets_the_weights_of_stock() -> None:
    pytest.importorskip("trl")
    found = re.findall(r"^\d\.\w+ \(.*\) (\w+)$", printed(EXAMPLES / "trl_weights.py"), re.MULTILINE)
    assert found == ["equal"] * 4
