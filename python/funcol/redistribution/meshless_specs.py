"""Specs to be remembered, which do not keep their mesh."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .. import _C


def copy_without_mesh(spec: DTensorSpec) -> DTensorSpec:
    """To be remembered, not for a program."""
    copied: DTensorSpec = _C.copy_spec(spec)
    vars(copied)["mesh"] = None  # without DTensorSpec's own __setattr__
    return copied


def copy_onto(spec: DTensorSpec, mesh: DeviceMesh) -> DTensorSpec:
    """A copy of a remembered one, for a program."""
    copied: DTensorSpec = _C.copy_spec(spec)
    vars(copied)["mesh"] = mesh
    return copied


def canonical(spec: DTensorSpec) -> DTensorSpec:
    """One object for all specs of a mesh that equal ``spec``, as long as it is kept: to tell specs apart by
    identity. Raises for symbols and masks."""
    known: DTensorSpec = _C.canonical_spec(spec)
    vars(known)["mesh"] = None  # it is remembered there by what it was made of
    return known
