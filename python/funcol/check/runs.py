"""The two runs of a check on a rank, and the exchange of what they recorded."""

from __future__ import annotations

import itertools
import math
import random
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
from .comparison import Comparison
from .recording import (
    LOSS,
    NORM,
    RecordedTensor,
    Recorder,
    Recording,
    TensorKey,
    own_line,
    plain_name,
    widen,
    without_ddp,
)
from .report import Report
from .verdict import Verdict

Program = Callable[[DeviceMesh | None], Any]
Heads = Sequence[Any]  # of the values of a rank, by the place of their key

_DTYPES = ("float64", "float32", "bfloat16", "float16")
_BUCKET_BYTES = 64 << 20  # of the values that are compared at a time


class CheckError(ValueError):
    """A check that cannot be made: no program, a mesh that does not fit, programs that do not correspond."""


@dataclass
class Check:
    """A check, which each rank of the default group runs. Arguments: see :func:`funcol.check`."""

    program: Program
    mesh_shape: tuple[int, ...]
    axes: tuple[str, ...]
    device: str
    dtype: str
    seed: int
    timeout_s: float
    max_bytes: int
    layouts: Mapping[str, Sequence[str]]
    recorder: Recorder | None = None  # of the run in progress

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

    def run(self) -> Report:
        """Returns the report, on all ranks. Raises ``CheckError`` on all if the check cannot be made."""
        num_ranks = math.prod(self.mesh_shape)
        if dist.get_world_size() != num_ranks:
            raise CheckError(
                f"the mesh {self.mesh_shape} has {num_ranks} ranks, and {dist.get_world_size()} run. "
                "Start as many ranks as the mesh has."
            )
        self._agreement = Agreement("check", None)
        self._mesh = init_device_mesh(self.device, self.mesh_shape, mesh_dim_names=self.axes)
        self._ranks = init_device_mesh(self.device, (num_ranks,))
        weights: dict[str, Tensor] = {}
        reference: Recording | None = None
        keys_and_weights: Any = None  # or the text of an error
        if dist.get_rank() == 0:
            try:
                reference = self._reference(weights)
                # Parameters come first: their layouts are those of their gradients.
                keys = sorted(reference.values, key=lambda key: key.kind != "param")
                metas = [(name, [*one.shape], str(one.dtype)) for name, one in weights.items()]
                keys_and_weights = keys, metas
            except CheckError as error:
                keys_and_weights = str(error)
            except Exception as error:
                keys_and_weights = f"the reference run, program(None), ended with {describe_error(error)}"
        keys_and_weights = self._agreement.exchange(keys_and_weights)[0]
        if isinstance(keys_and_weights, str):
            raise CheckError(keys_and_weights)
        keys = [TensorKey(*key) for key in keys_and_weights[0]]
        for name, shape, dtype in keys_and_weights[1]:
            dtype = getattr(torch, dtype.removeprefix("torch."))
            full = torch.empty(shape, dtype=dtype, device=self.device)
            dist.broadcast(full.copy_(weights.get(name, full)), src=0)
            weights[name] = full
        report, has_guessed = self._compare_parallel_run(reference, weights, keys, guesses=True)
        if has_guessed and not report.ok:
            other, _ = self._compare_parallel_run(reference, weights, keys, guesses=False)
            report = other if other.ok else report
        return report

    def _reference(self, weights: dict[str, Tensor]) -> Recording:
        """Runs the program without a mesh, and gives ``weights`` those before the first call. Unless in
        float64, it runs again with random errors of the size of the dtype's."""

        def keep(root: nn.Module) -> None:
            held = [*root.named_parameters(), *root.named_buffers()]
            weights.update({plain_name(name): one.detach().clone() for name, one in held})

        def run(noise: float) -> Recording:
            model, made = self._run(None, keep, noise)
            made.values[NORM] = _norm_of(model)
            return made

        if self.dtype == "float64":
            return run(0.0)
        return run(0.0)._replace(perturbed=run(torch.finfo(getattr(torch, self.dtype)).eps))

    def _compare_parallel_run(
        self, reference: Recording | None, weights: Mapping[str, Tensor], keys: list[TensorKey], guesses: bool
    ) -> tuple[Report, bool]:
        """Returns the report of a parallel run, and true if weights were loaded by a guess."""
        guessed: list[str] = []

        def load(root: nn.Module) -> None:
            guessed.extend(_load(root, weights, self._mesh, self.layouts, guesses))

        model, run = self._run(self._mesh, load)
        own = _join_calls(run.values, {*keys})
        present = [one.kind == "grad" and one in own and own[one].local is not None for one in keys]
        of_ranks = self._agreement.exchange([[*_names(own)], guessed, run.drawing, present]).values()
        names, all_guessed, drawing, all_present = zip(*of_ranks, strict=True)
        _check_names(_names(keys), {*itertools.chain(*names)})
        if all(one == present for one in all_present):
            own[NORM] = _norm_of(model)
        heads = [own[key].head() if key in own else None for key in keys]
        values_of_ranks = self._stream_values(keys, [*self._agreement.exchange(heads).values()], own)
        if reference is None:
            assert not [*values_of_ranks]
            return Report.of(self._agreement.exchange("")[0]), any(all_guessed)
        values, drew = reference.values, {*itertools.chain(reference.drawing, *drawing)}
        comparison = Comparison(reference, self._mesh.mesh.cpu(), self.axes, self.layouts)
        findings = [comparison.judge(*each) for each in values_of_ranks]
        report = Report(
            dict(zip(self.axes, self.mesh_shape, strict=True)),
            self.dtype,
            Verdict(findings, drew, {**reference.lines, **run.lines}).faults(),
            findings,
            reference.classes,
            values[LOSS].number() if LOSS in values else None,
            values[NORM].number(),
            own[NORM].number() if findings[-1].agrees is not None else None,
            sorted(drew),
        )
        return Report.of(self._agreement.exchange(report.json())[0]), any(all_guessed)

    def _run(
        self, mesh: DeviceMesh | None, begin: Callable[[nn.Module], None], noise: float = 0.0
    ) -> tuple[nn.Module, Recording]:
        def widen_and_begin(root: nn.Module) -> None:
            if self.dtype == "float64":
                widen(root)
            begin(root)

        recorder = self.recorder = Recorder(self.max_bytes, widen_and_begin, noise)
        torch.manual_seed(self.seed)
        random.seed(self.seed)
        with self._default_dtype_and_device():
            try:
                with recorder.recording(is_reference=mesh is None):
                    model, loss, optimizer = _results(self.program(mesh))
            except Exception as error:
                error.add_note(f"rank {dist.get_rank()} was in {recorder.where()}")
                raise
            model = without_ddp(model)
            return model, recorder.finish(model, loss, optimizer)

    @contextmanager
    def _default_dtype_and_device(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self.dtype == "float64":
                stack.callback(torch.set_default_dtype, torch.get_default_dtype())
                torch.set_default_dtype(torch.float64)
                stack.enter_context(_WidenDtypes())
            if self.device != "cpu":
                stack.enter_context(torch.device(self.device))
            yield

    def _stream_values(
        self, keys: Sequence[TensorKey], heads: Sequence[Heads], own: Mapping[TensorKey, RecordedTensor]
    ) -> Iterator[tuple[TensorKey, list[RecordedTensor | None]]]:
        """Yields on rank 0 what the ranks have under each key, as much at a time as the bound allows."""

        def rows() -> Iterator[tuple[str, Tensor]]:
            for i, key in enumerate(keys):
                numbers = own.get(key, RecordedTensor(None)).bytes()
                size = max([1, *(one[i][-1] for one in heads if one[i] is not None)])
                row = nn.functional.pad(numbers, (0, size - numbers.numel())).to(self.device)
                yield str(i), DTensor.from_local(row[None], self._ranks, [Shard(0)], run_check=False)

        most = min(self.max_bytes, _BUCKET_BYTES)
        with full_tensors(rows(), to=0, bucket_bytes=most, device="cpu") as stream:
            for i, (_, full) in enumerate(stream):
                if full is not None:
                    of_rank = zip(heads, full, strict=True)
                    yield keys[i], [one[i] and RecordedTensor.of(one[i], row) for one, row in of_rank]


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
        full, local, on = weights[name], held, mesh
        layouts: list[Sequence[Placement]] = [[Replicate()] * mesh.ndim]
        if isinstance(held, DTensor):
            local, on, layouts = held.to_local(), held.device_mesh, [held.placements]
        elif name in declared:
            layouts = [[Shard(int(op[1:])) if op[0] == "S" else Replicate() for op in declared[name]]]
        elif held.ndim == full.ndim:
            cut = [dim for dim, size in enumerate(full.shape) if held.shape[dim] < size]
            for axis in reversed(range(mesh.ndim)) if len(cut) == 1 else ():
                layouts.append([Shard(cut[0]) if one == axis else Replicate() for one in range(mesh.ndim)])
        full_dtensor = DTensor.from_local(full.to(local), on, [Replicate()] * on.ndim, run_check=False)
        parts = (redistribute(full_dtensor, placements=placements).to_local() for placements in layouts)
        part = next((one for one in parts if one.shape == local.shape), local)
        is_guess = len(layouts) > 1 and local.shape != full.shape and not torch.equal(part, local)
        if is_guess:
            yield name
        if guesses or not is_guess:
            local.copy_(part)


_WIDER: dict[Any, Any] = {
    **dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64),
    **dict.fromkeys((Tensor.float, Tensor.half, Tensor.bfloat16), Tensor.double),
}


