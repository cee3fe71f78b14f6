from __future__ import annotations

import atexit
import os
from collections.abc import Iterator

import pytest
import ranks
import torch
import torch.distributed as dist
from simulated import MESHES
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import funcol
from funcol.sharding import ShardingPropagator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="run the tests marked long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    long = [item for item in items if item.get_closest_marker("long") is not None]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


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
    """One of ``simulated.MESHES``, by its name."""
    return DeviceMesh("cpu", MESHES[request.param])


@pytest.fixture
def mesh_2x2() -> Iterator[DeviceMesh]:
    """A 2 x 2 mesh (dp, tp), seen from rank 1; nothing is sent."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture
def _installed() -> Iterator[None]:
    with funcol.installed():
        yield


@pytest.fixture
def _not_installed() -> Iterator[None]:
    assert not funcol.dropin.is_installed()
    yield
    funcol.uninstall()


@pytest.fixture
def _fresh_compiler() -> None:
    torch._dynamo.reset()
