"""The recorder of a run: inputs, outputs and their gradients of every module, and the weights."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from ..collectives.async_tensor import wait_tensor
from .layouts import Value

_WRAPPERS = re.compile(r"(^|\.)(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)(?=\.|$)")
_LIBRARIES = tuple(str(Path(file).parents[up]) for file, up in ((torch.__file__, 0), (__file__, 1)))
_NO_GRAPH_TASK = -1


class Key(NamedTuple):
    """The name of a recorded tensor: ``kind`` is input, output, grad_output, grad_input, param, grad, step or
    loss; ``call`` counts the module's calls; ``path`` is the place among the tensors of the call, or the
    parameter's name in its module."""

    module: str
    kind: str
    call: int
    path: str


def plain_name(name: str) -> str:
    """The name without the parts that wrappers of modules add."""
    return _WRAPPERS.sub("", name).lstrip(".")


class Store:
    """Values in order; those beyond ``max_bytes`` are in memory-mapped temporary files."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.values: list[tuple[Any, Value]] = []

    def add(self, key: Any, tensor: Tensor | None) -> None:
        self.values.append((key, Value(None) if tensor is None else self._value(tensor)))

    def _value(self, tensor: Tensor) -> Value:
        tensor = tensor.detach()
        value = Value(None, str(tensor.dtype).removeprefix("torch."))
        if isinstance(tensor, DTensor):
            value.mesh = tensor.device_mesh.mesh.tolist()
            value.placements = tuple(map(_op_of, tensor.placements))
            tensor = tensor.to_local()
        tensor = wait_tensor(tensor)
        if tensor.is_floating_point():
            wide = torch.float64
        else:
            wide = torch.complex128 if tensor.is_complex() else torch.int64
        size = tensor.numel() * wide.itemsize
        value.local = self._memory(tensor.shape, wide, size).copy_(tensor)
        self._left -= size
        return value

    def _memory(self, shape: torch.Size, dtype: torch.dtype, size: int) -> Tensor:
        if size <= max(self._left, 0) or size == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="funcol_check_")
        path = str(Path(self._folder.name, f"{len(self.values)}"))
        return torch.from_file(path, True, shape.numel(), dtype=dtype).view(shape)


def _op_of(placement: Any) -> str:
    if placement.is_replicate():
        return "R"
    if placement.is_partial():
        op = getattr(placement, "reduce_op", "sum")
        return f"P({op if op in ('sum', 'avg', 'max', 'min') else 'sum'})"
    return f"S{placement.dim}"


class Recorder:
    """Records a run of a program from the first call of a module on.

    ``begin`` is called with the root of the modules before that call, to give it other weights. ``noise`` is
    the relative size of random changes to what modules return and to gradients, or 0.
    """

    def __init__(self, max_bytes: int, begin: Callable[[nn.Module], None], noise: float = 0.0) -> None:
        self.store = Store(max_bytes)
        self.sites: dict[nn.Module, str] = {}
        self.draws: set[nn.Module] = set()
        self.failed_in = ""
        self._begin = begin
        self._noise = torch.Generator().manual_seed(1), noise
        self._calls: dict[nn.Module, int] = {}
        self._running: list[tuple[str, nn.Module, Tensor]] = []
        self._names: dict[nn.Module, str] = {}
        self._last_gradient = ""
        self._handles: list[Any] = []
        self._undo: list[Callable[[], None]] = []

    def where(self) -> str:
        """The module that runs, for a report of a hang."""
        if self._running:
            return " > ".join(dict.fromkeys(name for name, *_ in self._running))
        if self._last_gradient:
            return f"no module; the last gradient was the {self._last_gradient}"
        return "no module yet" if not self._calls else "no module"

    @contextmanager
    def running(self) -> Iterator[None]:
        """Records what runs within."""
        parents: dict[nn.Module, None] = {}
        children: set[nn.Module] = set()
        called = nn.Module.__call__

        def registered(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if child is not None:
                parents[parent] = None
                children.add(child)

        def first_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            nn.Module.__call__ = called  # type: ignore[method-assign]
            roots = (one for one in parents if one not in children and _contains(one, module))
            root = next(roots, module)
            self._begin(root)
            self._attach(root)
            parents.clear()
            children.clear()
            return module(*args, **kwargs)

        handle = nn.modules.module.register_module_module_registration_hook(registered)
        nn.Module.__call__ = first_call  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.__call__ = called  # type: ignore[method-assign]
            handle.remove()
            for one in self._handles:
                one.remove()
            for undo in self._undo:
                undo()

    def _attach(self, root: nn.Module) -> None:
        compiled: tuple[str, ...] = ()
        for name, module in root.named_modules():
            plain = plain_name(name)
            if plain in self._names.values() or name.startswith(compiled):
                continue
            self._names[module] = plain
            inner = getattr(module, "_compiled_call_impl", None)
            if hasattr(module, "_orig_mod") or inner is not None:
                compiled = (*compiled, f"{name}." if name else "")
            if inner is not None:
                self._attach_to_compiled(module, inner)
                continue
            self._handles += [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after, always_call=True),
            ]

    def _attach_to_compiled(self, module: nn.Module, inner: Callable[..., Any]) -> None:
        def bordered(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before(module, args, kwargs) or (args, kwargs)
            output = inner(*args, **kwargs)
            changed = self._after(module, args, output)
            return output if changed is None else changed

        module._compiled_call_impl = bordered
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", inner))

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        self._running.append((self._names[module] or type(module).__name__, module, torch.get_rng_state()))
        if _is_recomputing():
            return None
        call = self._calls[module] = self._calls.get(module, -1) + 1
        self.sites.setdefault(module, _call_site())
        # The gradient that reaches a tensor through this module alone is that of an alias of it.
        aliases: dict[int, Tensor] = {}

        def record(path: Any, one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            key = (module, "input", call, pytree.keystr(path))
            self.store.add(key, one)
            if not (one.requires_grad and torch.is_grad_enabled()):
                return one
            if id(one) not in aliases:
                aliases[id(one)] = one.view_as(one)
                self._watch(aliases[id(one)], (module, "grad_input", *key[2:]))
            return aliases[id(one)]

        return pytree.tree_map_with_path(record, (args, kwargs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._running:
            return None
        if sys.exc_info()[0] is not None:
            self.failed_in = self.failed_in or self.where()
        _, _, random_state = self._running.pop()
        if _is_recomputing():
            return None
        if not torch.equal(random_state, torch.get_rng_state()):
            self.draws.add(module)
        call = self._calls[module]

        def record(path: Any, one: Any) -> Any:
            if not isinstance(one, Tensor):
                return one
            one = self._disturbed(one)
            key = (module, "output", call, pytree.keystr(path))
            self.store.add(key, one)
            if one.requires_grad and torch.is_grad_enabled():
                self._watch(one, (module, "grad_output", *key[2:]))
            return one

        changed = pytree.tree_map_with_path(record, output)
        return changed if self._noise[1] else None

    def _watch(self, tensor: Tensor, key: tuple[nn.Module, str, int, str]) -> None:
        def record(gradient: Tensor) -> Tensor | None:
            self._last_gradient = f"{key[1]} of {self._names[key[0]] or type(key[0]).__name__}"
            changed = self._disturbed(gradient)
            self.store.add(key, changed)
            return changed if self._noise[1] else None

        tensor.register_hook(record)  # type: ignore[no-untyped-call]

    def _disturbed(self, tensor: Tensor) -> Tensor:
        generator, size = self._noise
        if not size or not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
        return tensor * (1 + size * noise).to(tensor)

    def finish(self, model: nn.Module, loss: Any, optimizer: Any) -> list[tuple[Key, Value]]:
        """Records weights, loss and a step of the optimizer; returns all values by the names that ``model``
        gives its modules. Modules outside of it are left out."""
        names: dict[nn.Module, str] = {}
        for name, module in model.named_modules():
            names[module] = plain_name(name)
        named = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]

        def each(kind: str, value_of: Callable[[Tensor], Tensor | None]) -> None:
            for name, parameter in named:
                module, _, path = name.rpartition(".")
                self.store.add((module, kind, 0, path), value_of(parameter))

        each("param", lambda parameter: parameter)
        if loss is not None:
            self.store.add(("", "loss", 0, ""), loss)
        each("grad", lambda parameter: parameter.grad)
        if optimizer is not None:
            optimizer.step()
            each("step", lambda parameter: parameter)
        values = []
        for (module, *rest), value in self.store.values:
            name = module if isinstance(module, str) else names.get(module)
            if name is not None:
                values.append((Key(name, *rest), value))
        return values


def widen(model: nn.Module) -> None:
    """Makes weights float64 and drops the dtypes of FSDP2's mixed precision."""
    if any(one.is_floating_point() and one.dtype != torch.float64 for one in _held(model)):
        model.double()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            for group in filter(None, groups):
                for holder in (group, *group.fsdp_params):
                    _widen_policy(holder, "mp_policy")
            _widen_policy(state, "_mp_policy")


def _widen_policy(holder: Any, name: str) -> None:
    policy: MixedPrecisionPolicy | None = getattr(holder, name, None)
    if policy is not None:
        setattr(holder, name, replace(policy, param_dtype=None, reduce_dtype=None, output_dtype=None))


def _held(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _contains(root: nn.Module, module: nn.Module) -> bool:
    return any(one is module for one in root.modules())


def _is_recomputing() -> bool:
    """True in the forward pass that checkpointing repeats within a backward pass."""
    return torch._C._current_graph_task_id() != _NO_GRAPH_TASK


def _call_site() -> str:
    """The innermost line outside of PyTorch and funcol."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_LIBRARIES, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def definition(module: nn.Module) -> str:
    """The line of the module's ``forward``, if it is neither PyTorch's nor funcol's."""
    code = getattr(getattr(module.forward, "__func__", module.forward), "__code__", None)
    if code is None or code.co_filename.startswith((*_LIBRARIES, "<")):
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"
