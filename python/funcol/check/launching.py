"""The ranks of a check: local processes, or those that run already."""

from __future__ import annotations

import atexit
import json
import math
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .report import Report
from .running import CheckError, Options, Program, check_on_rank, fault_of_error, program_of, write_end
from .verdict import Fault

DTYPES = ("float64", "float32", "bfloat16", "float16")
_PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "funcol.check.running"]
_GRACE_S = 5.0  # for ranks to end after the first has failed


def run_check(program: Program | Path, *, mesh_shape: tuple[int, ...], **given: Any) -> Report:
    """Checks ``program`` on the ranks that run, or on new ones; see :func:`funcol.check`."""
    axes = given.pop("axes") or tuple(f"axis{i}" for i in range(len(mesh_shape)))
    options = Options(mesh_shape, axes, **given)
    if not mesh_shape or any(not isinstance(size, int) or size < 1 for size in mesh_shape):
        raise CheckError(f"the mesh has the sizes {mesh_shape}, expected one or more, each at least 1.")
    if len(axes) != len(mesh_shape):
        raise CheckError(f"the mesh has {len(mesh_shape)} axes and {len(axes)} names: {', '.join(axes)}.")
    if options.dtype not in DTYPES:
        raise CheckError(f"dtype is {options.dtype!r}, expected one of {', '.join(DTYPES)}.")
    if dist.is_initialized():
        return check_on_rank(_loaded(program), options)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _under_torchrun(program, options)
    return _on_new_ranks(program, options)


def _loaded(program: Program | Path) -> Program:
    return program_of(program) if isinstance(program, Path) else program


def _under_torchrun(program: Program | Path, options: Options) -> Report:
    if os.environ["WORLD_SIZE"] != str(math.prod(options.mesh_shape)):
        raise CheckError(
            f"the mesh {options.mesh_shape} has {math.prod(options.mesh_shape)} ranks, WORLD_SIZE is "
            f"{os.environ['WORLD_SIZE']}. Start as many ranks as the mesh has."
        )
    # It stays for later checks: made anew, it could meet addresses of this one in the store.
    _start_group(options)
    atexit.register(_end_group)
    return check_on_rank(_loaded(program), options)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _start_group(options: Options, **where: Any) -> None:
    backend = "gloo"
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=options.timeout_s + 60), **where)


def _on_new_ranks(program: Program | Path, options: Options) -> Report:
    try:
        pickle.dumps(program)
    except Exception:
        raise CheckError(
            f"{program} is not found by name on other ranks. Define it at the top of a module."
        ) from None
    num_ranks = math.prod(options.mesh_shape)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="funcol_check_") as folder:
        processes = [
            context.Process(target=_run_rank, args=(rank, num_ranks, program, options, folder), daemon=True)
            for rank in range(num_ranks)
        ]
        for process in processes:
            process.start()
        try:
            _wait(processes, options.timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        return _answer(Path(folder), processes, options)


def _wait(processes: list[Any], timeout_s: float) -> None:
    """Waits until all ranks have ended, or some time after one has failed."""
    end = time.monotonic() + timeout_s + 4 * _GRACE_S
    while any(process.is_alive() for process in processes) and time.monotonic() < end:
        if any(process.exitcode for process in processes):
            end = min(end, time.monotonic() + _GRACE_S)
        for process in processes:
            process.join(0.05)


def _answer(folder: Path, processes: list[Any], options: Options) -> Report:
    path = folder / "report"
    if path.exists():
        return pickle.loads(path.read_bytes())  # type: ignore[no-any-return]
    ends = {rank: folder / f"end{rank}.json" for rank in range(len(processes))}
    told = {rank: json.loads(path.read_text()) for rank, path in ends.items() if path.exists()}
    refused = [end["text"] for end in told.values() if end["kind"] == "input"]
    if refused:
        raise CheckError(refused[0])
    raised = {rank: end for rank, end in told.items() if end["kind"] == "raised"}
    texts = {rank: end["text"] for rank, end in (raised or told).items()}
    if not texts:
        texts = {r: f"ended with exit code {p.exitcode}" for r, p in enumerate(processes) if p.exitcode}
    detail = "\n".join(f"rank {rank}: {text}" for rank, text in sorted(texts.items()))
    kind = "raised" if raised else "hang" if told else "died"
    axes = dict(zip(options.axes, options.mesh_shape, strict=True))
    return Report(axes, options.dtype, [Fault("run", "", kind, detail)])


def _run_rank(rank: int, num_ranks: int, program: Program | Path, options: Options, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    try:
        store = dist.FileStore(str(Path(folder, "store")), num_ranks)  # type: ignore[attr-defined]
        _start_group(options, store=store, rank=rank, world_size=num_ranks)
        report = check_on_rank(_loaded(program), options, Path(folder))
        if rank == 0:
            path = Path(folder, "report")
            path.with_suffix(".new").write_bytes(pickle.dumps(report))
            path.with_suffix(".new").rename(path)
    except CheckError as error:
        write_end(Path(folder), rank, "input", str(error))
        os._exit(2)
    except BaseException as error:
        write_end(Path(folder), rank, "raised", fault_of_error(error).detail)
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)
