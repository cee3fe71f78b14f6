"""Runs a function of ranks with one rank in this process, where ``breakpoint()`` and gdb work.

    python tools/run_rank.py 1 test/python/weights/test_full_tensors.py::test_a_bucket_is_one_collective
    gdb --args python tools/run_rank.py 0 test/python/x/test_y.py::reduces --args '"sum", 3'

The function is a test made by ``on_ranks``, or one that a test gives to ``run_ranks``:
``function(rank, world, *args)``. The other ranks run beside it, on gloo, without breakpoints; their output
appears as it comes. Ranks wait for each other for an hour.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import os
import subprocess
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(rank: int, world: int, path: str, name: str, args: tuple[object, ...], store: str) -> None:
    """Joins the group of the ranks that share ``store``, then calls the function."""
    import torch
    import torch.distributed as dist

    sys.path[:0] = [str(Path(path).resolve().parent), str(ROOT / "test/python/support")]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(hours=1)
    )
    function = getattr(importlib.import_module(Path(path).stem), name)
    result = getattr(function, "on_rank", function)(rank, world, *args)
    sys.stdout.write(f"rank {rank} returns {result!r}\n")  # at once, for ranks share the output
    sys.stdout.flush()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rank", type=int, help="the rank of this process")
    parser.add_argument("function", metavar="PATH::NAME")
    parser.add_argument("--world", type=int, default=2, metavar="N", help="ranks (default %(default)s)")
    parser.add_argument("--args", default="", metavar="LITERALS", help="arguments after rank and world")
    parser.add_argument("--store", help=argparse.SUPPRESS)
    options = parser.parse_args()
    path, separator, name = options.function.partition("::")
    if not separator or not 0 <= options.rank < options.world:
        parser.error(f"expected PATH::NAME and a rank below {options.world}")
    args = ast.literal_eval(f"({options.args},)") if options.args else ()
    if options.store:
        run(options.rank, options.world, path, name, args, options.store)
        return
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        command = [options.function, f"--world={options.world}", f"--args={options.args}", f"--store={store}"]
        env = os.environ | {"PYTHONBREAKPOINT": "0"}
        others = [
            subprocess.Popen([sys.executable, __file__, str(rank), *command], env=env)
            for rank in range(options.world)
            if rank != options.rank
        ]
        try:
            run(options.rank, options.world, path, name, args, store)
            failed = [other.wait() for other in others]
        finally:
            for other in others:
                other.kill()
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
