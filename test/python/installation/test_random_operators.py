"""Random numbers for DTensors: those of one tensor, on any mesh and with any placements."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import backend, device_type, on_ranks, run_ranks
from sharded import Layout, layouts, placed, shard_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, rand, randn
from torch.distributed.tensor import _random as stock_random
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import funcol

aten = torch.ops.aten
Draw = Callable[[DTensor], Tensor]

DRAWS: dict[str, Draw] = {
    "uniform in place": lambda x: x.uniform_(-1, 2),
    "normal in place": lambda x: x.normal_(3, 0.5),
    "log normal in place": lambda x: x.log_normal_(),
    "cauchy in place": lambda x: x.cauchy_(),
    "exponential in place": lambda x: x.exponential_(2),
    "geometric in place": lambda x: x.geometric_(0.25),
    "bernoulli in place": lambda x: x.bernoulli_(0.25),
    "bernoulli in place by a tensor": lambda x: torch.empty_like(x).bernoulli_(x),
    "random in place": lambda x: x.random_(),
    "random in place up to a number": lambda x: x.random_(7),
    "random in place in a range": lambda x: x.random_(-3, 5),
    "uniform": lambda x: aten.uniform(x, -1.0, 2.0),
    "exponential": lambda x: aten.exponential(x),
    "normal by a tensor of means": lambda x: torch.normal(x, 0.5),
    "normal by a tensor of deviations": lambda x: torch.normal(2.0, x),
    "normal by two tensors": lambda x: torch.normal(x, x),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli by a number": lambda x: aten.bernoulli(x, 0.25),
    "like: uniform": lambda x: torch.rand_like(x),
    "like: normal": lambda x: torch.randn_like(x),
    "like: double": lambda x: torch.randn_like(x, dtype=torch.float64),
    "like: half": lambda x: torch.rand_like(x, dtype=torch.bfloat16),
    "like: complex": lambda x: torch.randn_like(x, dtype=torch.complex64),
    "like: integers": lambda x: torch.randint_like(x, 5, 9),
    "like: booleans": lambda x: torch.empty_like(x, dtype=torch.bool).bernoulli_(),
    "a view": lambda x: x.t().uniform_(),
    "dropout": lambda x: nn.functional.dropout(x, 0.25),
    "native dropout": lambda x: torch.native_dropout(x, 0.25, True)[0],
    "native dropout's mask": lambda x: torch.native_dropout(x, 0.25, True)[1],
    "alpha dropout": lambda x: nn.functional.alpha_dropout(x, 0.25),
    "initialization": lambda x: nn.init.kaiming_uniform_(x.clone()),
    "truncated": lambda x: nn.init.trunc_normal_(x.clone()),
    "multinomial": lambda x: torch.multinomial(x, 3),
    "poisson": lambda x: torch.poisson(10 * x),
    "binomial": lambda x: torch.binomial(torch.ones_like(x) * 9, x),
    "gamma": lambda x: torch._standard_gamma(x),
    "dirichlet": lambda x: torch._sample_dirichlet(x),
}
LAYOUTS = [
    ((1,), "S0"),
    ((2,), "R"),
    ((2,), "S0"),
    ((2,), "S1"),
    ((4,), "S0"),
    ((4,), "S1"),
    ((2, 2), "R S0"),
    ((2, 2), "S0 S1"),
    ((2, 2), "S1 S0"),
    ((2, 2), "S1 S1"),
    ((2, 2), "_S0/2 S0"),
]


def check_shard(dtensor: DTensor, whole: Tensor, layout: Layout) -> None:
    """Asserts that this rank holds its own part of ``whole``: replicas hold the same."""
    at = dtensor.device_mesh.get_coordinate()
    assert at is not None
    assert torch.equal(dtensor.to_local(), shard_of(whole, layout, tuple(dtensor.device_mesh.shape), at))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device_type(), shape)


def rng_state() -> Tensor:
    """Returns the state of the default generator of the rank's device."""
    return torch.cuda.get_rng_state() if device_type() == "cuda" else torch.get_rng_state()


