"""Finds the wheel in dist/ that tools/wheel made of the sources as they are, for this machine and Python.

    python tools/fitting_wheel.py X.Y.Z HASH    the release of PyTorch, and hash_of the package's sources

Prints the wheel's path, or nothing; for each wheel that does not fit, the reason on standard error. Needs the
standard library alone, since it runs before anything is installed.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import zipfile
from pathlib import Path

DIST = Path(__file__).resolve().parent.parent / "dist"


def why_not(wheel: Path, torch: str, sources: str) -> str | None:
    """Returns why ``wheel`` cannot be installed for ``torch``; None if it can."""
    *_, python, _, platforms = wheel.stem.split("-")
    this_python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    if python != this_python:
        return f"it is for Python {python}, this is {this_python}"
    if not any(map(runs_here, platforms.split("."))):
        return f"it is for {platforms}, this is {platform.machine()} with {libc_version() or 'no glibc'}"
    minor = "torch_{}_{}".format(*torch.split(".")[:2])
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
        if f"funcol/{minor}/libfuncol.so" not in names:
            return f"it has no libraries for PyTorch {torch}"
        recorded = "funcol/sources.sha256"
        if recorded not in names or content.read(recorded).decode().strip() != sources.strip():
            return "the sources have changed since it was made; tools/wheel makes it anew"
    return None


def runs_here(tag: str) -> bool:
    """Returns true if a platform tag such as manylinux_2_35_x86_64 is for this machine."""
    found = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", tag)
    if found is None:
        return tag == f"linux_{platform.machine()}"
    major, minor, machine = found.groups()
    here = re.search(r"(\d+)\.(\d+)", libc_version())
    return (
        machine == platform.machine()
        and here is not None
        and (int(major), int(minor)) <= tuple(map(int, here.groups()))
    )


def libc_version() -> str:
    """Returns a version such as "glibc 2.36"; empty where there is no glibc."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):
        return ""


def main() -> None:
    torch, sources = sys.argv[1:]
    for wheel in sorted(DIST.glob("funcol-*.whl")):
        reason = why_not(wheel, torch, sources)
        if reason is None:
            print(wheel)
            return
        print(f"dist/{wheel.name} is not taken: {reason}", file=sys.stderr)


if __name__ == "__main__":
    main()
