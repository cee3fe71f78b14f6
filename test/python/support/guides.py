"""Pages of the documentation as programs: their code blocks in order, run on gloo ranks of their own.

A page says in its front matter on how many ranks it runs (``ranks: 2``; 1 if it does not). Its blocks of
``python`` are one program, which torchrun could have started. Its blocks of ``text`` are what rank 0 prints,
in order. A block of ``console`` is a command of ``python -m funcol``, or several, each with what it prints.
Blocks of ``bash``, and those after a line ``% not run: <reason>``, are not run.
"""

from __future__ import annotations

import contextlib
import os
import re
import runpy
import shlex
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from processes import run_python
from ranks import forking_context
from versions import TORCH

DOCS = Path(__file__).resolve().parents[3] / "docs"
TIMEOUT_S = 180

on_the_newest_pytorch = pytest.mark.skipif(
    TORCH < (2, 15),
    reason="the documentation is that of the newest PyTorch, whose names and results it shows",
)

_BLOCK = re.compile(
    r"(?:^% not run: (?P<reason>[^\n]+)\n)?^```(?P<language>\w+)\n(?P<code>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int  # of the page on which the code starts, from 1
    not_run: str | None  # the reason


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(found["language"], found["code"], text.count("\n", 0, found.start("code")) + 1, found["reason"])
        for found in _BLOCK.finditer(text)
    ]


def num_ranks(page: Path) -> int:
    found = re.match(r"---\nranks: (\d+)\n---\n", page.read_text())
    return int(found[1]) if found else 1


def program(page: Path) -> str:
    """Returns the page's program; each line has the number that it has on the page."""
    lines = [""] * (page.read_text().count("\n") + 1)
    for block in blocks(page):
        if block.language == "python" and block.not_run is None:
            code = block.code.splitlines()
            lines[block.line - 1 : block.line - 1 + len(code)] = code
    return "\n".join(lines) + "\n"


def expected_output(page: Path) -> str:
    return "".join(block.code for block in blocks(page) if block.language == "text" and block.not_run is None)


def commands(page: Path) -> Iterator[tuple[str, str]]:
    """Yields each command of the page's ``console`` blocks, without the prompt, and what it prints."""
    for block in blocks(page):
        if block.language == "console":
            for text in re.split(r"^\$ ", block.code, flags=re.M)[1:]:
                command, _, printed = text.partition("\n")
                yield command, printed


def output_of_command(command: str) -> str:
    """Of ``python -m funcol ...``."""
    python, *arguments = shlex.split(command)
    assert python == "python", command
    return run_python(*arguments)


def run_page(page: Path, folder: Path) -> str:
    """Runs the page's program in ``folder``; returns what rank 0 prints. Raises if a rank fails or is not
    done in time."""
    path = folder / f"{page.stem}.py"
    path.write_text(program(page))
    world = num_ranks(page)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = forking_context()
    processes = [
        context.Process(target=_run_rank, args=(path, rank, world, port), daemon=True)
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(TIMEOUT_S)
        outputs = [_output(path, rank).read_text() for rank in range(world)]
        codes = [process.exitcode for process in processes]
        assert codes == [0] * world, f"{page.name}: the ranks ended with {codes}\n" + "\n".join(outputs)
    finally:
        for process in processes:
            process.kill()
    return outputs[0]


def _output(path: Path, rank: int) -> Path:
    return path.with_suffix(f".{rank}.out")


def _run_rank(path: Path, rank: int, world: int, port: int) -> None:
    os.environ |= {
        "GLOO_SOCKET_IFNAME": "lo",
        "LOCAL_RANK": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    os.chdir(path.parent)
    sys.path.insert(0, str(path.parent))
    torch.set_num_threads(1)
    with _output(path, rank).open("w", buffering=1) as out, contextlib.redirect_stdout(out):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except BaseException:
            import traceback

            traceback.print_exc(file=out)
            raise
