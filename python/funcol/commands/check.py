"""``python -m funcol check``: finds the module that makes a parallel program wrong."""

from __future__ import annotations

import argparse
import functools
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ..check import check
from ..check.runs import CheckError, describe_error
from ..redistribution.texts import bytes_of, mesh_sizes
from .arguments import argument_read_by, writing


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser(
        "check",
        help="compare a parallel program with its reference, module by module",
        description="Calls program(None) of the file as the reference, and program(mesh) on every rank of "
        "the mesh, in processes of this machine or those of torchrun. Both return model, loss[, optimizer]. "
        "Says in which module they begin to differ, and why. Exit status: 1 after a fault.",
        epilog="example: python -m funcol check model_check.py --mesh dp=2,tp=2",
    )
    command.add_argument("file", type=Path, metavar="FILE", help="a Python file that defines program(mesh)")
    command.add_argument("--mesh", required=True, metavar="NAME=RANKS,...", help="the axes: dp=2,tp=2")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument(
        "--dtype",
        choices=("float64", "float32", "bfloat16", "float16"),
        default="float64",
        help="float64: both runs in double precision; others: as they are, with bounds of that precision",
    )
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of a rank")
    command.add_argument(
        "--max-bytes",
        type=argument_read_by(bytes_of),
        default=1 << 30,
        help="recorded values that a rank keeps in memory; others go to files (default: %(default)s)",
    )
    command.add_argument("--html", type=Path, metavar="FILE", help="write a page with the tree of modules")
    command.add_argument("--json", type=Path, metavar="FILE", help="write all of the report as JSON")
    command.set_defaults(run=_run)


@functools.cache
def _module_of(file: Path) -> Any:
    """Returns the module of a file. Raises ``CheckError`` if it cannot be imported or has no program."""
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise CheckError(f"there is no Python file {file}. Pass one that defines program(mesh).")
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CheckError(f"{file} cannot be imported: {describe_error(error)}") from error
    if not callable(getattr(module, "program", None)):
        raise CheckError(f"{file} defines no function program(mesh). Define one that returns model and loss.")
    return module


def _program(file: Path, mesh: Any) -> Any:
    """Calls the program of a file."""
    return _module_of(file).program(mesh)


def _run(arguments: argparse.Namespace) -> None:
    mesh = mesh_sizes(arguments.mesh)
    report = check(
        functools.partial(_program, arguments.file),
        mesh_shape=tuple(mesh.values()),
        mesh_dim_names=tuple(mesh),
        device=arguments.device,
        dtype=arguments.dtype,
        seed=arguments.seed,
        timeout_s=arguments.timeout,
        max_bytes=arguments.max_bytes,
    )
    if os.environ.get("RANK", "0") == "0":
        report.show()
        for path, text in ((arguments.html, report.html), (arguments.json, report.json)):
            if path is not None:
                with writing(path):
                    path.write_text(text())
    if not report.ok:
        sys.stdout.flush()
        sys.exit(1)
