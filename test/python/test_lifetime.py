"""Collectives never waited for or older than their group, and results that pass through other hands."""

from __future__ import annotations

import copy
import gc
import io
import os
import random
import re
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from differential import world_group
from ranks import forking_context, rejoin, run_ranks
from test_async_tensor import SlowCollective, make_pending, same, values
from test_async_threads_and_errors import end_of, start_process
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import funcol
from funcol import _compat

each_world = pytest.mark.parametrize("world", [1, 2])


# Never waited for


def resident_bytes() -> int:
    """Without those of files, such as code that runs for the first time."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE")


DROPPED = {
    "all_reduce": lambda x: funcol.all_reduce(x, "sum", world_group()),
    "reduce_scatter_tensor": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, world_group()),
}


def drops_many(rank: int, world: int, op: str, count: int, num_bytes: int) -> None:
    call = DROPPED[op]
    x = torch.ones(num_bytes // 4)
    num_unwaited = funcol.unwaited_collectives().get(op, 0)
    num_orphans = funcol._C.num_orphans()
    num_registered = torch._C._distributed_c10d._get_work_registry_size()
    before = resident_bytes()
    for i in range(count):
        call(x)
        if i % 100 == 0:  # so that no rank runs far ahead, which takes memory as well
            dist.barrier()
    dist.barrier()
    assert resident_bytes() - before < count * num_bytes / 8
    deadline = time.monotonic() + 30
    while funcol._C.num_orphans() > num_orphans:  # another thread waits for them
        assert time.monotonic() < deadline
    assert torch._C._distributed_c10d._get_work_registry_size() <= num_registered
    assert funcol.unwaited_collectives()[op] == num_unwaited + count


@each_world
@pytest.mark.parametrize("op", DROPPED)
def test_results_that_are_dropped_take_no_memory(world: int, op: str) -> None:
    run_ranks(drops_many, world, op, 10_000, 1 << 16)


NEVER_WAIT = """
import sys, warnings
import torch, torch.distributed as dist, funcol
warnings.simplefilter("default")
rank, world, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[4]
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[3], world), rank=rank, world_size=world)
group = dist.group.WORLD
assert funcol.all_reduce(torch.ones(2), "sum", group).tolist() == [world] * 2
for _ in range(NUM_DROPPED):
    funcol.all_reduce(torch.ones(3), "sum", group)
held = [funcol.all_gather_tensor(torch.ones(2, 2), 1, group).view(-1) for _ in range(NUM_HELD)]
exec(end)
"""


def ends_of(
    world: int, directory: Path, num_dropped: int, num_held: int, end: str = ""
) -> list[tuple[int, str, str]]:
    """Return codes, outputs and errors of ranks that wait for nothing and ``end``."""
    counts = f"NUM_DROPPED, NUM_HELD = {num_dropped}, {num_held}"
    processes = [
        start_process(counts + NEVER_WAIT, str(rank), str(world), str(directory / "store"), end)
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=60) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def test_a_process_with_10000_unwaited_collectives_ends_with_one_warning(tmp_path: Path) -> None:
    for code, out, err in ends_of(2, tmp_path, 9_000, 1_000):
        assert (code, out) == (0, "")
        assert err.count("Warning") == 1, err
        assert "10000 collectives: 1000 all_gather_into_tensor, 9000 all_reduce. " in err


ENDS = {
    "destroyed": ("dist.destroy_process_group()", 0, "3 collectives: 1 all_gather_into_tensor, 2 all_reduce"),
    "sys_exit": ("sys.exit(3)", 3, "3 collectives: 1 all_gather"),
    "exception": ("raise KeyError", 1, "3 collectives: 1 all_gather"),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_warning_comes_however_the_process_ends(name: str, tmp_path: Path) -> None:
    end, expected_code, expected = ENDS[name]
    ((code, _, err),) = ends_of(1, tmp_path, 2, 1, end)
    assert code == expected_code, err
    assert err.count("Warning") == 1, err
    assert expected in err


def test_a_process_that_waited_for_all_ends_silently(tmp_path: Path) -> None:
    assert ends_of(1, tmp_path, 0, 2, "[h.sum() for h in held]; dist.destroy_process_group()") == [
        (0, "", "")
    ]


FORK = """
import os, sys, warnings
import torch, funcol
warnings.simplefilter("default")
parents = funcol._C.make_pending([torch.ones(1)], lambda: None, "parents")
child = os.fork()
if child == 0:
    exec(sys.argv[1])
