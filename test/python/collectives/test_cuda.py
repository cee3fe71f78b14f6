"""On a GPU: one NCCL rank, and Gloo ranks that share the device. `tools/gpu_check` runs these."""

import pytest
import torch
import torch.distributed as dist
from ranks import require_compiled_kernels, run_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import funcol

pytestmark = pytest.mark.cuda

DTYPES = [
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.complex64,
]


@pytest.fixture(scope="module")
def nccl(needs_cuda):
    group = dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group(group)


def numbered(*sizes, dtype=torch.float32):
    return torch.arange(torch.Size(sizes).numel(), device="cuda").reshape(sizes).to(dtype)


def test_a_build_with_cuda_kernels_loads_them(needs_cuda):
    assert (funcol._C.why_no_cuda_kernels() is None) == funcol._build_info.CUDA


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_of_one_rank_is_the_input(nccl, dtype):
    x = numbered(3, 5, dtype=dtype)
    y = funcol.all_reduce(x, "sum", nccl)
    assert funcol.is_pending(y)
    assert torch.equal(y, x)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_all_gather_along_a_dim_of_one_rank_is_the_input(nccl, dim):
    x = numbered(2, 3, 4)
    assert torch.equal(funcol.all_gather_tensor(x, dim, nccl), x)


def test_a_captured_cuda_graph_replays_the_collective(nccl):
    x = numbered(64)
    funcol.all_reduce(x, "sum", nccl).add(1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = funcol.all_reduce(x, "sum", nccl) + 1
    x.fill_(5)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, 6))


def test_a_result_that_was_dropped_is_not_asked_about_within_a_capture(nccl):
    x = numbered(1 << 20)
    funcol.all_reduce(x, "sum", nccl)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        funcol.all_reduce(x, "sum", nccl)
        y = funcol.all_reduce(x, "sum", nccl) + 1
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, x + 1)
    funcol.wait_tensor(funcol.all_reduce(x, "sum", nccl))  # which finds those that were captured


def test_waiting_makes_the_stream_wait_and_not_the_host(nccl):
    x = numbered(1 << 20)
    torch.cuda._sleep(200_000_000)
    done = torch.cuda.Event()
    y = funcol.wait_tensor(funcol.all_reduce(x, "sum", nccl))
    done.record()
    assert not done.query()
    assert torch.equal(y, x)


def test_a_result_settled_on_another_stream_is_right(nccl):
    x = numbered(1 << 20)
    expected = x + 1
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    y = funcol.all_reduce(x, "sum", nccl)
    with torch.cuda.stream(side):
        z = y + 1
    side.synchronize()
    assert torch.equal(z, expected)


@pytest.mark.parametrize("dim", [0, 1])
def test_the_start_stream_does_not_wait_for_what_is_queued_where_a_result_is_used_first(nccl, dim):
    x = numbered(64, 64)
    side = torch.cuda.Stream()
    after = torch.cuda.Event()
    _ = x * 2, x + 1  # kernels are loaded at their first use, which waits for all streams
    torch.cuda.synchronize()
    y = funcol.all_gather_tensor(x, dim, nccl)
    with torch.cuda.stream(side):
        torch.cuda._sleep(2_000_000_000)
        z = y + 1
        after.record()
    doubled = y * 2
    torch.cuda.current_stream().synchronize()
    assert not after.query()
    assert torch.equal(doubled, x * 2)
    side.synchronize()
    assert torch.equal(z, x + 1)


@pytest.mark.parametrize("copied", [False, True], ids=["itself", "detached"])
@pytest.mark.parametrize("order", ["bc", "sb", "bsc", "cbs"])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather dim 1"])
def test_a_result_is_there_on_every_stream_where_it_is_used(nccl, name, order, copied):
    x = torch.zeros(512, 512, device="cuda")
    expected = torch.rand(512, 512, device="cuda")
    streams = {"s": torch.cuda.current_stream(), "b": torch.cuda.Stream(), "c": torch.cuda.Stream()}
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    x.copy_(expected)
    y = funcol.all_reduce(x, "sum", nccl) if name == "all_reduce" else funcol.all_gather_tensor(x, 1, nccl)
    sums = []
    for stream in order:
        with torch.cuda.stream(streams[stream]):
            sums.append((y.detach() if copied else y) + 1)
    torch.cuda.synchronize()
    for once in sums:
        assert torch.equal(once, expected + 1)


def slow_gather(num_ranks, rows, dim, fill_after_cycles):
    """A pending gather whose blocks arrive on the device only after a while."""
    shards = [numbered(rows, 6) + 100 * rank for rank in range(num_ranks)]
    buffer = torch.full((num_ranks * rows, 6), float("nan"), device="cuda")

    def arrive():
        torch.cuda._sleep(fill_after_cycles)
        buffer.copy_(torch.cat(shards))

    return funcol._C.make_pending([buffer], arrive)[0], torch.cat(shards)