class _WidenDtypes(TorchFunctionMode):
    """Makes float64 of the floating-point dtypes that a program names."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widened(one: Any) -> Any:
            return _WIDER.get(one, one) if isinstance(one, torch.dtype) and func is not Tensor.view else one

        kwargs = {name: widened(one) for name, one in (kwargs or {}).items()}
        return _WIDER.get(func, func)(*map(widened, args), **kwargs)


def _norm_of(model: nn.Module) -> RecordedTensor:
    """Returns the norm of all gradients by PyTorch's function; of plain tensors, on this rank alone."""
    by_mesh: dict[Any, list[Tensor]] = {}
    for one in model.parameters():
        if one.grad is not None:
            by_mesh.setdefault(getattr(one.grad, "device_mesh", None), []).append(one.grad)
    norms = (nn.utils.get_total_norm(some) for some in by_mesh.values())
    norm = math.hypot(*(float(one.full_tensor() if isinstance(one, DTensor) else one) for one in norms))
    return RecordedTensor(torch.tensor(norm, dtype=torch.float64), "float64")


def _results(returned: Any) -> tuple[nn.Module, Tensor | None, Any]:
    fits = isinstance(returned, tuple) and len(returned) in (2, 3) and isinstance(returned[0], nn.Module)
    if not fits or not isinstance(returned[1], Tensor | None):
        raise CheckError(
            f"program(mesh) returned {type(returned).__name__}, expected model, loss or model, loss, "
            "optimizer, with a module and a tensor."
        )
    return (*returned, None)[:3]


