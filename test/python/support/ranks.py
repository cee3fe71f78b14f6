"""Runs a function on real ranks: of gloo, or on CUDA devices of NCCL.

    def sums(rank: int, world: int) -> None: ...

    run_ranks(sums, 3)

``@on_ranks(3)`` makes a test of such a function.

``use_backend("nccl")`` puts what follows on devices, a rank on each: tensors are made there by default, the
default group sends them by that backend (and those of the CPU by gloo), and ``device_type()`` is "cuda".

Each rank is a process of its own. A set of ranks lives as long as the test session, since importing torch
costs more than most tests; it is killed when a case fails on it, and the next case gets a new set. After
every case the ranks agree that their default group is in step, so that a case that leaves a collective
without its counterpart fails itself, not the one after it. Groups that cases made are destroyed once there
are many, since the threads of each wake a hundred times a second.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import importlib
import inspect
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from device_reports import check_device

# How much later than a rank itself its parent gives up: a rank that can still run its watchdog says where
# it hangs.
GRACE_S = 10.0

MAX_GROUPS = 8

# A group of gloo has a thread that wakes up a hundred times a second. It stays while something refers to the
# group, also when that is destroyed.
MAX_GROUP_THREADS = 12

# Stock functional collectives import Dynamo at their first use.
_PRELOADED = ["torch.distributed.device_mesh", "torch.distributed._functional_collectives", "torch._dynamo"]


class RankError(Exception):
    """A rank raised; the message holds its traceback."""


def run_ranks(function: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """Calls ``function(rank, world, *args)`` on ``world`` ranks and returns what each returned.

    ``function`` is a module's own, found by name on the ranks; arguments and results are pickled. If a rank
    raises, the others are ended and :class:`RankError` shows the traceback of the one that raised first. If
    one takes more than ``timeout`` seconds, all are ended and ``TimeoutError`` says where it was.
    """
    if "<" in function.__qualname__:
        raise ValueError(f"ranks find {function.__qualname__} by name: define it at the top of a module.")
    _require_devices(world)
    key = (world, _backend)
    if key not in _running:
        _running[key] = _Ranks(world, _backend)
    try:
        results = _running[key].call(function, args, timeout)
    except BaseException:
        _running.pop(key).kill()
        raise
    if _running[key].num_group_threads() > MAX_GROUP_THREADS:
        _running.pop(key).kill()
    return results


def on_ranks(
    world: int | None = None, *, run: Callable[..., Any] = run_ranks, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Makes a test that runs on ``world`` ranks, or on as many as its parameter ``world`` says.

        @pytest.mark.parametrize("dim", [0, 1])
        @on_ranks(3)
        def test_gathers_in_rank_order(rank: int, world: int, dim: int) -> None: ...

    ``rank`` and ``world`` come first; the parameters and fixtures of the test follow, in the order in which
    ``run`` hands them on. The function itself is the test's attribute ``on_rank``.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., None]:
        _, of_world, *parameters = inspect.signature(function).parameters.values()

        @functools.wraps(function)
        def test(**given: Any) -> None:
            size = given["world"] if world is None else world
            run(function, size, *(given[parameter.name] for parameter in parameters), **options)

        function.__qualname__ += ".on_rank"
        test.on_rank = function  # type: ignore[attr-defined]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [of_world, *parameters] if world is None else parameters
        )
        return test

    return decorate


def _require_devices(world: int) -> None:
    """Skips the test if each rank is to have a device and there are too few."""
    import pytest
    import torch

    if _backend != "gloo" and not _shares_devices and world > torch.cuda.device_count():
        pytest.skip(f"needs {world} devices, and there are {torch.cuda.device_count()}")


def share_devices() -> None:
    """Lets more ranks run than there are devices: rank r uses device r modulo their number."""
    global _shares_devices
    _shares_devices = True


def require_compiled_kernels(on_device: bool = False) -> None:
    """Skips the test if its ranks, or it itself, are on simulated devices, which run no compiled kernels."""
    import pytest
    import torch

    if (on_device or _backend != "gloo") and torch.cuda.get_device_name(0).startswith("Simulated"):
        pytest.skip("a simulated device runs no compiled kernels")


def use_backend(name: str) -> None:
    """From now on, ``run_ranks`` uses ranks of this backend: gloo, or one of CUDA tensors."""
    global _backend
    _backend = name


def backend() -> str:
    """Returns the backend of the ranks: gloo, or one of CUDA tensors."""
    return _backend


def device_type() -> str:
    """On a rank: where its tensors are, "cpu" or "cuda"."""
    return "cpu" if _this_rank is None or _this_rank.backend == "gloo" else "cuda"


def rejoin() -> None:
    """On a rank: destroys all groups and makes the default group anew."""
    assert _this_rank is not None
    _this_rank.rejoin()


Make = TypeVar("Make", bound=Callable[..., Any])


def made_once(make: Make) -> Make:
    """functools.cache for what is made of groups: forgotten when the default group is made anew."""
    cached = functools.cache(make)
    _made.append(cached.cache_clear)
    return cached  # type: ignore[return-value]


def stop_all() -> None:
    """Ends all ranks; a later ``run_ranks`` starts new ones."""
    while _running:
        _running.popitem()[1].kill()


class _Ranks:
    """The processes of one world, seen from the test session."""

    def __init__(self, world: int, backend: str) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="funcol_ranks_"))
        self._connections: list[Connection] = []
        self._processes = []
        context = forking_context()
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(rank, world, self._directory, backend, theirs),
                name=f"rank {rank}",
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        request = pickle.dumps((function.__module__, function.__qualname__, pickle.dumps(args), timeout))
        for ours in self._connections:
            ours.send_bytes(request)
        deadline = time.monotonic() + timeout + GRACE_S
        results: list[Any] = [None] * len(self._connections)
        unfinished = {ours: rank for rank, ours in enumerate(self._connections)}
        while unfinished:
            answered = connection.wait(list(unfinished), max(0.0, deadline - time.monotonic()))
            if not answered:
                raise TimeoutError(f"ranks {list(unfinished.values())} have not answered in {timeout} s")
            for ours in answered:
                rank = unfinished[ours]
                try:
                    raised, value = pickle.loads(ours.recv_bytes())
                except EOFError:
                    raise self._death_of(rank, list(unfinished.values()), timeout) from None
                if raised:
                    raise RankError(f"rank {rank} of {len(self._processes)} raised\n{value}")
                results[rank] = value
                del unfinished[ours]
        return results

    def num_group_threads(self) -> int:
        """Counts the threads of gloo on the first rank."""
        num_threads = 0
        for file in Path(f"/proc/{self._processes[0].pid}/task").glob("*/comm"):
            with contextlib.suppress(OSError):  # the thread has ended since
                num_threads += file.read_text().startswith("gloo")
        return num_threads

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process, ours in zip(self._processes, self._connections, strict=True):
            process.join()
            ours.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _death_of(self, rank: int, unfinished: list[int], timeout: float) -> Exception:
        self._processes[rank].join()
        stacks = self._stacks_of(rank)
        if not stacks.startswith("Timeout"):
            return RankError(f"rank {rank} died with exit code {self._processes[rank].exitcode}\n{stacks}")
        # The rank that hangs is often not the one that noticed first.
        for other in unfinished:
            self._processes[other].join(GRACE_S)
        places = "\n".join(f"rank {other}: {self._stacks_of(other)}" for other in unfinished)
        return TimeoutError(f"ranks {unfinished} have not finished in {timeout} s; they were here:\n{places}")

    def _stacks_of(self, rank: int) -> str:
        lines = _stacks_file(self._directory, rank).read_text().splitlines()
        ours = ("/multiprocessing/", " in _serve")
        return "\n".join(line for line in lines if not any(part in line for part in ours))


class _ThisRank:
    """A rank, seen from its own process."""

    def __init__(self, rank: int, world: int, directory: Path, backend: str) -> None:
        self.rank = rank
        self.world = world
        self.backend = backend
        self._directory = directory
        self._num_joins = 0
        self._num_cases = 0

    def join(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        store = dist.FileStore(str(self._directory / f"store{self._num_joins}"), self.world)
        self._num_joins += 1
        if self.backend == "gloo":
            backend = "gloo"
        else:
            backend = f"cpu:gloo,cuda:{self.backend}"
            torch.cuda.set_device(self.rank % torch.cuda.device_count())
            if self.world > torch.cuda.device_count():
                # NCCL refuses two ranks of one host on one device: each gets the name of another host.
                os.environ["NCCL_HOSTID"] = f"rank {self.rank}"
            # And not torch.set_default_device(), which is a mode that every call would see.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.set_default_tensor_type(torch.cuda.FloatTensor)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world, timeout=timedelta(minutes=5)
        )

    def rejoin(self) -> None:
        import torch.distributed as dist

        if "torch.distributed.tensor" in sys.modules:  # its caches keep meshes, which keep groups
            from torch.distributed.tensor.debug import _clear_sharding_prop_cache

            _clear_sharding_prop_cache()
        for forget in _made:
            forget()
        dist.destroy_process_group()
        self.join()

    def run(self, module: str, qualname: str, args: bytes) -> Any:
        if self._num_joins == 0:
            self.join()
        function: Any = importlib.import_module(module)
        for name in qualname.split("."):
            function = getattr(function, name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = function(self.rank, self.world, *pickle.loads(args))
        if self.backend != "gloo":
            check_device()
        if self._check_in_step() > MAX_GROUPS:
            self.rejoin()
        return result

    def _check_in_step(self) -> int:
        """Returns the largest number of groups that a rank has."""
        import torch
        import torch.distributed as dist

        self._num_cases += 1
        num_groups = len(dist.distributed_c10d._world.pg_map)
        bounds = torch.tensor([self._num_cases, -self._num_cases, num_groups], device="cpu")
        dist.all_reduce(bounds, dist.ReduceOp.MAX)
        *num_cases, most_groups = bounds.tolist()
        assert num_cases == [self._num_cases, -self._num_cases], "the ranks are out of step"
        return most_groups


_backend = "gloo"
_shares_devices = False
_running: dict[tuple[int, str], _Ranks] = {}
_made: list[Callable[[], None]] = []
_this_rank: _ThisRank | None = None
atexit.register(stop_all)


def forking_context() -> Any:
    """Returns a context whose processes have torch imported from the start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    # A server with threads cannot be forked safely.
    threads = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(threads)
    os.environ[threads] = "1"
    try:
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ[threads]
        else:
            os.environ[threads] = before
    return context


