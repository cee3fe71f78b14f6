"""Groups that are aborted, shrunk or reconfigured: what was of the old ones raises, the new ones work.

Each case runs on processes of its own, since it changes their default group.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from processes import comes_true, start_process
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import funcol

LIMIT_S = 120.0
TIMEOUT = timedelta(seconds=60)


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:  # of PyTorch's type as well, under install()
        return f"ValueError: {error}"
    except dist.DistBackendError as error:
        return f"DistBackendError: {error}"
    return "no error"


# Ends. Each takes this rank's part in the change; False on a rank that is not a member of the new group.

END = Callable[[dist.Store, int, int], bool]
reconfigurations = iter(range(1, 100))


def reconfigured(store: dist.Store, rank: int, members: Iterable[int]) -> bool:
    """Makes the processes ``members`` ranks 0, 1, ... of the default group."""
    members = list(members)
    number = next(reconfigurations)
    if rank not in members:
        return False
    store.set(f"handle {number} {rank}", dist._get_reconfigure_handle())
    handles = [store.get(f"handle {number} {member}").decode() for member in members]
    dist._reconfigure(uuid=number, handles=handles).wait()
    return True


def without_the_last(store: dist.Store, rank: int, world: int) -> bool:
    return reconfigured(store, rank, reversed(range(world - 1)))


def in_another_order(store: dist.Store, rank: int, world: int) -> bool:
    return reconfigured(store, rank, [*range(1, world), 0])


class ShrinkingGloo:
    """A gloo backend with ``shrink_group``, which gloo lacks."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store, self.rank, self.world = store, rank, world

    def shrink(self, excluded: list[int], flags: int, options: Any) -> Any:
        left = [rank for rank in range(self.world) if rank not in excluded]
        store = dist.PrefixStore("shrunk", self.store)
        return dist.ProcessGroupGloo(store, left.index(self.rank), len(left), TIMEOUT)  # type: ignore[attr-defined]


def shrunk(store: dist.Store, rank: int, world: int) -> bool:
    if rank == world - 1:
        return False
    c10d._validate_shrink_backend_requirements = lambda _: ShrinkingGloo(store, rank, world)  # type: ignore[assignment]
    dist.shrink_group([world - 1])
    return True


ENDS: dict[str, END] = {
    "reconfigured": without_the_last,
    "reordered": in_another_order,
    "shrunk": shrunk,
}


# Runs a rank before and after the end of its group; returns its results.


def results_around(store: dist.Store, rank: int, world: int, end: END) -> dict[str, Any]:
    group = world_group()
    over = funcol.all_reduce(torch.ones(2000), "sum", group)
    assert comes_true(lambda: funcol.pending() == [])
    running = funcol.all_gather_tensor(torch.ones(3, 2), 1, group) if rank == 0 else None
    if not end(store, rank, world):
        return {}
    seen: dict[str, Any] = {"over": error_of(over.sum)}
    if running is not None:
        view = running.view(-1)
        seen["running"] = [error_of(running.sum), error_of(running.tolist), error_of(view.sum)]
    own = torch.full((1, 2), float(dist.get_rank()))
    seen["gathered"] = funcol.all_gather_tensor(own, 0, world_group()).tolist()
    seen["from 1"] = funcol.broadcast(own, 1, world_group()).tolist()
    seen["size"] = world_group().size()
    return seen


