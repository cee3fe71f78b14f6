"""torchtitan's trainer on the CPU: the program of each gloo rank, which torchrun starts, and configurations.

    torchrun --nproc-per-node 4 tools/examples/torchtitan_on_cpu.py --folder FOLDER [--funcol] \\
        --module torchtitan_on_cpu --config llama3 [OPTION OF TORCHTITAN ...]

torchtitan asks for an accelerator, and its wheel holds no data. prepare_for_cpu() and write_data() make up
for that; the trainer and its models stay as they are. The last rank writes losses, gradient norms and
times of all steps to FOLDER/steps.json.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

NUM_BYTES = 1 << 20
END = "<end>"


def prepare_for_cpu() -> None:
    """Makes torchtitan take the CPU for its device. Comes before any other import of torchtitan."""
    from torchtitan.tools import utils

    def nothing(*args: Any) -> None:
        pass

    utils.device_type = "cpu"
    utils.device_module = SimpleNamespace(
        set_device=nothing,
        current_device=lambda: 0,
        device_count=lambda: 1,
        synchronize=nothing,
        # Asked by the memory monitor.
        get_device_name=lambda device: "cpu",
        get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
    )
    utils.get_local_device = lambda: torch.device("cpu")
    utils.get_peak_flops = lambda name: 1e12  # for a utilisation that is not read here

    from torchtitan.distributed import fsdp

    def keep_sums(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale what it adds

    fsdp.disable_fsdp_gradient_division = keep_sums


def draw_whole_weights() -> None:
    """Initializes DTensors with the random numbers of one whole tensor. Comes before torchtitan's models.

    Stock PyTorch draws other numbers for other meshes, funcol those of one device: without this, the two
    would start from different weights.
    """

    def drawn(initialize: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(initialize)
        def replacement(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
            if not isinstance(tensor, DTensor):
                return initialize(tensor, *args, **options)
            whole = initialize(torch.empty(tensor.shape, dtype=tensor.dtype), *args, **options)
            placed = (tensor.device_mesh, tensor.placements)
            with torch.no_grad():
                return tensor.copy_(distribute_tensor(whole, *placed, src_data_rank=None))

        return replacement

    for name in ("normal_", "trunc_normal_", "uniform_"):
        setattr(nn.init, name, drawn(getattr(nn.init, name)))


def write_data(folder: Path) -> None:
    """Writes a tokenizer of bytes and the first of Python's standard library's sources as a dataset."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    (folder / "tokenizer").mkdir()
    (folder / "dataset").mkdir()
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    of_tokenizer = {"bos_token": END, "eos_token": END}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))

    num_left = NUM_BYTES
    with (folder / "dataset" / "sources.jsonl").open("w") as dataset:
        for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text = source.read_text(errors="replace")[:num_left]
            num_left -= len(text)
            if text:
                dataset.write(json.dumps({"text": text}) + "\n")


# Configurations, found by torchtitan's --module torchtitan_on_cpu --config NAME.


def llama3() -> Any:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return smaller(llama3_debugmodel())


def llama3_narrow() -> Any:
    """Returns the debug model's layers at a quarter of their width: arithmetic takes little of a step."""
    from dataclasses import replace

    from torchtitan.models import llama3 as models
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    config = llama3_debugmodel()
    width, num_heads, num_words = 64, 4, 512
    debug = config.model_spec.model
    layers = models._build_llama3_layers(
        n_layers=len(debug.layers),
        dim=width,
        n_heads=num_heads,
        hidden_dim=4 * width,
        rope=replace(debug.layers[0].attention.rope, dim=width // num_heads),
        attn_backend="flex",
    )
    config.model_spec.model = replace(
        debug,
        dim=width,
        vocab_size=num_words,
        tok_embeddings=replace(debug.tok_embeddings, num_embeddings=num_words, embedding_dim=width),
        norm=replace(debug.norm, normalized_shape=width),
        lm_head=replace(debug.lm_head, in_features=width, out_features=num_words),
        layers=layers,
    )
    config.loss.loss_fn.global_vocab_size = num_words
    return smaller(config)


def smaller(config: Any) -> Any:
    """Returns ``config`` with short sequences and an attention that the CPU has a backward pass of."""
    from torchtitan.models.common.attention import ScaledDotProductAttention

    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.training.seq_len = 128
    config.training.local_batch_size = 2
    config.activation_checkpoint = None
    config.debug.seed = 0
    config.debug.enable_structured_logging = False
    return config


# A rank.


def record_steps() -> list[dict[str, float]]:
    """Returns the values that torchtitan logs, a step an entry."""
    from torchtitan.components.metrics import MetricsProcessor

    steps: list[dict[str, float]] = []
    log = MetricsProcessor.log
    used = time.process_time()

    def keep_and_log(self: Any, step: int, loss: float, max_loss: float, norm: float, **rest: Any) -> None:
        nonlocal used
        used_before, used = used, time.process_time()
        seconds = time.perf_counter() - self.time_last_log
        steps.append({"loss": loss, "norm": norm, "seconds": seconds, "cpu_seconds": used - used_before})
        log(self, step, loss, max_loss, norm, **rest)

    MetricsProcessor.log = keep_and_log
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--folder", type=Path, required=True, help="where write_data() wrote")
    parser.add_argument("--funcol", action="store_true", help="on funcol (default: on PyTorch as it is)")
    args, of_torchtitan = parser.parse_known_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["HF_HOME"] = str(args.folder / "cache")
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    draw_whole_weights()
    prepare_for_cpu()

    if args.funcol:
        import funcol

        funcol.install()

    from torchtitan.train import main as train

    steps = record_steps()
    sys.argv[1:] = [
        *of_torchtitan,
        f"--hf-assets-path={args.folder / 'tokenizer'}",
        f"--dataloader.dataset-path={args.folder / 'dataset'}",
        f"--dump-folder={args.folder / 'out'}",
    ]
    train()
    # A pipeline has the loss in its last stage alone.
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        (args.folder / "steps.json").write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
