from __future__ import annotations

import atexit
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
        "--sample", type=float, default=1.0, help="run this share of the tests, chosen at random"
    )
    parser.addoption("--sample-seed", type=int, default=0, help="which ones --sample chooses")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Where there are devices, each test of a module that says ``ON_DEVICES = True`` has a twin on them, and
    each that is marked ``on_devices_too``."""
    is_marked = metafunc.definition.get_closest_marker("on_devices_too") is not None
    if (is_marked or getattr(metafunc.module, "ON_DEVICES", False)) and torch.cuda.is_available():
        backend = metafunc.config.getoption("--cuda-backend")
        on_devices = pytest.param(backend, marks=pytest.mark.cuda)
        metafunc.parametrize("_backend", ["gloo", on_devices], indirect=True)


@pytest.fixture(autouse=True)
def _backend(request: pytest.FixtureRequest) -> Iterator[None]:
    """That of ``run_ranks``: gloo, but in twins on devices."""
    ranks.use_backend(getattr(request, "param", "gloo"))
    yield
    ranks.use_backend("gloo")


@pytest.fixture
def on_devices(request: pytest.FixtureRequest, _backend: None, needs_cuda: None) -> None:
    """For tests of devices alone: ``run_ranks`` runs on them."""
    ranks.use_backend(request.config.getoption("--cuda-backend"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    chosen = random.Random(config.getoption("--sample-seed"))

    def is_left_out(item: pytest.Item) -> bool:
        if is_twin(item) and (item.get_closest_marker("cpu_only") or not has_twin(item.callspec.params)):
            return True
        if item.get_closest_marker("long") is not None and not config.getoption("--long"):
            return True
        return chosen.random() >= config.getoption("--sample")

    left_out = [item for item in items if is_left_out(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def is_twin(item: pytest.Item) -> bool:
    """Whether ``item`` is a twin on devices of a test that runs on gloo."""
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