def meshes_around(store: dist.Store, rank: int, world: int, end: END) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    unused = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("y",))
    whole = torch.arange(12.0).reshape(6, 2)
    dtensor = distribute_tensor(whole, mesh, [Shard(0)])
    assert dtensor.full_tensor().equal(whole)
    assert torch.mm(dtensor, distribute_tensor(torch.eye(2), mesh, [Shard(0)])).full_tensor().equal(whole)
    if not end(store, rank, world):
        return {}
    seen: dict[str, Any] = {
        "full_tensor": error_of(dtensor.full_tensor),
        "redistribute": error_of(lambda: dtensor.redistribute(placements=[Shard(1)])),
        "funcol.redistribute": error_of(lambda: funcol.redistribute(dtensor, placements=[Replicate()])),
        "redistribute_many": error_of(lambda: funcol.redistribute_many([dtensor] * 2, [Replicate()])),
        "distribute_tensor": error_of(lambda: distribute_tensor(whole, mesh, [Shard(0)])),
        "all_reduce over a mesh": error_of(lambda: funcol.all_reduce(torch.ones(2), "sum", (mesh, 0))),
        "a mesh that was not used before": error_of(lambda: distribute_tensor(whole, unused, [Shard(0)])),
        "operator": error_of(lambda: torch.mm(dtensor, DTensor.from_local(torch.eye(2), mesh, [Shard(1)]))),
    }
    assert dtensor.to_local().equal(whole.chunk(world)[rank])
    new_mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))
    again = distribute_tensor(whole, new_mesh, [Shard(0)])
    assert again.full_tensor().equal(whole)
    identity = distribute_tensor(torch.eye(2), new_mesh, [Shard(0)])
    for _ in range(2):
        assert torch.mm(again, identity).full_tensor().equal(whole)
        assert again.redistribute(placements=[Shard(1)]).full_tensor().equal(whole)
    return seen


def counts_around(store: dist.Store, rank: int, world: int, end: END) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("x",))
    x, identity = (distribute_tensor(one, mesh, [Shard(0)]) for one in (torch.ones(6, 2), torch.eye(2)))
    assert torch.mm(x, identity).full_tensor().equal(torch.ones(6, 2))
    if not end(store, rank, world):
        return {}
    funcol.installation.forget_operator_counts()
    return {"error": error_of(lambda: torch.mm(x, identity)), "counts": funcol.installation.operator_counts()}


def model_on(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def fsdp_around(store: dist.Store, rank: int, world: int, end: END) -> dict[str, Any]:
    x = torch.ones(3, 4)
    old = model_on(init_device_mesh("cpu", (world,)))
    expected = old(x)
    expected.sum().backward()
    gradients = [param.grad.full_tensor() for param in old.parameters()]  # type: ignore[union-attr]
    backward = old(x).sum()
    if not end(store, rank, world):
        return {}
    seen: dict[str, Any] = {
        "backward": error_of(backward.backward),
        "forward": error_of(lambda: old(x)),
    }
    model = model_on(init_device_mesh("cpu", (dist.get_world_size(),)))
    result = model(x)
    assert result.equal(expected)
    result.sum().backward()
    for param, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), gradient)  # type: ignore[union-attr]
    return seen


CASES = {case.__name__: case for case in (results_around, meshes_around, counts_around, fsdp_around)}


def run_rank(case: str, end: str, rank: int, world: int, path: str) -> None:
    store = dist.FileStore(path, world)
    needs: dict[str, Any] = {} if end == "shrunk" else {"enable_reconfigure": True}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=TIMEOUT, **needs)
    if needs:
        reconfigured(store, rank, range(world))
    if case != "results_around":
        funcol.install()
    seen = CASES[case](store, rank, world, ENDS[end])
    print(json.dumps(seen), flush=True)
    store.add("ranks that are done", 1)
    while store.add("ranks that are done", 0) < world:  # a rank that goes ends the connections of others
        time.sleep(0.01)
    os._exit(0)  # groups that have ended cannot be left in good order


