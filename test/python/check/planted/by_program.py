"""An MLP whose weights are cut over ``dp``, on a mesh with another axis of that size."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .plain import HIDDEN, WIDTH, CopyToRanks, SumOfRanks, batch


class Mlp(nn.Module):
    """Each rank draws its weights if ``is_drawn``, and else cuts full ones."""

    def __init__(self, mesh: DeviceMesh | None, is_drawn: bool) -> None:
        super().__init__()
        self.group = None if mesh is None else mesh.get_group("dp")
        ranks, rank = (1, 0) if mesh is None else (mesh["dp"].size(), mesh.get_local_rank("dp"))
        hidden = HIDDEN // ranks if is_drawn else HIDDEN
        self.up = nn.Linear(WIDTH, hidden, bias=False)
        self.down = nn.Linear(hidden, WIDTH, bias=False)
        if not is_drawn:
            self.up.weight = nn.Parameter(self.up.weight.detach().chunk(ranks)[rank].clone())
            self.down.weight = nn.Parameter(self.down.weight.detach().chunk(ranks, 1)[rank].clone())

    def forward(self, x: Tensor) -> Tensor:
        if self.group is None:
            return self.down(torch.relu(self.up(x)))
        x = CopyToRanks.apply(x, self.group)
        return SumOfRanks.apply(self.down(torch.relu(self.up(x))), self.group)


def _run(mesh: DeviceMesh | None, is_drawn: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Mlp(mesh, is_drawn)
    loss = model(batch()).square().mean()
    loss.backward()
    return model, loss


def cut(mesh: DeviceMesh | None, fault: str | None = None) -> tuple[nn.Module, Tensor]:
    """The program cuts full weights."""
    return _run(mesh, is_drawn=False)


def drawn(mesh: DeviceMesh | None, fault: str | None = None) -> tuple[nn.Module, Tensor]:
    """Ranks draw their weights from equal seeds, so that only a declaration says which axis cuts them."""
    return _run(mesh, is_drawn=True)
