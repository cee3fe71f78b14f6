"""Counts the instructions of hot paths under valgrind and compares them with the stored counts.

    .venv/bin/python tools/bench/instructions.py             # exit status 1: a path executes over 5 % more
    .venv/bin/python tools/bench/instructions.py --update    # store the counts of this build

Counts are stored for one compiler and PyTorch; with others nothing is compared. See
docs/instruction_counts.md.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

STORED = Path(__file__).with_suffix(".json")
LIMIT_PERCENT = 5.0
NUM_ROUNDS = 5
MISSING_TOOL = 2  # the exit status

# The requests that a program can make of callgrind, which runs it.
REQUESTS = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char* label) { CALLGRIND_DUMP_STATS_AT(label); }
"""
CALLGRIND = ("--tool=callgrind", "--instr-atstart=no", "--dump-line=no")
# Hashes and threads are the same in every run.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}

Counts = Mapping[str, int]


@dataclass(frozen=True)
class Stored:
    """Instructions a call by path, and the versions that they depend on."""

    versions: dict[str, str]
    instructions: dict[str, int]

    @staticmethod
    def read(path: Path) -> Stored:
        """Returns nothing stored if the file does not exist."""
        return Stored(**json.loads(path.read_text())) if path.exists() else Stored({}, {})

    def write(self, path: Path) -> None:
        text = json.dumps({"versions": self.versions, "instructions": self.instructions}, indent=2)
        path.write_text(text + "\n")


# Comparing


class Row(NamedTuple):
    """A path with its two counts: None if it is not stored, or not counted any more."""

    name: str
    stored: int | None
    now: int | None

    @property
    def change(self) -> float | None:
        """The change in percent."""
        if self.stored is None or self.now is None:
            return None
        return 100 * (self.now - self.stored) / self.stored

    def finding(self) -> str | None:
        """Returns what is wrong with the path, or None."""
        if self.stored is None:
            return f"{self.name}: not stored yet, run --update"
        if self.now is None:
            return f"{self.name}: stored, but it exists no more, run --update"
        if self.change is not None and self.change > LIMIT_PERCENT:
            counts = f"{self.stored:,} instructions before, {self.now:,} now"
            return f"{self.name}: {counts}, {self.change:+.1f} % (limit {LIMIT_PERCENT:+g} %)"
        return None

    def line(self) -> str:
        stored, now = ("-" if count is None else f"{count:,}" for count in (self.stored, self.now))
        change = "-" if self.change is None else f"{self.change:+.2f} %"
        return f"{self.name:<46}{stored:>14}{now:>14}{change:>11}"


def rows(stored: Counts, now: Counts, only: str = "") -> list[Row]:
    """Returns the paths of both whose names contain ``only``, in the order of ``now``."""
    names = [name for name in dict.fromkeys([*now, *stored]) if only in name]
    return [Row(name, stored.get(name), now.get(name)) for name in names]


def differences(stored: Mapping[str, str], running: Mapping[str, str]) -> list[str]:
    """Returns a text for each version that differs."""
    return [
        f"{name} {stored.get(name)} (now {version})"
        for name, version in running.items()
        if stored.get(name) != version
    ]


def report(compared: Iterable[Row]) -> int:
    """Prints the table and the findings; returns the exit status."""
    listed = list(compared)
    say(f"\n{'instructions a call':<46}{'stored':>14}{'now':>14}{'change':>11}")
    for row in listed:
        say(row.line())
    findings = [finding for row in listed if (finding := row.finding()) is not None]
    for finding in findings:
        say(f"FAILED {finding}")
    say(f"{len(findings)} of {len(listed)} paths failed")
    return 1 if findings else 0


# Counting


class Counter(Protocol):
    """Functions of a tool that counts instructions."""

    def start(self) -> None: ...
    def zero(self) -> None: ...
    def dump(self, label: bytes) -> None: ...


def count_paths(counter: Counter, only: str) -> None:
    """Has the paths counted, in rounds, after as many calls that are not counted and fill the caches."""
    import hot_paths

    hot_paths.import_modules()
    counter.start()
    for path in hot_paths.hot_paths():
        if only not in path.name:
            continue
        _call(path.call, path.num_calls * NUM_ROUNDS)
        label = f"{path.num_calls} {path.name}".encode()
        for _ in range(NUM_ROUNDS):
            counter.zero()
            _call(path.call, path.num_calls)
            counter.dump(label)
        say(f"[{time.process_time():3.0f} s] {path.name}")


