"""The recorder of a run: inputs, outputs and their gradients of every module, and the weights."""

from __future__ import annotations

import functools
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from .._compat.fully_shard import param_groups
from ..collectives.async_tensor import wait_tensor
from ..installation import is_installed
from ..installation.random_operators import FullDraws

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_LIBRARIES = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
_NO_GRAPH_TASK = -1


class TensorKey(NamedTuple):
    """The name of a recorded tensor: ``kind`` is input, output, grad_output, grad_input, param, grad, step,
    loss or norm; ``call`` counts the module's calls; ``path`` is the place among the tensors of the call, or
    the parameter's name in its module."""

    module: str
    kind: str
    call: int
    path: str


LOSS = TensorKey("", "loss", 0, "")
NORM = TensorKey("", "norm", 0, "")  # of all gradients


@dataclass
class RecordedTensor:
    """A tensor as a rank has it: the local part, in a wide dtype on the CPU, or None for a gradient that
    nothing reached; ``placements`` has an op and its ranks for each axis of a DTensor's mesh."""

    local: Tensor | None
    dtype: str = ""
    placements: Sequence[tuple[str, list[int]]] = ()

    def number(self) -> float:
        """Returns the sum of the tensor's elements."""
        return 0.0 if self.local is None else float(self.local.sum())

    def bytes(self) -> Tensor:
        """Returns the bytes of the numbers, which share memory with the tensor."""
        local = torch.empty(0) if self.local is None else self.local
        return local.reshape(-1).view(torch.uint8)

    def head(self) -> list[Any]:
        """Returns what :meth:`of` needs beside the bytes; their number comes last."""
        shape = None if self.local is None else [*self.local.shape]
        return [shape, self.dtype, self.placements, self.bytes().numel()]

    @classmethod
    def of(cls, head: list[Any], row: Tensor) -> RecordedTensor:
        """Returns the value with this head, whose bytes ``row`` begins with."""
        shape, dtype, placements, num_bytes = head
        local = None if shape is None else row[:num_bytes].clone().view(_wide(dtype)).view(shape)
        return cls(local, dtype, placements)


class Recording(NamedTuple):
    """The values of a run, and facts on its modules by their names: their classes, the lines that define and
    call them, and those that drew random numbers."""

    values: dict[TensorKey, RecordedTensor]
    classes: Mapping[str, str]
    lines: Mapping[str, tuple[str, str]]
    drawing: list[str]
    noise: float  # see Recorder
    perturbed: Recording | None = None  # a run of the same program with noise


def _wide(name: str) -> torch.dtype:
    """Returns the dtype in which tensors of the dtype ``name`` are kept."""
    dtype: torch.dtype = getattr(torch, name)
    if dtype.is_floating_point:
        return torch.float64
    return torch.complex128 if dtype.is_complex else torch.int64


def _op_of(placement: Any) -> str:
    if placement.is_partial():
        return f"P({getattr(placement, 'reduce_op', 'sum')})"
    return "R" if placement.is_replicate() else f"S{placement.dim}"


def plain_name(name: str) -> str:
    """Returns the name without the parts that wrappers of modules add."""
    return _WRAPPERS.sub("", name).lstrip(".")


def without_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