else:
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize(
    ("in_child", "warned_of"),
    [
        ("childs = funcol._C.make_pending([torch.ones(1)], print, 'childs')", ["childs", "parents"]),
        ("parents[0].sum()", ["parents"]),
    ],
    ids=["own", "uses_its_parents"],
)
def test_a_forked_process_warns_of_its_own(in_child: str, warned_of: list[str]) -> None:
    _, err = end_of(start_process(FORK, in_child))
    assert re.findall(r"Warning.* 1 collectives: 1 (\w+)\.", err) == warned_of, err


@pytest.mark.parametrize("drop", [False, True], ids=["held", "dropped"])
def test_what_nothing_waited_for_is_counted_by_op(drop: bool) -> None:
    op = f"counted_{drop}"
    results = [make_pending([torch.ones(2), torch.ones(3)], list, op) for _ in range(3)]
    views = [t.view(-1) for ts in results for t in ts]
    assert funcol.unwaited_collectives()[op] == 3
    if drop:
        del results, views
        assert funcol.unwaited_collectives()[op] == 3
    else:
        views[-1].sum()
        assert funcol.unwaited_collectives()[op] == 2


def test_a_result_of_pytorchs_registry_is_left_to_its_count() -> None:
    before = funcol.unwaited_collectives()
    wrapped = funcol.AsyncCollectiveTensor(torch.ones(2))
    assert funcol.is_pending(wrapped)
    num_orphans = funcol._C.num_orphans()
    del wrapped
    assert funcol._C.num_orphans() == num_orphans
    assert funcol.unwaited_collectives() == before


# The group is destroyed


STARTS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "all_reduce": lambda x, g: funcol.all_reduce(x, "sum", g),
    "all_gather_into_tensor": lambda x, g: funcol.all_gather_tensor(x, 1, g),
    "reduce_scatter_tensor": lambda x, g: funcol.reduce_scatter_tensor(x, "sum", 0, g),
    "all_to_all_single": lambda x, g: funcol.all_to_all_single(x, None, None, g),
    "broadcast": lambda x, g: funcol.broadcast(x, 0, g),
    "all_reduce_coalesced": lambda x, g: funcol.all_reduce_coalesced([x, x], "sum", g)[1],
    "by_name": lambda x, g: torch.ops.funcol.all_reduce(x, "sum", g.group_name),
}


def uses_after_destroying(rank: int, world: int, op: str, destroy: str) -> None:
    group = world_group() if destroy == "all" else dist.new_group()
    name = group.group_name
    result = STARTS[op](torch.ones(2, 2), group)
    view = result.view(-1)
    if destroy == "let_go":
        dist.destroy_process_group(group)
        del group
    elif destroy == "one":
        dist.destroy_process_group(group)
    else:
        rejoin()
    expected = op if op in STARTS and op != "by_name" else "all_reduce"
    message = rf"group '{name}' was destroyed(.|\n)*funcol::{expected} failed .*\[2, {result.shape[1]}\]"
    for use in (torch.sum, repr, Tensor.numpy, lambda _: view + 1, funcol.wait_tensor):
        with pytest.raises(dist.DistBackendError, match=message):
            use(result)
    assert funcol.all_reduce(torch.ones(1), "sum", world_group()).item() == world


@each_world
@pytest.mark.parametrize("op", [op for op in STARTS if op != "reduce_scatter_tensor"])
@pytest.mark.parametrize("destroy", ["one", "let_go", "all"])
def test_a_result_of_a_destroyed_group_raises_at_each_use(world: int, op: str, destroy: str) -> None:
    run_ranks(uses_after_destroying, world, op, destroy)


