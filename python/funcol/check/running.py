"""The two runs of a check on a rank, and the exchange of what they recorded."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.overrides import TorchFunctionMode

from ..collectives.in_flight import pending
from .comparing import Comparison, Finding
from .layouts import Value
from .recording import Key, Recorder, definition, plain_name, widen
from .report import Report
from .verdict import Fault, faults_of
from .weights import load_weights, share_weights

Program = Callable[[DeviceMesh | None], Any]


@dataclass
class Options:
    """The arguments of a check: see :func:`funcol.check`."""

    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    device: str = "cpu"
    dtype: str = "float64"
    seed: int = 0
    timeout_s: float = 300.0
    max_bytes: int = 1 << 30
    declared: dict[str, tuple[str, ...]] = field(default_factory=dict)


class CheckError(ValueError):
    """A check that cannot be made: no program, a mesh that does not fit, programs that do not correspond."""


@dataclass
class _Run:
    values: list[tuple[Key, Value]]
    names: list[str]  # of the modules
    drawing: set[str]
    lines: dict[str, tuple[str, str]]  # of each module: where it is defined, and called
    classes: dict[str, str]
    first: dict[str, Tensor]  # the weights before the first call


def program_of(path: Path) -> Program:
    """Returns the function ``program`` of a file."""
    if not path.is_file():
        raise CheckError(f"there is no file {path}. Pass a file that defines program(mesh).")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CheckError(f"{path} is no Python file. Pass a file that defines program(mesh).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise CheckError(f"{path} cannot be imported: {described(error)}") from error
    program = getattr(module, "program", None)
    if not callable(program):
        raise CheckError(f"{path} defines no function program(mesh). Define one that returns model and loss.")
    return program  # type: ignore[no-any-return]


def check_on_rank(program: Program, options: Options, folder: Path | None = None) -> Report:
    """Runs the check on this rank of the default group; all ranks call it alike, and get the report.

    A rank that is not done after the timeout ends its process: it writes where it stopped to ``folder``, or
    to standard error.
    """
    num_ranks = math.prod(options.mesh_shape)
    if dist.get_world_size() != num_ranks:
        raise CheckError(
            f"the mesh {options.mesh_shape} has {num_ranks} ranks, and {dist.get_world_size()} run. "
            "Start as many ranks as the mesh has."
        )
    watch = _Watch(options.timeout_s, folder)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=options.timeout_s + 60))
    try:
        return _Check(program, options, group, watch).run()
    finally:
        watch.done.set()
        dist.destroy_process_group(group)


class _Check:
    def __init__(self, program: Program, options: Options, group: Any, watch: _Watch) -> None:
        self._program = program
        self._options = options
        self._group = group
        self._watch = watch
        self._rank = dist.get_rank()
        self._mesh = init_device_mesh(options.device, options.mesh_shape, mesh_dim_names=options.axes or None)

    def run(self) -> Report:
        reference, perturbed = self._references()
        weights = share_weights(None if reference is None else reference.first, self._group)
        run = self._run(self._mesh, lambda root: self._begin(root, weights))
        self._watch.last = "the end of the program"
        self._check_names(reference, run)
        findings = self._compare(reference, perturbed, run)
        runs: list[_Run] = self._gathered(
            _Run([], [], run.drawing, run.lines, run.classes, {}) if self._rank else run
        )
        answer = [None if reference is None else self._report(reference, findings, runs)]
        dist.broadcast_object_list(answer, src=0, group=self._group)
        assert answer[0] is not None
        return answer[0]

    def _references(self) -> tuple[_Run | None, _Run | None]:
        """The reference run and, but for float64, a perturbed one; on rank 0. The others wait for it."""
        reference = perturbed = None
        problem: list[str | None] = [None]
        if self._rank == 0:
            try:
                reference = self._run(None, self._widen)
                if self._options.dtype != "float64":
                    perturbed = self._run(None, self._widen, torch.finfo(_dtype(self._options)).eps)
            except CheckError as error:
                problem = [str(error)]
            except Exception as error:
                problem = [f"the reference run, program(None), ended with {described(error)}"]
        dist.broadcast_object_list(problem, src=0, group=self._group)
        if problem[0] is not None:
            raise CheckError(problem[0])
        return reference, perturbed

    def _widen(self, root: nn.Module) -> None:
        if self._options.dtype == "float64":
            widen(root)

    def _begin(self, root: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._widen(root)
        load_weights(root, weights, self._mesh)

    def _run(self, mesh: DeviceMesh | None, begin: Callable[[nn.Module], None], noise: float = 0.0) -> _Run:
        first: dict[str, Tensor] = {}

        def begin_and_keep(root: nn.Module) -> None:
            begin(root)
            if mesh is None:
                held = [*root.named_parameters(), *root.named_buffers()]
                first.update({plain_name(name): one.detach().clone() for name, one in held})

        recorder = Recorder(self._options.max_bytes, begin_and_keep, noise)
        self._watch.recorder = recorder
        torch.manual_seed(self._options.seed)
        random.seed(self._options.seed)
        with _defaults(self._options), recorder.running():
            try:
                model, loss, optimizer = _results(self._program(mesh))
            except CheckError:
                raise
            except Exception as error:
                where = f" in {recorder.failed_in}" if recorder.failed_in else ""
                error.add_note(f"rank {self._rank} was{where or ' outside of the modules'}")
                raise
        with _defaults(self._options):
            values = recorder.finish(model, loss, optimizer)
        names = {module: plain_name(name) for name, module in model.named_modules()}
        return _Run(
            values,
            list(dict.fromkeys(names.values())),
            {names[one] for one in recorder.draws if one in names},
            {names[one]: (definition(one), site) for one, site in recorder.sites.items() if one in names},
            {plain_name(name): type(module).__name__ for name, module in model.named_modules()},
            first,
        )

    def _check_names(self, reference: _Run | None, run: _Run) -> None:
        """Refuses programs whose models have other parameters with and without a mesh."""
        mine = [_parameter(key) for key, _ in run.values if key.kind == "param"]
        everyone = self._gathered(mine)
        problem: list[str | None] = [None]
        if reference is not None:
            expected = {_parameter(key) for key, _ in reference.values if key.kind == "param"}
            found = set().union(*everyone)
            if expected != found:
                missing, new = sorted(expected - found)[:3], sorted(found - expected)[:3]
                problem = [
                    "the models of the two runs have parameters of other names: "
                    f"{len(expected - found)} only without a mesh ({', '.join(missing) or 'none'}), "
                    f"{len(found - expected)} only with it ({', '.join(new) or 'none'}). Name them alike."
                ]
        dist.broadcast_object_list(problem, src=0, group=self._group)
        if problem[0] is not None:
            raise CheckError(problem[0])

    def _compare(self, reference: _Run | None, perturbed: _Run | None, run: _Run) -> list[Finding]:
        """Sends what the ranks recorded to rank 0, as much at a time as the bound allows, and compares it."""
        order: list[Any] = [
            None if reference is None else [(key, _size(one)) for key, one in reference.values]
        ]
        dist.broadcast_object_list(order, src=0, group=self._group)
        own = _by_key(run.values, {key for key, _ in order[0]})
        comparison = None
        if reference is not None:
            comparison = Comparison(
                dict(reference.values),
                None if perturbed is None else dict(perturbed.values),
                self._mesh.mesh.cpu(),
                self._options.axes,
                torch.finfo(_dtype(self._options)).eps,
                self._options.declared,
            )
        findings = []
        most = self._options.max_bytes // dist.get_world_size()
        # Weights first: their layouts are those of their gradients.
        for keys in _buckets(sorted(order[0], key=lambda one: one[0].kind != "param"), most):
            everyone = self._gathered({key: own.get(key) for key in keys})
            if comparison is not None:
                findings += [comparison.judge(key, [one[key] for one in everyone]) for key in keys]
        return findings

    def _gathered(self, value: Any) -> list[Any]:
        """Returns what all ranks have, on rank 0."""
        found = [None] * dist.get_world_size() if self._rank == 0 else None
        dist.gather_object(value, found, dst=0, group=self._group)
        return found or []

    def _report(self, reference: _Run, findings: list[Finding], runs: Sequence[_Run]) -> Report:
        drawing = reference.drawing.union(*(run.drawing for run in runs))
        faults = faults_of(findings, drawing)
        lines = dict(reference.lines)
        for run in runs:
            lines |= {name: line for name, line in run.lines.items() if name not in lines or run is runs[0]}
        for fault in faults:
            fault.line, fault.called = lines.get(fault.module, ("", ""))
        loss = next((one.local for key, one in reference.values if key.kind == "loss"), None)
        gradients = [
            one.local for key, one in reference.values if key.kind == "grad" and one.local is not None
        ]
        return Report(
            dict(zip(self._options.axes, self._options.mesh_shape, strict=True)),
            self._options.dtype,
            faults,
            findings,
            {name: reference.classes.get(name, "") for name in reference.names},
            None if loss is None else float(loss.double().sum()),
            math.sqrt(sum(float(one.double().square().sum()) for one in gradients)),
            sorted(drawing),
        )


class _Watch:
    """Ends the process if it is not done in time, after it wrote where it stopped."""

    def __init__(self, timeout_s: float, folder: Path | None) -> None:
        self.done = threading.Event()
        self.recorder: Recorder | None = None
        self.last = ""
        self._timeout_s = timeout_s
        self._folder = folder
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        if self.done.wait(self._timeout_s):
            return
        where = self.last or ("no module yet" if self.recorder is None else self.recorder.where())
        text = "; ".join([f"stopped in {where}", *map(str, pending())])
        if self._folder is None:
            print(f"funcol check: rank {dist.get_rank()} {text}", file=sys.stderr, flush=True)
        else:
            write_end(self._folder, dist.get_rank(), "hang", text)
        os._exit(3)


def write_end(folder: Path, rank: int, kind: str, text: str) -> None:
    """Leaves for the parent how the rank ended."""
    path = folder / f"end{rank}.json"
    path.with_suffix(".new").write_text(json.dumps({"kind": kind, "text": text}))
    path.with_suffix(".new").rename(path)


class _Widened(TorchFunctionMode):
    """Makes float64 of the floating-point dtypes that a program names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("float", "half", "bfloat16") and func is getattr(Tensor, name):
            func = Tensor.double
        elif func is not Tensor.view:
            args = tuple(_WIDER.get(one, one) if isinstance(one, torch.dtype) else one for one in args)
            if kwargs and isinstance(kwargs.get("dtype"), torch.dtype):
                kwargs = {**kwargs, "dtype": _WIDER.get(kwargs["dtype"], kwargs["dtype"])}
        return func(*args, **(kwargs or {}))


