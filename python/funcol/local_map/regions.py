"""Regions of local tensors as data: name, mesh and the placements of operands and results.

A region keeps placements as text (``"S(0)R"``), so that a graph can hold it: copies, renumbering and
serialization of the graph keep it.
"""

from __future__ import annotations

import functools
import math
import re
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.placement_types import _StridedShard

from .. import _C
from ..redistribution.specs import is_shard, spec_of_shape, with_nonnegative_dim
from ..redistribution.texts import short_repr

Placements = tuple[Placement, ...]
Sizes = tuple[int, ...]


class MeshKey(NamedTuple):
    """A ``DeviceMesh`` by value; ``ranks`` are in row-major order."""

    device_type: str
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        axes = zip(self.names, self.sizes, strict=True) if self.names else enumerate(self.sizes)
        return f"{self.device_type} mesh ({', '.join(f'{name}={size}' for name, size in axes)})"


class Region(NamedTuple):
    """A function on local tensors, as a node of a graph holds it.

    ``name`` is the function's name and the place of its definition. ``inputs`` and ``outputs`` hold the
    placements of each operand and result, such as ``"S(0)R"``; ``None`` for numbers and for activations,
    which the backward graph takes as they are. ``are_full``: the node's operands and results are full
    tensors, of which the function gets and returns shards; else they are this rank's tensors. ``sizes`` are
    those of full results with uneven shards, ``None`` for the others.
    """

    name: str
    are_full: bool
    mesh: MeshKey
    inputs: tuple[str | None, ...]
    outputs: tuple[str | None, ...]
    sizes: tuple[Sizes | None, ...]

    @staticmethod
    def of(packed: Sequence[Any]) -> Region:
        """Returns the region from which :meth:`packed` made ``packed``. Raises ValueError for other forms,
        since a graph may come from a file."""
        if not _is_packed(packed):
            raise ValueError(
                f"funcol.local_map_hop: {short_repr(packed)} is not a region. Pass what a traced call of "
                "apply_local_map has in its node."
            )
        name, are_full, mesh, inputs, outputs, sizes = packed
        return Region(name, are_full, MeshKey(*mesh), tuple(inputs), tuple(outputs), tuple(sizes))

    def packed(self) -> tuple[Any, ...]:
        """Returns the region as plain tuples, which a node can have as an argument."""
        return tuple(self._replace(mesh=tuple(self.mesh)))  # type: ignore[arg-type]

    def placements_in(self) -> tuple[Placements | None, ...]:
        return tuple(map(self._placements, self.inputs))

    def placements_out(self) -> tuple[Placements | None, ...]:
        return tuple(map(self._placements, self.outputs))

    def _placements(self, text: str | None) -> Placements | None:
        placements = placements_of(text)
        if placements is not None and len(placements) != len(self.mesh.sizes):
            raise ValueError(
                f"funcol.local_map_hop: {short_repr(text)} are {len(placements)} placements for a "
                f"{self.mesh}. Give one for each axis."
            )
        return placements


def _is_packed(packed: Any) -> bool:
    """Returns true if ``packed`` has the form of :meth:`Region.packed`. Does not check the text in it."""

    def are(kinds: Any, values: Any) -> bool:
        return isinstance(values, Sequence) and all(isinstance(value, kinds) for value in values)

    if not isinstance(packed, Sequence) or isinstance(packed, str) or len(packed) != len(Region._fields):
        return False
    name, are_full, mesh, inputs, outputs, sizes = packed
    if not isinstance(mesh, Sequence) or len(mesh) != len(MeshKey._fields):
        return False
    device_type, mesh_sizes, names, ranks = mesh
    return (
        are(str, (name, device_type))
        and isinstance(are_full, bool)
        and are(int, mesh_sizes)
        and are(str, names)
        and len(names) in (0, len(mesh_sizes))
        and are(int, ranks)
        and math.prod(mesh_sizes) == len(ranks)
        and all(not isinstance(texts, str) and are(str | None, texts) for texts in (inputs, outputs))
        and are(Sequence | None, sizes)
        and all(of_one is None or are(int, of_one) for of_one in sizes)
    )


# Text

# Numbers as Python writes them, of at most 9 digits: dims and split factors are C++ numbers.
_DIM = r"(0|[1-9]\d{0,8})"
_WORD = re.compile(rf"R|S\({_DIM}\)|_S\({_DIM}, ([1-9]\d{{0,8}})\)|P\(([A-Za-z_]\w*)\)", re.ASCII)


