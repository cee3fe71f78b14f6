from __future__ import annotations

import atexit
import collections
import os
import random
from collections.abc import Iterator

import pytest
import ranks
import torch
import torch.distributed as dist
from nccl import has_twin
from simulated import MESHES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import funcol
from funcol.sharding import ShardingPropagator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")
    parser.addoption("--cuda-backend", default="nccl", help="backend of the tests on devices (default: nccl)")
    parser.addoption(
        "--share-devices",
        action="store_true",
        help="run tests of more ranks than there are devices, too: several ranks on a device",
    )
    parser.addoption(
        "--sample",
        type=float,
        help="run this share of the tests, chosen at random (default: all, but one case in n of those marked "
        "sampled(n), unless with --long)",
    )
    parser.addoption("--sample-seed", type=int, default=0, help="which ones are chosen")


def pytest_configure(config: pytest.Config) -> None:
    # For the processes of tests: ranks share the cores, and a fork of one whose threads have computed hangs.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--share-devices"):
        ranks.share_devices()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Adds a twin on devices, if there are any, to each test marked ``on_devices_too`` and to each of a
    module with ``ON_DEVICES = True``."""
    is_marked = metafunc.definition.get_closest_marker("on_devices_too") is not None
    if (is_marked or getattr(metafunc.module, "ON_DEVICES", False)) and torch.cuda.is_available():
        backend = metafunc.config.getoption("--cuda-backend")
        on_devices = pytest.param(backend, marks=pytest.mark.cuda)
        metafunc.parametrize("_backend", ["gloo", on_devices], indirect=True)


@pytest.fixture(autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """Sets the backend of ``run_ranks``: gloo, but for twins on devices."""
    ranks.use_backend(getattr(request, "param", "gloo"))
    yield
    ranks.use_backend("gloo")


@pytest.fixture
def on_devices(request: pytest.FixtureRequest, _backend: None, needs_cuda: None) -> None:
    """For tests of devices alone: ``run_ranks`` runs on them."""
    ranks.use_backend(request.config.getoption("--cuda-backend"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    is_long = config.getoption("--long")

    def is_left_out(item: pytest.Item) -> bool:
        if is_twin(item) and (item.get_closest_marker("cpu_only") or not has_twin(item.callspec.params)):
            return True
        return item.get_closest_marker("long") is not None and not is_long

    kept = [item for item in items if not is_left_out(item)]
    seed, share = config.getoption("--sample-seed"), config.getoption("--sample")
    if share is not None:
        chosen = random.Random(seed)
        kept = [item for item in kept if chosen.random() < share]
    elif not is_long:
        kept = with_some_of_each_family(kept, seed)
    stays = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in stays])
    items[:] = kept


def with_some_of_each_family(items: list[pytest.Item], seed: int) -> list[pytest.Item]:
    """Leaves out all but one case in n of each test that is marked ``sampled(n)``; twins on devices are a
    family of their own."""
    families = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            families[item.nodeid.split("[")[0], is_twin(item)].append(item)
    left_out: set[pytest.Item] = set()
    for (name, _), cases in families.items():
        (n,) = cases[0].get_closest_marker("sampled").args  # type: ignore[union-attr]
        num_left_out = len(cases) - -(-len(cases) // n)
        left_out.update(random.Random(f"{seed} {name}").sample(cases, num_left_out))
    return [item for item in items if item not in left_out]


def is_twin(item: pytest.Item) -> bool:
    """Returns true if ``item`` is a twin on devices of a test that runs on gloo."""
    return "_backend" in getattr(getattr(item, "callspec", None), "params", {}) and (
        item.get_closest_marker("cuda") is not None
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("cuda") is not None:
        require_gpu()


@pytest.fixture(scope="session")
def needs_cuda() -> None:
    """For fixtures that use the GPU."""
    require_gpu()


def require_gpu() -> None:
    """Skips the test where there is no GPU; fails it instead if FUNCOL_REQUIRE_CUDA is set."""
    if torch.cuda.is_available():
        return
    if os.environ.get("FUNCOL_REQUIRE_CUDA"):
        pytest.fail("FUNCOL_REQUIRE_CUDA is set, but PyTorch finds no GPU", pytrace=False)
    pytest.skip("PyTorch finds no GPU")


@pytest.fixture(scope="session", autouse=True)
def _ranks_end_with_the_session() -> Iterator[None]:
    yield
    ranks.stop_all()


@pytest.fixture(scope="session", autouse=True)
def _unwaited_collectives_of_the_tests_are_no_news() -> None:
    atexit.unregister(funcol.collectives.async_tensor.end_unwaited_collectives)


@pytest.fixture(scope="module")
def fake_world(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rank ``RANK``, or 0, of the ``WORLD`` ranks that the test's module states; nothing is sent."""
    rank, world = getattr(request.module, "RANK", 0), request.module.WORLD
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def propagator() -> ShardingPropagator:
    return ShardingPropagator()


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> DeviceMesh:
    """Returns one of ``simulated.MESHES``, by its name."""
    return DeviceMesh("cpu", MESHES[request.param])


@pytest.fixture
def mesh_2x2() -> Iterator[DeviceMesh]:
    """Yields a 2 x 2 mesh (dp, tp), seen from rank 1; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def _installed() -> Iterator[None]:
    with funcol.installed():
        yield


@pytest.fixture
def _not_installed() -> Iterator[None]:
    assert not funcol.installation.is_installed()
    yield
    funcol.uninstall()


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()
