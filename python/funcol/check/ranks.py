"""The ranks of a check: new local processes, or those of torchrun, or those that run already."""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.in_flight import pending
from .report import Report
from .running import Check, CheckError, Options, Program, described, program_of
from .verdict import Fault

_PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "funcol.check.running"]
_GRACE_S = 5.0  # for ranks to end after the first has failed
_STATUS = {"report": 0, "raised": 1, "input": 2, "hang": 3}


def check_on_ranks(program: Program | Path, options: Options) -> Report:
    """Checks ``program`` on the ranks that run, or on new ones; see :func:`funcol.check`."""
    if dist.is_initialized():
        return _check_on_rank(program, options, None)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        # The group stays for later checks: made anew, it could meet addresses of this one in the store.
        atexit.register(_end_group)
        return _check_on_new_group(program, options, None)
    return _check_on_new_ranks(program, options)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_on_new_group(program: Program | Path, options: Options, folder: Path | None) -> Report:
    backend = "gloo"
    if options.device == "cuda":
        if not torch.cuda.is_available():
            raise CheckError("PyTorch finds no GPU. Leave out the device, or check on one that has GPUs.")
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        init_method=None if folder is None else f"file://{folder}/store",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=options.timeout_s + 60),
    )
    return _check_on_rank(program, options, folder)


def _check_on_rank(program: Program | Path, options: Options, folder: Path | None) -> Report:
    """Runs the check on this rank. A rank that is not done after the timeout ends its process: it says where
    it stopped in ``folder``, or on standard error."""
    num_ranks = math.prod(options.mesh_shape)
    if dist.get_world_size() != num_ranks:
        raise CheckError(
            f"the mesh {options.mesh_shape} has {num_ranks} ranks, and {dist.get_world_size()} run. "
            "Start as many ranks as the mesh has."
        )
    done = threading.Event()
    check = Check(program_of(program) if isinstance(program, Path) else program, options)

    def watch() -> None:
        if not done.wait(options.timeout_s):
            text = "; ".join([f"stopped in {check.where()}", *map(str, pending())])
            if folder is None:
                print(f"funcol check: rank {dist.get_rank()} {text}", file=sys.stderr, flush=True)
            _end(folder, dist.get_rank(), "hang", text)

    threading.Thread(target=watch, daemon=True).start()
    try:
        return check.run()
    finally:
        done.set()


def _end(folder: Path | None, rank: int, kind: str, text: str) -> None:
    """Ends the process, after it left for the parent how it ended."""
    if folder is not None:
        path = folder / f"{rank}.json"
        path.with_suffix(".new").write_text(json.dumps({"kind": kind, "text": text}))
        path.with_suffix(".new").rename(path)
    sys.stdout.flush()
    os._exit(_STATUS[kind])


def _check_on_new_ranks(program: Program | Path, options: Options) -> Report:
    num_ranks = math.prod(options.mesh_shape)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="funcol_check_") as folder:
        processes = [
            context.Process(
                target=_run_rank, args=(rank, num_ranks, program, options, Path(folder)), daemon=True
            )
            for rank in range(num_ranks)
        ]
        try:
            for process in processes:
                _start(process, program)
            _wait(processes, options.timeout_s)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        ends = {
            rank: json.loads(path.read_text())
            for rank in range(num_ranks)
            if (path := Path(folder, f"{rank}.json")).exists()
        }
    return _report_of(ends, [process.exitcode for process in processes], options)


def _start(process: Any, program: Any) -> None:
    try:
        process.start()
    except Exception as error:
        raise CheckError(
            f"{program} is not found by name on other ranks: {error}. Define it at the top of a module."
        ) from None


def _wait(processes: list[Any], timeout_s: float) -> None:
    """Waits until all ranks have ended, or some time after one has failed."""
    end = time.monotonic() + timeout_s + 4 * _GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + _GRACE_S)
        for process in processes:
            process.join(0.05)


def _report_of(ends: dict[int, Any], codes: list[int | None], options: Options) -> Report:
    """The report of rank 0, or one that says how the ranks ended."""
    texts: dict[str, dict[int, str]] = {}
    for rank, end in ends.items():
        texts.setdefault(end["kind"], {})[rank] = end["text"]
    if 0 in texts.get("report", ()):
        return Report.of(texts["report"][0])
    for text in texts.get("input", {}).values():
        raise CheckError(text)
    died = {rank: f"ended with exit code {code}" for rank, code in enumerate(codes) if code}
    kind, found = next(((one, texts[one]) for one in ("raised", "hang") if one in texts), ("died", died))
    detail = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(found.items()))
    return Report(options.mesh, options.dtype, [Fault("run", "", kind, detail)])


def _run_rank(rank: int, num_ranks: int, program: Program | Path, options: Options, folder: Path) -> None:
    """The process of a new rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    try:
        _end(folder, rank, "report", _check_on_new_group(program, options, folder).json())
    except CheckError as error:
        _end(folder, rank, "input", str(error))
    except BaseException as error:
        _end(folder, rank, "raised", "; ".join([described(error), *getattr(error, "__notes__", ())]))