def generator_of(seed: int) -> torch.Generator:
    return torch.Generator(device_type()).manual_seed(seed)


def values(
    rank: int, world: int, shape: tuple[int, ...], words: str, size: tuple[int, ...]
) -> dict[str, Any]:
    """Returns the full tensors that each of ``DRAWS`` gives."""
    (layout,), drawn = layouts(words), {}
    whole = torch.linspace(0.1, 0.9, math.prod(size)).view(size)
    torch.manual_seed(5)
    with funcol.installed():
        for name, draw in DRAWS.items():
            x = placed(whole, layout, mesh_of(shape))
            result = draw(x)
            assert isinstance(result, DTensor)
            full = result.full_tensor()
            if result.placements == layout.placements() and name != "a view":
                check_shard(result, full, layout)
            drawn[name] = full.cpu()
        drawn["state of the generator"] = rng_state()
    return drawn


@functools.cache
def values_on_one_rank(size: tuple[int, ...], _backend: str) -> dict[str, Any]:
    (drawn,) = run_ranks(values, 1, (1,), "R", size)
    return dict(drawn)


@pytest.mark.on_devices_too
@pytest.mark.sampled(4)
@pytest.mark.parametrize(("shape", "words"), LAYOUTS, ids=str)
@pytest.mark.parametrize("size", [(5, 7), (4, 6)], ids=str)
def test_values_depend_neither_on_the_mesh_nor_on_placements(
    shape: tuple[int, ...], words: str, size: tuple[int, ...]
) -> None:
    expected = values_on_one_rank(size, backend())
    for of_rank in run_ranks(values, math.prod(shape), shape, words, size):
        wrong = [name for name, value in of_rank.items() if not torch.equal(value, expected[name])]
        assert not wrong


NUM_DRAWN = 200_000


@functools.cache
def many(rank: int, world: int) -> dict[str, tuple[float, float]]:
    """Returns mean and standard deviation of many numbers of each distribution."""
    mesh, drawn = mesh_of((world,)), {}
    torch.manual_seed(1)
    with funcol.installed():
        x = rand(NUM_DRAWN, device_mesh=mesh, placements=[Shard(0)])
        for dtype in (torch.float32, torch.float64):
            like = x.to(dtype)
            for name, draw in STATISTICS.items():
                values = draw(like).full_tensor().double()
                drawn[f"{name} {dtype}"] = (values.mean().item(), values.std().item())
    return drawn


# The draw, its mean, its standard deviation.
STATISTICS: dict[str, Draw] = {
    "uniform": lambda x: x.uniform_(-1, 2),
    "normal": lambda x: x.normal_(3, 0.5),
    "log normal": lambda x: x.log_normal_(0, 0.5),
    "exponential": lambda x: x.exponential_(2),
    "geometric": lambda x: x.geometric_(0.25),
    "bernoulli": lambda x: x.bernoulli_(0.25),
    "integers": lambda x: x.random_(-3, 5),
    "arctangents of cauchy": lambda x: x.cauchy_().atan(),
}
MOMENTS = {
    "uniform": (0.5, 3 / math.sqrt(12)),
    "normal": (3, 0.5),
    "log normal": (math.exp(0.125), math.exp(0.125) * math.sqrt(math.exp(0.25) - 1)),
    "exponential": (0.5, 0.5),
    "geometric": (4, math.sqrt(0.75) / 0.25),
    "bernoulli": (0.25, math.sqrt(0.1875)),
    "integers": (0.5, math.sqrt(63 / 12)),
    "arctangents of cauchy": (0, math.pi / math.sqrt(12)),
}