def test_a_slow_result_is_never_read_early(needs_cuda):
    y, expected = slow_gather(4, 3, 0, 100_000_000)
    assert torch.equal(y.view(-1) + 1, expected.view(-1) + 1)


def gathers_along_each_dim(rank, world):
    for dim in range(3):
        shard = numbered(2, 3, 4) + 1000 * rank
        expected = torch.cat([numbered(2, 3, 4) + 1000 * r for r in range(world)], dim)
        assert torch.equal(funcol.all_gather_tensor(shard, dim, dist.group.WORLD), expected)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_gather_concatenates_along_each_dim(needs_cuda, world):
    run_ranks(gathers_along_each_dim, world)


def scatters_along_each_dim(rank, world):
    for dim in range(3):
        sizes = [2, 3, 4]
        sizes[dim] *= world
        whole = numbered(*sizes)
        expected = (whole * world).chunk(world, dim)[rank]
        assert torch.equal(funcol.reduce_scatter_tensor(whole, "sum", dim, dist.group.WORLD), expected)
        strided = whole.transpose(0, 2).contiguous().transpose(0, 2)
        assert torch.equal(funcol.reduce_scatter_tensor(strided, "sum", dim, dist.group.WORLD), expected)


@pytest.mark.parametrize("world", [1, 2])
def test_reduce_scatter_takes_its_part_along_each_dim(needs_cuda, world):
    run_ranks(scatters_along_each_dim, world)


def gathers_every_dtype(rank, world):
    for dtype in (*DTYPES, torch.bool, torch.float8_e4m3fn, torch.int16):
        shard = (numbered(3, 5) + rank).to(dtype)
        expected = torch.cat([(numbered(3, 5) + r).to(dtype) for r in range(world)], 1)
        gathered = funcol.all_gather_tensor(shard, 1, dist.group.WORLD)
        assert torch.equal(gathered.view(torch.uint8), expected.view(torch.uint8)), dtype


def test_all_gather_moves_every_dtype(needs_cuda):
    run_ranks(gathers_every_dtype, 2)


def moves_rows(rank, world):
    x = numbered(world * 2, 3) + 100 * rank
    y = funcol.all_to_all_single(x, None, None, dist.group.WORLD)
    expected = torch.cat([(numbered(world * 2, 3) + 100 * r)[2 * rank : 2 * rank + 2] for r in range(world)])
    assert torch.equal(y, expected)
    z = funcol.broadcast(x, 0, dist.group.WORLD)
    assert torch.equal(z, numbered(world * 2, 3))
    p = funcol.permute_tensor(x, [(r + 1) % world for r in range(world)], dist.group.WORLD)
    assert torch.equal(p, numbered(world * 2, 3) + 100 * ((rank - 1) % world))


def test_rows_move_between_ranks_that_share_the_device(needs_cuda):
    run_ranks(moves_rows, 2)


def redistributes_many(rank, world, src, dst):
    mesh = DeviceMesh("cuda", list(range(world)))
    wholes = [numbered(2 * size, 4) for size in range(1, 6)]

    def shard(whole, placement):
        return whole.chunk(world, placement.dim)[rank] if placement.is_shard() else whole

    sources = [
        DTensor.from_local(shard(whole, src).contiguous(), mesh, [src], run_check=False) for whole in wholes
    ]
    for whole, result in zip(wholes, funcol.redistribute_many(sources, [dst]), strict=True):
        assert result.device.type == "cuda"
        assert torch.equal(result.to_local(), shard(whole, dst))


@pytest.mark.parametrize(
    ("src", "dst"),
    [(Shard(0), Replicate()), (Shard(1), Replicate()), (Replicate(), Shard(1)), (Replicate(), Shard(0))],
    ids=str,
)
@pytest.mark.parametrize("world", [1, 2])
def test_many_tensors_are_redistributed_together_on_the_device(needs_cuda, world, src, dst):
    run_ranks(redistributes_many, world, src, dst)


def moves_uneven_parts(rank, world):
    group = dist.group.WORLD
    sizes = [1, 4][:world]
    shard = numbered(2, sizes[rank]) + 100 * rank
    shards = [numbered(2, size) + 100 * r for r, size in enumerate(sizes)]
    whole = torch.cat(shards, 1)
    assert torch.equal(funcol.all_gather_tensor(shard, 1, group, split_sizes=sizes), whole)
    part = funcol.reduce_scatter_tensor(whole, "sum", 1, group, split_sizes=sizes)
    assert torch.equal(part, world * shards[rank])
    assert torch.equal(funcol.scatter(whole, 0, 1, group, split_sizes=sizes), shards[rank])
    gathered = funcol.gather(shard, 0, 1, group, split_sizes=sizes)
    assert torch.equal(gathered, whole if rank == 0 else whole[:, :0])
    reduced = funcol.reduce(whole, "sum", 0, group)
    assert torch.equal(reduced, world * whole if rank == 0 else torch.zeros_like(whole))