def text_of(placements: Placements | None) -> str | None:
    """Returns ``"S(0)R"``. Raises NotImplementedError for placements of kinds other than PyTorch's four."""
    return None if placements is None else "".join(map(_word, placements))


def _word(placement: Placement) -> str:
    if is_shard(placement) or isinstance(placement, Replicate) or type(placement) is Partial:
        return str(placement)
    raise NotImplementedError(
        f"funcol.apply_local_map: a graph cannot hold the placement {placement}. Use Shard, Replicate "
        "or Partial."
    )


@functools.lru_cache(maxsize=1024)
def placements_of(text: str | None) -> Placements | None:
    """Returns the placements that :func:`text_of` writes as ``text``."""
    if text is None:
        return None
    found = list(_WORD.finditer(text))
    if "".join(match.group() for match in found) != text:
        raise ValueError(
            f"funcol.local_map_hop: {short_repr(text)} are not placements. Write them as in 'S(0)RP(sum)'."
        )
    return tuple(map(_placement, found))


def _placement(match: re.Match[str]) -> Placement:
    dim, strided_dim, factor, reduce_op = match.groups()
    if dim is not None:
        return Shard(int(dim))
    if strided_dim is not None:
        return _StridedShard(int(strided_dim), split_factor=int(factor))
    return Replicate() if reduce_op is None else Partial(reduce_op)


# Meshes

_meshes: weakref.WeakValueDictionary[MeshKey, DeviceMesh] = weakref.WeakValueDictionary()


def key_of(mesh: DeviceMesh) -> MeshKey:
    """Returns ``mesh`` by value; :func:`mesh_of_key` finds it again as long as it lives."""
    ranks = tuple(mesh._flatten_rank_map)
    key = MeshKey(mesh.device_type, tuple(mesh.shape), tuple(mesh.mesh_dim_names or ()), ranks)
    _meshes.setdefault(key, mesh)
    return key


def mesh_of_key(key: MeshKey) -> DeviceMesh:
    """Returns a living mesh of ``key`` on which a region was made, or the current mesh (``with mesh:``)."""
    mesh = _meshes.get(key) or current_mesh()
    if mesh is None or key_of(mesh) != key:
        raise ValueError(
            f"funcol.local_map_hop: the region is for a {key}, which is not there. "
            "Make that DeviceMesh and enter it (`with mesh:`)."
        )
    return mesh


def current_mesh() -> DeviceMesh | None:
    """Returns the mesh that was entered last with ``with mesh:``, if any."""
    from torch.distributed.device_mesh import _mesh_resources

    return _mesh_resources.mesh_stack[-1] if _mesh_resources.mesh_stack else None


# Gradients


def gradient_placements(
    inputs: Sequence[Placements | None],
    outputs: Sequence[Placements | None],
    stated: Sequence[Placements | None] | None = None,
) -> tuple[list[Placements | None], list[Placements | None]]:
    """Returns the placements of gradients of local inputs and outputs; ``stated`` overrides those of inputs.

    Along an axis on which all tensors are replicated, every rank computes the same, gradients included. Along
    any other axis a rank's results are its own: the gradients on different ranks add up to that of a
    replicated tensor, which is partial there. A shard's gradient is sharded in the same way; each part of a
    partial tensor has the full gradient. On one axis:

        S <- R, S     gradients of the inputs: P, S; of the output: S
        P <- S, S     S, S; R
        R <- R, R     R, R; R
        R <- S        S; P, because the function must have collectives inside, whose gradients sum over ranks
    """
    num_axes = max((len(one) for one in (*inputs, *outputs) if one is not None), default=0)
    differs = [
        any(one is not None and not isinstance(one[axis], Replicate) for one in (*inputs, *outputs))
        for axis in range(num_axes)
    ]

    def gradient(placements: Placements | None) -> Placements | None:
        if placements is None:
            return None
        return tuple(
            Partial()
            if differs[axis] and isinstance(placement, Replicate)
            else Replicate()
            if placement.is_partial()
            else placement
            for axis, placement in enumerate(placements)
        )

    gradients_in = list(map(gradient, inputs))
    for i, one in enumerate(stated or ()):
        gradients_in[i] = one or gradients_in[i]
    return gradients_in, list(map(gradient, outputs))


def num_averaged(placements: Placements | None, mesh: DeviceMesh) -> int:
    """Returns the number of ranks whose tensors are averaged; 1 without averages."""
    if placements is None:
        return 1
    return math.prod(mesh.size(axis) for axis, one in enumerate(placements) if one.is_partial("avg"))