def settles_and_destroys(rank: int, world: int) -> None:
    group = dist.new_group()
    used, waited = (funcol.all_reduce(torch.ones(2), "sum", group) for _ in range(2))
    assert used.sum() == 2 * world
    view = funcol.wait_tensor(waited).view(-1)
    dist.destroy_process_group(group)
    assert [t.tolist() for t in (used, waited, view)] == [[world] * 2] * 3


@each_world
def test_a_result_that_was_waited_for_outlives_its_group(world: int) -> None:
    run_ranks(settles_and_destroys, world)


def destroys_another(rank: int, world: int) -> None:
    first, second = dist.new_group(), dist.new_group()
    results = [funcol.all_reduce(torch.ones(2), "sum", group) for group in (first, second, world_group())]
    dist.destroy_process_group(first)
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        results[0].sum()
    assert [r.tolist() for r in results[1:]] == [[world] * 2] * 2
    dist.destroy_process_group(second)


@each_world
def test_results_of_other_groups_stay_pending_and_right(world: int) -> None:
    run_ranks(destroys_another, world)


def destroys_before_the_peer_joins(rank: int, world: int) -> None:
    group = dist.new_group()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        data = np.ones((2, 3), dtype=np.float32)
        watched = weakref.ref(data)
        result = funcol.all_gather_tensor(torch.from_numpy(data), 0, group)
        dist.destroy_process_group(group)
        with pytest.raises(dist.DistBackendError, match="was destroyed"):
            result.sum()
        del data, result
        gc.collect()
        assert watched() is not None, "the input was freed while a peer may still read it"
        store.set("destroyed", "")
        deadline = time.monotonic() + 30
        while watched() is not None:
            assert time.monotonic() < deadline, "the finished Work is still kept"
            funcol._C.num_orphans()
    else:
        store.wait(["destroyed"])
        gathered = funcol.all_gather_tensor(torch.zeros(2, 3), 0, group)
        assert gathered.tolist() == [[1, 1, 1]] * 2 + [[0, 0, 0]] * 2
        dist.destroy_process_group(group)
    store.delete_key("destroyed") if rank == 1 else None


def test_what_runs_in_a_destroyed_group_is_kept_until_it_is_done() -> None:
    run_ranks(destroys_before_the_peer_joins, 2)


# Called on a mesh, with tensors on it that go with the call.
def maps(mesh: DeviceMesh) -> Any:
    return funcol.apply_local_map(torch.sin, out_placements=[Shard(0)] * 2, in_placements=([Shard(0)] * 2,))(
        DTensor.from_local(torch.ones(1, 4, requires_grad=True), mesh, [Shard(0)] * 2)
    )


held_map = funcol.apply_local_map(torch.sin, out_placements=[Shard(0)] * 2)

USES_OF_A_MESH: dict[str, Callable[[DeviceMesh], Any]] = {
    "distribute_tensor": lambda mesh: distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()]),
    "operators": lambda mesh: (DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)] * 2) + 1).sum(),
    "redistribute": lambda mesh: funcol.redistribute(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()]), placements=[Replicate()] * 2
    ),
    "redistribute to another dtype": lambda mesh: funcol.redistribute(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()]),
        placements=[Replicate()] * 2,
        forward_dtype=torch.float64,
    ),
    "redistribute to an order of axes": lambda mesh: funcol.redistribute(
        DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0), Replicate()]),
        placements=[Shard(0)] * 2,
        shard_order=[(0, (1, 0))],
    ),
    "apply_local_map": lambda mesh: maps(mesh),
    "apply_local_map, its gradient": lambda mesh: maps(mesh).to_local().sum().backward(),
    "apply_local_map that is kept": lambda mesh: held_map(
        DTensor.from_local(torch.ones(1, 4), mesh, [Shard(0)] * 2)
    ),
    "redistribute_many": lambda mesh: funcol.redistribute_many(
        [DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)] * 2)] * 2, [[Replicate()] * 2] * 2
    ),
}


@pytest.mark.parametrize("use", USES_OF_A_MESH)
def test_nothing_that_is_remembered_keeps_a_mesh_and_its_groups(use: str) -> None:
    if use == "operators" and not _compat.has_rules_of_an_axis(DTensor._op_dispatcher.sharding_propagator):
        pytest.skip("PyTorch decides, and keeps the mesh")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        with funcol.installed():
            USES_OF_A_MESH[use](mesh)
        watched = weakref.ref(mesh)
        del mesh
    finally:
        dist.destroy_process_group()
    gc.collect()
    assert watched() is None


