"""Eager calls of functions on local tensors, and what follows from the placements of their arguments."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from ..redistribution.conversions import from_local, to_local
from ..redistribution.functions import redistribute
from ..redistribution.local_redistribute import settled
from ..redistribution.specs import canonical, copy_without_mesh, has_own_order, with_placements
from .arguments import (
    LocalMapArguments,
    check_keywords,
    flatten,
    input_placements,
    name_of,
    output_placements,
    unflatten,
)
from .regions import (
    Placements,
    Sizes,
    Uneven,
    check_differentiable,
    checked_placements,
    cuts_of,
    full_spec,
    gradient_placements,
    num_averaged,
    uneven_dims,
)

num_modes = torch._C._len_torch_dispatch_stack
_NO_TENSORS = frozenset({int, float, bool, str, complex, type(None), torch.dtype, torch.device})
_TENSORS = frozenset({Tensor, torch.nn.Parameter})
_UNKNOWN = object()
_MAX_REMEMBERED = 256


class Signature(NamedTuple):
    """The consequences of the placements of a call's arguments, found once and cached.

    It does not keep the mesh alive: its specs have none.
    """

    mesh_reference: weakref.ref[DeviceMesh]
    moves: tuple[Placements | None, ...] | None  # to which arguments are redistributed first, if any are
    gradients_in: tuple[DTensorSpec | None, ...]
    gradients_out: tuple[Placements | None, ...]
    averages_in: tuple[int, ...] | None  # factors of the gradients of averages, if there are any
    uneven: list[Uneven]
    results: list[dict[Any, Result]]  # by shape, stride and dtype, for each value

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh of the arguments, which keep it alive during a call, or ``device_mesh``."""
        mesh = self.mesh_reference()
        assert mesh is not None
        return mesh


class Result(NamedTuple):
    spec: DTensorSpec
    gradient: DTensorSpec
    average: int  # divisor of the gradient; 0 if no placement is a partial other than a sum