def check_differentiable(placements: Placements, what: str, name: str) -> None:
    """Raises for partials other than sums and averages, whose gradients a rank cannot compute alone."""
    for placement in placements:
        if placement.is_partial() and not (placement.is_partial("sum") or placement.is_partial("avg")):
            raise NotImplementedError(
                f"funcol.apply_local_map: {name}: {what} is {placement} and requires a gradient, which only "
                "Partial('sum') and Partial('avg') have here. Reduce it inside the function, or detach it."
            )


# Shapes


def checked_placements(placements: Placements, num_dims: int, what: str, name: str) -> Placements:
    """Returns ``placements`` with dims counted from the front. Raises ValueError if the tensor lacks them."""
    for placement in placements:
        if is_shard(placement) and not -num_dims <= placement.dim < num_dims:
            raise ValueError(
                f"funcol.apply_local_map: {name}: {what} has {num_dims} dims, but its placements "
                f"{list(placements)} shard dim {placement.dim}. State a dim that it has."
            )
    return tuple(with_nonnegative_dim(placement, num_dims) for placement in placements)


def cuts_of(placements: Placements) -> dict[int, tuple[int, ...]]:
    """Returns the axes that cut each sharded dim, by dim."""
    cuts: dict[int, tuple[int, ...]] = {}
    for axis, placement in enumerate(placements):
        if is_shard(placement):
            cuts[placement.dim] = (*cuts.get(placement.dim, ()), axis)
    return cuts


def num_pieces(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    return math.prod(mesh.size(axis) for axis in axes)


def local_shape(spec: DTensorSpec, what: str, name: str) -> tuple[Any, ...]:
    """Returns this rank's shape. Symbolic sizes have to be divisible by the number of shards."""
    shape: list[Any] = list(spec.shape)
    if all(isinstance(size, int) for size in shape):
        return tuple(_C.local_shape_of(spec, shape))
    for dim, axes in cuts_of(spec.placements).items():
        pieces = num_pieces(spec.mesh, axes)
        if shape[dim] % pieces != 0:
            raise NotImplementedError(
                f"funcol.apply_local_map: {name}: dim {dim} of {what} has the symbolic size "
                f"{shape[dim]}, which the {pieces} ranks that share it need not divide. Trace with "
                "static sizes, or with even ones."
            )
        shape[dim] = shape[dim] // pieces
    return tuple(shape)


class Uneven(NamedTuple):
    """A dim of an input with uneven shards."""

    axes: tuple[int, ...]
    full_size: int
    local_size: int


def uneven_dims(specs: Sequence[DTensorSpec | None]) -> list[Uneven]:
    """Returns the dims of inputs under ``specs`` that have uneven shards."""
    found = []
    for spec in filter(None, specs):
        shape = spec.shape
        for dim, axes in cuts_of(spec.placements).items():
            if isinstance(shape[dim], int) and shape[dim] % num_pieces(spec.mesh, axes):
                local = _C.local_shape_of(spec, list(shape))
                found.append(Uneven(axes, shape[dim], local[dim]))
    return found


def full_spec(
    local: Tensor,
    mesh: DeviceMesh,
    placements: Placements,
    sizes: Sizes | None,
    uneven: Sequence[Uneven],
    what: str,
    name: str,
) -> DTensorSpec:
    """Returns the spec of a result of which this rank has ``local``, with the full ``sizes``, if known.

    Otherwise shards are assumed to be even, unless an input has uneven ones on the same axes: then the result
    has the size of the input. Raises ``ValueError`` if this rank's shards of the two differ in length.
    """
    if sizes is not None:
        return spec_of_shape(mesh, placements, sizes, local)
    placements = checked_placements(placements, local.dim(), what, name)
    shape: list[Any] = list(local.shape)
    for dim, axes in cuts_of(placements).items():
        related = [one for one in uneven if set(one.axes) & set(axes)]
        if not related:
            shape[dim] = shape[dim] * num_pieces(mesh, axes)
            continue
        found = {one.full_size for one in related if one.axes == axes and one.local_size == shape[dim]}
        if len(found) != 1:
            raise ValueError(
                f"funcol.apply_local_map: {name}: {what} has shape {tuple(local.shape)} on this rank and the "
                f"placements {list(placements)}; dim {dim} lies on axes whose shards of the inputs are "
                f"uneven ({', '.join(f'{one.local_size} of {one.full_size}' for one in related)}), so "
                "its whole size cannot be told. Pad the inputs, or return shards as long as theirs."
            )
        shape[dim] = found.pop()
    return spec_of_shape(mesh, placements, shape, local)
