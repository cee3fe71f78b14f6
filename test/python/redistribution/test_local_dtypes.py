"""The dtype of a redistributed tensor: that of the local tensor, whatever the spec says, as in PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import on_ranks
from sharded import Layout, layouts, local_of, mesh_of, whole_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

import funcol
from funcol import redistribute, redistribute_many

WAYS: dict[str, Callable[[DTensor], Tensor]] = {
    "redistribute": lambda x: redistribute(x, placements=[Replicate()]).to_local(),
    "redistribute_many": lambda x: redistribute_many([x, x], [Replicate()])[1].to_local(),
    "DTensor.redistribute": lambda x: x.redistribute(placements=[Replicate()]).to_local(),
    "full_tensor": lambda x: x.full_tensor(),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("src", layouts("R", "S0", "S1", "Psum"), ids=str)
@pytest.mark.parametrize("name", WAYS)
@on_ranks(2)
def test_a_moved_tensor_keeps_the_dtype_of_the_local_tensor(
    rank: int, world: int, name: str, src: Layout, requires_grad: bool
) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((5, 4), torch.float64) / 3
    local = local_of(whole, src, mesh.shape, (rank,))
    spec = src.spec(mesh, whole.float())
    expected = WAYS["full_tensor"](DTensor(local, spec, requires_grad=False))  # type: ignore[call-arg]
    assert expected.dtype == torch.float64
    with funcol.installed():
        dtensor = DTensor(local, spec, requires_grad=requires_grad)  # type: ignore[call-arg]
        result = WAYS[name](dtensor)
    assert result.dtype == torch.float64
    torch.testing.assert_close(result.detach(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("requires_grad", [False, True])
@on_ranks(2)
def test_a_forward_dtype_casts(rank: int, world: int, requires_grad: bool) -> None:
    mesh = mesh_of((world,))
    whole = whole_of((5, 4), torch.float64) / 3
    src = Layout(("S0",))
    dtensor = DTensor(  # type: ignore[call-arg]
        local_of(whole, src, mesh.shape, (rank,)), src.spec(mesh, whole.float()), requires_grad=requires_grad
    )
    result = redistribute(dtensor, placements=[Replicate()], forward_dtype=torch.float32)
    assert result.dtype == result.to_local().dtype == torch.float32
    torch.testing.assert_close(result.to_local().detach(), whole.float(), rtol=0, atol=0)
