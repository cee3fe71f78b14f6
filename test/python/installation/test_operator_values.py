"""With funcol under DTensor, results and gradients of operators over shards of any length, partial values and
pending norms are those of plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from ranks import on_ranks, run_ranks
from sharded import mesh_of, placed
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.utils._pytree import tree_leaves
from twins import agrees, as_on_plain_tensors, numbers, replicated
from versions import needs_decisions_in_cpp

import funcol

aten = torch.ops.aten

Function = Callable[[Tensor], Any]
Loss = Callable[..., Tensor]

both_ways = pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])

# Losses

REDUCTIONS = ["mean", "sum", "none"]


def weighted(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy(x, y, weight=x.detach() + 1, reduction=reduction)


def with_logits(x: Tensor, y: Tensor, reduction: str) -> Tensor:
    return functional.binary_cross_entropy_with_logits(x, y, pos_weight=y[0] + 1, reduction=reduction)


LOSSES: dict[str, Loss] = {
    "mse": functional.mse_loss,
    "l1": functional.l1_loss,
    "smooth l1": functools.partial(functional.smooth_l1_loss, beta=0.3),
    "huber": functools.partial(functional.huber_loss, delta=0.3),
    "binary cross entropy": functional.binary_cross_entropy,
    "weighted binary cross entropy": weighted,
    "binary cross entropy with logits": functional.binary_cross_entropy_with_logits,
    "binary cross entropy with logits and weights": with_logits,
    "soft margin": functional.soft_margin_loss,
    "divergence": functional.kl_div,
    "poisson": functional.poisson_nll_loss,
}


def clear_of_ties(*shape: int) -> list[Tensor]:
    return [0.1 + 0.8 * numbers(*shape, seed=seed) for seed in (1, 2)]


@pytest.mark.sampled(6)
@both_ways
@pytest.mark.parametrize(
    "words", [("S0", "S0"), ("S1", "S1"), ("S0", "R"), ("Psum", "R"), ("R", "S1")], ids=",".join
)
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
@as_on_plain_tensors(lambda size: clear_of_ties(size, 3), backward=None)
def test_a_loss_of_shards_is_that_of_the_whole(x: Tensor, y: Tensor, *, name: str, reduction: str) -> Tensor:
    return LOSSES[name](x, y.detach(), reduction=reduction)


@pytest.mark.parametrize("words", ["S0 S0", "S0 S1", "R S0"])
@pytest.mark.parametrize("name", ["mse", "huber", "weighted binary cross entropy"])
@as_on_plain_tensors(lambda: clear_of_ties(5, 3), backward=True)
def test_a_loss_of_shards_of_two_axes_has_the_gradient_of_the_whole(
    x: Tensor, y: Tensor, *, name: str
) -> Tensor:
    return LOSSES[name](x, y.detach(), reduction="mean")


@pytest.mark.sampled(3)
@both_ways
@pytest.mark.parametrize("words", [("S0", "S0", "R"), ("S0", "R", "R"), ("Psum", "R", "R")], ids=",".join)
@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@as_on_plain_tensors(
    lambda size: [numbers(size, 3), torch.tensor([0, 2, 1, 1, 2])[:size], 1 + numbers(3)], backward=None
)
def test_a_cross_entropy_of_shards_is_that_of_the_whole(
    x: Tensor, classes: Tensor, weight: Tensor, *, reduction: str
) -> Tensor:
    return functional.cross_entropy(x, classes, weight=weight.detach(), reduction=reduction, ignore_index=1)


# Means and extremes

MEANS: dict[str, Function] = {
    "mean": lambda x: x.mean(),
    "mean of rows": lambda x: x.mean(0),
    "variance": lambda x: x.var(),
    "variance of rows": lambda x: x.var(0, unbiased=False),
    "deviation": lambda x: x.std(0, keepdim=True),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, 3, dim=0),
    "mean without nan": lambda x: x.nanmean(0),
    "logsumexp": lambda x: x.logsumexp(0),
}


@pytest.mark.sampled(4)
@both_ways
@pytest.mark.parametrize("words", ["S0", "S1", "Psum", "Pavg"])
@pytest.mark.parametrize("name", MEANS)
@as_on_plain_tensors(lambda: [numbers(5, 3)], backward=None)
def test_a_mean_of_uneven_shards_is_that_of_the_whole(x: Tensor, *, name: str) -> Any:
    return MEANS[name](x)


@on_ranks(2)
def test_the_gradient_of_a_mean_over_shards_needs_no_communication(rank: int, world: int) -> None:
    x, y = (placed(one, "S0", mesh_of((world,))) for one in clear_of_ties(5, 3))
    x.requires_grad_()
    with funcol.installed(), CommDebugMode() as during:
        functional.mse_loss(x, y).backward()
    assert during.get_total_counts() == 0


EXTREMES: dict[str, Function] = {
    "first of the largest": lambda x: x.argmax(),
    "first of the smallest of rows": lambda x: x.argmin(1, keepdim=True),
}


def with_ties(size: int = 5) -> list[Tensor]:
    rows = [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0], [0, 1, 0, 0, 1]]
    return [torch.tensor(rows, dtype=torch.float64)[:, :size]]


@pytest.mark.parametrize("words", ["S0", "S1", "Psum"])
@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("name", EXTREMES)
@as_on_plain_tensors(with_ties)
def test_the_first_of_equal_extremes_is_found(x: Tensor, *, name: str) -> Any:
    return EXTREMES[name](x)


@pytest.mark.parametrize("words", ["S0 S1", "S1 S0", "S0 S0", "S1 R"])
@as_on_plain_tensors(lambda: with_ties())
def test_the_first_of_equal_extremes_is_found_over_two_axes(x: Tensor) -> Tensor:
    return x.argmax()


@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@as_on_plain_tensors(lambda: [numbers(4, 0)])
def test_a_view_of_nothing_ends(x: Tensor) -> Tensor:
    return x.unflatten(1, (2, 0, 0, 0))


# Convolutions


class Convolution(NamedTuple):
    images: tuple[int, ...]
    kernel: tuple[int, ...]
    run: Loss


CONVOLUTIONS = {
    "1d": Convolution((4, 4, 12), (6, 4, 4), functional.conv1d),
    "1d, padded": Convolution((4, 4, 12), (6, 4, 3), functools.partial(functional.conv1d, padding=1)),
    "1d, windows side by side": Convolution(
        (4, 4, 12), (6, 4, 3), functools.partial(functional.conv1d, stride=3)
    ),
    "2d, padded": Convolution((4, 4, 6, 8), (6, 4, 3, 3), functools.partial(functional.conv2d, padding=1)),
    "2d, windows side by side": Convolution(
        (4, 4, 6, 8), (6, 4, 2, 2), functools.partial(functional.conv2d, stride=2)
    ),
    "2d, groups": Convolution((4, 4, 6, 8), (6, 2, 2, 3), functools.partial(functional.conv2d, groups=2)),
    "2d, dilated": Convolution((4, 4, 6, 8), (6, 4, 3, 3), functools.partial(functional.conv2d, dilation=2)),
    "3d": Convolution((4, 4, 4, 4, 6), (6, 4, 2, 2, 2), functional.conv3d),
    "1d, transposed": Convolution(
        (4, 4, 12), (4, 6, 4), functools.partial(functional.conv_transpose1d, stride=2)
    ),
    "2d, transposed": Convolution(
        (4, 4, 6, 8), (4, 6, 2, 2), functools.partial(functional.conv_transpose2d, stride=2, padding=1)
    ),
}
# Of few images and channels, of which a rank may have none, and of windows that stride over borders.
UNEVEN_CONVOLUTIONS: dict[str, Loss] = {
    "padded": functools.partial(functional.conv2d, padding=1),
    "apart": functools.partial(functional.conv2d, stride=2, dilation=2),
    "back": functools.partial(functional.conv_transpose2d, stride=2),
}


def words_of(shape: Sequence[int]) -> list[str]:
    return ["R", "Psum", *(f"S{dim}" for dim in range(len(shape)))]


CONVOLVED = [
    (name, words)
    for name, one in CONVOLUTIONS.items()
    for words in [
        *[("R", kernel, "R") for kernel in words_of(one.kernel)],
        *[(images, "R", "R") for images in words_of(one.images)],
        *[("S0", kernel, "S0") for kernel in words_of(one.kernel)[2:]],
        (f"S{len(one.images) - 1}", f"S{len(one.kernel) - 1}", "R"),
        ("Psum", "Psum", "Psum"),
    ]
]


@pytest.mark.on_devices_too
@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "words"), CONVOLVED, ids=str)
@as_on_plain_tensors(
    lambda name: [numbers(*CONVOLUTIONS[name].images), numbers(*CONVOLUTIONS[name].kernel), numbers(6)],
    backward=True,
)
def test_a_convolution_is_that_of_one_process(
    x: Tensor, kernel: Tensor, bias: Tensor, *, name: str
) -> Tensor:
    return CONVOLUTIONS[name].run(x, kernel, bias)


@pytest.mark.sampled(4)
@both_ways
@pytest.mark.parametrize(
    "words",
    [("S0", "R", "R"), ("S1", "R", "R"), ("S3", "R", "R"), ("R", "S0", "S0"), ("Psum", "R", "R")],
    ids=",".join,
)
@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("name", UNEVEN_CONVOLUTIONS)
@as_on_plain_tensors(lambda size: [numbers(3, 2, 6, size), numbers(2, 2, 3, 3), numbers(2)], backward=None)
def test_a_convolution_of_shards_is_that_of_the_whole(
    x: Tensor, kernel: Tensor, bias: Tensor, *, name: str
) -> Tensor:
    return UNEVEN_CONVOLUTIONS[name](x, kernel, bias)


@pytest.mark.on_devices_too
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "words", [(images, kernel) for images in ("R", "S0", "S2") for kernel in ("R", "S0", "S2")], ids=",".join
)
@as_on_plain_tensors(
    lambda: [numbers(4, 4, 12), numbers(6, 4, 4)], backward=True, compiles={"fullgraph": True}
)
def test_a_compiled_convolution_is_that_of_one_process(x: Tensor, kernel: Tensor) -> Tensor:
    return functional.conv1d(x, kernel)


@pytest.mark.on_devices_too
@pytest.mark.parametrize("world", [2, 3])
def test_strips_of_images_have_their_neighbours_borders(world: int) -> None:
    tensors = [numbers(2, 4, 6, 12).float(), numbers(6, 4, 3, 3).float()]
    run_ranks(agrees, world, CONVOLUTIONS["2d, padded"].run, tensors, ("S3", "R"), (world,), False)


@pytest.mark.on_devices_too
@on_ranks(2)
def test_uninstall_puts_back_pytorch_s_handlers(rank: int, world: int) -> None:
    table = DTensor._op_dispatcher._custom_op_handlers
    before = dict(table)
    with funcol.installed():
        assert table != before
    assert table == before


# Normalizations, and other operators on a batch, most of whose ranks have no element of it


def weight(x: Tensor, *shape: int) -> Any:
    return replicated(torch.linspace(0.5, 1.5, torch.Size(shape).numel(), dtype=torch.float64).view(shape), x)


def rows_of(x: Tensor, *numbers: int) -> Any:
    return replicated(torch.tensor(numbers), x)


@pytest.mark.parametrize("training", [True, False])
@as_on_plain_tensors(lambda: [numbers(8, 6, 4)], words="R R")
def test_a_batch_norm_of_a_frozen_input_has_gradients_where_strided_shards_cut_it(
    x: Tensor, *, training: bool
) -> Any:
    """Compares the gradients of weight and bias; two kinds of shards cut ``x``."""
    mean, scale = weight(x, 6), weight(x, 6)
    if isinstance(x, DTensor):
        x = x.redistribute(placements=[_StridedShard(0, split_factor=2), Shard(0)])
    return aten.native_batch_norm_backward(
        x * x, x, scale, mean, scale, mean, scale, training, 1e-5, [False, True, True]
    )[1:]


NORMS: dict[str, Loss] = {
    "evaluated": lambda x, mean, variance: aten._native_batch_norm_legit(
        x, None, None, mean, variance, False, 0.1, 1e-5
    )[0],
    "batch_norm": functional.batch_norm,
}


@pytest.mark.parametrize("words", [("S0", "S0", "R"), ("S1", "R", "S0"), ("R", "S0", "Psum")], ids=",".join)
@pytest.mark.parametrize("norm", NORMS)
@as_on_plain_tensors(lambda: [numbers(4, 6, 3), numbers(6), numbers(6, seed=1) + 1])
def test_statistics_that_a_batch_norm_reads_may_be_anywhere(
    x: Tensor, mean: Tensor, variance: Tensor, *, norm: str
) -> Tensor:
    return NORMS[norm](x, mean, variance)


OF_A_BATCH: dict[str, Function] = {
    "layer norm": lambda x: functional.layer_norm(x, (4,), weight(x, 4)),
    "group norm": lambda x: functional.group_norm(x, 3, weight(x, 6)),
    "batch norm, evaluated": lambda x: functional.batch_norm(x, weight(x, 6), weight(x, 6)),
    "convolution": lambda x: functional.conv1d(x, weight(x, 2, 6, 2)),
    "max pooling": lambda x: functional.max_pool2d(x[:, :, None, :], (1, 2)),
    "average pooling": lambda x: functional.avg_pool2d(x[:, :, None, :], (1, 2)),
    "upsampling": lambda x: functional.interpolate(x, scale_factor=2.0, mode="linear"),
    "cross entropy": lambda x: functional.cross_entropy(
        x.reshape(-1, 24), replicated(torch.arange(x.shape[0]), x), reduction="sum"
    ),
    "index": lambda x: x[:, rows_of(x, 1, 3)],
    "index select": lambda x: x.index_select(1, rows_of(x, 1, 3)),
    "index fill": lambda x: x.index_fill(1, rows_of(x, 1, 3), 2.0),
    "index add": lambda x: x.index_add(1, rows_of(x, 1, 3), weight(x, x.shape[0], 2, 4)),
    "index copy": lambda x: x.index_copy(1, rows_of(x, 1, 3), weight(x, x.shape[0], 2, 4)),
    "scatter add": lambda x: x.scatter_add(1, (x[:, :2] * 0).long().detach(), x[:, :2]),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("name", OF_A_BATCH)
@as_on_plain_tensors(lambda size: [numbers(size, 6, 4)], words="S0", mesh=(4,), backward=True)
def test_an_operator_of_a_batch_has_its_gradient_on_ranks_without_elements(x: Tensor, *, name: str) -> Any:
    return OF_A_BATCH[name](x)


@pytest.mark.parametrize("size", [5, 6, 9])
@pytest.mark.parametrize("name", ["layer norm", "group norm", "convolution"])
@on_ranks(4)
def test_an_operator_of_a_batch_sends_nothing_where_ranks_have_no_element(
    rank: int, world: int, name: str, size: int
) -> None:
    x = placed(numbers(size, 6, 4), "S0", mesh_of((world,))).requires_grad_()
    with funcol.installed():
        with CommDebugMode() as during:
            OF_A_BATCH[name](x).sum().backward()
        assert x.grad is not None
        assert x.grad.placements == (Shard(0),)  # type: ignore[attr-defined]
    assert during.get_total_counts() == 0


# Numbers beside DTensors

COMPLEX: dict[str, Function] = {
    "equal": lambda x: x == 1j,
    "not equal": lambda x: x != 0.5 + 1j,
    "power": lambda x: x**1j,
    "add": lambda x: x + 2j,
    "multiply": lambda x: x * 1j,
    "divide": lambda x: x / 2j,
    "fill": lambda x: torch.full_like(x, 1j, dtype=torch.complex128),
    "lists": lambda x: torch._foreach_mul([x], 1j)[0],
}


def beside_a_complex_number(name: str, dtype: torch.dtype, words: str) -> list[Tensor]:
    if name == "lists" and dtype == torch.float64:
        pytest.skip("PyTorch multiplies no list of real tensors by a complex number")
    if name == "add" and words == "Psum" and torch.__version__ < "2.15":
        pytest.skip("the rule of older PyTorch releases adds the number on every rank")
    return [numbers(4, 3).to(dtype)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
@pytest.mark.parametrize("name", COMPLEX)
@as_on_plain_tensors(beside_a_complex_number)
def test_a_complex_number_is_an_argument(x: Tensor, *, name: str) -> Any:
    return COMPLEX[name](x)


ZEROS_AND_INFINITIES: dict[str, Function] = {
    "divided": lambda x: [x / 2, x / 0, x / -0.0, x / 0.0, x / 3],
    "multiplied": lambda x: [x * 2, x * float("inf"), x * -float("inf"), x * 3],
    "added": lambda x: [
        x + float("inf"),
        torch.add(x, x, alpha=float("inf")),
        torch.addcmul(x, x, x, value=float("inf")),
    ],
    "of lists": lambda x: [
        *torch._foreach_div([x], 0.0),
        *torch._foreach_div([x], [0.0]),
        *torch._foreach_mul([x], float("inf")),
        *torch._foreach_mul([x], [float("inf")]),
        *torch._foreach_div([x], 2.0),
    ],
    "in place": lambda x: [x.clone().div_(0), x.clone().mul_(float("inf")), x.clone().div_(2)],
}


def of_both_signs(words: str) -> list[Tensor]:
    if words != "S0" and torch.__version__ < "2.15":
        pytest.skip("the rules of older PyTorch releases scale the parts")
    whole = numbers(4, 3)
    whole[1] = -whole[1]
    return [whole]


@pytest.mark.parametrize("words", ["Psum", "Pavg", "Pmax", "S0"])
@pytest.mark.parametrize("name", ZEROS_AND_INFINITIES)
@as_on_plain_tensors(of_both_signs)
def test_a_pending_tensor_meets_zero_and_infinity_as_its_values_do(x: Tensor, *, name: str) -> Any:
    return ZEROS_AND_INFINITIES[name](x)


# Views in inference mode

VIEWS: dict[str, Function] = {
    "view": lambda x: x.view(12),
    "slice": lambda x: x[1:3],
    "row": lambda x: x[0],
    "transpose": lambda x: x.t(),
    "split": lambda x: x.split(2),
    "chunk": lambda x: x.chunk(3, 1),
    "unbind": lambda x: x.unbind(0),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "expand": lambda x: x.unsqueeze(0).expand(2, 4, 3),
    "detach": lambda x: x.detach(),
    "reshape": lambda x: x.reshape(2, 6),
    "flatten": lambda x: x.flatten(),
    "permute": lambda x: x.permute(1, 0),
    "diagonal": lambda x: x.diagonal(),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("words", ["R", "S0", "S1", "Psum"])
@pytest.mark.parametrize("name", VIEWS)
@as_on_plain_tensors(lambda: [numbers(4, 3)])
def test_a_view_in_inference_mode_has_its_values(x: Tensor, *, name: str) -> Any:
    with torch.inference_mode():
        return [view + 1 for view in tree_leaves(VIEWS[name](x))]


@pytest.mark.parametrize("words", ["R", "S0"])
@on_ranks(2)
def test_a_view_in_inference_mode_of_a_normal_tensor_is_normal(rank: int, world: int, words: str) -> None:
    x = placed(numbers(4, 3), words, mesh_of((world,))).requires_grad_()
    with funcol.installed():
        with torch.inference_mode():
            view, computed = x.t(), x + 1
            of_inference = computed.t()
        assert isinstance(view, DTensor)
        assert not view.is_inference()
        assert view.requires_grad  # as a plain one
        assert computed.is_inference()
        assert of_inference.is_inference()
        (x.t() * view).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor().cpu(), numbers(4, 3))  # type: ignore[union-attr]


# Norms whose parts lie on several ranks

# Each gets the norms of several tensors: scalars, most of which are pending, on other axes.
OF_NORMS: dict[str, Callable[[list[Tensor]], Any]] = {
    "stack": torch.stack,
    "norm of norms": lambda norms: torch.linalg.vector_norm(torch.stack(norms), 2.0),
    "norm of norms, by 1": lambda norms: torch.linalg.vector_norm(torch.stack(norms), 1.0),
    "sum": lambda norms: torch.stack(norms).sum(),
    "maximum": lambda norms: torch.maximum(norms[0], norms[1]),
    "add": lambda norms: norms[0] + norms[1],
    "add a number": lambda norms: norms[0] + 1e-6,
    "multiply": lambda norms: norms[0] * norms[2],
    "multiply by a number": lambda norms: norms[0] * 2.0,
    "multiply in place": lambda norms: norms[1].mul_(2.0),
    "divide a number": lambda norms: (1.0 / (norms[0] + 1e-6)).clamp(max=1.0),
    "compare": lambda norms: norms[0] > norms[1],
    "compare with a number": lambda norms: norms[2] < 3.0,
    "is finite": lambda norms: torch.logical_or(norms[0].isnan(), norms[0].isinf()),
    "item": lambda norms: [norm.item() for norm in norms],
    "lists": lambda norms: torch.stack(torch._foreach_mul(norms, 2.0)),
    "a list in place": lambda norms: (torch._foreach_mul_(norms, 2.0), torch.stack(norms))[1],
}


def norms_of(tensors: list[Tensor], order: float, foreach: bool) -> list[Tensor]:
    if foreach:
        return list(torch._foreach_norm(tensors, order))
    return [torch.linalg.vector_norm(tensor, order) for tensor in tensors]


@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "one by one"])
@pytest.mark.parametrize(
    "order",
    [
        *(0.0, float("inf"), -float("inf")),
        # PyTorch 2.11 refuses these in place, and adds up stacked ones wrongly.
        *(pytest.param(order, marks=needs_decisions_in_cpp) for order in (1.0, 2.0, 3.0)),
    ],
)
@as_on_plain_tensors(
    lambda: [torch.arange(24.0, dtype=torch.float64).reshape(4, 6).sub(7 + 2 * i) for i in range(4)],
    words=("S0 S1", "R S0", "S1 R", "R R"),
)
def test_norms_are_used_as_plain_ones(*tensors: Tensor, order: float, foreach: bool) -> Any:
    """Uses each of them twice: decided, then remembered."""
    results = {}
    for name, use in OF_NORMS.items():
        results[name] = [use(norms_of(list(tensors), order, foreach)) for _ in range(2)]
    return results
