"""``python -m funcol info``: versions, kernels and functions of this installation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _C, _build_info, installation
from ..installation import dtensor_on_import, spmd_types
from ..installation.kernels import ops_with_program_kernels


def add_to(commands: Any) -> None:
    """Adds the command to argparse's ``commands``."""
    command = commands.add_parser("info", help="versions, wake key, kernels per device, CUDA and NCCL")
    command.add_argument(
        "--verbose", action="store_true", help="list the functions, and not only how many there are"
    )
    command.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    print(info(arguments.verbose))


def info(verbose: bool = False) -> str:
    """Returns versions, wake key, kernels per device, CUDA, NCCL and the drop-in, as lines of text; with
    ``verbose`` lists of functions, and else their numbers."""
    kernels = _C.registered_kernels()
    backends = [
        name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if getattr(dist, f"is_{name}_available")()
    ]
    rows = {
        "funcol": f"{_build_info.VERSION}, built with {_build_info.COMPILER}",
        "PyTorch": f"{torch.__version__} running, built for {_build_info.TORCH_VERSION}",
        "wake key": _C.wake_key_name() if _C.has_wake_key() else "none: another library holds it; views wait",
        "backends": ", ".join(backends),
        "CUDA": _cuda_kernels(),
        "GPUs": str(torch.cuda.device_count()),
        "NCCL": f"headers {_build_info.NCCL or 'none'}, PyTorch's {_nccl_version() or 'none'}",
    }
    for device, names in sorted(kernels.items()):
        rows[f"kernels, {device}"] = str(len(names))
    rows["in this process"] = "installed" if installation.is_installed() else "not installed"
    rows["install() replaces"] = (
        f"{_counted(installation.replaced_functions(), verbose)} functions and "
        f"{_counted(_C.ops_with_core_kernels(), verbose)} operators of PyTorch"
    )
    kept = {
        **dict.fromkeys(ops_with_program_kernels(), "a kernel of a program"),
        **installation.kept_from_programs(),
    }
    with dtensor_on_import.fall_back_to_pytorch("DTensor and FSDP2"):
        rows.update(_under_dtensor(kept, verbose))
    rows.update(
        {f"left to PyTorch: {part}": error for part, error in dtensor_on_import.fallback_reasons().items()}
    )
    rows["under spmd_types"] = _under_spmd_types()
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())


def _cuda_kernels() -> str:
    reason = _C.why_no_cuda_kernels()
    if reason is not None:
        return f"no kernels: {reason}"
    return f"kernels for {_build_info.CUDA_ARCHS}, by nvcc {_build_info.CUDA_TOOLKIT}"


def _counted(names: Sequence[str], verbose: bool) -> str:
    """Returns how many ``names`` there are, and with ``verbose`` which."""
    return f"{len(names)} ({', '.join(names)})" if verbose and names else str(len(names))


def _under_dtensor(kept: dict[str, str], verbose: bool) -> dict[str, str]:
    from ..installation.install_dtensor import replaced_functions
    from ..installation.user_patches import all_patches

    kept = {**kept, **all_patches()}
    return {
        "kept from programs": ", ".join(f"{theirs} in the place of {name}" for name, theirs in kept.items())
        or "nothing",
        "under DTensor": f"{'' if installation.is_under_dtensor() else 'not '}installed; replaces "
        f"{_counted(replaced_functions(), verbose)} functions",
        "operators on DTensors": "in C++" if _C.has_native_operators() else "by PyTorch, in this process",
        "under FSDP2": _under_fsdp2(verbose),
    }


def _under_fsdp2(verbose: bool) -> str:
    from ..installation import fully_shard

    functions, left = fully_shard.replaced_and_unsupported()
    row = f"replaces {_counted(functions, verbose)} functions; left to PyTorch: {_counted(left, verbose)}"
    patched = fully_shard.patched_by_programs()
    return f"{row}; not PyTorch's own any more: {', '.join(patched)}" if patched else row


def _under_spmd_types() -> str:
    found = spmd_types.known_version()
    if found is None:
        return "not there"
    version, is_known = found
    return f"{version}: {'replaces its collectives' if is_known else 'runs as it is, not known to funcol'}"


def _nccl_version() -> str | None:
    if not dist.is_nccl_available() or torch.version.cuda is None:
        return None
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
