"""Programs that use what FSDP2 lets a program put in place of its own: replicas, hooks around the gather,
tensor classes, collectives, settings.

As those of :mod:`fsdp_programs`, each takes its rank, the number of ranks and options, and gives tensors to
compare.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from fsdp_programs import Block, Tied, batch, blocks, copies, sharded, state, steps
from ranks import device_type
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

# Replicas


def _replicate(module: nn.Module, **options: Any) -> nn.Module:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    return replicate(module, **options)  # type: ignore[no-any-return]


def replicates_all(rank: int, world: int, how: str = "") -> list[Tensor]:
    options: dict[str, Any] = {}
    if how == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if how == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = blocks()
    for block in model:
        _replicate(block, **options)
    _replicate(model, **options)
    return steps(model, rank, 3, torch.optim.SGD(model.parameters(), 0.1))


def _accumulated(model: Any, set_reduces: Callable[[bool], None], rank: int) -> list[Tensor]:
    """Parameters and gradients after each of four backward passes; every second pass reduces gradients."""
    found: list[Tensor] = []
    for step in range(4):
        set_reduces(step % 2 == 1)
        model(batch(rank, step)).square().mean().backward()
        found += copies(state(model))
    return found


def replicates_and_accumulates(rank: int, world: int) -> list[Tensor]:
    model = blocks()
    for block in model:
        _replicate(block)
    _replicate(model)
    return _accumulated(model, model.set_requires_gradient_sync, rank)


def replicates_and_evaluates(rank: int, world: int) -> list[Tensor]:
    model = _replicate(blocks())
    with torch.no_grad():
        found = [model(batch(rank))]
    model.unshard()
    found += copies(list(model.parameters()))
    model.reshard()
    found += copies(list(model.state_dict().values()))
    return found + steps(model, rank, 2)


def mixes_replicas_and_shards(rank: int, world: int) -> list[Tensor]:
    """Trains a replicated block beside a sharded one, then a model whose blocks have own meshes."""
    model = blocks(4)
    _replicate(model[0])
    fully_shard(model[1])
    found = steps(model[:2], rank, 2)
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model[2], mesh=mesh)
    fully_shard(model[3], mesh=mesh["shard"])
    tree = fully_shard(nn.Sequential(model[2], model[3], Block()), mesh=mesh)
    return found + steps(tree, rank, 2)


def reduces_shards_without_replicas(rank: int, world: int) -> list[Tensor]:
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(blocks(), mesh=mesh)
    return _accumulated(model, model.set_requires_all_reduce, rank)


# Extensions of the gather


def _linears(count: int = 2) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(count)))


def _wide_steps(model: nn.Module, rank: int, number: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step in range(number):
        x = torch.randn(4, 8, generator=torch.Generator(device_type()).manual_seed(10 * step + rank))
        loss = model(x).float().square().mean()
        loss.backward()
        found += [loss.detach(), *copies(state(model))]
        optimizer.step()
        optimizer.zero_grad()
    return found


def _doubled(self: Tensor, mesh: Any) -> tuple[Any, Any]:
    return (self * 2,), ("doubled", mesh.size())


def _halved(
    inner: Callable[[Tensor], Any],
    self: Tensor,
    outputs: tuple[Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: Tensor | None = None,
) -> Any:
    (gathered,) = outputs
    assert metadata[0] == "doubled"
    if out is None:
        whole = gathered / 2
        return whole, inner(whole)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
        torch.div(gathered, 2, out=out)
    return None


_INNER: dict[str, Callable[[Tensor], Any]] = {
    "tuple": lambda whole: (whole,),
    "list": lambda whole: [whole],
    "empty": lambda whole: (),
}


def gathers_by_hooks(rank: int, world: int, inner: str, on_all: bool = True) -> list[Tensor]:
    """Hooks on plain tensors, which give other memory than what was gathered."""
    model = _linears()
    for linear in model:
        fully_shard(linear)
    fully_shard(model)
    for name, parameter in model.named_parameters():
        if not on_all and name.endswith("bias"):
            continue
        local = parameter._local_tensor
        local.fsdp_pre_all_gather = MethodType(_doubled, local)
        local.fsdp_post_all_gather = MethodType(partial(_halved, _INNER[inner]), local)
    return _wide_steps(model, rank)


class Scaled(Tensor):
    """A weight that travels as 16 bits and a scale, as weights of float8 training do."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    _KEPT = ("detach", "view", "as_strided", "slice", "split", "split_with_sizes", "new_zeros", "copy_",
             "empty_like", "clone", "_to_copy", "narrow", "alias", "zeros_like")  # fmt: skip

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(cls, lambda one: one.inner, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.overloadpacket.__name__ in cls._KEPT:
            return pytree.tree_map_only(Tensor, cls, out)
        return out

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[Any, Any]:
        scale = self.inner.abs().amax().reshape(1)
        return (self.inner.bfloat16(), scale.expand(self.inner.shape).contiguous()), (outer_size, mp_policy)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        data, scale = outputs
        whole = data.to(param_dtype) + 0 * scale.to(param_dtype)
        if out is None:
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(whole)
        return None


def gathers_a_tensor_class(rank: int, world: int, types: str = "") -> list[Tensor]:
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    options = {"mp_policy": policy} if types else {}
    model = _linears()
    for linear in model:
        linear.weight = nn.Parameter(Scaled(linear.weight.detach()))
        fully_shard(linear, **options)
    fully_shard(model, **options)
    optimizer_free = []
    for step in range(2):
        x = torch.randn(4, 8, generator=torch.Generator(device_type()).manual_seed(10 * step + rank))
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer_free.append(loss.detach())
        for parameter in model.parameters():
            local = parameter.grad.to_local()
            optimizer_free.append((local.inner if isinstance(local, Scaled) else local).clone())
    return optimizer_free


# Collectives of a program's own


class _Counts:
    def __init__(self) -> None:
        self.calls: list[int] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.calls.append(size[0])
        return torch.zeros(*size, dtype=dtype, device=device)


class Gather(_Counts):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.calls.append(-1)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ReduceScatter(_Counts):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls.append(-2)
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)


