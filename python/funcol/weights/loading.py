"""Full tensors of one rank, copied into shards: the ranks agree, and each receives only its own shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

from .. import _C
from .._progress import Progress
from ..redistribution.agreement import Agreement, Manifest, agreed_ties, mesh_value, own_ties
from ..redistribution.specs import has_own_order, spec_of
from .export import ByName, check_bytes, own_rank
from .full_sources import GivenTensors, Target, TensorSource
from .fusing import NameOrParts
from .sync import WeightSync


def load(
    op: str,
    held: Callable[[], Mapping[str, Tensor]],
    given: Callable[[], tuple[GivenTensors, Any]],
    src: int,
    *,
    strict: bool,
    names: ByName[NameOrParts] | None,
    bucket_bytes: int,
    group: dist.ProcessGroup | None,
    progress: bool,
    shards: Mapping[str, DTensor] | None = None,
) -> tuple[IncompatibleKeys, Any]:
    """Copies the tensors of ``given()`` on rank ``src`` into those of ``held()``, in place. ``given()`` also
    has a value for JSON, which is returned on all ranks. If either function raises, all ranks are notified.
    ``shards``: DTensors of this rank, which ``src`` need not have.

    The other arguments and the errors, which name ``op``, are those of :func:`funcol.load_full_state_dict`.
    """
    # In-place writes to parameters need neither a graph nor inference mode, which would refuse them.
    with torch.inference_mode(mode=False), torch.no_grad(), Agreement(op, group) as agreement:
        check_bytes(op, "bucket_bytes", bucket_bytes)
        loading = _Loading(op, held(), src, bucket_bytes, strict, agreement)
        offered = agreement.exchange([src, *(shards or ())]).values()
        of_src = {name for theirs, *found in offered if theirs == src for name in found}
        source = (
            TensorSource(op, given(), loading.target_of, names, strict, of_src) if src == own_rank() else None
        )
        if any(found for _, *found in offered):
            loading.move_shards(shards or {}, source, group)
        before: list[tuple[Target, Tensor]] = []
        with Progress(op, len(loading.targets), is_on=progress and src == own_rank()) as shown:
            for bucket in loading.buckets(source, bucket_bytes):
                shown.show(bucket[0][0].name)
                started = loading.start(bucket)
                _copy(before)
                before = started
                agreement.num_done += len(bucket)
                shown.advance(len(bucket))
                del bucket
            agreement.end()
            _copy(before)
        return loading.incompatible, loading.extra


class IncompatibleKeys(NamedTuple):
    """Names of the model that were not loaded, and names that the model does not have.

    PyTorch counterpart: what ``Module.load_state_dict`` returns.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]


class _ShardMove(WeightSync):
    _op = "load_full_state_dict"