class Recorder:
    """Records the calls of modules while a program runs.

    ``begin`` is called with the root of the modules before the first call of one of them, to give it other
    weights. ``noise`` is the relative size of random changes to what modules return and to gradients, or 0.
    Values beyond ``max_bytes`` are in memory-mapped temporary files.
    """

    def __init__(self, max_bytes: int, begin: Callable[[nn.Module], None], noise: float = 0.0) -> None:
        self._recorded: list[tuple[nn.Module, str, int, str, RecordedTensor]] = []  # see TensorKey
        self._bytes_left = max_bytes
        self._begin = begin
        self._noise = torch.Generator().manual_seed(1), noise
        self._calls: dict[nn.Module, int] = {}
        self._running: list[str] = []
        self._names: dict[nn.Module, str] = {}
        self._sites: dict[nn.Module, str] = {}
        self._draws: set[nn.Module] = set()
        self._last_gradient = ""

    def where(self) -> str:
        """Names the module that runs, for a report of a hang or an error."""
        if self._running:
            return " > ".join(dict.fromkeys(self._running))
        last = f"; the last gradient was the {self._last_gradient}" if self._last_gradient else ""
        return f"no module{last}" if self._calls else "no module yet"

    @contextmanager
    def recording(self, is_reference: bool) -> Iterator[None]:
        """Records what runs within. If funcol is installed, the reference draws the numbers of DTensors."""
        parents: dict[nn.Module, None] = {}
        called: Any = nn.Module.__call__

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or _is_recomputing():
                return called(module, *args, **kwargs)
            if module not in self._names:
                around = [one for one in parents if any(module is inner for inner in one.modules())]
                root = without_ddp(max(around, key=lambda one: len([*one.modules()]), default=module))
                self._names |= {module: ""} | {one: plain_name(name) for name, one in root.named_modules()}
                self._begin(root)
            is_compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
            nn.Module.__call__ = called if is_compiled else recorded  # type: ignore[method-assign]
            try:
                return self._call(called, module, args, kwargs)
            finally:
                nn.Module.__call__ = recorded  # type: ignore[method-assign]

        with ExitStack() as stack:
            register = nn.modules.module.register_module_module_registration_hook
            stack.callback(register(lambda parent, name, child: parents.update({parent: None})).remove)
            stack.callback(setattr, nn.Module, "__call__", called)
            if is_reference and is_installed():
                stack.enter_context(FullDraws(lambda: bool(self._running) or _is_recomputing()))
            nn.Module.__call__ = recorded  # type: ignore[method-assign]
            yield

    def _call(self, called: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = self._calls[module] = self._calls.get(module, -1) + 1
        self._sites.setdefault(module, own_line(traceback.walk_stack(sys._getframe())))
        args, kwargs = self._record_tensors(module, "input", call, (args, kwargs))
        depth, random_state = len(self._running), _random_state()
        self._running.append(self._names[module] or type(module).__name__)
        output = called(module, *args, **kwargs)
        del self._running[depth:]  # also those that raised
        if not torch.equal(random_state, _random_state()):
            self._draws.add(module)
        return self._record_tensors(module, "output", call, output)

    def _record_tensors(self, module: nn.Module, kind: str, call: int, passed: Any) -> Any:
        """Records the tensors of ``passed`` and their gradients; returns what is passed instead of it."""
        # The gradient that reaches an input through this module alone is that of an alias of it.
        aliases: dict[int, Tensor] = {}

        def record_gradient(path: str, gradient: Tensor) -> Tensor | None:
            self._last_gradient = f"grad_{kind} of {self._names[module] or type(module).__name__}"
            gradient = self._add_noise(gradient)
            self._recorded.append((module, f"grad_{kind}", call, path, self._value(gradient)))
            return gradient if self._noise[1] else None

        def record(keys: Any, tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            path, is_first = pytree.keystr(keys), True
            passed = tensor if kind == "input" else self._add_noise(tensor)
            self._recorded.append((module, kind, call, path, self._value(passed)))
            if not (passed.requires_grad and torch.is_grad_enabled()):
                return passed
            if kind == "input":
                is_first = id(tensor) not in aliases
                passed = aliases.setdefault(id(tensor), tensor.view_as(tensor))
            if is_first:
                passed.register_hook(functools.partial(record_gradient, path))  # type: ignore[no-untyped-call]
            return passed

        return pytree.tree_map_with_path(record, passed)

    def _add_noise(self, tensor: Tensor) -> Tensor:
        generator, size = self._noise
        if not size or not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
        return tensor * (1 + size * noise).to(tensor)

    def _value(self, tensor: Tensor) -> RecordedTensor:
        value = RecordedTensor(None, str(tensor.dtype).removeprefix("torch."))
        tensor = tensor.detach()
        if isinstance(tensor, DTensor):
            ranks = map(dist.get_process_group_ranks, tensor.device_mesh.get_all_groups())
            value.placements = [*zip(map(_op_of, tensor.placements), ranks, strict=True)]
            tensor = tensor.to_local()
        value.local = self._memory(tensor.shape, _wide(value.dtype)).copy_(wait_tensor(tensor))
        return value

    def _memory(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = shape.numel() * dtype.itemsize
        self._bytes_left -= size
        if self._bytes_left >= 0 or size == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        with tempfile.NamedTemporaryFile(prefix="funcol_check_") as file:  # the mapping outlives its name
            return torch.from_file(file.name, True, shape.numel(), dtype=dtype).view(shape)

    def finish(self, model: nn.Module, loss: Any, optimizer: Any) -> Recording:
        """Records weights, loss and a step of the optimizer, and names all values as ``model`` names its
        modules; those outside of it are left out."""
        names = {module: plain_name(name) for name, module in model.named_modules()}
        values = {TensorKey(names[one[0]], *one[1:4]): one[4] for one in self._recorded if one[0] in names}

        def add_each(kind: str, value_of: Callable[[Tensor], Tensor | None]) -> None:
            for name, parameter in model.named_parameters():
                module, _, path = plain_name(name).rpartition(".")
                tensor = value_of(parameter)
                values[TensorKey(module, kind, 0, path)] = (
                    RecordedTensor(None) if tensor is None else self._value(tensor)
                )

        add_each("param", lambda parameter: parameter)
        if loss is not None:
            values[LOSS] = self._value(loss)
        add_each("grad", lambda parameter: parameter.grad)
        if optimizer is not None:
            optimizer.step()
            add_each("step", lambda parameter: parameter)
        return Recording(
            values,
            classes={name: type(module).__name__ for module, name in names.items()},
            lines={name: (_definition(one), self._sites.get(one, "")) for one, name in names.items()},
            drawing=[names[one] for one in self._draws if one in names],
            noise=self._noise[1],
        )


def widen(model: nn.Module) -> None:
    """Makes weights float64 and drops the dtypes of FSDP2's mixed precision."""
    held = (*model.parameters(), *model.buffers())
    if any(one.is_floating_point() and one.dtype != torch.float64 for one in held):
        model.double()
    states: list[Any] = [one._get_fsdp_state() for one in model.modules() if isinstance(one, FSDPModule)]
    groups = [group for state in states for group in param_groups(state)]
    holders = [*groups, *(parameter for group in groups for parameter in group.fsdp_params)]
    for holder, name in [(one, "_mp_policy") for one in states] + [(one, "mp_policy") for one in holders]:
        policy = getattr(holder, name, None)
        if policy is not None:
            setattr(holder, name, replace(policy, param_dtype=None, reduce_dtype=None, output_dtype=None))


def _is_recomputing() -> bool:
    """Returns true in the forward pass that checkpointing repeats within a backward pass."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def _random_state() -> Tensor:
    state = torch.get_rng_state()
    return torch.cat([state, torch.cuda.get_rng_state()]) if torch.cuda.is_initialized() else state  # type: ignore[no-untyped-call]


def own_line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """Returns the first line that is neither PyTorch's nor funcol's, or an empty text."""
    lines = ((frame.f_code.co_filename, line) for frame, line in frames)
    return next((f"{file}:{line}" for file, line in lines if not file.startswith((*_LIBRARIES, "<"))), "")


def _definition(module: nn.Module) -> str:
    """Returns the line of the module's ``forward``, if it is neither PyTorch's nor funcol's."""
    code = getattr(getattr(module.forward, "__func__", module.forward), "__code__", None)
    if code is None or code.co_filename.startswith((*_LIBRARIES, "<")):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"
