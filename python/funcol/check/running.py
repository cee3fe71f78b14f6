"""The two runs of a check on a rank, and the exchange of what they recorded."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.overrides import TorchFunctionMode

from ..redistribution.agreement import Agreement, reason_of
from ..redistribution.functions import redistribute
from ..weights.export import full_tensors
from .comparing import Comparison, Reference
from .recording import Key, Recorder, Value, num_bytes, plain_name, widen, without_ddp
from .report import Report
from .verdict import Verdict

Program = Callable[[DeviceMesh | None], Any]
Heads = Sequence[Any]  # of the values of a rank, by the place of their key

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_BUCKET_BYTES = 64 << 20  # of the values that are compared at a time
_ALIGNMENT = 16  # bytes of a complex number


class CheckError(ValueError):
    """A check that cannot be made: no program, a mesh that does not fit, programs that do not correspond."""


@dataclass
class Options:
    """The arguments of a check: see :func:`funcol.check`."""

    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    device: str
    dtype: str
    seed: int
    timeout_s: float
    max_bytes: int
    layouts: Mapping[str, Sequence[str]]

    def __post_init__(self) -> None:
        shape, names = self.mesh_shape, ", ".join(self.axes)
        if not shape or any(not isinstance(size, int) or size < 1 for size in shape):
            raise CheckError(f"the mesh has the sizes {shape}, expected one or more, each at least 1.")
        if len(self.axes) != len(shape):
            raise CheckError(f"the mesh has {len(shape)} axes and {len(self.axes)} names: {names}.")
        if self.dtype not in _DTYPES:
            raise CheckError(f"dtype is {self.dtype!r}, expected one of {', '.join(_DTYPES)}.")
        for name, ops in self.layouts.items():
            if len(ops) != len(shape):
                raise CheckError(
                    f"the layout of '{name}' has {len(ops)} ops, expected one for each of {names}."
                )


class Check:
    """A check on this rank of the default group; all ranks make it alike."""

    def __init__(self, program: Program, options: Options) -> None:
        self._program = program
        self._options = options
        self._eps = torch.finfo(getattr(torch, options.dtype)).eps
        self._agreement = Agreement("check", None)
        self._rank = dist.get_rank()
        self._recorder: Recorder | None = None

    def where(self) -> str:
        """The place where this rank is, for a report of a hang."""
        return "no module yet" if self._recorder is None else self._recorder.where()

    def run(self) -> Report:
        """Returns the report, on all ranks. ``CheckError`` on all if the check cannot be made."""
        options = self._options
        self._mesh = init_device_mesh(options.device, options.mesh_shape, mesh_dim_names=options.axes)
        self._ranks = init_device_mesh(options.device, (dist.get_world_size(),))
        weights: dict[str, Tensor] = {}
        reference: Reference | None = None
        told: Any = None
        if self._rank == 0:
            try:
                reference = self._reference(weights)
                told = (
                    [*reference.values],
                    [(name, [*one.shape], str(one.dtype)) for name, one in weights.items()],
                )
            except CheckError as error:
                told = str(error)
            except Exception as error:
                told = f"the reference run, program(None), ended with {described(error)}"
        told = self._agreement.tell(told)[0]
        if isinstance(told, str):
            raise CheckError(told)
        for name, shape, dtype in told[1]:
            full = torch.empty(
                shape, dtype=getattr(torch, dtype.removeprefix("torch.")), device=options.device
            )
            full.copy_(weights.get(name, full))
            dist.broadcast(full, src=0)
            weights[name] = full
        keys = [Key(*key) for key in told[0]]
        report, has_guessed = self._checked(reference, weights, keys, guesses=True)
        if has_guessed and not report.ok:
            other, _ = self._checked(reference, weights, keys, guesses=False)
            report = other if other.ok else report
        return report

    def _reference(self, weights: dict[str, Tensor]) -> Reference:
        """Runs the program without a mesh, and gives ``weights`` those before the first call."""

        def keep(root: nn.Module) -> None:
            held = [*root.named_parameters(), *root.named_buffers()]
            weights.update({plain_name(name): one.detach().clone() for name, one in held})

        values, facts, model = self._run(None, keep)
        reference = Reference(values, facts, _norm_of(model), self._eps)
        if self._options.dtype != "float64":
            reference.perturbed, _, model = self._run(None, keep, self._eps)
            reference.norm_noise = abs(_norm_of(model) - reference.norm)
        return reference

    def _checked(
        self, reference: Reference | None, weights: Mapping[str, Tensor], keys: list[Key], guesses: bool
    ) -> tuple[Report, bool]:
        """Returns the report of a parallel run, and true if weights were loaded by a guess."""
        guessed: list[str] = []

        def load(root: nn.Module) -> None:
            guessed.extend(_load(root, weights, self._mesh, self._options.layouts, guesses))

        values, facts, model = self._run(self._mesh, load)
        own = _joined_calls(values, {*keys})
        heads = [own[key].head() if key in own else None for key in keys]
        told = [*self._agreement.tell([[*_names(own)], guessed, facts, heads]).values()]
        _check_names(_names(keys), {name for one in told for name in one[0]})
        all_heads = [one[3] for one in told]
        grads = [i for i, key in enumerate(keys) if key.kind == "grad"]
        present = {tuple(i for i in grads if one[i] and one[i][0] is not None) for one in all_heads}
        norms = self._agreement.tell(_norm_of(model) if len(present) == 1 else None)
        streamed = self._streamed(keys, all_heads, own)
        text = ""
        if reference is None:
            assert not [*streamed]
        else:
            norm = norms[0] if len({f"{one:.6g}" for one in norms.values() if one is not None}) == 1 else None
            text = self._report(reference, streamed, norm, [one[2] for one in told]).json()
        return Report.of(self._agreement.tell(text)[0]), any(one[1] for one in told)

    def _run(
        self, mesh: DeviceMesh | None, begin: Callable[[nn.Module], None], noise: float = 0.0
    ) -> tuple[dict[Key, Value], dict[str, Any], nn.Module]:
        """Runs the program; returns the values, facts on the modules, and the model."""

        def widen_and_begin(root: nn.Module) -> None:
            if self._options.dtype == "float64":
                widen(root)
            begin(root)

        recorder = self._recorder = Recorder(self._options.max_bytes, widen_and_begin, noise)
        torch.manual_seed(self._options.seed)
        random.seed(self._options.seed)
        with _defaults(self._options):
            try:
                with recorder.running(is_reference=mesh is None):
                    model, loss, optimizer = _results(self._program(mesh))
            except Exception as error:
                error.add_note(f"rank {self._rank} was in {recorder.where()}")
                raise
            model = without_ddp(model)
            return recorder.values, recorder.finish(model, loss, optimizer), model

    def _streamed(
        self, keys: Sequence[Key], heads: Sequence[Heads], own: Mapping[Key, Value]
    ) -> Iterator[tuple[Key, list[Value | None]]]:
        """Yields on rank 0 what the ranks have under each key, as much at a time as the bound allows.
        Parameters come first: their layouts are those of their gradients."""
        order = sorted(range(len(keys)), key=lambda i: keys[i].kind != "param")

        def rows() -> Iterator[tuple[str, Tensor]]:
            for i in order:
                size = max(1, *(num_bytes(one[i]) for one in heads))
                row = torch.zeros(1, -(-size // _ALIGNMENT) * _ALIGNMENT, dtype=torch.uint8)
                local = own[keys[i]].local if keys[i] in own else None
                if local is not None:
                    row[0, : local.numel() * local.itemsize] = local.reshape(-1).view(torch.uint8)
                row = row.to(self._options.device)
                yield str(i), DTensor.from_local(row, self._ranks, [Shard(0)], run_check=False)

        most = min(self._options.max_bytes, _BUCKET_BYTES)
        with full_tensors(rows(), to=0, bucket_bytes=most, device="cpu") as stream:
            for i, (_, full) in zip(order, stream, strict=True):
                if full is not None:
                    yield keys[i], [Value.of(one[i], row) for one, row in zip(heads, full, strict=True)]

    def _report(
        self,
        reference: Reference,
        streamed: Iterable[tuple[Key, list[Value | None]]],
        norm: float | None,
        facts: Sequence[Mapping[str, Any]],
    ) -> Report:
        options = self._options
        comparison = Comparison(reference, self._mesh.mesh.cpu(), options.axes, options.layouts)
        findings = [comparison.judge(key, values) for key, values in streamed]
        findings.append(comparison.judge_norm(norm))
        drawing = sorted({name for one in (*facts, reference.facts) for name in one["drawing"]})
        faults = Verdict(findings, drawing).faults()
        lines = reference.facts["lines"] | facts[0]["lines"]
        for fault in faults:
            fault.line, fault.called = lines.get(fault.module, ("", ""))
        loss = next((one.local for key, one in reference.values.items() if key.kind == "loss"), None)
        return Report(
            dict(zip(options.axes, options.mesh_shape, strict=True)),
            options.dtype,
            faults,
            findings,
            reference.facts["classes"],
            None if loss is None else float(loss.sum()),
            reference.norm,
            norm,
            drawing,
        )


@torch.no_grad()
def _load(
    root: nn.Module,
    weights: Mapping[str, Tensor],
    mesh: DeviceMesh,
    declared: Mapping[str, Sequence[str]],
    guesses: bool,
) -> Iterator[str]:
    """Gives parameters and buffers their part of ``weights``, by name, with no communication: stages of a
    pipeline come here at different times. Yields the names of those whose part is a guess.

    DTensors get their shards, and plain tensors what ``declared`` says. A plain one that is smaller in one
    dim may have been drawn from equal seeds on all ranks, or cut by the program. If the call ``guesses``, it
    gets the block of this rank on the last axis that cuts the dim to this size, and else it is left alone.
    """
    for name, held in (*root.named_parameters(), *root.named_buffers()):
        name = plain_name(name)
        if name not in weights:
            continue
        full, on = weights[name], held.device_mesh if isinstance(held, DTensor) else mesh
        local = held.to_local() if isinstance(held, DTensor) else held
        whole = DTensor.from_local(full.to(local), on, [Replicate()] * on.ndim, run_check=False)
        if isinstance(held, DTensor):
            tries: list[Sequence[Placement]] = [held.placements]
        elif name in declared:
            tries = [[Shard(int(op[1:])) if op[0] == "S" else Replicate() for op in declared[name]]]
        else:
            tries = [[Replicate()] * mesh.ndim]
            cut = [
                dim
                for dim in range(full.ndim)
                if held.ndim == full.ndim and held.shape[dim] < full.shape[dim]
            ]
            for axis in reversed(range(mesh.ndim)) if len(cut) == 1 else ():
                tries.append([Shard(cut[0]) if one == axis else Replicate() for one in range(mesh.ndim)])
        parts = (redistribute(whole, placements=placements).to_local() for placements in tries)
        part = next((one for one in parts if one.shape == local.shape), local)
        is_guess = len(tries) > 1 and local.shape != full.shape and not torch.equal(part, local)
        if is_guess:
            yield name
        if guesses or not is_guess:
            local.copy_(part)


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


def _norm_of(model: nn.Module) -> float:
    """The norm of all gradients by PyTorch's function; of plain tensors, on this rank alone."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for one in model.parameters():
        if one.grad is not None:
            by_mesh.setdefault(getattr(one.grad, "device_mesh", None), []).append(one.grad)
    norms = (nn.utils.get_total_norm(some) for some in by_mesh.values())
    return math.hypot(*(float(one.full_tensor() if isinstance(one, DTensor) else one) for one in norms))


def _results(returned: Any) -> tuple[nn.Module, Tensor | None, Any]:
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)
    if not fits or not isinstance(returned[1], Tensor | None):
        raise CheckError(
            f"program(mesh) returned {type(returned).__name__}, expected model, loss or model, loss, "
            "optimizer, with a module and a tensor."
        )
    return (*returned, None)[:3]


def _names(keys: Iterable[Key]) -> set[str]:
    """The names of the parameters."""
    return {f"{key.module}.{key.path}".lstrip(".") for key in keys if key.kind == "param"}


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


def described(error: BaseException) -> str:
    """The error in one line: its type, text, and the innermost line outside of PyTorch and this module."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (str(Path(torch.__file__).parent), __file__)
    own = [one for one in frames if not one.filename.startswith(others)]
    return reason_of(error) + (f" at {own[-1].filename}:{own[-1].lineno}" if own else "")