class LocalMap:
    """A function on local tensors and its placements; remembers a signature for each kind of call."""

    def __init__(
        self, func: Callable[..., Any], arguments: LocalMapArguments, name: str | None = None
    ) -> None:
        if not callable(func):
            raise TypeError(f"funcol.apply_local_map: got a {type(func).__name__}, expected a function.")
        self.func = func
        self.arguments = arguments
        self.name = name_of(func) if name is None else name
        self.sizes: Sequence[Sizes | None] | None = None  # of full results, where they are known
        self.outputs = output_placements(arguments.out_placements, self.name)
        self.inputs = input_placements(arguments.in_placements, "in_placements", self.name)
        self.gradients = input_placements(arguments.in_grad_placements, "in_grad_placements", self.name)
        self._by_identity: dict[tuple[int, ...], Any] = {}
        self._kept: dict[tuple[int, ...], list[Any]] = {}  # whose identities a key holds

    # Eager calls

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs or num_modes():
            return self.run_nested(args, kwargs)
        identity = []
        needs_gradients = False
        for arg in args:
            kind = type(arg)
            if kind is DTensor:
                identity.append(_identity_of(arg._spec))
                needs_gradients = needs_gradients or arg.requires_grad
            elif kind in _NO_TENSORS:
                identity.append(0)
            elif kind in _TENSORS:
                identity.append(1)
            else:
                return self.run_nested(args, kwargs)
        key = tuple(identity)
        signature = self._by_identity.get(key, _UNKNOWN)
        if signature is _UNKNOWN:
            signature = self._learn(args)
        if signature is None:
            return self.func(*args)
        return self._wrap(self.func(*self._unwrap(args, signature, needs_gradients)), signature)

    def run_nested(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a call with containers or keywords, or under a mode."""
        check_keywords(kwargs, self.name)
        flat, structure = flatten(args)
        return self.run_flat(flat, lambda *local: self.call(local, structure, kwargs))

    def call(self, local: Sequence[Any], structure: Any, kwargs: dict[str, Any]) -> Any:
        """Calls the function itself."""
        return self.func(*unflatten(local, structure), **kwargs)

    def run_flat(self, flat: Sequence[Any], call: Callable[..., Any]) -> Any:
        """Runs ``call`` on the local tensors of flattened arguments. Returns its results as DTensors."""
        signature = self._signature_or_none(flat)
        if signature is None:
            return call(*flat)
        return self._wrap(call(*self._unwrap(flat, signature, True)), signature)

    def run_node(self, operands: Sequence[Any], call: Callable[..., Any]) -> tuple[Any, ...]:
        """Runs ``call`` like :meth:`run_flat`, for a tuple of results. Keeps tensors without placements."""
        signature = self.signature_of(operands)
        results = call(*self._unwrap(operands, signature, True))
        return tuple(
            value if placements is None else self._wrap_result(i, value, signature)
            for i, (value, placements) in enumerate(zip(results, self.outputs, strict=True))
        )

    def signature_of(self, flat: Sequence[Any]) -> Signature:
        """Returns the signature of a call with DTensors among its arguments."""
        signature = self._signature_or_none(flat)
        assert signature is not None
        return signature

    def _signature_or_none(self, flat: Sequence[Any]) -> Signature | None:
        key = tuple(
            _identity_of(arg._spec) if isinstance(arg, DTensor) else int(isinstance(arg, Tensor))
            for arg in flat
        )
        known = self._by_identity.get(key, _UNKNOWN)
        return self._learn(flat) if known is _UNKNOWN else known

    def check_full_arguments(self, flat: Sequence[Any], mesh: DeviceMesh) -> None:
        """Raises ValueError unless placements are stated for each of ``flat``, which are full tensors."""
        if self.inputs is None:
            raise ValueError(
                f"funcol.apply_local_map: {self.name} is traced with tensors that are not DTensors and has "
                "no in_placements. State where each argument is to live."
            )
        self._check_arguments(flat, Tensor)
        for stated, name in ((self.inputs, "in_placements"), (self.outputs, "out_placements")):
            for placements in stated:
                if placements is not None:
                    self._check_num_axes(placements, mesh, name)

    # Signatures

    def _learn(self, flat: Sequence[Any]) -> Signature | None:
        """Finds the signature of a call and remembers it; ``None`` if no argument is a DTensor."""
        self._check_arguments(flat)
        specs = [arg._spec if isinstance(arg, DTensor) else None for arg in flat]
        signature = None if all(spec is None for spec in specs) else self._signature(specs)
        kept = [spec and _canonical(spec) for spec in specs]
        if any(spec is not None and one is spec for spec, one in zip(specs, kept, strict=True)):
            return signature
        if len(self._by_identity) >= _MAX_REMEMBERED:
            self._by_identity.clear()
            self._kept.clear()
        for known, held in list(self._kept.items()):
            if held == kept and any(map(operator.is_not, held, kept)):  # forgotten, and made anew
                del self._by_identity[known], self._kept[known]
        key = tuple(
            int(isinstance(arg, Tensor)) if one is None else id(one)
            for arg, one in zip(flat, kept, strict=True)
        )
        self._by_identity[key] = signature
        self._kept[key] = kept
        return signature

    def _check_arguments(self, flat: Sequence[Any], kind: type[Tensor] = DTensor) -> None:
        """Raises ValueError unless placements are stated for arguments of ``kind``, and only for tensors."""
        for stated, name in ((self.inputs, "in_placements"), (self.gradients, "in_grad_placements")):
            if stated is not None and len(stated) != len(flat):
                raise ValueError(
                    f"funcol.apply_local_map: {self.name}: {len(stated)} entries in {name}, but the call has "
                    f"{len(flat)} flattened positional arguments. State one for each, None for no tensors."
                )
        if self.inputs is None:
            return
        noun = "DTensor" if kind is DTensor else "tensor"
        for i, (arg, placements) in enumerate(zip(flat, self.inputs, strict=True)):
            if isinstance(arg, kind) and placements is None:
                raise ValueError(
                    f"funcol.apply_local_map: {self.name}: argument {i} is a {noun} of shape "
                    f"{tuple(arg.shape)}, but in_placements has None for it. State its placements."
                )
            if not isinstance(arg, Tensor) and placements is not None:
                raise ValueError(
                    f"funcol.apply_local_map: {self.name}: argument {i} is a {type(arg).__name__}, but "
                    f"in_placements has {list(placements)} for it. State None for other values than tensors."
                )

    def _signature(self, specs: Sequence[DTensorSpec | None]) -> Signature:
        mesh = self._mesh_of(specs)
        placements = [None if spec is None else self._placements_in(i, spec) for i, spec in enumerate(specs)]
        moves = [
            wanted if spec is not None and (wanted != spec.placements or has_own_order(spec)) else None
            for spec, wanted in zip(specs, placements, strict=True)
        ]
        has_moves = any(move is not None for move in moves)
        if has_moves and not self.arguments.redistribute_inputs:
            i = next(i for i, move in enumerate(moves) if move is not None)
            raise ValueError(
                f"funcol.apply_local_map: {self.name}: argument {i} has the placements "
                f"{list(specs[i].placements)}"  # type: ignore[union-attr]
                f"{' in an order of its own' if has_own_order(specs[i]) else ''}, expected "
                f"{list(moves[i] or ())}. Redistribute it, or pass redistribute_inputs=True."
            )
        held = [
            spec and with_placements(spec, mesh, wanted or ())
            for spec, wanted in zip(specs, placements, strict=True)
        ]
        for wanted in self.outputs:
            if wanted is not None:
                self._check_num_axes(wanted, mesh, "out_placements")
        num_dims = [0 if spec is None else spec.ndim for spec in specs]
        stated = self.stated_gradients(placements, num_dims, mesh)
        gradients_in, gradients_out = gradient_placements(placements, self.outputs, stated)
        averages = tuple(num_averaged(one, mesh) for one in placements)
        return Signature(
            weakref.ref(mesh),
            tuple(moves) if has_moves else None,
            tuple(
                spec and copy_without_mesh(with_placements(spec, mesh, gradient or ()))
                for spec, gradient in zip(held, gradients_in, strict=True)
            ),
            tuple(gradients_out),
            averages if any(_has_partials_other_than_sums(one) for one in placements) else None,
            uneven_dims(held),
            [{} for _ in self.outputs],
        )

    def _mesh_of(self, specs: Sequence[DTensorSpec | None]) -> DeviceMesh:
        mesh = self.arguments.device_mesh
        for i, spec in enumerate(specs):
            if spec is None:
                continue
            if mesh is None:
                mesh = spec.mesh
            elif spec.mesh != mesh:
                raise ValueError(
                    f"funcol.apply_local_map: {self.name}: argument {i} is on {spec.mesh}, expected {mesh}"
                    f"{' as device_mesh says' if self.arguments.device_mesh is not None else ''}. "
                    "Put all arguments on one mesh."
                )
        assert mesh is not None
        return mesh

    def _placements_in(self, i: int, spec: DTensorSpec) -> Placements:
        if self.inputs is None:
            return spec.placements
        placements = self.inputs[i]
        assert placements is not None
        self._check_num_axes(placements, spec.mesh, "in_placements")
        return checked_placements(placements, spec.ndim, f"argument {i}", self.name)

    def _check_num_axes(self, placements: Placements, mesh: DeviceMesh, stated: str) -> None:
        if len(placements) != mesh.ndim:
            raise ValueError(
                f"funcol.apply_local_map: {self.name}: {stated} has {list(placements)}, "
                f"{len(placements)} placements for the {mesh.ndim} axes of {mesh}. State one for each axis."
            )

    def stated_gradients(
        self, placements: Sequence[Placements | None], num_dims: Sequence[int], mesh: DeviceMesh
    ) -> list[Placements | None]:
        """Returns the stated placements of gradients of tensors with ``placements``, None where unstated."""
        gradients: list[Placements | None] = [None] * len(placements)
        for i, stated in enumerate(self.gradients or ()):
            held = placements[i]
            if stated is None or held is None:
                continue
            self._check_num_axes(stated, mesh, "in_grad_placements")
            wanted = checked_placements(stated, num_dims[i], f"the gradient of argument {i}", self.name)
            if cuts_of(wanted) != cuts_of(held):
                raise ValueError(
                    f"funcol.apply_local_map: {self.name}: in_grad_placements has {list(stated)} for "
                    f"argument {i}, whose placements are {list(held)}. A local gradient is as large as "
                    "its tensor: shard both alike."
                )
            gradients[i] = wanted
        return gradients

    # From DTensors to local tensors and back

    def _unwrap(self, flat: Sequence[Any], signature: Signature, needs_gradients: bool) -> list[Any]:
        if signature.moves is not None:
            flat = [
                arg if move is None else redistribute(arg, placements=move)
                for arg, move in zip(flat, signature.moves, strict=True)
            ]
        if not (needs_gradients and torch.is_grad_enabled()):
            return [settled(arg._local_tensor) if isinstance(arg, DTensor) else arg for arg in flat]
        local = []
        for i, arg in enumerate(flat):
            gradient = signature.gradients_in[i]
            if gradient is None:
                local.append(arg)
            else:
                local.append(to_local(arg, gradient))
                if signature.averages_in is not None and arg.requires_grad:
                    self._multiply_gradient(local[i], arg._spec.placements, i, signature.averages_in[i])
        return local

    def _multiply_gradient(self, local: Tensor, placements: Placements, i: int, average: int) -> None:
        check_differentiable(placements, f"argument {i}", self.name)
        if average > 1:
            local.register_hook(lambda gradient: gradient * average)  # type: ignore[no-untyped-call]

    def _wrap(self, out: Any, signature: Signature) -> Any:
        outputs = self.outputs
        if isinstance(out, Tensor) and len(outputs) == 1:
            return self._wrap_result(0, out, signature)
        flat, structure = flatten(out)
        self.check_num_outputs(len(flat))
        return unflatten(
            [
                self._wrap_result(i, value, signature)
                if isinstance(value, Tensor)
                else self._check_no_placements(i, value)
                for i, value in enumerate(flat)
            ],
            structure,
        )

    def check_num_outputs(self, num_values: int) -> None:
        if num_values != len(self.outputs):
            raise ValueError(
                f"funcol.apply_local_map: {self.name} returned {num_values} values, but out_placements has "
                f"{len(self.outputs)} entries. State one for each value, None for no tensors."
            )

    def _check_no_placements(self, i: int, value: Any) -> Any:
        if self.outputs[i] is not None:
            raise ValueError(
                f"funcol.apply_local_map: {self.name}: result {i} is a {type(value).__name__}, but "
                f"out_placements has {list(self.outputs[i] or ())} for it. State None for other values "
                "than tensors."
            )
        return value

    def check_output(self, i: int, value: Any) -> Placements | None:
        """Returns the placements stated for result ``i``. Raises ValueError if they do not fit ``value``."""
        if not isinstance(value, Tensor):
            self._check_no_placements(i, value)
            return None
        placements = self.outputs[i]
        if isinstance(value, DTensor):
            raise ValueError(
                f"funcol.apply_local_map: {self.name}: result {i} is a DTensor, expected this rank's tensor. "
                "Return its to_local()."
            )
        if placements is None:
            raise ValueError(
                f"funcol.apply_local_map: {self.name}: result {i} is a tensor of shape {tuple(value.shape)}, "
                "but out_placements has None for it. State its placements."
            )
        return checked_placements(placements, value.dim(), f"result {i}", self.name)

    def _wrap_result(self, i: int, value: Tensor, signature: Signature) -> DTensor:
        value = settled(value)
        if num_modes():  # sizes may be symbols
            result = self._result(i, value, signature)
        else:
            key = (value.shape, value.stride(), value.dtype)
            results = signature.results[i]
            known = results.get(key)
            result = self._result(i, value, signature) if known is None else known
            if known is None and len(results) < _MAX_REMEMBERED:
                results[key] = result
        if result.average and value.requires_grad and torch.is_grad_enabled():
            check_differentiable(result.spec.placements, f"result {i}", self.name)
            average = result.average
            value.register_hook(lambda gradient: gradient / average)  # type: ignore[no-untyped-call]
        return from_local(value, result.spec, result.gradient, signature.mesh)

    def _result(self, i: int, value: Tensor, signature: Signature) -> Result:
        placements = self.check_output(i, value)
        assert placements is not None
        sizes = self.sizes[i] if self.sizes is not None else None
        mesh, what = signature.mesh, f"result {i}"
        spec = full_spec(value, mesh, placements, sizes, signature.uneven, what, self.name)
        gradient = signature.gradients_out[i]
        assert gradient is not None
        gradient = checked_placements(gradient, value.dim(), what, self.name)
        return Result(
            copy_without_mesh(spec),
            copy_without_mesh(with_placements(spec, mesh, gradient)),
            num_averaged(placements, mesh) if _has_partials_other_than_sums(placements) else 0,
        )


# Specs


def _has_partials_other_than_sums(placements: Placements | None) -> bool:
    """Returns true if there are partials other than sums, whose gradients are not those of the parts."""
    return any(one.is_partial() and not one.is_partial("sum") for one in placements or ())


def _canonical(spec: DTensorSpec) -> DTensorSpec:
    """Returns one object for equal specs of a mesh; the spec itself if it has symbols or masks."""
    try:
        return canonical(spec)
    except (NotImplementedError, TypeError, ValueError):
        return spec


def _identity_of(spec: DTensorSpec) -> int:
    return id(_canonical(spec))
