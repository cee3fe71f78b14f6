"""The two runs of a check on a rank, and the exchange of what they recorded."""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.overrides import TorchFunctionMode

from ..weights.agreement import Agreement
from ..weights.export import full_tensors
from .comparing import NOISE_FACTOR, TOLERANCE, Comparison, Finding
from .recording import Key, Recorder, Value, definition, num_bytes, plain_name, widen
from .report import Report
from .verdict import Verdict
from .weights import Loader

Program = Callable[[DeviceMesh | None], Any]

DTYPES = ("float64", "float32", "bfloat16", "float16")
_BUCKET_BYTES = 64 << 20  # of the values that are compared at a time
_ALIGNMENT = 16  # bytes of a complex number


class CheckError(ValueError):
    """A check that cannot be made: no program, a mesh that does not fit, programs that do not correspond."""


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
    layouts: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.mesh_shape or any(not isinstance(size, int) or size < 1 for size in self.mesh_shape):
            raise CheckError(
                f"the mesh has the sizes {self.mesh_shape}, expected one or more, each at least 1."
            )
        num_axes, names = len(self.mesh_shape), ", ".join(self.axes)
        if len(self.axes) != num_axes:
            raise CheckError(f"the mesh has {num_axes} axes and {len(self.axes)} names: {names}.")
        if self.dtype not in DTYPES:
            raise CheckError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}.")
        for name, ops in self.layouts.items():
            if len(ops) != num_axes:
                raise CheckError(
                    f"the layout of '{name}' has {len(ops)} ops, expected {num_axes}, one for each axis."
                )

    @property
    def mesh(self) -> dict[str, int]:
        return dict(zip(self.axes, self.mesh_shape, strict=True))

    @property
    def eps(self) -> float:
        return torch.finfo(getattr(torch, self.dtype)).eps


@dataclass
class _Run:
    values: dict[Key, Value]
    drawing: list[str]  # the modules that drew random numbers
    lines: dict[str, tuple[str, str]]  # of each module: where it is defined, and called
    classes: dict[str, str]
    norm: float  # of the gradients that are plain tensors
    gradients: list[DTensor]
    first: dict[str, Tensor]  # the weights before the first call

    def parameters(self) -> list[str]:
        return sorted(f"{key.module}.{key.path}".lstrip(".") for key in self.values if key.kind == "param")


