"""Cost models of plans of redistributions, and the files of measured ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from .. import _C
from .texts import MOST_RANKS, short_repr

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute")
"""The collectives of plans."""

StepCounts = _C.StepCounts

_BYTES_PER_US = 1e3  # of a gigabyte a second

_MOST_BYTES = 1 << 24  # of a file

# Of numbers in files.
_MOST = 1e12
_LEAST_BANDWIDTH = 1e-12


@dataclass(frozen=True)
class LinkCost:
    """A message of ``b`` bytes takes ``latency_us + b / (1000 * gigabytes_per_s)`` microseconds."""

    latency_us: float
    gigabytes_per_s: float

    def _in_us_per_byte(self) -> _C.LinkCost:
        return _C.LinkCost(self.latency_us, 1 / (_BYTES_PER_US * self.gigabytes_per_s))


@dataclass(frozen=True)
class AxisCost:
    """The costs of collectives along a mesh axis of ``size`` ranks.

    Bytes are those that the busiest rank sends: ``(size - 1) / size`` of the gathered, scattered or exchanged
    tensor, twice that for an all_reduce, the full tensor for a permute.
    """

    size: int
    all_gather: LinkCost
    reduce_scatter: LinkCost
    all_reduce: LinkCost
    all_to_all: LinkCost
    permute: LinkCost


@dataclass(frozen=True)
class AlphaBeta:
    """Latency and bandwidth of every mesh axis and collective, and of local copies; plans cost microseconds.

    ``python -m funcol calibrate`` measures one on a running mesh. PyTorch's counterpart is ``MeshTopoInfo``,
    which has one latency and one bandwidth for each mesh dim.
    """

    axes: Mapping[str, AxisCost]
    copy: LinkCost

    @classmethod
    def load(cls, path: str | Path) -> AlphaBeta:
        """Reads a file that :meth:`save` wrote.

        Raises ``ValueError`` that names the key that is missing, unknown, duplicate or wrong. Untrusted files
        may be read: they are JSON of numbers.
        """
        what = f"AlphaBeta.load: {path}"
        try:
            content = json.loads(_read(path), object_pairs_hook=_without_duplicates)
        except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, too deep, too many digits
            raise ValueError(f"{what} is not valid JSON of a cost model: {error}.") from None
        parts = _keys(content, ("axes", "copy"), what)
        if not isinstance(parts["axes"], dict) or not parts["axes"]:
            raise ValueError(
                f"{what}: 'axes' is {short_repr(parts['axes'])}, expected an object with an entry for each "
                "axis."
            )
        axes = {name: _axis(axis, f"{what}: axis '{name}'") for name, axis in parts["axes"].items()}
        return cls(axes, _link(parts["copy"], f"{what}: 'copy'"))

    def save(self, path: str | Path) -> None:
        """Writes a JSON file: latencies in microseconds, bandwidths in 10^9 bytes a second."""
        axes = {
            name: {"size": axis.size} | {kind: vars(getattr(axis, kind)) for kind in COLLECTIVES}
            for name, axis in self.axes.items()
        }
        Path(path).write_text(json.dumps({"axes": axes, "copy": vars(self.copy)}, indent=2) + "\n")

    def for_mesh(self, mesh: _C.Mesh) -> _C.AlphaBeta:
        """Returns costs in the order of the axes of ``mesh``. Raises ValueError if axes or sizes differ."""
        sizes = dict(zip(axis_names(mesh), mesh.sizes, strict=True))
        known = {name: axis.size for name, axis in self.axes.items()}
        if sizes != known:
            raise ValueError(
                f"AlphaBeta: the cost model is for a mesh of {listed_axes(known)}, the mesh is "
                f"{listed_axes(sizes)}. Measure this mesh with `python -m funcol calibrate`, or pass the "
                "model of its axes."
            )
        costs = [
            _C.AxisCost(*(getattr(self.axes[name], kind)._in_us_per_byte() for kind in COLLECTIVES))
            for name in sizes
        ]
        return _C.AlphaBeta(costs, self.copy._in_us_per_byte())


CostModel: TypeAlias = AlphaBeta | _C.StepCounts


def axis_names(mesh: _C.Mesh) -> tuple[str, ...]:
    """Returns the names of the axes, or their numbers if they have no names."""
    return mesh.names or tuple(map(str, range(len(mesh.sizes))))


def listed_axes(sizes: Mapping[str, int]) -> str:
    """Returns the sizes of axes in words: ``dp=2, tp=4``."""
    return ", ".join(f"{name}={size}" for name, size in sizes.items())


def _axis(value: Any, what: str) -> AxisCost:
    parts = _keys(value, ("size", *COLLECTIVES), what)
    size = parts["size"]
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_RANKS:
        raise ValueError(f"{what}: 'size' is {short_repr(size)}, expected a number of ranks.")
    return AxisCost(size, *(_link(parts[kind], f"{what}: '{kind}'") for kind in COLLECTIVES))


def _link(value: Any, what: str) -> LinkCost:
    parts = _keys(value, ("latency_us", "gigabytes_per_s"), what)
    for key, number in parts.items():
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        is_bandwidth = key == "gigabytes_per_s"
        # NaN is in no range. Plans add up thousands of such numbers, and multiply them by bytes.
        if not is_number or not (_LEAST_BANDWIDTH if is_bandwidth else 0) <= number <= _MOST:
            least = f"more than 0, from {_LEAST_BANDWIDTH:g}" if is_bandwidth else "0 or more, up"
            raise ValueError(
                f"{what}: '{key}' is {short_repr(number)}, expected a number of {least} to {_MOST:g}."
            )
    return LinkCost(float(parts["latency_us"]), float(parts["gigabytes_per_s"]))


def _read(path: str | Path) -> str:
    with Path(path).open("rb") as file:
        data = file.read(_MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES} bytes")
    return data.decode()


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {short_repr(key)} is there twice")
        found[key] = value
    return found


def _keys(value: Any, expected: tuple[str, ...], what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(
            f"{what} is {short_repr(value)}, expected an object with the keys {', '.join(expected)}."
        )
    for key in expected:
        if key not in value:
            found = short_repr(", ".join(value)).strip("'\"") or "none"
            raise ValueError(f"{what}: the key '{key}' is missing. There are {found}.")
    for key in value:
        if key not in expected:
            raise ValueError(
                f"{what}: the key {short_repr(key)} is unknown. There are {', '.join(expected)}."
            )
    return value
