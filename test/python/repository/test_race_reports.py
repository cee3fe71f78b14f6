"""Which of ThreadSanitizer's reports count."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import race_reports

FUNCOL = (
    "#0 memcpy ../../sanitizer_common_interceptors.inc:827 (libtsan.so.2+0x6243e)\n"
    "    #1 funcol::copy() ../../csrc/kernels/cpu/rank_major.cpp:33 (libfuncol.so+0x1db36d)\n"
    "    #2 at::_ops::add_Tensor::call() <null> (libtorch_cpu.so+0x2af5d59)"
)
TEST = "#0 TestBody ../../test/cpp/async/wake_test.cpp:97 (test_async+0x1243ab)"
PYTORCH = (
    "#0 operator delete(void*, unsigned long) ../../tsan_new_delete.cpp:150 (libtsan.so+0x86c3d)\n"
    "    #1 c10::TensorImpl::~TensorImpl() <null> (libc10.so+0x5d3e0)\n"
    "    #2 funcol::settle(at::Tensor const&) ../../csrc/async/async_tensor.cpp:196 (libfuncol.so+0x20966a)"
)
LOST = "[failed to restore the stack]"


def report(now: str, before: str, kind: str = "data race") -> str:
    return (
        f"==================\nWARNING: ThreadSanitizer: {kind} (pid=23954)\n"
        f"  Write of size 8 at 0x7b5c00585938 by main thread:\n    {now}\n\n"
        f"  Previous atomic read of size 8 at 0x7b5c00585938 by thread T3:\n    {before}\n\n"
        "  Thread T3 'gloo' (tid=23959, running) created by main thread at:\n"
        "    #0 pthread_create ../../tsan_interceptors_posix.cpp:1001 (libtsan.so.2+0x5e686)\n"
        "    #1 c10d::ProcessGroupGloo::start() <null> (libtorch_cpu.so+0x698fc04)\n\n"
        f"SUMMARY: ThreadSanitizer: {kind} wherever\n==================\n"
    )


@pytest.mark.parametrize(("now", "before"), [(FUNCOL, FUNCOL), (FUNCOL, TEST), (FUNCOL, LOST)])
def test_a_race_between_accesses_of_funcol_counts(now: str, before: str) -> None:
    found, total = race_reports.findings(
        report(PYTORCH, FUNCOL) + report(now, before) + report(FUNCOL, PYTORCH)
    )
    assert total == 3
    (one,) = found
    assert one.startswith("WARNING: ThreadSanitizer: data race")
    assert one.endswith("wherever")
    assert now in one


@pytest.mark.parametrize(("now", "before"), [(PYTORCH, FUNCOL), (FUNCOL, PYTORCH), (PYTORCH, LOST)])
def test_a_race_with_an_access_of_pytorch_does_not(now: str, before: str) -> None:
    assert race_reports.findings(report(now, before)) == ([], 1)


def test_other_kinds_count_always() -> None:
    found, _ = race_reports.findings(report(PYTORCH, PYTORCH, "lock-order-inversion (potential deadlock)"))
    assert len(found) == 1


@pytest.mark.parametrize("found", [True, False])
def test_a_finding_fails(
    found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thread.1").write_text(report(FUNCOL, PYTORCH))
    (tmp_path / "thread.2").write_text(report(FUNCOL, FUNCOL if found else PYTORCH))
    monkeypatch.setattr(sys, "argv", ["race_reports.py", str(tmp_path)])
    assert race_reports.main() == (1 if found else 0)
    said = capsys.readouterr().out
    assert f"{int(found)} findings, {2 - int(found)} reports of accesses by PyTorch's own code" in said
    assert (FUNCOL in said) is found