class _Loading:
    """The targets of a call, in the order of the model, and how rank ``src`` sends to them."""

    def __init__(
        self,
        op: str,
        held: Mapping[str, Tensor],
        src: int,
        bucket_bytes: int,
        strict: bool,
        agreement: Agreement,
    ) -> None:
        self._op = op
        if src not in agreement.ranks:
            raise ValueError(
                f"funcol::{self._op}: src is {src}, expected one of the ranks that take part. Pass the "
                "global rank that has the tensors."
            )
        self._src = src
        self._bucket_bytes = bucket_bytes
        self._agreement = agreement
        self._owners: dict[DeviceMesh, int] = {}
        self._held = held
        self._moved: set[int] = set()  # indices of targets that come from shards
        state = [*held.items()]
        manifest = Manifest({"function": op, "src": src, "bucket_bytes": bucket_bytes, "strict": strict})
        for name, value in state:
            if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
                raise ValueError(
                    f"funcol::{self._op}: '{name}' has the placements {value.placements}. Reduce it first: a "
                    "whole tensor is loaded into shards and replicas."
                )
            manifest.add(name, value)
        manifest.ties = own_ties(value for _, value in state)
        self._manifests = agreement.meet(manifest)
        tied = agreed_ties(self._manifests)
        self.targets = [
            Target(index, name, value) for index, (name, value) in enumerate(state) if index not in tied
        ]
        places = {target.index: place for place, target in enumerate(self.targets)}
        # By name: the target, which tied names have in common.
        self.target_of = {
            name: self.targets[places[tied.get(index, index)]] for index, (name, _) in enumerate(state)
        }
        self.incompatible = IncompatibleKeys([], [])
        self.extra: Any = None
        for target in self.targets:
            if target.spec is not None:
                target.spec = self._spec_for_receivers(target, target.spec)
                if target.spec.mesh not in self._owners:
                    self._owners[target.spec.mesh] = mesh_value(target.spec.mesh).ranks.index(src)
        # The ranks that take part, and so receive plain tensors.
        self._receivers = sorted(self._manifests)
        self._mesh_of_all = next(
            (mesh for mesh in self._owners if sorted(mesh_value(mesh).ranks) == self._receivers), None
        )

    def _spec_for_receivers(self, target: Target, spec: DTensorSpec) -> DTensorSpec:
        """Returns ``spec`` on a mesh of all ranks that get shards from ``src``: its own mesh or, if other
        ranks have the tensor on submeshes of their own, the mesh that these were cut from."""
        meshes = {one.ranks_of(target.index) or () for one in self._manifests.values()}
        reached = {rank for ranks in meshes for rank in ranks}
        if len(meshes) > 1:
            spec = _on_common_mesh(spec, reached) or _on_stacked_meshes(spec, sorted(meshes)) or spec
        ranks = {*mesh_value(spec.mesh).ranks}
        missing = reached - ranks
        if self._src not in ranks or missing:
            outside = min(missing) if self._src in ranks else self._src
            raise ValueError(
                f"funcol::{self._op}: '{target.name}' is on {spec.mesh}, which rank {outside} is not part "
                "of. Pass a rank of every tensor's mesh as src."
            )
        return spec

    def move_shards(
        self,
        shards: Mapping[str, DTensor],
        source: TensorSource | None,
        group: dist.ProcessGroup | None,
    ) -> None:
        """Moves those of ``shards`` that rank ``src`` does not have as full tensors straight into the shards
        of the model."""
        by_rank = self._agreement.exchange([self._src, source and source.moved])
        names: dict[str, str] = by_rank[self._src][1]
        # Loads from several ranks, as those of the stages of a pipeline, are loads of different tensors.
        suffix = f" of src {self._src}" if len({theirs for theirs, _ in by_rank.values()}) > 1 else ""
        wanted = {*names.values()}
        _ShardMove(
            {name + suffix: tensor for name, tensor in shards.items() if name in wanted},
            {name + suffix: self._held[name] for name in names},
            names={name + suffix: theirs + suffix for name, theirs in names.items()},
            max_bytes=self._bucket_bytes,
            group=group,
        ).sync()
        self._moved = {self.target_of[name].index for name in names}

    def buckets(self, source: TensorSource | None, most: int) -> Iterator[list[tuple[Target, Tensor | None]]]:
        """Yields buckets of ``most`` bytes, with tensors on ``src``. All ranks are about to send each."""
        agreement, src = self._agreement, self._src
        by_rank = agreement.exchange(source and source.metadata())
        self.extra = by_rank[src]["extra"]
        agreement.exchanges_values = any(one is not None and one["in_own_order"] for one in by_rank.values())
        if by_rank[src]["in_own_order"]:
            while True:
                full_tensors = [] if source is None else source.read(most)
                found = agreement.meet_for_bucket(source and source.metadata())[src]
                if not found["names"]:
                    self.incompatible = IncompatibleKeys(*found["incompatible"])
                    return
                targets = [self.target_of[name] for name in found["names"]]
                yield [*zip(targets, full_tensors or [None] * len(targets), strict=True)]
        self.incompatible = IncompatibleKeys(*by_rank[src]["incompatible"])
        loaded = {
            self.target_of[name].index for name in {*self.target_of} - {*self.incompatible.missing_keys}
        }
        for bucket in self._in_order(loaded - self._moved, most):
            pairs = [(target, None if source is None else source.tensor_for(target)) for target in bucket]
            agreement.meet_for_bucket()
            if source is not None:
                source.loaded += [target.name for target in bucket]
            yield pairs

    def _in_order(self, loaded: set[int], most: int) -> Iterator[list[Target]]:
        bucket: list[Target] = []
        left = most
        for target in self.targets:
            if target.index not in loaded:
                continue
            if bucket and target.num_bytes() > left:
                yield bucket
                bucket, left = [], most
            bucket.append(target)
            left -= target.num_bytes()
        if bucket:
            yield bucket

    def start(self, bucket: list[tuple[Target, Tensor | None]]) -> list[tuple[Target, Tensor]]:
        """Sends a bucket. Returns this rank's tensors of it, which may be pending."""
        started: list[tuple[Target, Tensor]] = []
        by_mesh: dict[DeviceMesh | None, list[tuple[Target, Tensor | None]]] = {}
        for target, full in bucket:
            mesh = self._mesh_of_all if target.spec is None else target.spec.mesh
            by_mesh.setdefault(mesh, []).append((target, full))
        for mesh, of_mesh in by_mesh.items():
            if mesh is None:
                started += [(target, self._send_plain(target, full)) for target, full in of_mesh]
            elif mesh.get_coordinate() is not None:
                replicated = (Replicate(),) * mesh.ndim
                moved = _C.move_from_owners(
                    [_on_device_of(mesh, full) for _, full in of_mesh],
                    [target.spec or spec_of(mesh, replicated, target.local) for target, _ in of_mesh],
                    [self._owners[mesh]] * len(of_mesh),
                    [None] * len(of_mesh),
                    True,
                    None,
                )
                started += [
                    (target, dtensor._local_tensor)
                    for (target, _), dtensor in zip(of_mesh, moved, strict=True)
                ]
        return started

    def _send_plain(self, target: Target, full: Tensor | None) -> Tensor:
        """Sends a plain tensor from ``src`` to each rank, if no mesh has all ranks that take part."""
        held = torch.empty(target.shape, dtype=target.dtype, device=target.local.device)
        received = held if full is None else full.contiguous()
        group = self._agreement.group
        if group is not None and self._receivers == sorted(dist.get_process_group_ranks(group)):
            dist.broadcast(received, self._src, group)
        elif full is None:
            dist.recv(received, self._src)
        else:
            others = [rank for rank in self._receivers if rank != self._src]
            for work in [dist.isend(received, rank) for rank in others]:
                if work is not None:
                    work.wait()
        return received