def _names(keys: Iterable[TensorKey]) -> set[str]:
    """Returns the names of the parameters."""
    return {f"{key.module}.{key.path}".lstrip(".") for key in keys if key.kind == "param"}


def _check_names(expected: set[str], found: set[str]) -> None:
    """Raises ``CheckError`` if the models have different parameters with and without a mesh."""
    if expected != found:
        missing, new = sorted(expected - found), sorted(found - expected)
        raise CheckError(
            "the models of the two runs have parameters of other names: "
            f"{len(missing)} only without a mesh ({', '.join(missing[:3]) or 'none'}), "
            f"{len(new)} only with it ({', '.join(new[:3]) or 'none'}). Name them alike."
        )


def _join_calls(
    values: Mapping[TensorKey, RecordedTensor], wanted: set[TensorKey]
) -> dict[TensorKey, RecordedTensor]:
    """Returns the values, in which calls of a module that the reference called once, such as those of the
    micro-batches of a pipeline, are joined to one."""
    found = dict(values)
    for key in [key for key in found if key.call and key not in wanted]:
        first, more = found.get(key._replace(call=0), RecordedTensor(None)), found[key].local
        if first.local is None or more is None or not first.local.ndim == more.ndim > 0:
            continue
        if first.local.shape[1:] == more.shape[1:]:
            first.local = torch.cat([first.local, more])
    return found


def describe_error(error: BaseException) -> str:
    """Returns the error in one line: its type, text, and the innermost line of the program."""
    frames = [*traceback.walk_tb(error.__traceback__)]
    line = own_line(reversed(frames))
    return reason_of(error) + (f" at {line}" if line else "")
