"""Correct programs of the examples, torchtitan and transformers. ``mesh`` is None for the reference."""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools" / "examples"))

Result = tuple[nn.Module, Tensor, Any]


def tokens(num_words: int, batch: int, length: int) -> Tensor:
    return torch.randint(num_words, (batch, length), generator=torch.Generator().manual_seed(1))


def of_this_group(batch: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """The part of the ranks with this coordinate of ``dp``."""
    return batch if mesh is None else batch.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]


def next_token_loss(scores: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())


def language_model(mesh: DeviceMesh | None, width: int, hidden: int, length: int) -> Result:
    """``tools/examples/tensor_parallel_lm.py``: FSDP2 x tensor and sequence parallel."""
    from language_model import Config, LanguageModel
    from tensor_parallel_lm import parallelized

    torch.manual_seed(0)
    model = LanguageModel(Config(vocabulary=67, width=width, hidden_width=hidden, max_length=length))
    if mesh is not None:
        parallelized(model, mesh)
    ids = of_this_group(tokens(67, 4, length + 1), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=True)
    loss = next_token_loss(model(ids[:, :-1]), ids)
    loss.backward()
    return model, loss, optimizer


def muon(mesh: DeviceMesh | None, width: int) -> Result:
    """``tools/examples/muon.py``: FSDP2 weights, which are orthogonalised by their owners."""
    import muon as example

    torch.manual_seed(0)
    sizes = [width * (1 + i % 3) for i in range(5)]
    layers = [nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)]
    model = nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in layers))
    change: Any = lambda momenta: [example.orthogonalized(one) for one in momenta]  # noqa: E731
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(1))
    if mesh is not None:
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        change = example.Owners([*model.parameters()])
        x = of_this_group(x, mesh)
    loss = model(x).square().mean()
    loss.backward()
    return model, loss, example.Muon([*model.parameters()], change)


def accelerate_fsdp2(mesh: DeviceMesh | None, width: int) -> Result:
    """``tools/examples/accelerate_fsdp2.py``."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 16))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = of_this_group(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), mesh)
    if mesh is None:
        loss = (model(x) - x).square().mean()
        loss.backward()
        return model, loss, optimizer
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # which Accelerate wants, and does not use
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, optimizer)
    loss = (model(x) - x).square().mean()
    accelerator.backward(loss)
    return model, loss, optimizer


def torchtitan_llama(mesh: DeviceMesh | None, backend: str, length: int) -> Result:
    """torchtitan's debug model of Llama 3, FSDP2 x tensor parallel, with its losses and divisions."""
    from torchtitan_on_cpu import llama3, prepare_for_cpu

    prepare_for_cpu()
    from torchtitan.config import ParallelismConfig
    from torchtitan.distributed import ParallelDims

    config = llama3()
    dp, tp = (1, 1) if mesh is None else mesh.shape
    config.parallelism = ParallelismConfig(
        data_parallel_shard_degree=dp, tensor_parallel_degree=tp, spmd_backend=backend
    )
    config.training.seq_len = 128
    spec = config.model_spec
    spec.model.update_from_config(config=config)
    torch.manual_seed(0)
    model = spec.model.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    if mesh is not None:
        spec.parallelize_fn(
            model,
            parallel_dims=ParallelDims.from_config(config.parallelism, mesh.size()),
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=None,
            dump_folder="",
        )
    ids = tokens(spec.model.vocab_size, 4, length + 1)
    part = of_this_group(ids, mesh)
    scores = model(part[:, :-1])
    if hasattr(scores, "full_tensor"):
        scores = scores.full_tensor()
    loss = next_token_loss(scores, part) * part[:, 1:].numel() / ids[:, 1:].numel()
    loss.backward()
    return model, loss, torch.optim.AdamW(model.parameters(), lr=8e-4, foreach=False)


def loaded(config: Any, **distributed: Any) -> nn.Module:
    """A causal language model of transformers from a checkpoint, which the reference run writes."""
    from transformers import AutoModelForCausalLM

    folder = Path(tempfile.gettempdir(), f"library_programs_{os.getppid()}")
    if not distributed:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager", **distributed)


def transformers_llama(mesh: DeviceMesh | None, hidden: int, length: int) -> Result:
    """transformers' Llama with its own plan of tensor parallelism."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=66,
        hidden_size=32,
        intermediate_size=hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    model = loaded(config, **({} if mesh is None else {"tp_plan": "auto"}))
    ids = tokens(66, 2, length)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)


def transformers_moe(mesh: DeviceMesh | None, length: int) -> Result:
    """transformers' Qwen3-MoE with expert parallelism."""
    from transformers import Qwen3MoeConfig
    from transformers.distributed import DistributedConfig

    config = Qwen3MoeConfig(
        vocab_size=66,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    options = {}
    if mesh is not None:
        size = mesh.size()
        options = {"distributed_config": DistributedConfig(tp_size=size, ep_size=size)}
    model = loaded(config, **options)
    ids = tokens(66, 2, length)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return model, loss, torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
