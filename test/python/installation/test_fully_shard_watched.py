"""Programs that watch or replace functions of FSDP2 see the same with funcol under it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import sys
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fsdp_checks import assert_same
from fsdp_programs import batch, blocks, sharded, state, steps
from programs import settled
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

import funcol
from funcol.commands.info import info
from funcol.installation import fully_shard as under

ON_DEVICES = True


def group_of(module: Any) -> Any:
    state = module._get_fsdp_state()
    return state._fsdp_param_group  # older releases have no more than one


# The Python of FSDP2 that gathers parameters and reduces gradients.
IN_PYTHON = {
    "foreach_all_gather",
    "foreach_all_gather_copy_out",
    "foreach_reduce",
    "post_backward",
    "unshard",
}


def is_served(rank: int, world: int, module: str, program: str, args: tuple[Any, ...]) -> None:
    called = set()

    def notes(frame: Any, event: str, arg: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and "_fully_shard" in file and "funcol" not in file:
            called.add(frame.f_code.co_name)

    with funcol.installed():
        sys.setprofile(notes)
        try:
            getattr(importlib.import_module(module), program)(rank, world, *args)
        finally:
            sys.setprofile(None)
    assert called.isdisjoint(IN_PYTHON), called & IN_PYTHON


@pytest.mark.skipif(torch.__version__ < "2.15", reason="C++ serves parts of older FSDP2 only")
@pytest.mark.parametrize(
    ("program", "world", "args"),
    [
        ("fsdp_programs.trains", 2, ()),
        ("fsdp_programs.mixes", 2, ("bfloat16", "float32", "")),
        ("fsdp_programs.mixes", 2, ("bfloat16", "", "float32")),
        ("fsdp_programs.trains_in_16_bits", 2, ()),
        ("fsdp_programs.accumulates_mixed", 2, ()),
        ("fsdp_programs.offloads", 2, ()),
        ("fsdp_programs.offloads_mixed", 2, ()),
        ("fsdp_programs.replicates", 4, ("float32",)),
        ("fsdp_programs.over_tensor_parallel", 4, ()),
        ("fsdp_extensions.mixes_by_parameter", 2, ()),
        ("fsdp_programs.trains_with_types", 2, (True,)),
    ],
    ids=str,
)
def test_groups_are_gathered_and_reduced_in_cpp(program: str, world: int, args: tuple[str, ...]) -> None:
    module, _, name = program.partition(".")
    run_ranks(is_served, world, module, name, args)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("of_instance", [True, False])
@pytest.mark.parametrize(
    "path",
    [
        "FSDPParam.to_sharded",
        "FSDPParam.to_unsharded",
        "FSDPParam.init_unsharded_param",
        "FSDPParam.to_sharded_dtensor",
        "FSDPParamGroup.unshard",
        "FSDPParamGroup.wait_for_unshard",
        "FSDPParamGroup.reshard",
        "FSDPParamGroup._to_sharded",
        "FSDPParamGroup._to_unsharded",
        "FSDPParamGroup.pre_forward",
        "FSDPParamGroup.pre_backward",
        "FSDPParamGroup.post_backward",
    ],
)
@on_ranks(2)
def test_a_method_that_somebody_replaced_is_called(
    rank: int, world: int, path: str, of_instance: bool
) -> None:
    """Replaces a method of FSDP2's classes by one that counts; it is called as often as in PyTorch."""
    owner_name, _, name = path.partition(".")
    owner_class = getattr(_fsdp_param if owner_name == "FSDPParam" else _fsdp_param_group, owner_name)
    original = getattr(owner_class, name)
    seen = []

    def counts(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return original(self, *args, **kwargs)

    def run() -> int:
        seen.clear()
        model = sharded(blocks())
        steps(model, rank, 1)
        group = group_of(model[0])
        one = group if owner_name == "FSDPParamGroup" else group.fsdp_params[0]
        owner = one if of_instance else owner_class
        model.zero_grad()
        with mock.patch.object(owner, name, counts.__get__(one) if of_instance else counts):
            steps(model, rank, 1)
        found = len(seen)
        steps(model, rank, 1)
        assert len(seen) == found
        return found

    expected = run()
    assert expected > 0
    with funcol.installed():
        assert run() == expected


_IN_FSDP2 = "torch.distributed.fsdp._fully_shard."


@pytest.mark.sampled(5)
@pytest.mark.skipif(
    not under.replaced_and_unsupported()[0] or bool(under.replaced_and_unsupported()[1]),
    reason="not all is taken over",
)
@pytest.mark.parametrize(
    ("module", "path", "how"),
    [
        ("_fsdp_collectives", "DefaultAllGather.allocate", "plain"),
        ("_fsdp_collectives", "DefaultReduceScatter.__call__", "plain"),
        ("_fsdp_param_group", "foreach_all_gather", "wraps"),
        ("_fsdp_param_group", "foreach_all_gather", "plain"),
        ("_fsdp_collectives", "foreach_reduce_scatter_copy_in", "wraps"),
        ("_fsdp_collectives", "_get_gradient_divide_factors", "plain"),
        ("_fsdp_param", "FSDPParam.to_sharded", "wraps"),
        ("_fsdp_param", "FSDPParam.init_unsharded_param", "no_grad"),
        ("_fsdp_param_group", "FSDPParamGroup.unshard", "wraps"),
        ("_fsdp_param_group", "FSDPParamGroup.pre_forward", "wraps"),
        ("_fsdp_param_group", "FSDPParamGroup.post_backward", "plain"),
        ("_fsdp_param_group", "record_function", "plain"),
        ("torch.distributed", "all_gather_single", "wraps"),
        pytest.param("torch.cpu", "Stream.wait_stream", "wraps", marks=pytest.mark.cpu_only),
    ],
)
@on_ranks(2)
def test_what_somebody_replaced_before_is_called(
    rank: int, world: int, module: str, path: str, how: str
) -> None:
    """Checks that a wrapper installed before funcol is called as often as without funcol."""
    owner: Any = importlib.import_module(_IN_FSDP2 + module if module.startswith("_") else module)
    *classes, name = path.split(".")
    for one in classes:
        owner = getattr(owner, one)
    original = getattr(owner, name)
    seen = []

    def counts(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return original(*args, **kwargs)

    if how == "wraps":
        functools.update_wrapper(counts, original)
    if how == "no_grad":
        counts = torch.no_grad()(counts)

    def run() -> tuple[int, list[Tensor]]:
        seen.clear()
        torch.manual_seed(0)
        found = settled(steps(sharded(blocks()), rank, 2))
        return len(seen), found

    with mock.patch.object(owner, name, counts):
        expected_count, expected = run()
        assert expected_count > 0
        with funcol.installed():
            count, found = run()
            assert count == expected_count
            assert_same(found, expected)
            if (owner, name) not in ((torch.cpu.Stream, "wait_stream"),):
                assert name in " ".join(under.patched_by_programs())
                assert name in info()
        assert run()[0] == expected_count
    assert inspect.getattr_static(owner, name, None) is not counts
    assert not under.patched_by_programs()


def counts_replaced_collectives(rank: int, world: int, name: str) -> None:
    original = getattr(dist, name)
    seen = []

    def counts(*args: Any, **kwargs: Any) -> Any:
        seen.append(name)
        return original(*args, **kwargs)

    def run() -> int:
        seen.clear()
        with mock.patch.object(dist, name, counts):
            steps(sharded(blocks()), rank, 1)
        return len(seen)

    expected = run()
    with funcol.installed():
        assert run() == expected


@pytest.mark.parametrize(
    "name",
    ["all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"],
)
def test_a_collective_that_somebody_replaced_is_called(name: str) -> None:
    if not hasattr(dist, name):
        pytest.skip(f"this PyTorch has no {name}")
    run_ranks(counts_replaced_collectives, 2, name)


@on_ranks(2)
def test_it_logs_the_same(rank: int, world: int) -> None:
    logger = logging.getLogger(_fsdp_param_group.__name__)

    def run() -> list[str]:
        found: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
        logger.addHandler(handler)
        with mock.patch.object(logger, "level", logging.DEBUG), mock.patch.dict(logger._cache, clear=True):
            steps(sharded(blocks()), rank, 1)
        logger.removeHandler(handler)
        logger._cache.clear()
        return found

    expected = run()
    with funcol.installed():
        assert run() == expected


@on_ranks(2)
def test_an_error_of_a_collective_reaches_the_caller(rank: int, world: int) -> None:
    """Checks that an error of a collective reaches the caller, and that the next step runs."""

    def run() -> tuple[str, list[Tensor]]:
        torch.manual_seed(0)
        model = sharded(blocks())
        steps(model, rank, 1)

        def fails(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no network")

        collectives = ["all_gather_single", "all_gather_into_tensor"]
        with contextlib.ExitStack() as stack:
            for name in filter(partial(hasattr, dist), collectives):
                stack.enter_context(mock.patch.object(dist, name, fails))
            with pytest.raises(RuntimeError, match="no network") as error:
                model(batch(rank))
        return str(error.value), state(model)

    expected = run()
    with funcol.installed():
        found = run()
    assert found[0] == expected[0]
    assert_same(settled(found[1]), settled(expected[1]))


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_a_dispatch_mode_sees_the_same_operators(rank: int, world: int) -> None:
    def run() -> list[str]:
        model = sharded(blocks())
        steps(model, rank, 1)
        with Operators() as mode:
            model(batch(rank)).square().mean().backward()
        return mode.names

    expected = run()
    with funcol.installed():
        found = run()
    assert [name for name in found if "fsdp" in name or "c10d" in name] == [
        name for name in expected if "fsdp" in name or "c10d" in name
    ]
    assert any("all_gather_copy_in" in name for name in found)


@on_ranks(2)
def test_a_profiler_sees_the_same_ranges(rank: int, world: int) -> None:
    def run() -> list[str]:
        model = sharded(blocks())
        with torch.profiler.profile() as profile:
            steps(model, rank, 1)
        return sorted(event.name for event in profile.events() if event.name.startswith("FSDP::"))

    expected = run()
    assert expected
    with funcol.installed():
        assert run() == expected
