"""Under funcol.install(), decisions count on the tensors that operators take by keyword."""

from __future__ import annotations

import pytest
import torch
from ranks import device_type, on_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.nn import functional

import funcol

ON_DEVICES = True

MASKS: dict[str, Placement] = {"R": Replicate(), "S1": Shard(1), "S2": Shard(2), "P": Partial()}


def placed(whole: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    if placement.is_partial():
        share = whole * 2 if mesh.get_local_rank() == 0 else -whole
        return DTensor.from_local(share, mesh, [placement])
    return distribute_tensor(whole, mesh, [placement])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize("heads", ["S1", "R"])
@pytest.mark.parametrize("second", MASKS)
@pytest.mark.parametrize("first", MASKS)
@on_ranks(2)
def test_attention_decides_anew_for_a_mask_elsewhere(
    rank: int, world: int, first: str, second: str, heads: str, with_gradients: bool
) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    mask = torch.randn(2, 4, 6, 6)
    with funcol.installed():
        for word in (first, second):
            plain = [tensor.clone().requires_grad_(with_gradients) for tensor in whole]
            wanted = functional.scaled_dot_product_attention(*plain, attn_mask=mask)
            given = [placed(tensor, mesh, MASKS[heads]).requires_grad_(with_gradients) for tensor in whole]
            bias = placed(mask, mesh, MASKS[word])
            result = functional.scaled_dot_product_attention(*given, attn_mask=bias)
            torch.testing.assert_close(result.full_tensor(), wanted, rtol=1e-4, atol=1e-4)
            if with_gradients:
                wanted.square().sum().backward()
                result.square().sum().backward()
                for one, other in zip(given, plain, strict=True):
                    torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mask_first", [False, True])
@on_ranks(2)
def test_attention_decides_anew_with_and_without_a_mask(rank: int, world: int, mask_first: bool) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    mask = torch.randn(6, 6)
    with funcol.installed():
        given = [placed(tensor, mesh, Shard(1)) for tensor in whole]
        bias = placed(mask, mesh, Shard(0))
        calls = [({"attn_mask": mask}, {"attn_mask": bias}), ({}, {})]
        for plain, keywords in calls if mask_first else calls[::-1]:
            wanted = functional.scaled_dot_product_attention(*whole, **plain)
            result = functional.scaled_dot_product_attention(*given, **keywords)
            torch.testing.assert_close(result.full_tensor(), wanted, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_compiled_attention_reduces_a_partial_mask_first(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    torch.manual_seed(0)
    whole = [torch.randn(2, 4, 6, 8) for _ in range(3)]
    mask = torch.randn(2, 4, 6, 6)
    wanted = functional.scaled_dot_product_attention(*whole, attn_mask=mask)
    with funcol.installed():
        given = [placed(tensor, mesh, Shard(1)) for tensor in whole]
        compiled = torch.compile(functional.scaled_dot_product_attention, backend="aot_eager")
        result = compiled(*given, attn_mask=placed(mask, mesh, Partial()))
        torch.testing.assert_close(result.full_tensor(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("first", "second"), [("R", "S1"), ("S1", "R"), ("S1", "S2")])
@on_ranks(2)
def test_out_is_decided_anew_for_an_out_elsewhere(rank: int, world: int, first: str, second: str) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    torch.manual_seed(0)
    a, b = torch.randn(4, 6, 6), torch.randn(4, 6, 6)
    with funcol.installed():
        for word in (first, second):
            out = placed(torch.zeros(4, 6, 6), mesh, MASKS[word])
            torch.bmm(placed(a, mesh, Shard(0)), placed(b, mesh, Shard(0)), out=out)
            torch.testing.assert_close(out.full_tensor(), a @ b, rtol=1e-4, atol=1e-4)
            assert out.placements == (MASKS[word],)


@on_ranks(2)
def test_uninstall_puts_back_what_the_dispatcher_knows_of_arguments(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,))
    dispatcher = DTensor._op_dispatcher
    tables = dispatcher.sharding_propagator.op_to_schema_info
    before = {op: repr(info) for op, info in tables.items()}
    with funcol.installed():
        given = [placed(torch.randn(2, 4, 6, 8), mesh, Shard(1)) for _ in range(3)]
        functional.scaled_dot_product_attention(*given)
        out = placed(torch.zeros(4, 6, 6), mesh, Shard(0))
        torch.bmm(out + 1, out + 1, out=out)
    assert {op: repr(info) for op, info in tables.items()} == before