def _modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def communicates_by_its_own(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    gather, reduce = Gather(), ReduceScatter()
    for module in _modules(model):
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce)
    return [*steps(model, rank), torch.tensor(gather.calls), torch.tensor(reduce.calls)]


def reduces_by_a_hook(rank: int, world: int, replicas: bool = False) -> list[Tensor]:
    options = {}
    if replicas:
        options["mesh"] = init_device_mesh(
            device_type(), (2, world // 2), mesh_dim_names=("replicate", "shard")
        )
    model = sharded(blocks(), **options)

    def hook(output: Tensor) -> None:
        dist.all_reduce(output)
        output.mul_(0.5)

    for module in _modules(model):
        module.set_all_reduce_hook(hook)
    return steps(model, rank)


# Settings


def _set(model: nn.Module, name: str, *args: Any) -> None:
    for module in _modules(model):
        getattr(module, name)(*args)


def with_setting(rank: int, world: int, name: str, *args: Any) -> list[Tensor]:
    """Trains a model on which the method ``name`` was called."""
    model = sharded(blocks(4))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _set(model, name, *args)
    return steps(model, rank, 3, torch.optim.SGD(model.parameters(), 0.1))


def does_not_gather_in_the_backward_pass(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(9, 5), Block())
    fully_shard(model[0])
    fully_shard(model[1])
    fully_shard(model)
    model[0].set_unshard_in_backward(False)
    found = []
    for step in range(2):
        model((batch(rank, step) * 3).abs().long() % 9).square().mean().backward()
        found += copies(state(model))
    return found


class Skips(nn.Sequential):
    """Runs those of its modules that are named."""

    runs: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        for index in self.runs:
            x = self[index](x)
        return x


def _skips(count: int) -> Skips:
    torch.manual_seed(1)
    return Skips(*(Block() for _ in range(count)))


def reduces_unused_parameters(rank: int, world: int) -> list[Tensor]:
    """Each rank leaves the last block out in another step."""
    model: Any = _skips(3)
    fully_shard(model)
    model.set_reduce_scatter_unused_params(True)
    found = []
    for step in range(3):
        model.runs = (0, 1, 2) if rank == step else (0, 1)
        model(batch(rank, step)).square().mean().backward()
        found += copies(state(model))
    return found


def keeps_unsharded_storage(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    model.set_keep_unsharded_storage(True)
    found = steps(model, rank, 2)
    model.set_keep_unsharded_storage(False)
    return found + steps(model, rank, 1)


def waits_for_an_event(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    found = []
    for step in range(3):
        found += steps(model, rank, 1)
        event = torch.get_device_module(device_type()).Event()
        event.record()
        model.set_post_optim_event(event)
        assert step < 3
    return found


def finalizes_by_hand(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    model.set_manual_backward_finalization(True)
    found = []
    for step in range(2):
        model(batch(rank, step)).square().mean().backward()
        model.finalize_backward()
        found += copies(state(model))
    return found


def keeps_reductions_open(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    found = []
    for step in range(4):
        model.set_is_last_backward(step % 2 == 1)
        model(batch(rank, step)).square().mean().backward()
    return found + copies(state(model))


def starts_again(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    found = steps(model, rank, 1)
    model(batch(rank))
    model.reset_iter_state()
    return found + steps(model, rank, 2)


def gathers_asynchronously(rank: int, world: int) -> list[Tensor]:
    model = sharded(blocks())
    model._set_unshard_async_op(True)
    for before, after in zip(model, list(model)[1:], strict=False):
        before.set_modules_to_forward_prefetch([after])
    return steps(model, rank)


def shares_streams(rank: int, world: int) -> list[Tensor]:
    from torch.distributed.fsdp._fully_shard import share_comm_ctx

    models = [sharded(blocks(2)), sharded(blocks(2))]
    share_comm_ctx(models)
    return [result for model in models for result in steps(model, rank)]


class TwoForwards(Block):
    def other(self, x: Tensor) -> Tensor:
        return self.forward(x) * 2


def has_another_forward(rank: int, world: int) -> list[Tensor]:
    from torch.distributed.fsdp import register_fsdp_forward_method

    torch.manual_seed(1)
    model = TwoForwards()
    fully_shard(model)
    register_fsdp_forward_method(model, "other")
    model.other(batch(rank)).square().mean().backward()
    return state(model)


def groups_modules(rank: int, world: int, runs: tuple[int, ...]) -> list[Tensor]:
    model = _skips(4)
    fully_shard([model[0], model[1]])
    fully_shard([model[2], model[3]])
    fully_shard(model)
    model.runs = runs
    found = []
    for step in range(2):
        model(batch(rank, step)).square().mean().backward()
        found += copies(state(model))
    return found


def has_meshes_by_parameter(rank: int, world: int) -> list[Tensor]:
    """Some parameters of a block over all ranks, some over half of them."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    whole = init_device_mesh(device_type(), (world,), mesh_dim_names=("whole",))
    part = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("one", "part"))["part"]
    infos = [FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0) for mesh in (whole, part)]
    model = blocks()
    for block in model:
        down = block.down.weight

        def placement(parameter: nn.Parameter, down: nn.Parameter = down) -> Any:
            return ShardPlacementResult(None, infos[1 if parameter is down else 0])

        fully_shard(block, mesh=whole, shard_placement_fn=placement)
    fully_shard(model, mesh=whole)
    return steps(model, rank)


def mixes_by_parameter(rank: int, world: int) -> list[Tensor]:
    """Norms stay in 32 bits."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        output_dtype=torch.float32,
        param_dtype_override_fn=lambda one: torch.float32 if one.ndim == 1 else None,
        cast_forward_inputs=False,
    )
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8))

    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[1](self.inner[0](x.bfloat16()).float())

    module = Casts()
    fully_shard(module, mp_policy=policy)
    return _wide_steps(module, rank)


def has_gradients_of_any_type(rank: int, world: int) -> list[Tensor]:
    model = blocks()
    for parameter in model.parameters():
        parameter.grad_dtype = None
    return steps(sharded(model), rank)


def ties_across_modules(rank: int, world: int) -> list[Tensor]:
    torch.manual_seed(1)
    model = Tied()
    fully_shard([model.embed, model.head])
    fully_shard(model)
    return steps(model, rank)
