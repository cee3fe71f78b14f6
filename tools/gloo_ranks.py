"""Runs a function on gloo ranks, a process each."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Imported once, by the process that the ranks are forked from.
PRELOADED = ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch._dynamo", "funcol"]


def run_on_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, limit_s: float) -> Any:
    """Runs ``function(rank, *args)`` on each rank; returns the result of rank 0, through JSON.

    Each rank has one thread and the default group. Raises with the traceback of the first rank that fails,
    and TimeoutError if they are not done after ``limit_s`` seconds.
    """
    # Served by this process: what groups leave in it is no memory of a rank's.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        given = (num_ranks, limit_s, store.port, folder, function, args)
        multiprocessing.set_forkserver_preload(PRELOADED)
        ranks = mp.start_processes(_run, given, nprocs=num_ranks, join=False, start_method="forkserver")
        deadline = time.monotonic() + limit_s
        try:
            while not ranks.join(timeout=1):
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the gloo ranks were not done after {limit_s} s")
        finally:
            for process in ranks.processes:
                process.kill()
        return json.loads(Path(folder, "result.json").read_text())


def _run(
    rank: int,
    num_ranks: int,
    limit_s: float,
    port: int,
    folder: str,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    limit = timedelta(seconds=limit_s / 2)  # so that a rank that waits says so before it is stopped
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
    result = function(rank, *args)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
