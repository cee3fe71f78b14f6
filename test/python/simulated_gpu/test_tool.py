from __future__ import annotations

import subprocess

import pytest
from simulated_gpu_runs import STATUS_AFTER_REPORTS, TOOL, run_python


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--order", "fast", "true"], "--order is random, last, lazy or first, not 'fast'"),
        (["--seed", "x", "true"], "--seed takes a whole number, not 'x'"),
        (["--seed"], "--seed takes a value"),
        (["--devices", "0", "true"], "--devices takes at least 1"),
        (["--speed", "true"], "unknown option '--speed'"),
        ([], "no command is given"),
    ],
)
def test_the_tool_refuses_wrong_arguments(arguments: list[str], message: str) -> None:
    done = subprocess.run([str(TOOL), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr


def test_the_tool_sets_the_number_of_devices() -> None:
    done = run_python("-c", "import torch; print(torch.cuda.device_count())", options=("--devices", "5"))
    assert done.stdout == "5\n"


def test_the_status_of_the_command_is_kept() -> None:
    assert run_python("-c", "raise SystemExit(3)").returncode == 3


def test_operations_are_traced() -> None:
    done = run_python(
        "-c", "import torch; torch.zeros(2, device='cuda').add_(1).tolist()", options=("--trace",)
    )
    assert "aten::add_#1" in done.stderr


def test_an_operation_that_reads_nan_is_reported_if_asked_for() -> None:
    program = "import torch; (torch.empty(8, device='cuda') + 1).tolist()"
    done = run_python("-c", program, SIMULATED_GPU_NAN="1")
    assert done.returncode == STATUS_AFTER_REPORTS
    assert "aten::add#0 reads NaN in a tensor of 8 elements" in done.stderr
    assert 'File "<string>", line 1, in <module>' in done.stderr


def test_an_operation_can_be_made_its_callers_error() -> None:
    done = run_python("-c", "import torch; torch.zeros(2, device='cuda').add_(1)", SIMULATED_GPU_BREAK="1")
    assert done.returncode == 1
    assert "simulated GPU: operation 1, at which SIMULATED_GPU_BREAK stops" in done.stderr


def test_a_kernel_that_fails_is_an_error_of_the_device() -> None:
    program = """
import torch
torch.ones(3, device="cuda").index_select(0, torch.tensor([5], device="cuda"))
torch.cuda.synchronize()
"""
    done = run_python("-c", program)
    assert done.returncode == 1
    assert "aten::index_select#" in done.stderr
    assert "out of range" in done.stderr
    assert "line 4, in <module>" in done.stderr
