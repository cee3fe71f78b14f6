"""Collectives that were started and may still be running."""

from typing import Any

import torch

class InFlight:
    """A collective that was started and may still be running; see ``funcol.pending``."""

    @property
    def op(self) -> str:
        """``"all_reduce"``"""
    @property
    def group(self) -> str:
        """The name of its process group."""
    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the results on this rank."""
    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the first result; ``None`` if there are none."""
    @property
    def seconds(self) -> float:
        """The time since its start, to some milliseconds."""
    @property
    def caller(self) -> str | None:
        """``"train.py:41 in step"``, if callers are recorded and Python code started it."""
    @property
    def purpose(self) -> str | None:
        """``"layers.0 / redistribute S(0)->R: all_gather(dim 0, tp)"``, if callers are recorded."""

def collectives_in_flight() -> list[InFlight]: ...
def in_flight_text() -> str: ...
def record_callers(enabled: bool, /) -> None: ...
def set_library_folders(folders: list[str], /) -> None: ...
def enter_module(name: str | None, /) -> str | None:
    """Enters module ``name``, or leaves all modules if it is ``None``. Returns the module before."""

def dump_in_flight_on(signal: int, file_descriptor: int, /) -> None: ...
def stop_dumping_in_flight_on(signal: int, /) -> bool: ...
def follow_fork_of_dumps() -> None: ...
def note_group_ended(group_or_backend: Any, end: str, /) -> None:
    """Notes that the group, or the backend's group, ends by ``end``: "abort" or "reconfigure"."""

def note_mesh(device_mesh: Any, /) -> None: ...
def check_mesh_group(device_mesh: Any, group_name: str, op: str, /) -> None:
    """Raises ``ValueError`` if the group was aborted or reconfigured after the mesh was made."""
