"""With funcol under DTensor, operators without a sharding rule run on replicated tensors."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from operator_samples import INFOS, calls_of
from ranks import on_ranks, run_ranks
from sharded import mesh_of, placed
from simulated import Call
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only
from twins import as_on_plain_tensors, numbers, replicated

import funcol
from funcol.installation import without_rule

WORLD = 2
aten = torch.ops.aten


# Every operator of PyTorch's operator database, on replicated tensors. Nothing is sent, so the world is fake.

# Operators whose results have sizes that depend on data.
SIZES_DEPEND_ON_DATA = {
    "aten::_unique2", "aten::bincount", "aten::linalg_lstsq", "aten::masked_select", "aten::nonzero",
    "aten::unique_consecutive",
}  # fmt: skip
NUM_DRAWN = 60
DRAWN = random.Random(0).sample(sorted(INFOS), NUM_DRAWN)


@pytest.fixture(scope="module")
def line(fake_world: None) -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,))


def check(call: Call, mesh: DeviceMesh) -> None:
    """Asserts that ``call`` on replicated DTensors returns and writes what it does on plain tensors."""

    def dtensor(tensor: Tensor) -> DTensor:
        return DTensor.from_local(tensor.clone(), mesh, [Replicate()], run_check=False)

    plain = tree_map_only(Tensor, torch.clone, (call.args, call.kwargs))
    expected = call.op(*plain[0], **plain[1])
    if any(one.layout is not torch.strided for one in tree_leaves(expected) if isinstance(one, Tensor)):
        return
    held = tree_map_only(Tensor, dtensor, (call.args, call.kwargs))
    actual = call.op(*held[0], **held[1])
    of_all = tree_map_only(DTensor, DTensor.to_local, (actual, held))
    for one, other in zip(tree_leaves(of_all), tree_leaves((expected, plain)), strict=True):
        if isinstance(other, Tensor):
            torch.testing.assert_close(one, other, equal_nan=True)
        else:
            assert one == other or (one != one and other != other), call.op


def check_all(name: str, mesh: DeviceMesh) -> None:
    with funcol.installed(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in INFOS[name]:
            for call in calls_of(info, 3):
                if call.op.name().partition(".")[0] not in SIZES_DEPEND_ON_DATA:
                    check(call, mesh)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", DRAWN)
def test_an_operator_that_is_drawn_runs_on_replicated_tensors(name: str, line: DeviceMesh) -> None:
    check_all(name, line)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(INFOS))
def test_every_operator_runs_on_replicated_tensors(name: str, line: DeviceMesh) -> None:
    check_all(name, line)


# Operators without a rule, on tensors that are cut or pending


def mask_of(x: Tensor) -> Any:
    return replicated(torch.arange(12).view(4, 3) % 2 == 0, x)


def source_of(x: Tensor) -> Any:
    return replicated(torch.arange(12.0, dtype=torch.float64), x)


def image(x: Tensor) -> Tensor:
    return x.view(1, 1, 4, 3)


FUNCTIONAL: dict[str, Callable[[Tensor], Any]] = {
    "log sigmoid": torch.nn.functional.logsigmoid,
    "masked scatter": lambda x: torch.masked_scatter(x, mask_of(x), source_of(x)),
    "unfold": lambda x: x.unfold(0, 2, 1) * 1,
    "im2col": lambda x: torch.nn.functional.unfold(image(x), (2, 2)),
    "renorm": lambda x: torch.renorm(x, 2, 0, 0.5),
    "put": lambda x: torch.put(x, replicated(torch.tensor([1, 5]), x), source_of(x)[:2]),
    "searchsorted": lambda x: torch.searchsorted(source_of(x), x),
    "prelu": lambda x: torch.nn.functional.prelu(x - 0.5, replicated(torch.tensor([0.25]).double(), x)),
    "reflection pad": lambda x: torch.nn.functional.pad(image(x), (1, 1, 1, 1), mode="reflect"),
    "floor divide": lambda x: x // 0.3,
    "trilinear": lambda x: torch.nn.functional.bilinear(
        x, x, replicated(torch.ones(2, 3, 3, dtype=torch.float64), x)
    ),
    "cdist": lambda x: torch.cdist(x, x * 2),
    "allclose": lambda x: torch.allclose(x, x * 1),
    "multi margin loss": lambda x: torch.nn.functional.multi_margin_loss(
        x, replicated(torch.tensor([0, 1, 2, 0]), x)
    ),
    "triangle in place": lambda x: (x * 1).tril_() + (x * 1).triu_(1),
    "floor divide in place": lambda x: (x * 1).floor_divide_(0.3),
    "imaginary part of a conjugate": lambda x: torch.complex(x, 2 * x).conj().imag * 1,
}
WITH_GRADIENT = ["log sigmoid", "masked scatter", "unfold", "im2col", "prelu", "reflection pad", "renorm"]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@pytest.mark.parametrize("name", FUNCTIONAL)
@as_on_plain_tensors(lambda: [numbers(4, 3)])
def test_an_operator_without_a_rule_has_its_values(x: Tensor, *, name: str) -> Any:
    return FUNCTIONAL[name](x)


@pytest.mark.parametrize("words", ["S0", "Psum"])
@pytest.mark.parametrize("name", WITH_GRADIENT)
@as_on_plain_tensors(lambda: [numbers(4, 3)], backward=True)
def test_an_operator_without_a_rule_has_its_gradient(x: Tensor, *, name: str) -> Any:
    return FUNCTIONAL[name](x)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "masked scatter": lambda x: x.masked_scatter_(mask_of(x), source_of(x)),
    "put": lambda x: x.put_(replicated(torch.tensor([1, 5]), x), source_of(x)[:2]),
    "renorm": lambda x: x.renorm_(2, 0, 0.5),
    "write to windows": lambda x: x.unfold(0, 2, 2).mul_(2),
}


@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@pytest.mark.parametrize("name", IN_PLACE)
@as_on_plain_tensors(lambda: [numbers(4, 3)])
def test_an_operator_in_place_without_a_rule_writes_its_values(x: Tensor, *, name: str) -> Tensor:
    IN_PLACE[name](x)
    return x


@as_on_plain_tensors(lambda: [numbers(4, 3)], words="R")
def test_a_replicated_tensor_has_any_strided_view(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (3, 1), 1) + x[1:].as_strided((2, 2), (1, 1))


def warns_once(rank: int, world: int) -> list[str]:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    without_rule._warned.clear()
    with funcol.installed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for factor in (1, 2):
            torch.renorm(x * factor, 2, 0, 0.5 * factor)
    return [str(one.message) for one in caught if "no sharding rule" in str(one.message)]


def test_an_operator_without_a_rule_warns_once() -> None:
    for messages in run_ranks(warns_once, 2):
        (message,) = messages
        assert message.startswith("funcol: aten.renorm.default has no sharding rule: every rank runs it on")


@on_ranks(2)
def test_an_operator_that_draws_numbers_is_not_replicated(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with torch.library._scoped_library("draws_without_rule", "DEF") as library:
        library.define("draw(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
        library.impl("draw", torch.rand_like, "CPU")
        with funcol.installed(), pytest.raises(Exception, match="draws_without_rule") as raised:
            torch.ops.draws_without_rule.draw(x)
        assert isinstance(raised.value, (NotImplementedError, RuntimeError))


@on_ranks(2)
def test_the_result_of_an_operator_without_a_rule_is_replicated(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with funcol.installed():
        assert torch.renorm(x, 2, 0, 0.5).placements == (Replicate(),)
        assert torch.nn.functional.logsigmoid(x).placements == (Shard(0),)
