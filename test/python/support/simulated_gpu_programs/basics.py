"""Tensors, copies, random numbers, streams and events on the simulated GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


def devices() -> None:
    assert torch.cuda.is_available()
    assert torch.cuda.device_count() == 2
    assert torch.empty(1, device="cuda:1").device.index == 1


def fresh_memory_is_nan() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        assert torch.empty(1000, device="cuda", dtype=dtype).cpu().isnan().all()


def values() -> None:
    two = torch.empty(1000, device="cuda").fill_(2.0)
    five = two + 3
    assert five.cpu().eq(5).all()
    assert (two * five).sum().item() == 10000
    assert torch.arange(5, device="cuda").tolist() == [0, 1, 2, 3, 4]
    assert torch.equal(two, two.clone())


def sizes_that_depend_on_values() -> None:
    assert torch.nonzero(torch.tensor([0, 1, 1], device="cuda")).tolist() == [[1], [2]]
    assert torch.arange(4, device="cuda")[torch.tensor([True, False, True, False])].tolist() == [0, 2]


def out_of_another_size() -> None:
    out = torch.empty(0, device="cuda")
    torch.add(torch.ones(3, device="cuda"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    found = torch.empty(0, device="cuda", dtype=torch.long)
    torch.nonzero(torch.tensor([0, 1], device="cuda"), out=found)
    assert found.tolist() == [[1]]


def copies_between_devices() -> None:
    source = torch.randn(8, 6)
    assert source.cuda(1).to("cuda:0").cpu().equal(source)
    assert source.cuda(1).t().to("cuda:0").cpu().equal(source.t())
    target = torch.zeros(6, 8, 3, device="cuda:0", dtype=torch.float64)
    target[:, ::2, 1].copy_(source.cuda(1).t()[:, ::2])
    assert target.cpu()[:, ::2, 1].equal(source.t()[:, ::2].double())


def copies_of_complex_numbers() -> None:
    source = torch.randn(4, 3, dtype=torch.complex64)
    assert source.cuda().conj().cpu().equal(source.conj())
    assert torch.equal(source.cuda().conj().to("cuda:1").cpu(), source.conj().resolve_conj())
    assert torch.equal(source.cuda(1).imag.to("cuda:0").cpu(), source.imag)


def copies_that_expand() -> None:
    target = torch.zeros(2, 3, device="cuda")
    target.copy_(torch.arange(3, device="cuda"))
    assert target.tolist() == [[0, 1, 2], [0, 1, 2]]
    with pytest.raises(RuntimeError, match="expanded size"):
        target.copy_(torch.zeros(4, device="cuda"))


def copies_into_overlapping_elements() -> None:
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        torch.zeros(1, device="cuda").expand(3).copy_(torch.ones(3, device="cuda"))


def copies_of_zeros_without_memory() -> None:
    target = torch.ones(3, device="cuda")
    zeros = torch._efficientzerotensor(3, device="cuda")
    target.copy_(zeros)
    assert target.tolist() == [0, 0, 0]
    with pytest.raises(RuntimeError, match="ZeroTensors are immutable"):
        zeros.copy_(target)


def copies_from_pinned_memory() -> None:
    pinned = torch.arange(100.0).pin_memory()
    copied = pinned.to("cuda", non_blocking=True)
    back = torch.empty(100).pin_memory()
    back.copy_(copied, non_blocking=True)
    torch.cuda.synchronize()
    assert back.equal(torch.arange(100.0))


def random_numbers_follow_the_seed() -> None:
    def draw() -> list[Tensor]:
        torch.cuda.manual_seed(3)
        ones = torch.ones(64, device="cuda")
        dropped = torch.nn.functional.dropout(ones, 0.5)
        return [
            torch.rand(8, device="cuda"),
            torch.randn(8, device="cuda"),
            dropped,
            torch.bernoulli(ones * 0.5),
        ]

    for one, other in zip(draw(), draw(), strict=True):
        assert one.equal(other)
    assert not torch.rand(8, device="cuda").equal(torch.rand(8, device="cuda"))
    generators = [torch.Generator("cuda").manual_seed(7) for _ in range(2)]
    one, other = (torch.rand(8, device="cuda", generator=generator) for generator in generators)
    assert one.equal(other)


def random_numbers_in_a_graph() -> None:
    data = torch.zeros(16, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.uniform_()
    replayed = []
    for _ in range(2):
        graph.replay()
        replayed.append(data.cpu())
    assert not replayed[0].equal(replayed[1])
    assert replayed[0].min() >= 0


def dropout_keeps_its_share() -> None:
    dropped = torch.nn.functional.dropout(torch.ones(10000, device="cuda"), 0.3)
    assert abs((dropped == 0).float().mean().item() - 0.3) < 0.05  # five standard deviations are 0.023
    assert dropped.max().item() == pytest.approx(1 / 0.7)


def events() -> None:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    torch.zeros(10, device="cuda").mul_(2)
    end.record()
    end.synchronize()
    assert begin.elapsed_time(end) >= 0


def wrong_sizes_are_the_callers_errors() -> None:
    data = torch.zeros(3, device="cuda")
    with pytest.raises(RuntimeError, match="size"):
        data + torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError, match=r"size|shape"):
        data.add_(torch.zeros(4, device="cuda"))
    with pytest.raises(RuntimeError, match="shapes"):
        torch.mm(torch.zeros(2, 3, device="cuda"), torch.zeros(2, 3, device="cuda"))
    assert data.tolist() == [0, 0, 0]


def products_of_two_dtypes_are_the_callers_errors() -> None:
    half, single = torch.ones(2, 2, device="cuda", dtype=torch.half), torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match="dtype"):
        torch.mm(half, single)
    with pytest.raises(RuntimeError, match="dtype"):
        torch.nn.functional.linear(half, single, single[0])


def tensors_of_different_devices_are_errors() -> None:
    for other in (torch.ones(3), torch.ones(3, device="cuda:1")):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            torch.ones(3, device="cuda:0") + other
    assert (torch.ones(3, device="cuda") + torch.tensor(1.0)).tolist() == [2, 2, 2]


def freed_storage_is_an_error() -> None:
    data = torch.ones(8, device="cuda")
    data.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its memory was freed"):
        data + 1


def backward_runs_on_the_forward_stream() -> None:
    weight = torch.ones(4, device="cuda", requires_grad=True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (weight * 3).sum()
    torch.cuda.current_stream().wait_stream(side)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3, 3, 3, 3]


def profiles_show_the_host() -> None:
    with torch.profiler.profile() as profile:
        torch.ones(3, device="cuda").add_(1)
    assert "aten::add_" in [event.name for event in profile.events()]


CHECKS = {
    check.__name__: check
    for check in (
        devices,
        fresh_memory_is_nan,
        values,
        sizes_that_depend_on_values,
        out_of_another_size,
        copies_between_devices,
        copies_of_complex_numbers,
        copies_that_expand,
        copies_into_overlapping_elements,
        copies_of_zeros_without_memory,
        copies_from_pinned_memory,
        random_numbers_follow_the_seed,
        random_numbers_in_a_graph,
        dropout_keeps_its_share,
        events,
        wrong_sizes_are_the_callers_errors,
        products_of_two_dtypes_are_the_callers_errors,
        tensors_of_different_devices_are_errors,
        freed_storage_is_an_error,
        backward_runs_on_the_forward_stream,
        profiles_show_the_host,
    )
}
