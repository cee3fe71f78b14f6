"""Small programs on DTensor, tensor parallel modules and FSDP2: a step of each, and of the same not parallel.

They are so small that the time is that of PyTorch's layers, not of arithmetic. Run on a group
that sends nothing. Tensors are made on the default device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

NUM_RANKS = 8
WIDTH = 64
NUM_HEADS = 8
NUM_BLOCKS = 4
NUM_CLASSES = 128
BATCH, LENGTH = 4, 8
NUM_EXPERTS = 8
NUM_WEIGHTS = 200

Step = Callable[[], object]


# A transformer


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Of (batch, heads, length, width of a head). Written out: DTensor has no fused attention on CPU."""
    return torch.softmax(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5, -1) @ value


class Attention(nn.Module):
    """Takes as many heads as its weights have."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, -1, self.head_width).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        mixed = self.attend(query, key, value)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Attention and a feed-forward part, as GPT has them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, num_heads)
        self.feed_forward = FeedForward(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, NUM_HEADS) for _ in range(NUM_BLOCKS)))


def forward_and_backward(model: nn.Module, x: Tensor) -> Step:
    parameters = list(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def plain_transformer() -> Step:
    return forward_and_backward(transformer(), torch.randn(BATCH, LENGTH, WIDTH))


def cut_by_modules(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cuts weights by heads and columns over all ranks, activations between by the sequence."""
    by_block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "feed_forward_norm": SequenceParallel(),
        **{part: _gathers_sequence() for part in ("attention", "feed_forward")},
        **{f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")},
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.up": ColwiseParallel(),
        "feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    plan = {f"{i}.{name}": style for i in range(NUM_BLOCKS) for name, style in by_block.items()}
    parallelize_module(model, mesh, plan)


def tensor_parallel(device_type: str) -> Step:
    model = transformer()
    cut_by_modules(model, init_device_mesh(device_type, (NUM_RANKS,)))
    return forward_and_backward(model, torch.randn(BATCH, LENGTH // NUM_RANKS, WIDTH))


def classifier() -> nn.Sequential:
    return nn.Sequential(*transformer(), nn.Linear(WIDTH, NUM_CLASSES, bias=False))


def classification(model: nn.Module, x: Tensor) -> Step:
    target = torch.randint(NUM_CLASSES, (BATCH * LENGTH,))
    parameters = list(model.parameters())

    def step() -> None:
        with loss_parallel():
            F.cross_entropy(model(x).flatten(0, 1), target).backward()
        for parameter in parameters:
            parameter.grad = None

    return step


def plain_classification() -> Step:
    return classification(classifier(), torch.randn(BATCH, LENGTH, WIDTH))


def tensor_parallel_loss(device_type: str) -> Step:
    """As :func:`tensor_parallel`, and the loss of logits that are cut by classes."""
    mesh = init_device_mesh(device_type, (NUM_RANKS,))
    model = classifier()
    cut_by_modules(model, mesh)
    head = ColwiseParallel(input_layouts=Shard(1), use_local_output=False)
    parallelize_module(model, mesh, {str(NUM_BLOCKS): head})
    return classification(model, torch.randn(BATCH, LENGTH // NUM_RANKS, WIDTH))


def _gathers_sequence() -> ParallelStyle:
    return PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))


def cut_as_megatron(model: nn.Module, mesh: DeviceMesh) -> None:
    """Makes DTensors of all weights: cut by columns or rows along the last axis, replicated along others."""
    along_others = [Replicate()] * (mesh.ndim - 1)
    for name, weight in list(model.named_parameters()):
        path, _, leaf = name.rpartition(".")
        last: Placement = Replicate()
        if path.endswith(("query", "key", "value", "up")):
            last = Shard(0)
        elif path.endswith(("out", "down")):
            last = Shard(1)
        cut = distribute_tensor(weight.detach(), mesh, [*along_others, last], src_data_rank=None)
        setattr(model.get_submodule(path), leaf, nn.Parameter(cut))


def data_and_tensor_parallel(device_type: str) -> Step:
    """Makes a step of DTensors: the batch cut along one axis, weights along the other."""
    mesh = init_device_mesh(device_type, (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
    model = transformer()
    cut_as_megatron(model, mesh)
    x = distribute_tensor(torch.randn(BATCH, LENGTH, WIDTH), mesh, [Shard(0), Replicate()])
    parameters = list(model.parameters())

    def step() -> None:
        model(x).sum().backward()
        for parameter in parameters:
            assert isinstance(parameter.grad, DTensor)
            parameter.grad.redistribute(placements=parameter.placements)
            parameter.grad = None

    return step


def fully_sharded(device_type: str) -> Step:
    """FSDP2, a group of parameters a block."""
    mesh = init_device_mesh(device_type, (NUM_RANKS,))
    model = transformer()
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return forward_and_backward(model, torch.randn(BATCH, LENGTH, WIDTH))


# Training with FSDP2: the gradient's norm clipped, AdamW over lists

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FP32 = MixedPrecisionPolicy()


def training(model: nn.Module, x: Tensor) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain_training(dtype: torch.dtype) -> Step:
    return training(transformer().to(dtype), torch.randn(BATCH, LENGTH, WIDTH, dtype=dtype))


def sharded_training_without_mesh(policy: MixedPrecisionPolicy, device_type: str) -> Step:
    """Makes a step with a group of parameters a block, each on a mesh object of its own."""
    assert torch.get_default_device().type == device_type
    model = transformer()
    for block in [*model, model]:
        fully_shard(block, mp_policy=policy)
    return training(model, torch.randn(BATCH, LENGTH, WIDTH))


def sharded_training(policy: MixedPrecisionPolicy, shape: tuple[int, ...], device_type: str) -> Step:
    """Makes a step with a group of parameters a block. A mesh of two axes replicates along the first."""
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    model = transformer()
    for block in [*model, model]:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return training(model, torch.randn(BATCH, LENGTH, WIDTH))


def sharded_and_tensor_parallel_training(policy: MixedPrecisionPolicy, device_type: str) -> Step:
    mesh = init_device_mesh(device_type, (2, NUM_RANKS // 2), mesh_dim_names=("dp", "tp"))
    model = transformer()
    cut_by_modules(model, mesh["tp"])
    for block in [*model, model]:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    return training(model, torch.randn(BATCH, LENGTH // mesh["tp"].size(), WIDTH))


# A mixture of experts


class Experts(nn.Module):
    """Each token goes to one expert; every rank's tokens fill as many places of each expert.

    ``exchange`` moves tensors of (experts, places, width) to where the experts are, ``bring_back`` back.
    """

    def __init__(self, exchange: Callable[[Tensor], Tensor], bring_back: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5)
        self.exchange, self.bring_back = exchange, bring_back

    def forward(self, tokens: Tensor) -> Tensor:
        scores, chosen = torch.softmax(self.router(tokens), -1).max(-1)
        order = chosen.argsort(stable=True)
        sent = self.norm(tokens)[order].view(NUM_EXPERTS, -1, WIDTH)
        mixed = torch.bmm(F.gelu(torch.bmm(self.exchange(sent), self.up)), self.down)
        returned = self.bring_back(mixed).reshape(-1, WIDTH)
        return tokens + scores[:, None] * returned[order.argsort()]


def plain_experts() -> Step:
    torch.manual_seed(0)
    model = nn.Sequential(*(Experts(nn.Identity(), nn.Identity()) for _ in range(NUM_BLOCKS)))
    return forward_and_backward(model, torch.randn(2 * NUM_EXPERTS, WIDTH))


def expert_parallel(device_type: str) -> Step:
    """Makes a step with an expert a rank; tokens travel by all_to_all, as DTensors made of local tensors."""
    mesh = init_device_mesh(device_type, (NUM_RANKS,))

    def exchange(tokens: Tensor) -> Tensor:
        mine = DTensor.from_local(tokens, mesh, [Shard(1)], run_check=False)
        return mine.redistribute(placements=[Shard(0)])

    def bring_back(tokens: Tensor) -> Tensor:
        assert isinstance(tokens, DTensor)
        return tokens.redistribute(placements=[Shard(1)]).to_local()

    torch.manual_seed(0)
    model = nn.Sequential(*(Experts(exchange, bring_back) for _ in range(NUM_BLOCKS)))
    for layer in model:
        for name in ("up", "down"):
            weight = distribute_tensor(getattr(layer, name).detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(layer, name, nn.Parameter(weight))
    return forward_and_backward(model, torch.randn(2 * NUM_EXPERTS, WIDTH))


# An optimizer


def orthogonalized(gradient: Tensor) -> Tensor:
    """Returns one step of Newton-Schulz, where Muon does five."""
    gradient = gradient / gradient.norm()
    square = gradient @ gradient.T
    return 1.5 * gradient - 0.5 * square @ gradient


def weights_and_gradients() -> Iterable[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(16, 16), torch.randn(16, 16)) for _ in range(NUM_WEIGHTS)]


@torch.no_grad()
def plain_muon() -> Step:
    pairs = weights_and_gradients()

    def step() -> None:
        for weight, gradient in pairs:
            weight.add_(orthogonalized(gradient), alpha=-1e-3)

    return step


def muon(device_type: str) -> Step:
    """Gathers, changes and cuts every gradient, weight by weight."""
    mesh = init_device_mesh(device_type, (NUM_RANKS,))
    pairs = [
        [distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None) for tensor in pair]
        for pair in weights_and_gradients()
    ]

    def step() -> None:
        for weight, gradient in pairs:
            change = orthogonalized(gradient.full_tensor())
            whole = DTensor.from_local(change, mesh, [Replicate()], run_check=False)
            weight.add_(whole.redistribute(placements=gradient.placements), alpha=-1e-3)

    return step


class Program(NamedTuple):
    """``parallel`` takes the mesh's device type.

    ``limit``: of funcol's time above the plain step's, in stock's. ``limit_of_plain``: of funcol's time, in
    the plain step's.
    """

    name: str
    plain: Callable[[], Step]
    parallel: Callable[[str], Step]
    limit: float
    limit_of_plain: float = math.inf


PROGRAMS = [
    Program("tensor parallel 8", plain_transformer, tensor_parallel, 0.09, limit_of_plain=1.55),
    Program("TP 8, loss_parallel", plain_classification, tensor_parallel_loss, 0.15),
    Program("data 2 x tensor 4", plain_transformer, data_and_tensor_parallel, 0.08),
    Program("FSDP2", plain_transformer, fully_sharded, 0.22),
    Program(
        "FSDP2 fp32, AdamW",
        partial(plain_training, torch.float32),
        partial(sharded_training, FP32, (NUM_RANKS,)),
        0.28,
    ),
    Program(
        "FSDP2 bf16, AdamW",
        partial(plain_training, torch.bfloat16),
        partial(sharded_training, BF16, (NUM_RANKS,)),
        0.32,
    ),
    Program(
        "FSDP2 bf16, 5 meshes",
        partial(plain_training, torch.bfloat16),
        partial(sharded_training_without_mesh, BF16),
        0.32,
    ),
    Program(
        "FSDP2 x TP bf16, AdamW",
        partial(plain_training, torch.bfloat16),
        partial(sharded_and_tensor_parallel_training, BF16),
        0.40,
    ),
    Program(
        "HSDP bf16, AdamW",
        partial(plain_training, torch.bfloat16),
        partial(sharded_training, BF16, (2, NUM_RANKS // 2)),
        0.40,
    ),
    Program("experts, all_to_all", plain_experts, expert_parallel, 0.06),
    Program("Muon, 200 weights", plain_muon, muon, 0.08),
]
