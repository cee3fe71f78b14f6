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

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import ProcessException, start_processes

from ..collectives.in_flight import pending
from .report import Report
from .runs import Check, CheckError, describe_error
from .verdict import Fault

_PRELOADED = ["torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo", "funcol.check.runs"]
_GRACE_S = 5.0  # for ranks to end after the first has failed
_STATUS = {"report": 0, "raised": 1, "input": 2, "hang": 3}  # of a process, by how it ended


def check_on_ranks(check: Check) -> Report:
    """Runs the check on the ranks that run, or on new ones; see :func:`funcol.check`."""
    if not dist.is_initialized():
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return _check_on_new_ranks(check)
        _start_group(check)
        # The group stays for later checks: made anew, it could meet addresses of this one in the store.
        atexit.register(_end_group)
    return _check_on_rank(check, None)


def _start_group(check: Check, store: str | None = None) -> None:
    """Starts the default group as torchrun's variables say."""
    backend = "gloo"
    if check.device == "cuda":
        if not torch.cuda.is_available():
            raise CheckError("PyTorch finds no GPU. Check on the CPU: it finds faults of values as well.")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        backend = "cpu:gloo,cuda:nccl"
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = timedelta(seconds=check.timeout_s + 60)
    dist.init_process_group(backend, store, timeout, rank=rank, world_size=num_ranks)


def _end_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _check_on_rank(check: Check, folder: Path | None) -> Report:
    """Runs the check on this rank. A rank that is not done after the timeout ends its process, and reports
    where it stopped in ``folder``, or on standard error."""

    def stop() -> None:
        place = "no module yet" if check.recorder is None else check.recorder.where()
        _end(folder, "hang", "; ".join([f"stopped in {place}", *map(str, pending())]))

    watch = threading.Timer(check.timeout_s, stop)
    watch.daemon = True
    watch.start()
    try:
        return check.run()
    finally:
        watch.cancel()


def _end(folder: Path | None, kind: str, text: str) -> None:
    """Ends the process, after it has reported to the parent, or on standard error, how it ended."""
    if folder is None:
        print(f"funcol check: rank {dist.get_rank()} {text}", file=sys.stderr, flush=True)
    else:
        path = folder / f"{os.environ['RANK']}.new"
        path.write_text(json.dumps([kind, text]))
        path.rename(path.with_suffix(".json"))
    sys.stdout.flush()
    os._exit(_STATUS[kind])


def _check_on_new_ranks(check: Check) -> Report:
    num_ranks = math.prod(check.mesh_shape)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    end = time.monotonic() + check.timeout_s + 4 * _GRACE_S
    with tempfile.TemporaryDirectory(prefix="funcol_check_") as folder:
        arguments = num_ranks, check, Path(folder)
        try:
            started = start_processes(_run_rank, arguments, num_ranks, False, True, "forkserver")  # type: ignore[no-untyped-call]
        except Exception as error:
            raise CheckError(
                f"{check.program} is not found by name on other ranks: {error}. "
                "Define it at the top of a module."
            ) from None
        died: dict[int, str] = {}
        try:
            while time.monotonic() < end and not started.join(end - time.monotonic(), _GRACE_S):
                pass
        except ProcessException as error:
            died[error.error_index] = str(error)
        for process in started.processes:
            process.kill()
        ends = {int(path.stem): json.loads(path.read_text()) for path in Path(folder).glob("*.json")}
    texts_of = {kind: {r: text for r, (one, text) in sorted(ends.items()) if one == kind} for kind in _STATUS}
    for text in texts_of["report"].values():
        return Report.of(text)
    for text in texts_of["input"].values():
        raise CheckError(text)
    kind = "died" if not died.keys() <= ends.keys() else "raised" if texts_of["raised"] else "hang"
    texts = {**texts_of["raised"], **died} if kind == "died" else texts_of[kind]
    detail = "\n".join(f"rank {rank}: {text}" for rank, text in texts.items())
    axes = dict(zip(check.axes, check.mesh_shape, strict=True))
    return Report(axes, check.dtype, [Fault("run", "", kind, detail)])


def _run_rank(rank: int, num_ranks: int, check: Check, folder: Path) -> None:
    """Runs the check in the process of a new rank, and leaves in ``folder`` how it ended."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(num_ranks))
    torch.set_num_threads(1)
    try:
        _start_group(check, f"file://{folder}/store")
        _end(folder, "report", _check_on_rank(check, folder).json())
    except CheckError as error:
        _end(folder, "input", str(error))
    except BaseException as error:
        _end(folder, "raised", "; ".join([describe_error(error), *getattr(error, "__notes__", ())]))
