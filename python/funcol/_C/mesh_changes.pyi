"""Plans from one mesh to another: see redistribution.planning."""

from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .planner import Mesh, Plan

class TransferMessage:
    """``size`` elements of a box of the tensor, from ``begin`` on, its last dim counted first."""

    @property
    def sender(self) -> int: ...
    @property
    def receiver(self) -> int: ...
    @property
    def indices(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The box: all that the sender holds and the receiver wants."""

    @property
    def begin(self) -> int: ...
    @property
    def size(self) -> int: ...

class Transfer:
    """The messages of a move between meshes; its text has one line per message.

    Messages are made when they are read: those of one rank, or those of all, whose number may be the square.
    """

    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str: ...
    @property
    def messages(self) -> list[TransferMessage]:
        """The messages of all ranks, by sender and receiver: at most one for each pair of ranks."""

    def messages_of(self, rank: int) -> list[TransferMessage]:
        """Returns the messages that ``rank`` sends or receives."""

    @property
    def kept(self) -> list[TransferMessage]:
        """The indices that ranks hold and want, by rank: each is the ``sender`` and the ``receiver``."""

    def held(self, rank: int) -> tuple[tuple[tuple[int, int], ...], ...] | None:
        """Returns the indices that ``rank`` holds before; ``None`` outside of the source mesh."""

    @property
    def total(self) -> int:
        """Bytes that all ranks send together."""

    @property
    def busiest_sender(self) -> int:
        """The bytes that the busiest rank sends; ``bound`` is the least that this can be."""

    @property
    def bound(self) -> int: ...

class MeshChange:
    """A plan from one mesh to another: see :func:`funcol.redistribution.plan_mesh_change`."""

    @property
    def before(self) -> Plan | None:
        """The plan on the source mesh; all of it if ``is_on_common_mesh``: both meshes are views of one."""

    @property
    def transfer(self) -> Transfer | None: ...
    @property
    def after(self) -> Plan | None:
        """The plan on the target mesh."""

    @property
    def is_on_common_mesh(self) -> bool: ...
    @property
    def src_mesh(self) -> Mesh: ...
    @property
    def dst_mesh(self) -> Mesh: ...
    @property
    def src_ranks(self) -> tuple[int, ...]: ...
    @property
    def dst_ranks(self) -> tuple[int, ...]: ...
    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of both meshes, ascending."""

    @property
    def src(self) -> str: ...
    @property
    def dst(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def cost(self) -> float: ...
    @property
    def peak_bytes(self) -> int: ...
    @property
    def bytes(self) -> tuple[tuple[int, ...], ...]:
        """The bytes that each of ``ranks`` sends to each. An all_reduce counts as a reduce_scatter and an
        all_gather."""

    @property
    def bound(self) -> int | None:
        """The fewest bytes that the busiest rank sends in any plan; ``None`` where values are partial."""

    def as_transfer(self) -> Transfer:
        """Returns the plan without collectives. Raises ``ValueError`` for partial values."""

def plan_mesh_change(
    src: Any,
    dst: Any,
    mesh: tuple[Mesh | DeviceMesh, list[int] | None],
    to_mesh: tuple[Mesh | DeviceMesh, list[int] | None],
    shape: list[int],
    itemsize: int,
    src_order: Any,
    dst_order: Any,
    models: tuple[Any, Any] | None,
    max_bytes: int | None,
) -> MeshChange: ...
