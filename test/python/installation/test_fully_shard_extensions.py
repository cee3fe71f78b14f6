"""Replacements of FSDP2's own parts work the same with funcol under FSDP2."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import fsdp_extensions as programs
import pytest
import torch
from fsdp_checks import check
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

# Older releases reuse memory that a hook's stream still writes.
ON_DEVICES = torch.__version__ >= "2.15"

try:
    from torch.distributed._composable import replicate_with_fsdp
except ImportError:
    replicate_with_fsdp = None  # type: ignore[assignment]

has_replicas = pytest.mark.skipif(replicate_with_fsdp is None, reason="this PyTorch has no such replicate()")


def has(*names: str) -> Any:
    """For tests of methods that older releases do not have."""
    missing = [name for name in names if not hasattr(FSDPModule, name)]
    return pytest.mark.skipif(bool(missing), reason=f"this PyTorch has no {missing}")


# Replicas


@has_replicas
@pytest.mark.parametrize("how", ["", "bfloat16", "offload"])
def test_replicas(how: str) -> None:
    check(programs.replicates_all, 2, how)


@has_replicas
@pytest.mark.parametrize(
    "program",
    [programs.replicates_and_accumulates, programs.replicates_and_evaluates],
    ids=lambda program: program.__name__,
)
def test_replicas_in_a_program(program: Callable[..., list[Tensor]]) -> None:
    check(program, 2)


@has_replicas
def test_replicas_beside_shards() -> None:
    check(programs.mixes_replicas_and_shards, 4)


def test_shards_reduced_before_their_replicas() -> None:
    check(programs.reduces_shards_without_replicas, 4)


# Extensions of the gather


@pytest.mark.sampled(3)
@pytest.mark.parametrize("inner", ["tuple", "list", "empty"])
@pytest.mark.parametrize("on_all", [True, False])
def test_hooks_around_the_gather(inner: str, on_all: bool) -> None:
    check(programs.gathers_by_hooks, 2, inner, on_all)


@pytest.mark.parametrize("types", ["", "bfloat16"])
def test_a_tensor_class_that_is_gathered_as_two_tensors(types: str) -> None:
    check(programs.gathers_a_tensor_class, 2, types)


# Collectives and settings


@has("set_custom_all_gather", "set_custom_reduce_scatter")
def test_collectives_of_its_own() -> None:
    check(programs.communicates_by_its_own, 2)


def test_a_hook_that_reduces() -> None:
    check(programs.reduces_by_a_hook, 2)


def test_a_hook_that_reduces_replicas() -> None:
    check(programs.reduces_by_a_hook, 4, True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "setting",
    [
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_force_sum_reduction_for_comms", True),
        ("set_reduce_scatter_divide_factor", 2.0),
        ("set_reduce_scatter_max_input_buffers", 2),
        ("set_reshard_after_forward", False),
        ("set_separate_reduce_scatter_group", True),
    ],
    ids=lambda setting: setting[0],
)
def test_a_setting(setting: tuple[str, Any]) -> None:
    if not hasattr(FSDPModule, setting[0]):
        pytest.skip(f"this PyTorch has no {setting[0]}")
    check(programs.with_setting, 2, *setting)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("program", "needs"),
    [
        (programs.does_not_gather_in_the_backward_pass, "set_unshard_in_backward"),
        (programs.finalizes_by_hand, "set_manual_backward_finalization"),
        (programs.gathers_asynchronously, "_set_unshard_async_op"),
        (programs.has_another_forward, "unshard"),
        (programs.keeps_reductions_open, "set_is_last_backward"),
        (programs.keeps_unsharded_storage, "set_keep_unsharded_storage"),
        (programs.reduces_unused_parameters, "set_reduce_scatter_unused_params"),
        (programs.shares_streams, "unshard"),
        (programs.starts_again, "reset_iter_state"),
        (programs.ties_across_modules, "unshard"),
        (programs.waits_for_an_event, "set_post_optim_event"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_a_program(program: Callable[..., list[Tensor]], needs: str) -> None:
    if not hasattr(FSDPModule, needs):
        pytest.skip(f"this PyTorch has no {needs}")
    check(program, 2)


@pytest.mark.parametrize("runs", [(0, 1, 2, 3), (0, 1, 2), (0, 2)])
def test_modules_that_are_one_group(runs: tuple[int, ...]) -> None:
    check(programs.groups_modules, 2, runs)


@has("set_keep_unsharded_storage")
def test_meshes_by_parameter() -> None:
    check(programs.has_meshes_by_parameter, 4)


@pytest.mark.skipif(
    "param_dtype_override_fn" not in inspect.signature(MixedPrecisionPolicy).parameters,
    reason="this PyTorch has one type for all parameters",
)
def test_types_by_parameter() -> None:
    check(programs.mixes_by_parameter, 2)


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="this PyTorch has no grad_dtype")
def test_gradients_of_any_type() -> None:
    check(programs.has_gradients_of_any_type, 2)
