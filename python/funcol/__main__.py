"""``python -m funcol``: programs, what is installed, plans, costs of a mesh, profiles, faults of programs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from .commands import calibrate, check, info, plan, run, trace
from .redistribution.texts import one_line

_WRONG = 2  # the exit status after an error
_NOT_READ = 1  # the exit status after the reader of the output has closed it


def main(arguments: list[str] | None = None) -> None:
    """Runs the command that ``arguments``, by default those of the process, name.

    An error of a command, but not one of a program that it runs, ends the process with one line on standard
    error. No line is written if the reader of the standard output has closed it, as ``head`` does.
    """
    parser = _Parser(prog="python -m funcol", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in (run, check, info, plan, calibrate, trace):
        command.add_to(commands)
    name = parser.prog
    program: Callable[[], None] | None = None
    try:
        chosen = parser.parse_args(arguments)
        name = f"{name} {chosen.command}"
        program = chosen.run(chosen)
        _flush_output()
    except BrokenPipeError:
        sys.exit(_NOT_READ)
    except MemoryError:
        parser.exit(_WRONG, f"{name}: there is not enough memory for this.\n")
    except (ValueError, OSError, RecursionError) as error:
        parser.exit(_WRONG, f"{name}: {one_line(str(error))}\n")
    finally:
        _end_output()
    if program is not None:
        program()


class _Parser(argparse.ArgumentParser):
    """Reports wrong arguments in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG, f"{self.prog}: {one_line(message)}. See {self.prog} --help.\n")


def _flush_output() -> None:
    if sys.stdout is not None:
        sys.stdout.flush()


def _end_output() -> None:
    """Flushes the output, or drops what cannot be written: the interpreter would report it at its end."""
    try:
        _flush_output()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
