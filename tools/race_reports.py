"""Reads the reports that ThreadSanitizer wrote, and shows those that are findings in funcol.

    python tools/race_reports.py FOLDER    files that log_path=FOLDER/... has left there

PyTorch is not built with ThreadSanitizer, which does not see how PyTorch's reference counts and locks order
threads. A data race with an access that PyTorch's own code makes is therefore left out, such as memory that
PyTorch frees when the last reference goes. All else is a finding: a race between two accesses of funcol or of
its tests, and reports of other kinds. Exits with 1 if there is one.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# The tools' and the language's own: an access is its caller's.
RUNTIMES = re.compile(r"lib(tsan|stdc\+\+|gcc_s|c|m)\.so|ld-linux")
PYTORCH = re.compile(r"lib(torch|c10|shm|gomp)\w*[.-]")

REPORT = re.compile(r"^WARNING: ThreadSanitizer: ([^\n]*?) \(pid=.*?(?=^=+$|\Z)", re.MULTILINE | re.DOTALL)
ACCESS = re.compile(
    r"^  (?:Previous )?(?:atomic )?(?:write|read) of size .*?(?=^$|\Z)", re.I | re.MULTILINE | re.DOTALL
)
MODULE = re.compile(r"^    #\d+ .*\(([^()\s]+)\+0x[0-9a-f]+\)", re.MULTILINE)


def is_pytorchs(access: str) -> bool:
    """Returns true if PyTorch's code makes an access: innermost first, its stack reaches it before funcol."""
    caller = next((module for module in MODULE.findall(access) if not RUNTIMES.match(module)), "")
    return PYTORCH.match(caller) is not None


def findings(text: str) -> tuple[list[str], int]:
    """Returns the reports in ``text`` that count, and the number of all."""
    found = []
    reports = list(REPORT.finditer(text))
    for report in reports:
        accesses = ACCESS.findall(report[0])
        if report[1] != "data race" or not any(map(is_pytorchs, accesses)):
            found.append(report[0].rstrip())
    return found, len(reports)


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    total = 0
    found: list[str] = []
    for file in sorted(Path(sys.argv[1]).iterdir()):
        in_file, number = findings(file.read_text(errors="replace"))
        found += in_file
        total += number
    for report in found:
        print(report, end="\n\n")
    left_out = total - len(found)
    print(f"[race_reports] {len(found)} findings, {left_out} reports of accesses by PyTorch's own code")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