# Decisions about operators that PyTorch makes keep a mesh, as in PyTorch.
@pytest.mark.parametrize("use", [use for use in USES_OF_A_MESH if use != "operators"])
def test_a_mesh_that_is_dropped_goes_while_the_groups_stay(use: str) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        watched = []
        with funcol.installed():
            for i in range(3):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(f"rows{i}", f"columns{i}"))
                USES_OF_A_MESH[use](mesh)
                watched.append(weakref.ref(mesh))
                del mesh
            gc.collect()
            assert [mesh() for mesh in watched] == [None] * 3
    finally:
        dist.destroy_process_group()


def destroys_during_backward(rank: int, world: int) -> None:
    group = dist.new_group()

    class Reduced(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            result = funcol.all_reduce(gradient, "sum", group)
            dist.destroy_process_group(group)
            return result

    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(dist.DistBackendError, match="was destroyed"):
        Reduced.apply(leaf * 2).sum().backward()
    assert leaf.grad is None


def test_a_gradient_of_a_destroyed_group_is_an_error_of_backward() -> None:
    run_ranks(destroys_during_backward, 2)


# Other hands


def scaled_by_its_sum(t: Tensor, group: dist.ProcessGroup) -> Tensor:
    return funcol.all_reduce(t.detach(), "sum", group).t() * t.t()


def checkpoints(rank: int, world: int, use_reentrant: bool, of_pending: bool) -> None:
    group = world_group()

    def gradients(run: Callable[..., Tensor], is_pending: bool) -> list[Any]:
        x = torch.full((2, 3), rank + 1.0, requires_grad=True)
        scale = torch.full((2, 3), 2.0)
        if is_pending:
            scale = funcol.all_reduce(torch.full((2, 3), 2.0 / world), "sum", group)
            assert funcol.is_pending(scale)
        result = run(lambda x, scale: scaled_by_its_sum(x * scale, group).sin(), x, scale)
        result.sum().backward()
        return [result.tolist(), x.grad.tolist()]

    def checkpointed(*args: Any) -> Tensor:
        return checkpoint(*args, use_reentrant=use_reentrant)

    plain = gradients(lambda function, *args: function(*args), False)
    assert gradients(checkpointed, of_pending) == plain


@each_world
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("of_pending", [False, True])
def test_a_checkpointed_function_runs_its_collectives_again(
    world: int, use_reentrant: bool, of_pending: bool
) -> None:
    run_ranks(checkpoints, world, use_reentrant, of_pending)


def reduces_in_autocast(rank: int, world: int, dtype: torch.dtype) -> None:
    x = (torch.arange(12, dtype=dtype).reshape(3, 4) / 8 + rank).requires_grad_(False)
    reduced = funcol.all_reduce(x, "sum", world_group())
    plain = funcol.wait_tensor(funcol.all_reduce(x, "sum", world_group())).clone()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain @ plain.t()
        assert funcol.is_pending(reduced)
        product = reduced @ reduced.t()
        again = funcol.all_reduce(product, "sum", world_group())
    assert product.dtype == torch.bfloat16
    assert same(product, expected)
    assert again.dtype == torch.bfloat16
    assert same(again, expected * world)


@each_world
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_casts_a_pending_operand_as_a_plain_one(world: int, dtype: torch.dtype) -> None:
    run_ranks(reduces_in_autocast, world, dtype)


class Scaled(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() * self.scale.sum()


@pytest.mark.parametrize("copy_module", [copy.deepcopy, lambda module: module], ids=["copied", "shared"])
def test_replicas_in_threads_may_have_pending_weights_buffers_and_inputs(
    copy_module: Callable[[nn.Module], nn.Module],
) -> None:
    weight, scale, inputs = values(), torch.tensor([1.0, 2.0]), torch.arange(32.0).reshape(8, 4)
    expected = Scaled(weight, scale)(inputs)
    module = Scaled(SlowCollective(weight).tensor, SlowCollective(scale).tensor)
    replicas = [copy_module(module) for _ in range(4)]
    chunks = SlowCollective(inputs).tensor.chunk(4)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda replica, chunk: replica(chunk), replicas, chunks))
    assert same(torch.cat(outputs), expected)


