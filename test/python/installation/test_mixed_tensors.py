"""Plain tensors beside DTensors, such as the state that an optimizer makes by torch.zeros."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.utils._python_dispatch import TorchDispatchMode

import funcol

WORLD = 4

REMEDY = r"distribute_tensor\(.*DTensor\.from_local\(.*implicit_replication\(\)"
WRITTEN = r"the operator writes to (it|them)\. .*torch\.zeros_like\(param\)"

since_2_15 = pytest.mark.skipif(
    torch.__version__ < "2.15", reason="older PyTorch releases raise an AssertionError after the write"
)


@pytest.fixture
def param(fake_world: None) -> Iterator[DTensor]:
    with funcol.installed():
        mesh: DeviceMesh = init_device_mesh("cpu", (dist.get_world_size(),))
        yield DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)])


def plain() -> Tensor:
    return torch.eye(4)


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError, match=r"got mixed torch\.Tensor and DTensor: ") as raised:
        call()
    assert type(raised.value) is RuntimeError
    return str(raised.value)


READS: dict[str, tuple[Callable[[DTensor], object], str]] = {
    "functional": (lambda x: x * plain(), "aten.mul.Tensor: .*`other`, of shape \\[4, 4\\], is a plain"),
    "before the DTensor": (lambda x: plain() @ x, "aten.mm.default: .*`self`, of shape"),
    "in place": (lambda x: x.add_(plain()), "aten.add_.Tensor: .*`other`"),
    "out=": (lambda x: torch.mul(x, plain(), out=torch.empty_like(x)), "aten.mul.out: .*`other`"),
    "foreach": (
        lambda x: torch._foreach_add([x, x], [x, plain()]),
        "aten._foreach_add.List: .*`other\\[1\\]`",
    ),
    "foreach in place": (
        lambda x: torch._foreach_mul_([x], [plain()]),
        "aten._foreach_mul_.List: .*`other\\[0\\]`",
    ),
    "several": (
        lambda x: torch.addcmul(x, plain(), plain()),
        "aten.addcmul.default: .*`tensor1`, of shape \\[4, 4\\], and `tensor2`, of shape .*are plain tensors",
    ),
    "optional": (lambda x: torch.where(x > 0, x, plain()), "aten.where.self: .*`other`"),
    "beside out= alone": (
        lambda x: torch.mul(plain(), plain(), out=torch.ones_like(x)),
        "aten.mul.out: .*`self`, of shape \\[4, 4\\], and `other`",
    ),
    "within another operator": (lambda x: torch.nn.functional.linear(x, plain()), "`(mat2|weight)`"),
}


def skip_lists_on_older_releases(case: str) -> None:
    if case.startswith("foreach") and torch.__version__ < "2.15":
        pytest.skip("errors about plain tensors in lists are not funcol's below PyTorch 2.15")


@pytest.mark.parametrize("case", READS)
def test_a_plain_tensor_that_is_read_is_named(param: DTensor, case: str) -> None:
    skip_lists_on_older_releases(case)
    call, named = READS[case]
    text = refusal(lambda: call(param))
    assert text.startswith("funcol: aten.")
    assert text.count("got mixed") == 1
    assert re.search(f"{named}.*{REMEDY}", text)
    assert "writes to" not in text


@pytest.mark.parametrize("case", READS)
def test_a_plain_tensor_that_is_read_is_a_replicated_one_where_the_program_says_so(
    param: DTensor, case: str
) -> None:
    with implicit_replication():
        READS[case][0](param)


WRITES: dict[str, tuple[Callable[[DTensor], object], str]] = {
    "in place": (lambda x: plain().add_(x), "aten.add_.Tensor: .*`self`, of shape \\[4, 4\\]"),
    "lerp_": (lambda x: plain().lerp_(x, 0.1), "aten.lerp_.Scalar: .*`self`"),
    "copy_": (lambda x: plain().copy_(x), "aten.copy_.default: .*`self`"),
    "out=": (lambda x: torch.add(x, x, out=plain()), "aten.add.out: .*`out`"),
    "foreach in place": (
        lambda x: torch._foreach_lerp_([plain()] * 5, [x] * 5, 0.1),
        "aten._foreach_lerp_.Scalar: .*`self\\[0\\]`.*, and 2 more, are plain tensors",
    ),
}


@pytest.mark.parametrize("case", WRITES)
def test_a_plain_tensor_that_is_written_to_is_named(param: DTensor, case: str) -> None:
    skip_lists_on_older_releases(case)
    call, named = WRITES[case]
    assert re.search(f"{named}.*{WRITTEN}.*{REMEDY}", refusal(lambda: call(param)))


@on_ranks(WORLD)
def test_products_of_plain_tensors_are_written_to_a_dtensor_where_the_program_says_so(
    rank: int, world: int
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    out = distribute_tensor(torch.zeros(4, 4), mesh, [Shard(0)])
    with funcol.installed(), implicit_replication():
        assert torch.mul(plain() + 1, torch.arange(4.0), out=out) is out
    assert out.placements == (Shard(0),)
    torch.testing.assert_close(out.full_tensor(), (plain() + 1) * torch.arange(4.0))


@since_2_15
@on_ranks(WORLD)
def test_lists_of_plain_tensors_are_written_to_a_dtensor_where_the_program_says_so(
    rank: int, world: int
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    out = distribute_tensor(torch.zeros(8, 4), mesh, [Replicate()])
    with funcol.installed(), implicit_replication():
        assert torch.cat([plain(), plain()], out=out) is out
    assert torch.equal(out.full_tensor(), torch.cat([plain(), plain()]))


IN_PLACE: dict[str, Callable[[Tensor, Tensor], object]] = {
    "add_": lambda state, x: state.add_(x),
    "add_ twice": lambda state, x: state.add_(x).add_(x),
    "lerp_": lambda state, x: state.lerp_(x, 0.5),
    "copy_": lambda state, x: state.copy_(x),
    "addmm_": lambda state, x: state.addmm_(x, x),
    "out=": lambda state, x: torch.mul(x, x, out=state),
    "foreach": lambda state, x: torch._foreach_add_([state], [x]),
}


@pytest.mark.parametrize("case", IN_PLACE)
@since_2_15
@on_ranks(WORLD)
def test_a_plain_tensor_is_written_to_as_a_replicated_one_where_the_program_says_so(
    rank: int, world: int, case: str
) -> None:
    mesh = init_device_mesh("cpu", (world,))
    x = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
    tensors: list[Any] = [x, x.redistribute(placements=[Replicate()]) + 1]
    for tensor in tensors:
        expected, seen = plain(), plain()
        IN_PLACE[case](expected, tensor.full_tensor())
        with funcol.installed(), implicit_replication():
            for _ in range(2):
                seen = plain()
                IN_PLACE[case](seen, tensor)
        torch.testing.assert_close(seen, expected)


def test_the_plain_tensor_is_named_under_a_mode(param: DTensor) -> None:
    class Watches(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Watches():
        assert "`other`, of shape [4, 4]" in refusal(lambda: param * plain())


def test_other_errors_are_those_of_pytorch(param: DTensor) -> None:
    with pytest.raises(RuntimeError) as raised:
        param @ param.redistribute(placements=[Replicate()])[:3]
    assert "funcol: aten" not in str(raised.value)
