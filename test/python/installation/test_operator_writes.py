"""With funcol under DTensor, operators read and write the values that pending tensors stand for, not the
parts that the ranks hold."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import device_type, on_ranks, run_ranks
from sharded import mesh_of, placed
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from twins import as_on_plain_tensors, numbers, replicated

import funcol
from funcol.installation.operators import handlers

PARTIALS = ["Psum", "Pavg", "Pmax", "Pmin"]

Function = Callable[[Tensor], Any]

since_2_15 = pytest.mark.skipif(torch.__version__ < "2.15", reason="older PyTorch releases refuse such norms")

# Reads

READS: dict[str, Function] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.mean()),
    "integer": lambda x: int((x * 100).round().sum()),
    "largest": lambda x: x.max().item(),
    "norm": lambda x: torch.linalg.vector_norm(x).item(),
    "truth": lambda x: bool(x.sum() - 3),
    "equality": lambda x: torch.equal(x, x + 0),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["S0", "S1", *PARTIALS])
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("name", READS)
@as_on_plain_tensors(lambda size: [numbers(size, 3)])
def test_a_number_is_that_of_all_ranks(x: Tensor, *, name: str) -> Any:
    return READS[name](x)


@pytest.mark.parametrize("words", ["Psum R", "R Psum", "Psum Psum", "S0 Pmax"])
@as_on_plain_tensors(lambda: [numbers(4, 3)])
def test_a_number_is_that_of_all_ranks_of_two_axes(x: Tensor) -> Any:
    return x.sum().item()


# Writes


def ones(x: Tensor) -> Any:
    return replicated(torch.ones(tuple(x.shape), dtype=x.dtype), x)


WRITES: dict[str, Function] = {
    "fill": lambda x: x.fill_(3),
    "fill with a tensor": lambda x: x.fill_(replicated(torch.tensor(3.0, dtype=torch.float64), x)),
    "zero": lambda x: x.zero_(),
    "copy": lambda x: x.copy_(ones(x)),
    "mask": lambda x: x.masked_fill_(x > 0.5, 2),
    "full": lambda x: torch.full_like(x, 2),
    "made of ones": lambda x: torch.ones_like(x) + x.new_ones(5, 3) + x.new_full((5, 3), 3),
    "shift": lambda x: (x + 1) + (1 - x) * 2,
}


@pytest.mark.parametrize("words", PARTIALS)
@pytest.mark.parametrize("name", WRITES)
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_a_partial_value_is_written_as_a_whole(x: Tensor, *, name: str) -> Any:
    return WRITES[name](x)


@pytest.mark.parametrize("words", ["Psum S0", "S1 Pavg", "Psum Psum"])
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_a_partial_value_of_two_axes_is_filled(x: Tensor) -> Tensor:
    return x.fill_(3)


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


def written(x: Tensor, name: str) -> Tensor:
    held = x.placements if isinstance(x, DTensor) else None
    IN_PLACE[name](x)
    assert not isinstance(x, DTensor) or x.placements == held
    return x


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", PARTIALS)
@pytest.mark.parametrize("name", IN_PLACE)
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_an_operator_in_place_reads_the_values_of_a_pending_tensor(x: Tensor, *, name: str) -> Tensor:
    return written(x, name)


@pytest.mark.parametrize("words", ["Psum S0", "S1 Pmax", "Psum Psum", "R Pavg"])
@pytest.mark.parametrize("name", ["add a number", "pow", "sqrt", "relu", "sqrt of a list"])
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_an_operator_in_place_reads_values_pending_on_two_axes(x: Tensor, *, name: str) -> Tensor:
    return written(x, name)


@pytest.mark.parametrize("words", ["Psum", "Pavg"])
@pytest.mark.parametrize("name", ["add a number", "pow", "sqrt", "clamp", "exp"])
@as_on_plain_tensors(lambda: [numbers(5, 3)], backward=True)
def test_an_operator_in_place_on_a_pending_tensor_has_its_gradient(x: Tensor, *, name: str) -> Tensor:
    return written(x, name)


@pytest.mark.parametrize("name", ["pow", "sqrt", "clamp"])
@as_on_plain_tensors(lambda: [numbers(4, 3)], words="Psum", compiles={})
def test_a_compiled_operator_in_place_reads_the_values_of_a_pending_tensor(x: Tensor, *, name: str) -> Tensor:
    IN_PLACE[name](x)
    return x


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
    x = placed(numbers(5, 3), "Psum", mesh_of((world,)))
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


NORMS_IN_PLACE: dict[str, Function] = {
    "square": lambda x: torch.linalg.vector_norm(x, dim=0).square_().div_(x.shape[0]),
    "minus one": lambda x: torch.linalg.vector_norm(x).sub_(1),
}


@since_2_15
@pytest.mark.parametrize("name", NORMS_IN_PLACE)
@as_on_plain_tensors(lambda: [numbers(5, 3)], words="S0")
def test_an_operator_in_place_reads_the_value_of_a_pending_norm(x: Tensor, *, name: str) -> Tensor:
    return NORMS_IN_PLACE[name](x)


@on_ranks(2)
def test_a_pending_norm_that_another_tensor_shares_is_not_reduced_in_place(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "S0", mesh_of((world,)))
    with funcol.installed():
        norm = torch.linalg.vector_norm(x, dim=0)
        view = norm.view(3, 1)
        with pytest.raises(RuntimeError, match=r"another tensor shares. Redistribute it first"):
            norm.square_()
        expected = torch.linalg.vector_norm(numbers(4, 3), dim=0)
        torch.testing.assert_close(view.full_tensor().cpu().view(3), expected.cpu())


@on_ranks(2)
def test_numbers_are_drawn_into_no_pending_average(rank: int, world: int) -> None:
    x = placed(numbers(4, 3), "Pavg", mesh_of((world,)))
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


# Lists

# In-place operators on lists: what a list of one tensor becomes.
ON_LISTS: dict[str, Callable[[list[Tensor]], None]] = {
    "neg": torch._foreach_neg_,
    "erfc": torch._foreach_erfc_,
    "mul": lambda xs: torch._foreach_mul_(xs, -2.0),
    "mul of each": lambda xs: torch._foreach_mul_(xs, [-2.0]),
    "div": lambda xs: torch._foreach_div_(xs, -2.0),
    "sub of each": lambda xs: torch._foreach_sub_(xs, [3.0]),
    "mul, order kept": lambda xs: torch._foreach_mul_(xs, 2.0),
    "zero": torch._foreach_zero_,
}


@pytest.mark.parametrize("words", PARTIALS)
@pytest.mark.parametrize("name", ON_LISTS)
@as_on_plain_tensors(lambda: [numbers(4, 3)])
def test_lists_are_written_as_values_or_not_at_all(x: Tensor, *, name: str) -> Tensor:
    x = x.clone()
    held = x.placements if isinstance(x, DTensor) else None
    try:
        ON_LISTS[name]([x])
    except (RuntimeError, ValueError):
        assert isinstance(x, DTensor)  # refused, and not written: the result is compared
        x = x.redistribute(placements=[Replicate()])
        ON_LISTS[name]([x])
        return x
    assert not isinstance(x, DTensor) or x.placements == held
    return x


LERPS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "a number": lambda x, y: torch._foreach_lerp_([x], [y], 0.25),
    "numbers": lambda x, y: torch._foreach_lerp_([x], [y], [0.25]),
    "tensors": lambda x, y: torch._foreach_lerp_(
        [x], [y], [replicated(torch.full((4, 3), 0.25, dtype=torch.float64), x)]
    ),
}


@pytest.mark.parametrize("words", [("Psum", "Psum"), ("Pavg", "Pavg"), ("S0", "Psum"), ("R", "Psum")])
@pytest.mark.parametrize("name", LERPS)
@as_on_plain_tensors(lambda: [numbers(4, 3), numbers(4, 3, seed=1)])
def test_lists_are_interpolated_as_values(x: Tensor, y: Tensor, *, name: str) -> Tensor:
    x = x.clone()
    LERPS[name](x, y)
    return x


NORMS: dict[str, Callable[[Tensor], Any]] = {
    "maximum": lambda norm: torch._foreach_maximum([norm, norm], 0.5),
    "minimum in place": lambda norm: (torch._foreach_minimum_([norm], [0.5]), norm)[1],
    "copy": lambda norm: torch.ops.aten._foreach_copy([norm], [norm]),
}


@since_2_15
@pytest.mark.parametrize("words", ["S0", "R", "S1 S0"])
@pytest.mark.parametrize("name", NORMS)
@as_on_plain_tensors(lambda: [numbers(5, 3)])
def test_an_operator_on_lists_without_a_rule_of_pytorchs_takes_pending_norms(x: Tensor, *, name: str) -> Any:
    return NORMS[name](torch.linalg.vector_norm(x))


# Views and operators named with underscores

VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "transpose": lambda x: x.transpose_(0, 2),
    "transpose by names": lambda x: x.swapaxes_(-1, -2),
    "transpose of two dims": lambda x: x[0].t_(),
    "unsqueeze": lambda x: x.unsqueeze_(0),
    "unsqueeze behind": lambda x: x.unsqueeze_(-1),
    "one after the other": lambda x: x.unsqueeze_(1).transpose_(0, 2).mul_(2),
}


@pytest.mark.parametrize("words", ["S0", "S1", "S2", "R", "Psum", "S2 S0"])
@pytest.mark.parametrize("name", VIEWS)
@as_on_plain_tensors(lambda: [numbers(5, 3, 4)], backward=True)
def test_a_view_in_place_has_the_shape_and_placements_of_the_view(x: Tensor, *, name: str) -> Tensor:
    """Changes the shape of a result of ``x``, so that autograd records it."""
    changed = x * 2
    result = VIEWS[name](changed)
    assert result is changed or name == "transpose of two dims"
    return result + 1


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
@as_on_plain_tensors(lambda: [torch.arange(8)])
def test_an_operator_named_with_underscores_returns_its_result(x: Tensor, *, name: str) -> Tensor:
    return SHIFTS[name](x)


@pytest.mark.parametrize("name", ["left shift", "right shift"])
@as_on_plain_tensors(lambda: [torch.arange(8)], words="S0", compiles={})
def test_a_compiled_operator_named_with_underscores_returns_its_result(x: Tensor, *, name: str) -> Tensor:
    return SHIFTS[name](x)