def _call(call: Callable[[], object], num_calls: int) -> None:
    for _ in range(num_calls):
        call()


def count_under_valgrind(library: str, only: str) -> None:
    """Counts the paths in this process, which valgrind runs, and ends it without a cleanup."""
    gc.disable()
    count_paths(ctypes.CDLL(library), only)
    os._exit(0)


def instructions_of(dumps: Iterable[str]) -> dict[str, int]:
    """Returns instructions a call by path: the median of its rounds, as now and then the allocator tidies up.

    ``dumps`` are texts of callgrind's files. One without a label, which callgrind writes at exit, is ignored.
    """
    rounds: dict[str, list[float]] = {}
    for dump in dumps:
        label = re.search(r"^desc: Trigger: Client Request: (\d+) (.+)$", dump, re.M)
        summary = re.search(r"^summary: (\d+)$", dump, re.M)
        if label is not None and summary is not None:
            rounds.setdefault(label[2], []).append(int(summary[1]) / int(label[1]))
    return {name: round(statistics.median(of_path)) for name, of_path in rounds.items()}


def counted(only: str) -> dict[str, int]:
    """Runs this program under valgrind; returns instructions a call by path."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = folder / "requests.so"
        compile_requests = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(library)]
        subprocess.run(compile_requests, input=REQUESTS, text=True, check=True)
        files = (f"--callgrind-out-file={folder}/dump", f"--log-file={folder}/log")
        program = (sys.executable, __file__, "--case", only, "--under-valgrind", str(library))
        done = subprocess.run(["valgrind", *CALLGRIND, *files, *program], env={**os.environ, **ENVIRONMENT})
        if done.returncode != 0:
            sys.exit(
                f"the program under valgrind failed ({done.returncode}):\n{(folder / 'log').read_text()}"
            )
        dumps = sorted(folder.glob("dump.*"), key=lambda path: int(path.suffix[1:]))
        return instructions_of(path.read_text() for path in dumps)


# The command


def running_versions() -> dict[str, str]:
    """Returns the versions of everything whose instructions are counted, and of the tool."""
    import torch

    from funcol import _build_info

    valgrind = subprocess.run(["valgrind", "--version"], capture_output=True, text=True, check=True)
    return {
        "tool": f"callgrind of {valgrind.stdout.strip()}",
        "compiler": _build_info.COMPILER,
        "PyTorch": str(torch.__version__),
        "Python": platform.python_version(),
        "C library": " ".join(platform.libc_ver()),
        "machine": platform.machine(),
    }


def say(text: str) -> None:
    print(text, flush=True)


def run(update: bool, only: str) -> int:
    """Counts and compares, or updates; returns the exit status."""
    missing = [tool for tool in ("valgrind", "cc") if shutil.which(tool) is None]
    if missing:
        print(f"{', '.join(missing)} not found: instructions are counted by valgrind", file=sys.stderr)
        return MISSING_TOOL
    stored, running = Stored.read(STORED), running_versions()
    if not update and (differing := differences(stored.versions, running)):
        say(f"nothing compared, the stored counts are of others: {', '.join(differing)}")
        return 0
    begin = time.monotonic()
    say("importing PyTorch under valgrind, which takes the first minute ...")
    now = counted(only)
    say(f"counted {len(now)} paths in {time.monotonic() - begin:.0f} s")
    if not now:
        sys.exit(f"no path has {only!r} in its name")
    status = report(rows(stored.instructions, now, only))
    if not update:
        return status
    Stored(running, now).write(STORED)
    say(f"stored in {STORED}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--update", action="store_true", help="store the counts")
    parser.add_argument("--case", default="", metavar="TEXT", help="only the paths whose names contain TEXT")
    parser.add_argument("--under-valgrind", metavar="LIBRARY", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.update and args.case:
        parser.error("--update stores the counts of all paths: leave out --case")
    if args.under_valgrind:
        count_under_valgrind(args.under_valgrind, args.case)
    return run(args.update, args.case)


if __name__ == "__main__":
    sys.exit(main())
