"""Process groups that are written in Python, under the method names of some PyTorch release."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from torch import Tensor
from torch._C._distributed_c10d import Work, _register_process_group, _unregister_process_group

import funcol

NAME = "a_group_in_python"
NAMES = {
    "all_gather": ("_allgather_base", "all_gather_single"),
    "reduce_scatter": ("_reduce_scatter_base", "reduce_scatter_single"),
    "all_gather_coalesced": ("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    "reduce_scatter_coalesced": ("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    "all_to_all": ("alltoall_base", "all_to_all_single"),
}
AGES = ["old", "new"]


class Done(Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class TwoAlike(dist.ProcessGroup):
    """Rank 0 of two ranks that pass the same tensors."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.called: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802
        return "in Python"

    def getGroupName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return NAME


def gather(out: Tensor, own: Tensor) -> None:
    out.copy_(torch.cat([own, own]).view_as(out))


def reduce_scatter(out: Tensor, own: Tensor) -> None:
    out.copy_(2 * own.flatten()[: out.numel()].view_as(out))


def exchange(out: Tensor, own: Tensor) -> None:
    out.copy_(torch.cat([own[: len(own) // 2]] * 2))


METHODS = {"all_gather": gather, "reduce_scatter": reduce_scatter, "all_to_all": exchange}


def with_methods(kinds: list[str], age: str) -> TwoAlike:
    def method(kind: str, name: str) -> Callable[..., Work]:
        def run(self: TwoAlike, out: Any, own: Any, *rest: Any) -> Work:
            self.called.append(name)
            for each_out, each_own in (
                zip(out, own, strict=True) if kind.endswith("coalesced") else [(out, own)]
            ):
                METHODS[kind.removesuffix("_coalesced")](each_out, each_own)
            return Done()

        return run

    names = {kind: NAMES[kind][AGES.index(age)] for kind in kinds}
    methods = {name: method(kind, name) for kind, name in names.items()}
    return type("Group", (TwoAlike,), methods)()  # type: ignore[no-any-return]


@pytest.fixture
def registered() -> Iterator[Callable[[TwoAlike], TwoAlike]]:
    def register(group: TwoAlike) -> TwoAlike:
        _register_process_group(NAME, group)
        return group

    yield register
    _unregister_process_group(NAME)


CALLS: dict[str, Callable[[Any, Tensor, TwoAlike], Tensor]] = {
    "all_gather": lambda module, x, group: module.all_gather_tensor(x, 0, group),
    "all_gather_along_dim_1": lambda module, x, group: module.all_gather_tensor(x, 1, group),
    "reduce_scatter": lambda module, x, group: module.reduce_scatter_tensor(x, "sum", 0, group),
    "all_gather_coalesced": lambda module, x, group: module.all_gather_into_tensor_coalesced([x], group)[0],
    "reduce_scatter_coalesced": lambda module, x, group: module.reduce_scatter_tensor_coalesced(
        [x], "sum", [0], group
    )[0],
    "all_to_all": lambda module, x, group: module.all_to_all_single(x, [2, 2], [2, 2], group),
}


def skip_if_absent(age: str) -> None:
    if age == "new" and not hasattr(dist.ProcessGroup, NAMES["all_gather"][1]):
        pytest.skip("this PyTorch has only the old names")


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_a_group_with_the_names_of_one_age_gives_what_stock_gives(
    call: Callable[..., Tensor], age: str, registered: Callable[[TwoAlike], TwoAlike]
) -> None:
    skip_if_absent(age)
    group = registered(with_methods(list(NAMES), age))
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(call(funcol, x, group) * 1, call(stock, x, group) * 1)


@pytest.mark.parametrize("age", AGES)
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_the_coalesced_names_are_enough_for_one_tensor_as_they_are_for_stock(
    name: str, age: str, registered: Callable[[TwoAlike], TwoAlike]
) -> None:
    skip_if_absent(age)
    group = registered(with_methods([f"{name}_coalesced"], age))
    x = torch.arange(8.0).view(4, 2)
    assert torch.equal(CALLS[name](funcol, x, group) * 1, CALLS[name](stock, x, group) * 1)
    assert group.called == [NAMES[f"{name}_coalesced"][AGES.index(age)]] * 2


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_the_new_name_alone_is_enough(name: str, registered: Callable[[TwoAlike], TwoAlike]) -> None:
    skip_if_absent("new")
    group = registered(with_methods([name], "new"))
    x = torch.arange(8.0).view(4, 2)
    expected = torch.cat([x, x]) if name == "all_gather" else 2 * x[:2]
    assert torch.equal(CALLS[name](funcol, x, group) * 1, expected)