def seen_by_ranks(case: str, end: str, world: int, path: Path) -> list[dict[str, Any]]:
    here = Path(__file__)
    folders = [str(here.parent), str(here.parents[1] / "support")]
    code = f"import sys; sys.path[:0] = {folders!r}; import {here.stem}\n"
    processes = [
        start_process(
            code + f"{here.stem}.run_rank({case!r}, {end!r}, {rank}, {world}, {str(path / 'store')!r})"
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * world, outputs
    return [json.loads(out.splitlines()[-1]) for out, _ in outputs]


can_reconfigure = pytest.mark.skipif(
    not hasattr(dist, "_reconfigure"), reason="gloo is reconfigured from PyTorch 2.15 on"
)
each_end = pytest.mark.parametrize(
    "end",
    [
        pytest.param("reconfigured", marks=can_reconfigure),
        pytest.param("reordered", marks=can_reconfigure),
        "shrunk",
    ],
)

HOW_IT_ENDED = {
    "reconfigured": "was reconfigured",
    "reordered": "was reconfigured",
    "shrunk": "was destroyed",
}


@pytest.mark.sampled(3)
@each_end
def test_results_of_the_old_group_raise_and_new_ones_are_of_its_ranks(end: str, tmp_path: Path) -> None:
    world = 3
    seen = seen_by_ranks("results_around", end, world, tmp_path)
    members = [one for one in seen if one]
    size = world if end == "reordered" else world - 1
    assert len(members) == size
    for one in members:
        for error in [one["over"], *one.get("running", [])]:
            assert error.startswith("DistBackendError: process group '"), error
            assert f"' {HOW_IT_ENDED[end]} before this result was waited for" in error
        assert one["gathered"] == [[float(rank)] * 2 for rank in range(size)]
        assert one["from 1"] == [[1.0, 1.0]]
        assert one["size"] == size
    assert len(seen[0]["running"]) == 3


@pytest.mark.sampled(2)
@each_end
def test_meshes_of_the_old_group_refuse_to_communicate_and_new_ones_work(end: str, tmp_path: Path) -> None:
    refused = {
        "shrunk": r"no process group is registered under the name",
        "reconfigured": "was reconfigured after the DeviceMesh was made",
    }
    refused["reordered"] = refused["reconfigured"]
    for seen in filter(None, seen_by_ranks("meshes_around", end, 3, tmp_path)):
        for call, error in seen.items():
            assert "ValueError: funcol::" in error, (call, error)
            assert refused[end] in error, (call, error)


@can_reconfigure
def test_operators_that_communicate_on_the_old_group_are_counted_as_such(tmp_path: Path) -> None:
    for seen in filter(None, seen_by_ranks("counts_around", "reconfigured", 3, tmp_path)):
        assert "was reconfigured after the DeviceMesh was made" in seen["error"]
        assert seen["counts"]["aten.mm.default"] == {"ended group": 1}


@can_reconfigure
@pytest.mark.parametrize("end", ["reconfigured", "reordered"])
def test_fsdp2_modules_on_the_old_group_refuse_and_new_ones_train(end: str, tmp_path: Path) -> None:
    for seen in filter(None, seen_by_ranks("fsdp_around", end, 3, tmp_path)):
        for call, error in seen.items():
            assert error.startswith("ValueError: funcol::fully_shard: process group '0' was reconfigured"), (
                call,
                error,
            )


# Aborts


ABORTS: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "group": lambda group: group.abort(),
    "backend": lambda group: group._get_backend(torch.device("cpu")).abort(),
    "c10d": c10d._abort_process_group,
}


def pending_when_aborted(how: str) -> tuple[Tensor, dist.ProcessGroup]:
    group = dist.new_group()
    result = funcol.all_reduce(torch.ones(2), "sum", group)
    ABORTS[how](group)
    return result, group


ABORT = """
import sys; sys.path[:0] = {folders!r}
import torch, torch.distributed as dist, funcol, pytest
from {module} import pending_when_aborted
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
result, group = pending_when_aborted(sys.argv[1])
for use in (result.sum, result.tolist, result.view(-1).sum):
    with pytest.raises(dist.DistBackendError, match="was aborted before this result was waited for"):
        use()
if sys.argv[1] != "c10d":  # gloo's abort does nothing, and the group lives on
    assert funcol.all_reduce(torch.ones(2), "sum", group).tolist() == [1.0, 1.0]
assert funcol.all_reduce(torch.ones(2), "sum", dist.group.WORLD).tolist() == [1.0, 1.0]
"""


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ABORTS)
def test_results_that_are_pending_when_their_group_is_aborted_raise(how: str) -> None:
    here = Path(__file__)
    folders = [str(here.parent), str(here.parents[1] / "support")]
    process = start_process(ABORT.format(folders=folders, module=here.stem), how)
    _, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
