"""PyTorch's operator database on DTensors with funcol under them, against plain tensors: any layouts, uneven
sizes, in place, forward and backward. What raises is left out: a value that is given has to be right."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from ranks import run_ranks
from sharded import Layout, full, mesh_of, placed
from simulated import layouts_of, partials_of
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

import funcol

# Operators with random or uninitialized results, with results compared only up to a choice, without
# precision, or counted at a threshold that rounding passes; NaN, which the maximum of gloo's ranks may drop;
# and an item of a sharded tensor, which the rank with an empty shard rejects alone.
NOT_COMPARABLE = (
    "rand", "dropout", "bernoulli", "empty", "multinomial", "normal", "uniform", "exponential", "cauchy",
    "geometric", "poisson", "rrelu", "resize_", "set_", "svd_lowrank", "pca_lowrank", "half", "bfloat16",
    "multi_head_attention_forward", "matrix_rank", "masked.amax", "masked.amin", "item",
)  # fmt: skip
LARGEST = 600  # elements

NAMES = sorted({info.name for info in op_db if not any(part in info.name for part in NOT_COMPARABLE)})


class Case(NamedTuple):
    """A call of an operator: what it is called with, where its tensors are, and how it is called."""

    sample: Any
    layouts: list[Layout]
    form: str

    def __str__(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in tensors_of(self.sample)]
        layouts = [str(layout) for layout in self.layouts]
        return f"{self.form} of {self.sample.args} {self.sample.kwargs} {shapes} as {layouts}"


def exact(sample: Any) -> Any:
    """Returns ``sample`` with numbers that parts of a sum add up to exactly."""

    def rounded(tensor: Tensor) -> Tensor:
        is_small = tensor.is_floating_point() and bool((tensor.abs() < 1000).all())
        return (tensor * 64).round() / 64 if is_small else tensor

    first, args, kwargs = tree_map_only(Tensor, rounded, (sample.input, sample.args, sample.kwargs))
    return type(sample)(first, args=args, kwargs=kwargs)


def choices(tensor: Tensor, axes: int) -> list[Layout]:
    partials = partials_of(tensor)
    if partials and not bool((tensor.abs() < 1000).all()):
        partials = []
    return layouts_of(tensor, axes, partials)


def tensors_of(sample: Any) -> list[Tensor]:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def cases_of(name: str, axes: int, seed: int, most: int) -> Iterator[tuple[Any, Case]]:
    """Yields ``most`` cases of the operators ``name``, the same for a seed on every rank."""
    choose = random.Random(f"{name} {seed}")
    for info in (info for info in op_db if info.name == name):
        if torch.float64 not in info.dtypes and torch.int64 not in info.dtypes:
            continue
        dtype = torch.float64 if torch.float64 in info.dtypes else torch.int64
        torch.manual_seed(seed)
        samples = [
            exact(sample)
            for sample in info.sample_inputs("cpu", dtype, requires_grad=False)
            if tensors_of(sample)
            and not sample.kwargs.get("dropout_p")
            and all(one.layout is torch.strided and one.numel() <= LARGEST for one in tensors_of(sample))
        ]
        for _ in range(most if samples else 0):
            sample = choose.choice(samples)
            layouts = [choose.choice(choices(one, axes)) for one in tensors_of(sample)]
            forms = ["forward", *(["backward"] if info.supports_autograd else [])]
            forms += ["in place"] if info.inplace_variant is not None else []
            yield info, Case(sample, layouts, choose.choice(forms))


def run(info: Any, case: Case, made: Callable[[Tensor, Layout], Tensor]) -> list[Any]:
    """Returns results, what was written to, and gradients."""
    layouts = iter(case.layouts)
    leaves: list[Tensor] = []

    def make(whole: Tensor) -> Tensor:
        leaves.append(made(whole, next(layouts)))
        if case.form != "backward" or not whole.is_floating_point():
            return leaves[-1]
        return leaves[-1].requires_grad_() * 1

    first, args, kwargs = tree_map_only(
        Tensor, make, (case.sample.input, case.sample.args, case.sample.kwargs)
    )
    op = info.inplace_variant if case.form == "in place" else info.op
    results = [
        one for one in tree_leaves(op(first, *args, **kwargs)) if isinstance(one, Tensor | float | int)
    ]
    floats = [one for one in results if isinstance(one, Tensor) and one.requires_grad]
    if case.form == "backward" and floats:
        sum((one * one.detach()).abs().sum() for one in floats).backward()  # type: ignore[union-attr]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [full(one) for one in (*results, *gradients, *leaves)]


def rounding_of(values: list[Any]) -> float:
    """Of sums of parts, in the coarsest type among ``values``."""
    dtypes = [torch.as_tensor(value).dtype for value in values]
    return max(
        [600 * torch.finfo(one).eps for one in dtypes if one.is_floating_point or one.is_complex] or [0]
    )


def differs(actual: list[Any], expected: list[Any]) -> str | None:
    rounding = rounding_of(expected)
    if len(actual) != len(expected):
        return f"{len(actual)} values, expected {len(expected)}"
    for number, (one, other) in enumerate(zip(actual, expected, strict=True)):
        one, other = torch.as_tensor(one).detach(), torch.as_tensor(other).detach()
        if one.shape != other.shape:
            return f"value {number} has shape {tuple(one.shape)}, expected {tuple(other.shape)}"
        is_rounded = other.is_floating_point() or other.is_complex()
        largest = float(other[other.isfinite()].abs().max()) if is_rounded and other.isfinite().any() else 0.0
        tolerance = max(1e-5, rounding) if is_rounded else 0.0
        most = rounding * max(1.0, largest)
        if not torch.allclose(one.to(other.dtype), other, rtol=tolerance, atol=most, equal_nan=True):
            return f"value {number} is\n{one}\nexpected\n{other}"
    return None


def fuzzes(
    rank: int, world: int, name: str, mesh_shape: tuple[int, ...], seed: int, most: int
) -> tuple[Counter[str], list[str]]:
    mesh = mesh_of(mesh_shape)
    counts: Counter[str] = Counter()
    wrong = []
    # All within one installation: what one case leaves behind, such as decisions, must not harm the next.
    with funcol.installed():
        for info, case in cases_of(name, mesh.ndim, seed, most):
            try:
                expected = run(info, case, lambda whole, _: whole.clone())
            except Exception:
                counts["no case"] += 1
                continue
            try:
                actual = run(info, case, lambda whole, layout: placed(whole, layout, mesh))
            except Exception:
                counts["raised"] += 1
                continue
            difference = differs(actual, expected)
            counts["right" if difference is None else "wrong"] += 1
            if difference is not None:
                wrong.append(f"{info.name} {info.variant_test_name} {case}: {difference}")
    return counts, wrong


def check(name: str, mesh_shape: tuple[int, ...], seed: int, most: int) -> Counter[str]:
    outcomes = run_ranks(fuzzes, math.prod(mesh_shape), name, mesh_shape, seed, most, timeout=100)
    wrong = [f"rank {rank}: {one}" for rank, (_, found) in enumerate(outcomes) for one in found]
    assert not wrong, f"seed {seed}, mesh {mesh_shape}\n" + "\n".join(wrong)
    return outcomes[0][0]


ALWAYS = [
    "add",
    "index_add",
    "masked_fill",
    "mean",
    "nn.functional.mse_loss",
    "select_scatter",
    "sum",
    "where",
]


@pytest.mark.parametrize("name", ALWAYS)
def test_an_operator_gives_the_same_on_dtensors(name: str) -> None:
    assert check(name, (2,), seed=1, most=12)["right"] > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_operator_gives_the_same_on_dtensors(name: str, mesh_shape: tuple[int, ...], seed: int) -> None:
    check(name, mesh_shape, seed, most=20)