class Check:
    """A check on this rank of the default group; all ranks make it alike."""

    def __init__(self, program: Program, options: Options) -> None:
        self._program = program
        self._options = options
        self._agreement = Agreement("check", None)
        self._rank = dist.get_rank()
        self._recorder: Recorder | None = None
        self._has_ended = False  # the program

    def where(self) -> str:
        """The place where this rank is, for a report of a hang."""
        if self._has_ended:
            return "the end of the program"
        return "no module yet" if self._recorder is None else self._recorder.where()

    def run(self) -> Report:
        """Returns the report, on all ranks. ``CheckError`` on all if the check cannot be made."""
        self._mesh = init_device_mesh(
            self._options.device, self._options.mesh_shape, mesh_dim_names=self._options.axes
        )
        self._ranks = init_device_mesh(self._options.device, (dist.get_world_size(),))
        reference = perturbed = None
        told: dict[str, Any] = {"problem": ""}
        if self._rank == 0:
            try:
                reference = self._run(None, self._widen)
                if self._options.dtype != "float64":
                    perturbed = self._run(None, self._widen, self._options.eps)
                heads = {
                    name: (list(one.shape), str(one.dtype)[6:]) for name, one in reference.first.items()
                }
                told |= {"keys": [*reference.values], "names": reference.parameters(), "weights": heads}
            except CheckError as error:
                told["problem"] = str(error)
            except Exception as error:
                told["problem"] = f"the reference run, program(None), ended with {described(error)}"
        told = self._agreement.tell(told)[0]
        if told["problem"]:
            raise CheckError(told["problem"])
        weights = self._shared({} if reference is None else reference.first, told["weights"])
        keys = [Key(*key) for key in told["keys"]]
        report, is_guessed = self._checked(reference, perturbed, weights, keys, told["names"], guess=0)
        if not report.ok and is_guessed:
            other, _ = self._checked(reference, perturbed, weights, keys, told["names"], guess=1)
            report = other if other.ok else report
        return report

    def _shared(self, weights: Mapping[str, Tensor], heads: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns on all ranks what rank 0 has in ``weights``."""
        shared = {}
        for name, (shape, dtype) in heads.items():
            full = torch.empty(shape, dtype=getattr(torch, dtype), device=self._options.device)
            if self._rank == 0:
                full.copy_(weights[name])
            dist.broadcast(full, src=0)
            shared[name] = full
        return shared

    def _checked(
        self,
        reference: _Run | None,
        perturbed: _Run | None,
        weights: Mapping[str, Tensor],
        keys: list[Key],
        names: list[str],
        guess: int,
    ) -> tuple[Report, bool]:
        """Returns the report of a parallel run, and true if weights were loaded by a guess."""
        loader = Loader(weights, self._mesh, self._options.layouts, guess)
        self._has_ended = False

        def begin(root: nn.Module) -> None:
            self._widen(root)
            loader.load(root)

        run = self._run(self._mesh, begin)
        self._has_ended = True
        own = _joined_calls(run.values, {*keys})
        told = [
            *self._agreement.tell(
                {
                    "names": run.parameters(),
                    "is_guessed": loader.is_guessed,
                    "drawing": run.drawing,
                    "lines": run.lines,
                    "heads": [own[key].head() if key in own else None for key in keys],
                }
            ).values()
        ]
        _check_names({*names}, {name for one in told for name in one["names"]})
        heads = [one["heads"] for one in told]
        norms = self._agreement.tell(self._norm(run, keys, heads)).values()
        judge = None
        if reference is not None:
            judge = Comparison(
                reference.values,
                None if perturbed is None else perturbed.values,
                self._mesh.mesh.cpu(),
                self._options.axes,
                self._options.eps,
                self._options.layouts,
            ).judge
        findings = [
            judge(key, values) for key, values in self._streamed(keys, heads, own) if judge is not None
        ]
        text = ""
        if reference is not None:
            text = self._report(reference, perturbed, findings, told, [*norms]).json()
        return Report.of(self._agreement.tell(text)[0]), any(one["is_guessed"] for one in told)

    def _widen(self, root: nn.Module) -> None:
        if self._options.dtype == "float64":
            widen(root)

    def _run(self, mesh: DeviceMesh | None, begin: Callable[[nn.Module], None], noise: float = 0.0) -> _Run:
        first: dict[str, Tensor] = {}

        def begin_and_keep(root: nn.Module) -> None:
            begin(root)
            if mesh is None:
                held = [*root.named_parameters(), *root.named_buffers()]
                first.update({plain_name(name): one.detach().clone() for name, one in held})

        recorder = self._recorder = Recorder(self._options.max_bytes, begin_and_keep, noise)
        torch.manual_seed(self._options.seed)
        random.seed(self._options.seed)
        with _defaults(self._options):
            try:
                with recorder.running():
                    model, loss, optimizer = _results(self._program(mesh))
            except Exception as error:
                error.add_note(f"rank {self._rank} was in {recorder.failed_in or 'no module'}")
                raise
            values = recorder.finish(model, loss, optimizer)
        gradients = [one.grad for one in model.parameters() if one.grad is not None]
        plain = [one for one in gradients if not isinstance(one, DTensor)]
        names = {module: plain_name(name) for name, module in model.named_modules()}
        return _Run(
            values,
            sorted({names[one] for one in recorder.draws if one in names}),
            {names[one]: (definition(one), site) for one, site in recorder.sites.items() if one in names},
            {name: type(module).__name__ for module, name in names.items()},
            float(nn.utils.get_total_norm(plain)),
            [one for one in gradients if isinstance(one, DTensor)],
            first,
        )

    def _norm(self, run: _Run, keys: Sequence[Key], heads: Sequence[Sequence[Any]]) -> float | None:
        """The norm of all gradients by PyTorch's function; None if ranks have gradients that others lack."""
        places = [i for i, key in enumerate(keys) if key.kind == "grad"]
        present = {tuple(i for i in places if one[i] is not None and one[i][0] is not None) for one in heads}
        if len(present) > 1:
            return None
        meshes: dict[DeviceMesh, list[DTensor]] = {}
        for one in run.gradients:
            meshes.setdefault(one.device_mesh, []).append(one)
        norms = [nn.utils.get_total_norm(some) for some in meshes.values()]
        full = [one.full_tensor() if isinstance(one, DTensor) else one for one in norms]
        return math.hypot(run.norm, *map(float, full))

    def _streamed(
        self, keys: Sequence[Key], heads: Sequence[Sequence[Any]], own: Mapping[Key, Value]
    ) -> Iterator[tuple[Key, list[Value | None]]]:
        """Yields on rank 0 what the ranks have under each key, as much at a time as the bound allows.
        Parameters come first: their layouts are those of their gradients."""
        order = sorted(range(len(keys)), key=lambda i: keys[i].kind != "param")

        def rows() -> Iterator[tuple[str, Tensor]]:
            for i in order:
                size = max(num_bytes(one[i]) for one in heads)
                row = torch.zeros(-(-max(size, 1) // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
                value = own.get(keys[i])
                if value is not None and value.local is not None:
                    row[: num_bytes(value.head())] = value.local.reshape(-1).view(torch.uint8)
                row = row[None].to(self._options.device)
                yield str(i), DTensor.from_local(row, self._ranks, [Shard(0)], run_check=False)

        most = min(self._options.max_bytes, _BUCKET_BYTES)
        with full_tensors(rows(), to=0, bucket_bytes=most, device="cpu") as stream:
            for i, (_, full) in zip(order, stream, strict=True):
                if full is not None:
                    yield keys[i], [Value.of(one[i], row) for one, row in zip(heads, full, strict=True)]

    def _report(
        self,
        reference: _Run,
        perturbed: _Run | None,
        findings: list[Finding],
        told: Sequence[Mapping[str, Any]],
        norms: Sequence[float | None],
    ) -> Report:
        drawing = sorted({*reference.drawing}.union(*(one["drawing"] for one in told)))
        lines: dict[str, Any] = dict(reference.lines)
        for one in reversed(told):
            lines |= one["lines"]
        norm = norms[0] if norms[0] is not None and {*map(_rounded, norms)} == {_rounded(norms[0])} else None
        findings.append(self._judged_norm(reference, perturbed, norm))
        faults = Verdict(findings, drawing).faults()
        for fault in faults:
            fault.line, fault.called = lines.get(fault.module, ("", ""))
        loss = next((one.local for key, one in reference.values.items() if key.kind == "loss"), None)
        return Report(
            self._options.mesh,
            self._options.dtype,
            faults,
            findings,
            reference.classes,
            None if loss is None else float(loss.double().sum()),
            reference.norm,
            norm,
            drawing,
        )

    def _judged_norm(self, reference: _Run, perturbed: _Run | None, norm: float | None) -> Finding:
        """Compares the norm of the gradients; there is none if plain gradients are shards."""
        finding = Finding("", "norm", 0, "")
        if norm is not None:
            noise = 0.0 if perturbed is None else abs(perturbed.norm - reference.norm)
            bound = TOLERANCE * reference.norm if perturbed is None else NOISE_FACTOR * noise
            bound = max(bound, NOISE_FACTOR * self._options.eps * reference.norm)
            finding.agrees = abs(norm - reference.norm) <= bound
            finding.fault = "" if finding.agrees else "wrong"
            finding.detail = (
                "" if finding.agrees else f"it is {norm:.12g}, and {reference.norm:.12g} in the reference"
            )
        return finding


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


def _results(returned: Any) -> tuple[nn.Module, Tensor | None, Any]:
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)
    if not fits or not isinstance(returned[1], Tensor | None):
        raise CheckError(
            f"program(mesh) returned {type(returned).__name__}, expected model, loss or model, loss, "
            "optimizer, with a module and a tensor."
        )
    return (*returned, None)[:3]


def _check_names(expected: set[str], found: set[str]) -> None:
    """``CheckError`` if the models have other parameters with and without a mesh."""
    if expected != found:
        missing, new = sorted(expected - found), sorted(found - expected)
        raise CheckError(
            "the models of the two runs have parameters of other names: "
            f"{len(missing)} only without a mesh ({', '.join(missing[:3]) or 'none'}), "
            f"{len(new)} only with it ({', '.join(new[:3]) or 'none'}). Name them alike."
        )


def _joined_calls(values: Mapping[Key, Value], wanted: set[Key]) -> dict[Key, Value]:
    """The values, in which calls of a module that the reference called once, such as those of the
    micro-batches of a pipeline, are joined to one."""
    found = dict(values)
    for key in [key for key in found if key.call and key not in wanted]:
        first, more = found.get(key._replace(call=0)), found[key].local
        if first is None or first.local is None or more is None or not more.ndim:
            continue
        if first.local.ndim == more.ndim and first.local.shape[1:] == more.shape[1:]:
            first.local = torch.cat([first.local, more])
    return found


def _rounded(norm: float | None) -> str:
    return f"{norm:.6g}"


def described(error: BaseException) -> str:
    """The error in one line: its type, text, and the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [one for one in frames if not one.filename.startswith(str(Path(torch.__file__).parent))]
    line = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}{line}"