@contextmanager
def forked_ranks(
    target: Callable[..., None], world: int, *arguments: Any
) -> Iterator[tuple[list[Any], list[Connection]]]:
    """Processes of ranks that may end as they like, and the connection on which each answers.

    Each runs ``target(rank, world, *arguments, directory, answer)``, with one directory for all. They are
    killed at the end.
    """
    context = forking_context()
    processes, answers = [], []
    with tempfile.TemporaryDirectory(prefix="funcol_faults_") as directory:
        try:
            for rank in range(world):
                ours, theirs = context.Pipe()
                given = (rank, world, *arguments, Path(directory), theirs)
                processes.append(context.Process(target=target, args=given, daemon=True))
                processes[-1].start()
                theirs.close()
                answers.append(ours)
            yield processes, answers
        finally:
            for process in processes:
                process.kill()
                process.join()
            for ours in answers:
                ours.close()


def _stacks_file(directory: Path, rank: int) -> Path:
    return directory / f"stacks{rank}"


def _serve(rank: int, world: int, directory: Path, backend: str, requests: Connection) -> None:
    global _this_rank
    _this_rank = _ThisRank(rank, world, directory, backend)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with _stacks_file(directory, rank).open("w") as stacks:
        import torch

        # Stacks of all threads in C++ go to stderr; those in Python to the file.
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        faulthandler.enable(stacks)
        while True:
            try:
                module, qualname, args, timeout = pickle.loads(requests.recv_bytes())
            except EOFError:
                os._exit(0)
            faulthandler.dump_traceback_later(timeout, file=stacks, exit=True)
            try:
                answer = pickle.dumps((False, _this_rank.run(module, qualname, args)))
            except BaseException:
                answer = pickle.dumps((True, traceback.format_exc()))
            faulthandler.cancel_dump_traceback_later()
            requests.send_bytes(answer)