@pytest.mark.parametrize("world", [1, 2])
def test_uneven_parts_move_between_ranks_that_share_the_device(needs_cuda, world):
    run_ranks(moves_uneven_parts, world)


GRADIENTS = {
    "all_reduce": lambda x, group: funcol.all_reduce(x, "sum", group),
    "all_reduce max": lambda x, group: funcol.all_reduce(x, "max", group),
    "all_reduce product": lambda x, group: funcol.all_reduce(x, "product", group),
    "all_gather": lambda x, group: funcol.all_gather_tensor(x, 1, group),
    "reduce_scatter": lambda x, group: funcol.reduce_scatter_tensor(x, "avg", 1, group),
    "all_to_all": lambda x, group: funcol.all_to_all_single(x, None, None, group),
    "broadcast": lambda x, group: funcol.broadcast(x, 0, group),
    "permute": lambda x, group: funcol.permute_tensor(x, [0], group),
    "coalesced": lambda x, group: funcol.all_reduce_coalesced([x, x], "sum", group)[1],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_collective_of_one_rank_is_that_of_the_identity(nccl, name):
    x = numbered(4, 6).requires_grad_()
    weights = numbered(4, 6) + 1
    (GRADIENTS[name](x, nccl) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


def test_premul_sum_multiplies_the_gradient_by_its_factor(nccl):
    x = numbered(4).requires_grad_()
    funcol.all_reduce(x, dist._make_nccl_premul_sum(3.0), nccl).sum().backward()
    assert x.grad.tolist() == [3.0] * 4


def test_a_pending_gradient_is_used_by_the_optimizer_on_its_stream(nccl):
    x = torch.ones(1 << 20, device="cuda", requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.5)
    torch.cuda._sleep(100_000_000)
    funcol.all_reduce(x, "sum", nccl).backward(torch.ones_like(x))
    assert funcol.is_pending(x.grad)
    optimizer.step()
    assert torch.equal(x.detach(), torch.full_like(x, 0.5))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_region_takes_pending_and_plain_inputs_without_recompiling(nccl, backend):
    if backend == "inductor":
        require_compiled_kernels(on_device=True)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    @torch.compile(backend=backend, fullgraph=True)
    def region(x):
        return (x * 2).sum()

    x = numbered(1024)
    for step in range(6):
        value = funcol.all_reduce(x, "sum", nccl) if step % 2 else x
        assert region(value) == (x * 2).sum()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def refuses_a_batch_on_two_devices(rank, world):
    group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    tensors = [torch.ones(2, device="cuda"), torch.ones(2)]
    with pytest.raises(ValueError, match=r"batch_p2p_ops: tensor 1 is on cpu, tensor 0 on cuda:\d"):
        torch.ops.funcol.batch_p2p_ops(["isend", "irecv"], [1 - rank] * 2, [0, 0], tensors, group.group_name)


def test_a_batch_that_nccl_sends_as_one_is_on_one_device(needs_cuda):
    run_ranks(refuses_a_batch_on_two_devices, 2)


def shard_each_block(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def shard_in_half_precision(model, mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_each_block(model, mesh, mp_policy=policy, reshard_after_forward=False)


def split_each_block(model, mesh):
    for block in model:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


PARALLEL = {
    "fully_shard": shard_each_block,
    "fully_shard in half precision": shard_in_half_precision,
    "tensor parallel": split_each_block,
}


def trained(rank, world, way, device):
    mesh = init_device_mesh(device, (world,))
    torch.manual_seed(1)
    blocks = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6, bias=False)) for _ in range(3))
    model = nn.Sequential(*blocks).to(device)
    PARALLEL[way](model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for step in range(3):
        seed = step if way == "tensor parallel" else 10 * step + rank
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed)).to(device)
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(parameter.full_tensor() for parameter in model.parameters())]


def trains_as_without_funcol(rank, world, way, device="cuda"):
    expected = trained(rank, world, way, device)
    with funcol.installed():
        actual = trained(rank, world, way, device)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("way", PARALLEL)
def test_one_nccl_rank_trains_as_without_funcol(nccl, way):
    trains_as_without_funcol(0, 1, way)


def trains_as_on_the_cpu(rank, world, way):
    # And not on the device: PyTorch's functional all-gather over Gloo reads device memory on the host.
    expected = trained(rank, world, way, "cpu")
    with funcol.installed():
        actual = [result.cpu() for result in trained(rank, world, way, "cuda")]
    # The kernels of the two devices round differently; bfloat16 has 8 bits.
    tolerance = 1e-2 if "half" in way else 1e-4
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("way", PARALLEL)
def test_ranks_that_share_the_device_train_as_without_funcol(needs_cuda, way):
    run_ranks(trains_as_on_the_cpu, 2, way)