def _on_device_of(mesh: DeviceMesh, full: Tensor | None) -> Tensor | None:
    """Returns ``full`` on the devices on which the other ranks of ``mesh`` receive: a plain tensor may be on
    the CPU beside parameters on devices, like steps of optimizers."""
    return None if full is None else full.to(mesh.device_type)


def _copy(started: list[tuple[Target, Tensor]]) -> None:
    for target, received in started:
        if target.local.numel() > 0:
            target.local.copy_(received)


def _on_common_mesh(spec: DTensorSpec, ranks: set[int]) -> DTensorSpec | None:
    """Returns ``spec`` on the smallest mesh with ``ranks`` that its submesh is cut from, where other
    submeshes hold replicas; ``None`` if there is no such mesh."""
    mesh, root = spec.mesh, spec.mesh._get_root_mesh()
    names, of_root = mesh.mesh_dim_names or (), root.mesh_dim_names or ()
    if mesh is root or not names or not all(name in of_root for name in names):
        return None
    places = [(root.mesh == rank).nonzero() for rank in ranks]
    if any(place.numel() == 0 for place in places):
        return None
    coordinates = torch.cat(places).T.tolist()
    kept = tuple(
        name for name, along in zip(of_root, coordinates, strict=True) if name in names or len({*along}) > 1
    )
    common = root if kept == tuple(of_root) else root[kept]
    return _with_replicas(spec, common, [kept.index(name) for name in names])


_stacked: dict[tuple[str, tuple[int, ...], tuple[tuple[int, ...], ...]], DeviceMesh] = {}


def _on_stacked_meshes(spec: DTensorSpec, meshes: list[tuple[int, ...]]) -> DTensorSpec | None:
    """Returns ``spec`` on a mesh whose rows are ``meshes``, such as flattened ones; ``None`` if they differ
    in size or do not have all ranks of the world. No group has the ranks of a column: tensors go point to
    point."""
    ranks = [rank for row in meshes for rank in row]
    mesh = spec.mesh
    if sorted(ranks) != [*range(dist.get_world_size())] or {len(row) for row in meshes} != {mesh.size()}:
        return None
    key = mesh.device_type, tuple(mesh.shape), tuple(meshes)
    if key not in _stacked:
        rows = torch.tensor(ranks, device="cpu").view(len(meshes), *mesh.shape)
        _stacked[key] = DeviceMesh(mesh.device_type, rows, _init_backend=False)
    return _with_replicas(spec, _stacked[key], [axis + 1 for axis in range(mesh.ndim)])


def _with_replicas(spec: DTensorSpec, common: DeviceMesh, axes: list[int]) -> DTensorSpec:
    """Returns ``spec``, whose axes are ``axes`` of ``common``, with replicas along the others."""
    placements: list[Placement] = [Replicate()] * common.ndim
    for axis, placement in zip(axes, spec.placements, strict=True):
        placements[axis] = placement
    order = None
    if has_own_order(spec):
        order = tuple(
            ShardOrderEntry(entry.tensor_dim, tuple(axes[axis] for axis in entry.mesh_dims))
            for entry in spec.shard_order
        )
    return DTensorSpec(common, tuple(placements), tensor_meta=spec.tensor_meta, shard_order=order)  # type: ignore[arg-type]