def test_a_state_dict_of_pending_tensors_is_saved_with_its_data() -> None:
    module = Scaled(SlowCollective(values()).tensor, SlowCollective(torch.ones(2)).tensor)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert same(loaded["weight"], values())
    assert same(loaded["scale"], torch.ones(2))


def send_back(queue: Any, answers: Any) -> None:
    answers.put(queue.get().tolist())


def test_a_queue_gives_another_process_the_data() -> None:
    context = forking_context()
    queue, answers = context.Queue(), context.Queue()
    process = context.Process(target=send_back, args=(queue, answers), daemon=True)
    process.start()
    try:
        queue.put(SlowCollective(values()).tensor.t())
        assert answers.get(timeout=60) == values().t().tolist()
    finally:
        process.kill()
        process.join()


# Order


ORDERS: dict[str, Callable[[list[int]], list[int]]] = {
    "as_started": lambda indices: indices,
    "reversed": lambda indices: indices[::-1],
    "shuffled": lambda indices: random.Random(7).sample(indices, len(indices)),
}


def starts_many(rank: int, world: int, order: str, num_groups: int) -> None:
    groups = [world_group(), *(dist.new_group() for _ in range(num_groups - 1))]
    starts = list(STARTS.values())
    # Sizes that every rank count of the test divides.
    inputs = [torch.full((6, 2), float(i + rank)) for i in range(60)]
    results = [starts[i % len(starts)](x, groups[i % num_groups]) for i, x in enumerate(inputs)]
    # Each rank in an order of its own.
    indices = ORDERS[order](list(range(60)))
    indices = indices[10 * rank :] + indices[: 10 * rank]
    seen = {i: results[i].tolist() for i in indices}
    assert seen == {i: starts[i % len(starts)](x, groups[0]).tolist() for i, x in enumerate(inputs)}
    for group in groups[1:]:
        dist.destroy_process_group(group)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("num_groups", [1, 3])
def test_results_may_be_used_in_any_order(world: int, order: str, num_groups: int) -> None:
    run_ranks(starts_many, world, order, num_groups)


# CUDA streams


@pytest.fixture
def slow_on_device() -> tuple[Tensor, Tensor]:
    """A pending tensor whose data arrives on the device a while after it is waited for, and that data."""
    expected = torch.arange(1 << 16, device="cuda", dtype=torch.float32)
    buffer = torch.full_like(expected, float("nan"))

    def arrive() -> None:
        torch.cuda._sleep(100_000_000)
        buffer.copy_(expected)

    return make_pending([buffer], arrive)[0], expected


@pytest.mark.cuda
@pytest.mark.parametrize("view", [lambda t: t, lambda t: t.view(256, 256).t()], ids=["itself", "view"])
def test_a_result_crosses_streams_as_a_plain_tensor_does(
    slow_on_device: tuple[Tensor, Tensor], view: Callable[[Tensor], Tensor]
) -> None:
    result, expected = slow_on_device
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        used = view(result) + 1
    second.wait_stream(first)
    with torch.cuda.stream(second):
        again = view(result) + used
    second.synchronize()
    assert torch.equal(again, 2 * view(expected) + 1)


def reduces_on_streams(rank: int, world: int) -> None:
    group = world_group()
    x = torch.full((1 << 20,), rank + 1.0, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for i, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            results.append(funcol.all_reduce(x * (i + 1), "sum", group))
            funcol.all_reduce(x, "sum", group)  # dropped, while others use the memory around it
    with torch.cuda.stream(streams[0]):
        sums = [result.sum() for result in reversed(results)]
    streams[0].synchronize()
    size = (1 << 20) * sum(range(1, world + 1))
    assert [s.item() for s in sums] == [size * (i + 1) for i in reversed(range(4))]


@pytest.mark.cuda
@each_world
def test_results_started_on_some_streams_are_used_on_another(world: int) -> None:
    run_ranks(reduces_on_streams, world)
