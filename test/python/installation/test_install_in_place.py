"""With funcol under DTensor, operators in place see the values of pending tensors, and not their parts."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import device_type, on_ranks, run_ranks
from sharded import layouts, mesh_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from twins import agrees, check_twin, numbers, placed, replicated

import funcol
from funcol.installation.handlers import handlers

PARTIALS = ["Psum", "Pavg", "Pmax", "Pmin"]


def ones(x: Tensor) -> Any:
    return replicated(torch.ones(tuple(x.shape), dtype=x.dtype), x)


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "add a number": lambda x: x.add_(1),
    "add": lambda x: x.add_(ones(x)),
    "clamp": lambda x: x.clamp_(min=0.2, max=0.6),
    "pow": lambda x: x.pow_(2),
    "square": lambda x: x.square_(),
    "sqrt": lambda x: x.sqrt_(),
    "rsqrt": lambda x: x.rsqrt_(),
    "relu": lambda x: x.sub_(0.5).relu_(),
    "abs": lambda x: x.sub_(0.5).abs_(),
    "exp": lambda x: x.exp_(),
    "lerp": lambda x: x.lerp_(ones(x), 0.25),
    "mul": lambda x: x.mul_(-2),
    "mul by itself": lambda x: x.mul_(x),
    "div": lambda x: x.div_(2),
    "addcmul": lambda x: x.addcmul_(ones(x), ones(x), value=2),
    "masked fill": lambda x: x.masked_fill_(x > 0.5, 3),
    "one after the other": lambda x: x.pow_(2).add_(1).div_(3).clamp_(max=0.4),
    "view": lambda x: x[1:3].sqrt_(),
    "sqrt of a list": lambda x: torch._foreach_sqrt_([x]),
    "add to a list": lambda x: torch._foreach_add_([x], 1),
    "pow of a list": lambda x: torch._foreach_pow_([x], 3),
}


def written(name: str, x: Tensor) -> Tensor:
    held = x.placements if isinstance(x, DTensor) else None
    IN_PLACE[name](x)
    assert not isinstance(x, DTensor) or x.placements == held
    return x


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", PARTIALS)
@pytest.mark.parametrize("name", IN_PLACE)
def test_an_operator_in_place_reads_the_values_of_a_pending_tensor(name: str, words: str) -> None:
    check_twin(functools.partial(written, name), [numbers(5, 3)], words)


@pytest.mark.parametrize("words", ["Psum S0", "S1 Pmax", "Psum Psum", "R Pavg"])
@pytest.mark.parametrize("name", ["add a number", "pow", "sqrt", "relu", "sqrt of a list"])
def test_an_operator_in_place_reads_values_pending_on_two_axes(name: str, words: str) -> None:
    check_twin(functools.partial(written, name), [numbers(5, 3)], words, mesh=(2, 2))


@pytest.mark.parametrize("words", ["Psum", "Pavg"])
@pytest.mark.parametrize("name", ["add a number", "pow", "sqrt", "clamp", "exp"])
def test_an_operator_in_place_on_a_pending_tensor_has_its_gradient(name: str, words: str) -> None:
    check_twin(functools.partial(written, name), [numbers(5, 3)], words, backward=True)


def agrees_when_compiled(rank: int, world: int, name: str, words: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(IN_PLACE[name], backend="aot_eager")
    agrees(rank, world, lambda x: (compiled(x), x)[1], [numbers(4, 3)], [words], (world,), False)


@pytest.mark.parametrize("name", ["pow", "sqrt", "clamp"])
def test_a_compiled_operator_in_place_reads_the_values_of_a_pending_tensor(name: str) -> None:
    run_ranks(agrees_when_compiled, 2, name, "Psum")


OVERWRITING: dict[str, Callable[[Tensor], Any]] = {
    "fill": lambda x: x.fill_(3),
    "fill with a tensor": lambda x: x.fill_(torch.tensor(3.0)),
    "zero": lambda x: x.zero_(),
    "assign": lambda x: x.__setitem__(slice(None), 3.0),
    "assign a row": lambda x: x.__setitem__(1, 3.0),
    "zero a list": lambda x: torch._foreach_zero_([x]),
    "normal": lambda x: x.normal_(),
    "uniform": lambda x: x.uniform_(),
    "exponential": lambda x: x.exponential_(),
    "bernoulli": lambda x: x.bernoulli_(0.5),
    "cauchy": lambda x: x.cauchy_(),
    "geometric": lambda x: x.geometric_(0.5),
    "log normal": lambda x: x.log_normal_(),
}


def communicates_nothing(rank: int, world: int, name: str) -> Any:
    x = placed(numbers(5, 3), layouts("Psum")[0], mesh_of((world,)))
    held = x.placements
    with funcol.installed():
        with CommDebugMode() as during:
            OVERWRITING[name](x)
        assert x.placements == held
        whole = x.full_tensor()
    assert during.get_total_counts() == 0
    return whole.cpu()


@pytest.mark.parametrize("name", OVERWRITING)
def test_a_pending_tensor_is_overwritten_without_a_reduction(name: str) -> None:
    if name == "zero a list" and torch.__version__ < "2.15":
        pytest.skip("the rule of older PyTorch releases reduces the list")
    first, second = run_ranks(communicates_nothing, 2, name)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def squared_norm(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=0).square_().div_(x.shape[0])


def norm_minus_one(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x).sub_(1)


@pytest.mark.skipif(torch.__version__ < "2.15", reason="older PyTorch releases refuse norms in place")
@pytest.mark.parametrize("function", [squared_norm, norm_minus_one])
def test_an_operator_in_place_reads_the_value_of_a_pending_norm(function: Callable[[Tensor], Tensor]) -> None:
    check_twin(function, [numbers(5, 3)], "S0")


NORMS: dict[str, Callable[[Tensor], Any]] = {
    "maximum": lambda norm: torch._foreach_maximum([norm, norm], 0.5),
    "minimum in place": lambda norm: (torch._foreach_minimum_([norm], [0.5]), norm)[1],
    "copy": lambda norm: torch.ops.aten._foreach_copy([norm], [norm]),
}


def of_norms(name: str, x: Tensor) -> Any:
    return NORMS[name](torch.linalg.vector_norm(x))


@pytest.mark.skipif(torch.__version__ < "2.15", reason="older PyTorch releases refuse norms in lists")
@pytest.mark.parametrize("words", ["S0", "R", "S1 S0"])
@pytest.mark.parametrize("name", NORMS)
def test_an_operator_on_lists_without_a_rule_of_pytorchs_takes_pending_norms(name: str, words: str) -> None:
    check_twin(functools.partial(of_norms, name), [numbers(5, 3)], words, mesh=(2,) * len(words.split()))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transpose": lambda x: x.transpose_(0, 2),
    "transpose by names": lambda x: x.swapaxes_(-1, -2),
    "transpose of two dims": lambda x: x[0].t_(),
    "unsqueeze": lambda x: x.unsqueeze_(0),
    "unsqueeze behind": lambda x: x.unsqueeze_(-1),
    "one after the other": lambda x: x.unsqueeze_(1).transpose_(0, 2).mul_(2),
}


def viewed(name: str, x: Tensor) -> Tensor:
    """Changes the shape of a result of ``x``, so that autograd records it."""
    changed = x * 2
    result = VIEWS[name](changed)
    assert result is changed or name == "transpose of two dims"
    return result + 1


@pytest.mark.parametrize("words", ["S0", "S1", "S2", "R", "Psum", "S2 S0"])
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_in_place_has_the_shape_and_placements_of_the_view(name: str, words: str) -> None:
    check_twin(
        functools.partial(viewed, name),
        [numbers(5, 3, 4)],
        words,
        mesh=(2,) * len(words.split()),
        backward=True,
    )


@on_ranks(2)
def test_a_pending_norm_that_another_tensor_shares_is_not_reduced_in_place(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), layouts("S0")[0], mesh_of((world,)))
    with funcol.installed():
        norm = torch.linalg.vector_norm(x, dim=0)
        view = norm.view(3, 1)
        with pytest.raises(RuntimeError, match=r"another tensor shares. Redistribute it first"):
            norm.square_()
        expected = torch.linalg.vector_norm(numbers(4, 3), dim=0)
        torch.testing.assert_close(view.full_tensor().cpu().view(3), expected.cpu())


@on_ranks(2)
def test_numbers_are_drawn_into_no_pending_average(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), layouts("Pavg")[0], mesh_of((world,)))
    with funcol.installed(), pytest.raises(RuntimeError, match=r"normal_: no way to run it .* Redistribute"):
        x.normal_()


@pytest.mark.skipif(
    torch.__version__ < "2.15", reason="older PyTorch releases refuse to divide a norm in place"
)
@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_adafactor_trains_a_sharded_model_as_on_one_device(rank: int, world: int) -> None:
    device = device_type()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 5)).to(device)
    sharded = copy.deepcopy(model)
    mesh = mesh_of((world,))
    with funcol.installed():
        fully_shard(sharded, mesh=mesh)
        optimizers = [torch.optim.Adafactor(one.parameters(), lr=0.1) for one in (model, sharded)]
        for step in range(3):
            x = numbers(4, 8, seed=step).float()
            for one, optimizer in zip((model, sharded), optimizers, strict=True):
                one(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        for whole, cut in zip(model.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(cut.full_tensor(), whole, rtol=1e-5, atol=1e-6)  # type: ignore[attr-defined]


SHIFTS: dict[str, Callable[[Tensor], Tensor]] = {
    "left shift": lambda x: x << 1,
    "right shift": lambda x: x >> 1,
    "left shift by a tensor": lambda x: x << x,
    "and": lambda x: torch.ops.aten.__and__(x, 3),
    "or": lambda x: torch.ops.aten.__or__(x, x),
    "exclusive or": lambda x: torch.ops.aten.__xor__(x, 5),
    "left shift in place": lambda x: x.__ilshift__(2),
    "and in place": lambda x: x.__iand__(6),
}


def shifted(name: str, x: Tensor) -> Tensor:
    return SHIFTS[name](x)


def test_all_operators_named_with_underscores_have_handlers() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    ops = [
        getattr(getattr(torch.ops.aten, packet), overload or "default")
        for packet, _, overload in (name.removeprefix("aten::").partition(".") for name in names)
        if packet.endswith("__")
    ]
    new = {op for op in ops if not op._schema.is_mutable and str(op._schema.returns[0].type) == "Tensor"}
    with funcol.installed():
        assert new <= handlers().keys()


@pytest.mark.parametrize("words", ["S0", "R", "Psum"])
@pytest.mark.parametrize("name", SHIFTS)
def test_an_operator_named_with_underscores_returns_its_result(name: str, words: str) -> None:
    check_twin(functools.partial(shifted, name), [torch.arange(8)], words)


@pytest.mark.parametrize("name", ["left shift", "right shift"])
@on_ranks(2)
def test_a_compiled_operator_named_with_underscores_returns_its_result(
    rank: int, world: int, name: str
) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(SHIFTS[name], backend="aot_eager")
    agrees(rank, world, compiled, [torch.arange(8)], ["S0"], (world,), False)