_WIDER = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)


@contextmanager
def _defaults(options: Options) -> Iterator[None]:
    with ExitStack() as stack:
        if options.dtype == "float64":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
            stack.enter_context(_Widened())
        if options.device != "cpu":
            stack.enter_context(torch.device(options.device))
        yield


def _dtype(options: Options) -> torch.dtype:
    return getattr(torch, options.dtype)  # type: ignore[no-any-return]


def _results(returned: Any) -> tuple[nn.Module, Tensor | None, Any]:
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)
    if not fits or not isinstance(returned[1], Tensor | None):
        raise CheckError(
            f"program(mesh) returned {type(returned).__name__}, expected model, loss or model, loss, "
            "optimizer, with a module and a tensor."
        )
    return (*returned, None)[:3]


def _parameter(key: Key) -> str:
    return f"{key.module}.{key.path}".lstrip(".")


def _size(value: Value) -> int:
    return 0 if value.local is None else value.local.numel() * value.local.element_size()


def _buckets(order: Sequence[tuple[Key, int]], most: int) -> Iterator[list[Key]]:
    """Consecutive keys whose values have ``most`` bytes, or one that has more."""
    bucket: list[Key] = []
    held = 0
    for key, size in order:
        if bucket and held + size > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(key)
        held += size
    if bucket:
        yield bucket


def _by_key(values: Sequence[tuple[Key, Value]], wanted: set[Key]) -> dict[Key, Value]:
    """The values by their keys. Calls of a module that the reference called once, such as those of the
    micro-batches of a pipeline, are joined to one."""
    found = dict(values)
    for key in [key for key in found if key.call and key not in wanted]:
        first, more = found.get(key._replace(call=0)), found[key].local
        if first is None or first.local is None or more is None or not more.ndim:
            continue
        if first.local.ndim == more.ndim and first.local.shape[1:] == more.shape[1:]:
            first.local = torch.cat([first.local, more])
    return found


def described(error: BaseException) -> str:
    """The error in one line: its type, text, and the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(str(Path(torch.__file__).parent))]
    line = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}{line}"


def fault_of_error(error: BaseException) -> Fault:
    notes = "; ".join(getattr(error, "__notes__", []))
    return Fault("run", "", "raised", f"{described(error)}; {notes}")
