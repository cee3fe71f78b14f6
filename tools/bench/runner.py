"""Runs a benchmark: its options, its tables, rounds in which sides take turns, and the limits that it checks.

TABLES = [Table("calls", lambda args: bench_calls(args.device, args.repeat), print_calls)]
run(__doc__, TABLES, repeat(21), device())
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from gloo_ranks import run_on_ranks as run_on_ranks

import funcol
from funcol._progress import Progress

Call = Callable[[], Any]
T = TypeVar("T")

# The limits that mark() found missed in this process.
_missed: list[bool] = []


# Options and tables


class Option(NamedTuple):
    flag: str
    how: dict[str, Any]


class Table(NamedTuple):
    """A part of a benchmark. ``bench`` measures it, and ``show`` prints what that returns.

    JSON has the result under ``name``; without a name, the result's own keys.
    """

    name: str
    bench: Callable[[argparse.Namespace], Any]
    show: Callable[[Any], None] = lambda result: None
    is_on: Callable[[argparse.Namespace], bool] = lambda args: True


def number(flag: str, default: int | list[int] | None, text: str, **how: Any) -> Option:
    return Option(flag, {"type": int, "metavar": "N", "default": default, "help": text, **how})


def repeat(rounds: int, text: str = "rounds") -> Option:
    return number("--repeat", rounds, f"{text} (default %(default)s)")


def only(text: str) -> Option:
    return Option("--only", {"default": "", "metavar": "TEXT", "help": f"only {text} whose names hold TEXT"})


def device(text: str = "cuda: one GPU, or a simulated one") -> Option:
    return Option("--device", {"choices": ("cpu", "cuda"), "default": "cpu", "help": text})


def is_on_cpu(args: argparse.Namespace) -> bool:
    return args.device.type == "cpu"


def run(
    doc: str | None, tables: Sequence[Table], *options: Option, about: str = "", chooses: bool = False
) -> None:
    """Runs a program: parses its arguments, measures and prints the tables, writes ``--json``.

    Versions are keys of the JSON object itself, or under ``about``. With ``chooses``, ``--tables`` chooses
    tables. ``args.device`` is a device. The status is 1 if ``--check`` is given and a limit is missed.
    """
    how = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=how)
    for option in options:
        parser.add_argument(option.flag, **option.how)
    names = [table.name for table in tables]
    if chooses:
        parser.add_argument("--tables", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to FILE as well")
    parser.add_argument("--check", action="store_true", help="fail if a limit is missed")
    args = parser.parse_args()
    args.device = device_named(getattr(args, "device", "cpu"))
    versions = describe(args.device)
    result: dict[str, Any] = {about: versions} if about else versions
    for table in tables:
        if table.is_on(args) and table.name in getattr(args, "tables", names):
            found = table.bench(args)
            table.show(found)
            result.update({table.name: found} if table.name else found)
    say(f"\n{len(_missed)} limits missed")
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    if args.check and _missed:
        raise SystemExit(1)


def device_named(name: str) -> torch.device:
    """Returns the ``cpu`` or the first ``cuda`` device. Ends the program if there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda, but torch.cuda.is_available() is False")
    return torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")


def describe(device: torch.device) -> dict[str, Any]:
    """Returns versions and the device of a measurement; prints them, too."""
    is_cuda = device.type == "cuda"
    versions = {
        "torch": torch.__version__,
        "funcol": funcol.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device)
        if is_cuda
        else platform.processor() or platform.machine(),
        "num_cpus": os.cpu_count(),
    }
    say(", ".join(f"{key} {value}" for key, value in versions.items()))
    return versions


# Printing


def say(text: str) -> None:
    print(text, flush=True)


def show(title: str, form: str, header: Iterable[object], rows: Iterable[Iterable[object]]) -> None:
    """Prints a table whose rows have the columns of ``form``."""
    say(f"\n{title}")
    for row in (header, *rows):
        say(form.format(*row).rstrip())


def cell(times: Mapping[str, float], digits: int) -> str:
    return f"{times['median']:.{digits}f} ({times['best']:.{digits}f})"


def cells(of_sides: Mapping[str, Any], sides: Iterable[str], digits: int) -> list[str]:
    """Returns a cell for each side: its median and best, or its one number; "-" if it was not measured."""

    def text(found: Any) -> str:
        if found is None:
            return "-"
        return f"{found:.{digits}f}" if isinstance(found, float) else cell(found, digits)

    return [text(of_sides.get(side)) for side in sides]


def mark(met: bool | None) -> str:
    """Returns "met", "MISSED", or "noise" for None. run() counts missed limits."""
    if met is False:
        _missed.append(met)
    return "noise" if met is None else "met" if met else "MISSED"


def each(title: str, pieces: Iterable[T], *, is_on: bool = True) -> Iterator[T]:
    """Yields ``pieces`` and counts them on the terminal; nothing is drawn while the caller has one."""
    listed = list(pieces)
    with Progress(title, len(listed), is_on=is_on) as progress:
        for piece in listed:
            progress.show(str(getattr(piece, "name", "")))
            yield piece
            progress.advance()


# Rounds and numbers


def turns(sides: Iterable[str], rounds: Iterable[object]) -> Iterator[str]:
    """Yields every side once a round; each round begins with another side."""
    listed = list(sides)
    for turn, _ in enumerate(rounds):
        yield from (listed[(turn + k) % len(listed)] for k in range(len(listed)))


@contextlib.contextmanager
def without_gc() -> Iterator[None]:
    """Collects garbage, then switches the collector off."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def with_side(side: str) -> contextlib.AbstractContextManager[None]:
    """Installs funcol for the side of that name."""
    return funcol.installed() if side == "funcol" else contextlib.nullcontext()


def summary(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "best": min(values)}


def summaries(of_sides: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    return {side: summary(values) for side, values in of_sides.items()}


def median_ratio(ours: Iterable[float], theirs: Iterable[float]) -> float:
    """Returns the median over rounds of the ratio in a round."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def time_ms(call: Call, now: Callable[[], float] = time.perf_counter) -> float:
    begin = now()
    result = call()
    duration = (now() - begin) * 1000
    del result  # kept so far: giving large tensors back takes as long as filling them
    return duration


# Ranks


def slowest_ms(call: Call) -> float:
    """Returns the time of the slowest rank. The ranks of the default group start together."""
    dist.barrier()
    slowest = torch.tensor([time_ms(call)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def bytes_written() -> int:
    """Returns the bytes that this process has written so far: gloo writes to sockets."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def time_ranks(calls: Mapping[str, Call], rounds: int) -> dict[str, dict[str, Any]]:
    """Returns, by side, the slowest rank's ms by round, and the bytes that all ranks write in a call."""
    results: dict[str, dict[str, Any]] = {}
    for side, call in calls.items():
        call()
        dist.barrier()
        before = bytes_written()
        call()
        written = torch.tensor([bytes_written() - before])
        dist.all_reduce(written)
        results[side] = {"ms": [], "bytes": written.item()}
    for side in turns(calls, each("rounds", range(rounds), is_on=dist.get_rank() == 0)):
        results[side]["ms"].append(slowest_ms(calls[side]))
    return results