@functools.cache
def moments() -> dict[str, tuple[float, float]]:
    return dict(run_ranks(many, 2)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", MOMENTS)
def test_numbers_have_the_moments_of_their_distribution(name: str, dtype: torch.dtype) -> None:
    mean, std = moments()[f"{name} {dtype}"]
    expected_mean, expected_std = MOMENTS[name]
    # Five standard errors of a mean; deviations of these distributions vary by less than four times that.
    error = 5 * expected_std / math.sqrt(NUM_DRAWN)
    assert abs(mean - expected_mean) < error
    assert abs(std - expected_std) < 4 * error


def factories_give_one_tensor(rank: int, world: int, shape: tuple[int, ...], words: str) -> Any:
    (layout,) = layouts(words)
    torch.manual_seed(3)
    with funcol.installed():
        made = [
            make(5, 7, device_mesh=mesh_of(shape), placements=layout.placements(), **how)
            for make, how in (
                (rand, {}),
                (randn, {}),
                (randn, {"dtype": torch.float64, "requires_grad": True}),
            )
        ]
        for one in made:
            check_shard(one.detach(), one.full_tensor().detach(), layout)
        assert [one.requires_grad for one in made] == [False, False, True]
        assert made[2].is_leaf
        assert made[2].dtype == torch.float64
        return [one.full_tensor().detach() for one in made]


@pytest.mark.parametrize(("shape", "words"), LAYOUTS, ids=str)
def test_rand_and_randn_make_uneven_shards_of_one_tensor(shape: tuple[int, ...], words: str) -> None:
    (expected,) = run_ranks(factories_give_one_tensor, 1, (1,), "R")
    for made in run_ranks(factories_give_one_tensor, math.prod(shape), shape, words):
        assert all(map(torch.equal, made, expected))


@pytest.mark.on_devices_too
@on_ranks(2)
def test_a_generator_is_heeded_and_advanced(rank: int, world: int) -> None:
    torch.manual_seed(rank)  # nothing is drawn from the default generators, which differ
    before = rng_state()
    generator, same = generator_of(7), generator_of(7)
    (layout,) = layouts("S0")
    with funcol.installed():
        x = placed(torch.zeros(5, 3), layout, mesh_of((world,)))
        first = x.uniform_(generator=generator).full_tensor()
        second = x.normal_(generator=generator).full_tensor()
        assert torch.equal(x.uniform_(generator=same).full_tensor(), first)
        assert torch.equal(x.normal_(generator=same).full_tensor(), second)
        assert torch.equal(generator.get_state(), same.get_state())
        assert not torch.equal(x.normal_(generator=generator).full_tensor(), second)
        check_shard(x, x.full_tensor(), layout)
    assert torch.equal(rng_state(), before)


@pytest.mark.on_devices_too
@on_ranks(2)
def test_states_of_the_default_generator_are_saved_and_restored(rank: int, world: int) -> None:
    torch.manual_seed(2)
    with funcol.installed():
        x = placed(torch.zeros(5, 3), "S0", mesh_of((world,)))
        state = rng_state()
        first = x.uniform_().full_tensor()
        with torch.random.fork_rng():
            second = x.uniform_().full_tensor()
        assert torch.equal(x.uniform_().full_tensor(), second)
        (torch.cuda if device_type() == "cuda" else torch).set_rng_state(state)
        assert torch.equal(x.uniform_().full_tensor(), first)
        torch.manual_seed(2)
        assert torch.equal(x.uniform_().full_tensor(), first)
        assert not torch.equal(first, second)


@pytest.mark.on_devices_too
@pytest.mark.parametrize("use_reentrant", [True, False])
@on_ranks(2)
def test_a_checkpoint_draws_the_same_numbers_again(rank: int, world: int, use_reentrant: bool) -> None:
    torch.manual_seed(2)
    with funcol.installed():
        x = placed(torch.ones(5, 3), "S0", mesh_of((world,))).requires_grad_()
        y = checkpoint(nn.functional.dropout, x, 0.5, use_reentrant=use_reentrant)
        y.sum().backward()
        assert x.grad is not None
        assert torch.equal(x.grad.full_tensor(), y.detach().full_tensor())


@pytest.mark.on_devices_too
@on_ranks(3)
def test_a_rank_that_was_seeded_otherwise_takes_the_state_of_the_first_rank(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    mesh = DeviceMesh(device_type(), [0, 2])
    if rank == 1:
        return
    with funcol.installed(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()], src_data_rank=None)
        local = x.uniform_().to_local()
        (layout,) = layouts("R")
        with CommDebugMode() as mode:
            check_shard(x.normal_(), x.full_tensor(), layout)
        assert mode.get_total_counts() == 0
    told = [
        str(one.message) for one in caught if "another state of the default generator" in str(one.message)
    ]
    assert len(told) == (rank == 2)
    torch.manual_seed(0)  # the first rank's
    with funcol.installed():
        assert torch.equal(x.uniform_().to_local(), local)


def seeds_a_mesh(rank: int, world: int) -> Tensor:
    mesh = mesh_of((world,))
    with funcol.installed():
        stock_random.manual_seed(11, mesh)
        return rand(5, device_mesh=mesh, placements=[Shard(0)]).full_tensor().cpu()


@pytest.mark.on_devices_too
def test_manual_seed_seeds_a_mesh() -> None:
    (expected,) = run_ranks(seeds_a_mesh, 1)
    assert all(torch.equal(drawn, expected) for drawn in run_ranks(seeds_a_mesh, 2))


def pending_tensors_are_overwritten(rank: int, world: int) -> Tensor:
    torch.manual_seed(4)
    mesh = mesh_of((world,))
    with funcol.installed():
        x = placed(torch.ones(4, 3), layouts("Psum" if world > 1 else "R")[0], mesh)
        drawn = x.uniform_().full_tensor()
        y = placed(torch.full((5, 3), 0.5), layouts("Psum" if world > 1 else "R")[0], mesh)
        return torch.cat([drawn, torch.bernoulli(y).full_tensor(), torch.rand_like(y).full_tensor()]).cpu()


@pytest.mark.on_devices_too
def test_a_pending_sum_has_the_values_of_a_plain_tensor() -> None:
    (expected,) = run_ranks(pending_tensors_are_overwritten, 1)
    assert all(torch.equal(drawn, expected) for drawn in run_ranks(pending_tensors_are_overwritten, 2))


@pytest.mark.on_devices_too
@on_ranks(2)
def test_wrong_parameters_raise_the_errors_of_pytorch(rank: int, world: int) -> None:
    mesh = mesh_of((world,))
    with funcol.installed():
        x = placed(torch.ones(4, 3), "S0", mesh)
        for draw, message in (
            (lambda: x.normal_(0, -1), "normal expects std >= 0.0, but found std -1"),
            (lambda: x.bernoulli_(2), r"bernoulli_ expects p to be in \[0, 1\], but got p=2"),
            (lambda: x.random_(5, 3), "expects 'from' to be less than 'to'"),
        ):
            with pytest.raises(RuntimeError, match=message):
                draw()
        short = DTensor.from_local(torch.ones(1), mesh, [Shard(0)], run_check=False, shape=(8,), stride=(1,))
        with pytest.raises(ValueError, match="Pass shape= and stride= of the full tensor"):
            short.uniform_()


def compiled_draws_as_eager(rank: int, world: int, backend: str) -> None:
    mesh = mesh_of((world,))
    layer = nn.Dropout(0.5)

    def draw(x: DTensor) -> tuple[Tensor, Tensor, Tensor]:
        return layer(x * 2), torch.randn_like(x), torch.empty_like(x).exponential_()

    with funcol.installed():
        x = placed(torch.ones(5, 3), "S0", mesh).requires_grad_()
        torch.manual_seed(6)
        expected = [one.full_tensor() for one in draw(x)]
        torch.manual_seed(6)
        drawn = torch.compile(draw, backend=backend, fullgraph=True)(x)
        for one, other in zip(drawn, expected, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
        drawn[0].sum().backward()
        assert x.grad is not None
        torch.testing.assert_close(x.grad.full_tensor(), expected[0].detach())


@pytest.mark.on_devices_too
def test_a_compiled_region_draws_the_numbers_of_an_eager_one() -> None:
    run_ranks(compiled_draws_as_eager, 2, "aot_eager")
