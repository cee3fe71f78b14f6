"""FSDP2 does the same, bit for bit and call for call, with funcol under it."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import logging
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import fsdp_programs as programs
import pytest
import torch
import torch.distributed as dist
from fsdp_programs import Block, batch, blocks, recorded, sharded, state, steps
from programs import settled
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.utils._python_dispatch import TorchDispatchMode

import funcol
from funcol import dropin
from funcol.commands.info import info
from funcol.dropin import fully_shard as under
from funcol.dropin import fully_shard_on_import


def check(program: Callable[..., list[Tensor]], world: int, *args: Any) -> None:
    """``program`` gives the same with funcol, and asks the same of streams and groups in the same order."""
    run_ranks(does_the_same, world, program.__module__, program.__name__, args)


def does_the_same(rank: int, world: int, module: str, name: str, args: tuple[Any, ...]) -> None:
    program = getattr(importlib.import_module(module), name)

    def run() -> tuple[list[Tensor], list[Any], programs.Log]:
        torch.manual_seed(0)
        with recorded() as log:
            results = program(rank, world, *args)
        return settled(results), [getattr(result, "placements", None) for result in results], log

    expected = run()
    with funcol.installed():
        found = run()
        torch.manual_seed(0)
        unwatched = settled(program(rank, world, *args))
    assert found[2] == expected[2]
    assert found[1] == expected[1]
    assert_same(found[0], expected[0])
    assert_same(unwatched, expected[0])
    assert_same(run()[0], expected[0])


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert found
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_training_loop(world: int, reshard: bool) -> None:
    check(programs.trains, world, reshard)


def test_resharding_to_fewer_ranks_after_the_forward_pass() -> None:
    check(programs.trains, 4, 2)


@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_accumulated_without_reduction(reshard: bool) -> None:
    check(programs.accumulates, 2, reshard)


@pytest.mark.parametrize("outside", [True, False])
def test_activation_checkpointing(outside: bool) -> None:
    check(programs.recomputes, 2, outside)


@pytest.mark.parametrize(
    "types",
    [
        ("bfloat16", "float32", ""),
        ("bfloat16", "bfloat16", "float32"),
        ("bfloat16", "", ""),
        ("float16", "float16", ""),
        ("", "bfloat16", ""),
        ("", "float64", ""),
    ],
)
def test_mixed_precision(types: tuple[str, str, str]) -> None:
    check(programs.mixes, 2, *types)


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_factor_that_gradients_are_divided_by(factor: float) -> None:
    check(programs.divides_by, 2, factor)


@pytest.mark.parametrize(
    "program",
    [
        programs.accumulates_mixed,
        programs.clips_and_optimizes,
        programs.evaluates,
        programs.evaluates_first_in_inference_mode,
        programs.fails_between,
        programs.freezes,
        programs.keeps_gradients,
        programs.leaves_some_unused,
        programs.nests,
        programs.offloads,
        programs.optimizes_in_the_backward_pass,
        programs.passes_structures,
        programs.prefetches,
        programs.runs_twice,
        programs.saves_and_loads,
        programs.sets_by_its_own,
        programs.shards_columns,
        programs.shares,
        programs.trains_in_16_bits,
        programs.unshards_by_hand,
    ],
    ids=lambda program: program.__name__,
)
def test_a_program(program: Callable[..., list[Tensor]]) -> None:
    check(program, 2)


def test_replicas_of_shards() -> None:
    check(programs.replicates, 4)


def shards_tensor_parallel_modules(rank: int, world: int) -> None:
    def run() -> tuple[list[Tensor], programs.Log]:
        with recorded() as log:
            return settled(programs.over_tensor_parallel(rank, world)), log

    # Partial sums of DTensors may be added up in another order with funcol: it is there in both.
    with funcol.installed():
        found = run()
        fully_shard_on_import.take()
        expected = run()
    assert found[1] == expected[1]
    assert_same(found[0], expected[0])


def test_tensor_parallel_modules() -> None:
    run_ranks(shards_tensor_parallel_modules, 4)


# Coming and going


def changes_between_steps(rank: int, world: int) -> None:
    def run(come_and_go: bool) -> list[Tensor]:
        model = sharded(blocks())
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        found = []
        for step in range(6):
            if come_and_go:
                funcol.uninstall() if step % 2 else funcol.install()
            loss = model(batch(rank, step)).square().mean()
            if come_and_go and step in (3, 4):  # between forward and backward pass, too
                funcol.uninstall() if dropin.is_installed() else funcol.install()
            loss.backward()
            found += programs.copies(state(model))
            optimizer.step()
            optimizer.zero_grad()
        return settled(found)

    expected = run(come_and_go=False)
    try:
        assert_same(run(come_and_go=True), expected)
    finally:
        funcol.uninstall()


def test_a_model_may_see_funcol_come_and_go() -> None:
    run_ranks(changes_between_steps, 2)


def codes() -> dict[str, Any]:
    names = [part.theirs for part in under._PARTS] + list(under._HOOKS) + list(under._WITHOUT_GRADIENTS)
    functions = {name: under._looked_up(name) for name in names}
    inner = {f"{name}, undecorated": inspect.unwrap(functions[name]) for name in names if functions[name]}
    return {
        name: (function, function.__code__, function.__kwdefaults__)
        for name, function in {**functions, **inner}.items()
        if function is not None
    }


def test_uninstall_leaves_every_function_as_it_was() -> None:
    before = codes()
    with funcol.installed():
        assert codes() != before
    assert codes() == before
    assert _fsdp_param_group.record_function is torch.profiler.record_function


def test_functions_stay_the_same_objects_with_their_signatures() -> None:
    before = {name: (id(found), inspect.signature(found)) for name, (found, *_) in codes().items()}
    with funcol.installed():
        during = {name: (id(found), inspect.signature(found)) for name, (found, *_) in codes().items()}
    assert during == before


IMPORTS_LATE = """
import sys, funcol
funcol.install()
assert "torch.distributed.fsdp" not in sys.modules
import torch.distributed.fsdp
from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
import torch.profiler
assert record_function is not torch.profiler.record_function
funcol.uninstall()
from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
assert record_function is torch.profiler.record_function
"""

IMPORTS_TOO_LATE = """
import funcol
with funcol.installed(): pass
from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
import torch.profiler
assert record_function is torch.profiler.record_function
with funcol.installed():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import record_function
    assert record_function is not torch.profiler.record_function
"""


@pytest.mark.parametrize("program", [IMPORTS_LATE, IMPORTS_TOO_LATE], ids=["during", "after"])
def test_fsdp2_imported_after_install_is_taken_over(program: str) -> None:
    subprocess.run([sys.executable, "-c", program], check=True)


def test_this_minor_has_the_functions_that_are_taken_over() -> None:
    taken, left = under.taken_over()
    assert "FSDPParamGroup._to_unsharded" in taken
    if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15):
        assert not left


def test_what_is_taken_over_is_the_same_while_it_is() -> None:
    before = under.taken_over()
    with funcol.installed():
        assert under.taken_over() == before


def test_a_function_of_another_kind_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fsdp_param.FSDPParam, "to_unsharded", lambda self: None)
    assert "FSDPParamGroup._to_unsharded" in under.taken_over()[1]


def trains_under_a_checker_of_types(rank: int, world: int, checks: bool) -> None:
    import spmd_types
    from spmd_types.checker import typecheck
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    axis = spmd_types.MeshAxis.of(mesh.get_group("dp"))
    options: Any = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}

    def checking() -> Any:
        return typecheck(strict_mode="strict") if checks else contextlib.nullcontext()

    def run() -> list[Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5)) for _ in range(3)))
        for parameter in model.parameters():
            spmd_types.assert_type(parameter, {axis: spmd_types.R})
        sharded(model, **options)
        found = []
        for step in range(3):
            x = batch(rank, step).requires_grad_()
            with checking():
                spmd_types.assert_type(x, {axis: spmd_types.V})
                out = model(x)
                types = spmd_types.get_local_type(out)
                assert not checks or types == {axis: spmd_types.V}
                loss = out.square().mean()
            loss.backward()
            found += [loss.detach(), *programs.copies(state(model))]
        return settled(found)

    expected = run()
    with funcol.installed():
        assert not under.taken_over()[1]
        assert_same(run(), expected)


@pytest.mark.skipif(
    not getattr(dist, "_is_spmd_types_available", bool)(), reason="no package here checks types"
)
@pytest.mark.parametrize("checks", [True, False])
def test_under_a_checker_of_types(checks: bool) -> None:
    run_ranks(trains_under_a_checker_of_types, 2, checks)


# Those who watch


def group_of(module: Any) -> Any:
    state = module._get_fsdp_state()
    return state._fsdp_param_group  # older minors have no more than one


def counts_replaced_methods(rank: int, world: int, path: str, of_instance: bool) -> None:
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
def test_a_method_that_somebody_replaced_is_called(path: str, of_instance: bool) -> None:
    run_ranks(counts_replaced_methods, 2, path, of_instance)


_IN_FSDP2 = "torch.distributed.fsdp._fully_shard."


def counts_what_was_replaced_before(rank: int, world: int, module: str, path: str, how: str) -> None:
    """What a program put around a function before funcol came is called as often as without funcol."""
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
                assert name in " ".join(under.not_pytorchs())
                assert name in info()
        assert run()[0] == expected_count
    assert inspect.getattr_static(owner, name, None) is not counts
    assert not under.not_pytorchs()


@pytest.mark.skipif(not under.taken_over()[0] or bool(under.taken_over()[1]), reason="not all is taken over")
@pytest.mark.parametrize(
    ("module", "path", "how"),
    [
        ("_fsdp_collectives", "DefaultAllGather.allocate", "plain"),
        ("_fsdp_collectives", "DefaultReduceScatter.__call__", "plain"),
        ("_fsdp_param_group", "foreach_all_gather", "wraps"),
        ("_fsdp_param_group", "foreach_all_gather", "plain"),
        ("_fsdp_collectives", "foreach_reduce_scatter_copy_in", "wraps"),
        ("_fsdp_param", "FSDPParam.to_sharded", "wraps"),
        ("_fsdp_param", "FSDPParam.init_unsharded_param", "no_grad"),
        ("_fsdp_param_group", "FSDPParamGroup.unshard", "wraps"),
        ("_fsdp_param_group", "FSDPParamGroup.pre_forward", "wraps"),
        ("_fsdp_param_group", "FSDPParamGroup.post_backward", "plain"),
        ("_fsdp_param_group", "record_function", "plain"),
        ("torch.distributed", "all_gather_single", "wraps"),
        ("torch.cpu", "Stream.wait_stream", "wraps"),
    ],
)
def test_what_somebody_replaced_before_is_called(module: str, path: str, how: str) -> None:
    run_ranks(counts_what_was_replaced_before, 2, module, path, how)


def test_an_install_that_fails_undoes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    before = codes()

    def fails(parts: Any) -> None:
        raise ValueError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(under, "_know", fails)
        with pytest.raises(ValueError, match="on purpose"):
            funcol.install()
        with pytest.raises(ValueError, match="on purpose"), funcol.installed():
            pass
    assert not dropin.is_installed()
    assert not dropin.is_under_dtensor()
    assert codes() == before
    with funcol.installed():
        assert codes() != before
    assert codes() == before


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


def logs_what_it_does(rank: int, world: int) -> None:
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


def test_it_logs_the_same() -> None:
    run_ranks(logs_what_it_does, 2)


def fails_in_a_collective(rank: int, world: int) -> None:
    """What a collective raises reaches the caller, and the next step runs."""

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


def test_an_error_of_a_collective_reaches_the_caller() -> None:
    run_ranks(fails_in_a_collective, 2)


class Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def shows_its_operators(rank: int, world: int) -> None:
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


def test_a_dispatch_mode_sees_the_same_operators() -> None:
    run_ranks(shows_its_operators, 2)


def shows_its_ranges(rank: int, world: int) -> None:
    def run() -> list[str]:
        model = sharded(blocks())
        with torch.profiler.profile() as profile:
            steps(model, rank, 1)
        return sorted(event.name for event in profile.events() if event.name.startswith("FSDP::"))

    expected = run()
    assert expected
    with funcol.installed():
        assert run() == expected


def test_a_profiler_sees_the_same_ranges() -> None:
    run_ranks(shows_its_ranges, 2)


# Compiled


def compiled(place: str, checkpoint: str, **options: Any) -> Any:
    """A model of blocks that FSDP2 has hooks on, compiled in one of several places."""

    def compile_(module: Any) -> None:
        module.compile(backend="aot_eager", **options)

    model: Any = blocks()
    for i, block in enumerate(model):
        if place == "within the blocks":
            compile_(block.up)
            compile_(block.norm)
        if place == "blocks, then sharded":
            compile_(block)
        if checkpoint == "within":
            block = checkpoint_wrapper(block)
        if place == "blocks as another module":
            block = torch.compile(block, backend="aot_eager", **options)
        model[i] = fully_shard(block)
        if place == "sharded blocks":
            compile_(block)
        if checkpoint == "around":
            model[i] = checkpoint_wrapper(block)
    fully_shard(model)
    if place == "everything":
        compile_(model)
    if place == "a step":

        @torch.compile(backend="aot_eager", **options)
        def step(x: Tensor) -> Tensor:
            return model(x * 2).sin()

        step.parameters = model.parameters
        return step
    return model


def compiles(rank: int, world: int, place: str, checkpoint: str, fullgraph: bool) -> None:
    def run() -> tuple[list[Tensor], dict[str, dict[str, int]], str]:
        torch._dynamo.reset()
        counters = torch._dynamo.utils.counters
        counters.clear()
        error = ""
        found: list[Tensor] = []
        try:
            model = compiled(place, checkpoint, fullgraph=fullgraph)
            found = settled(steps(model, rank, 3, torch.optim.SGD(model.parameters(), 0.1)))
        except Exception as raised:  # Dynamo's, of several classes
            error = str(raised).splitlines()[0]
        names = ("stats", "frames", "graph_break", "unimplemented", "recompile_limit")
        return found, {name: dict(counters[name]) for name in names}, error

    found_before, counts_before, error_before = run()
    # Hooks within blocks keep Dynamo of older minors from any graph.
    assert any(counts_before.values()) or error_before or place == "within the blocks"
    with funcol.installed():
        found, counts, error = run()
    assert error == error_before
    assert counts == counts_before
    torch.testing.assert_close(found, found_before, rtol=0, atol=0)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("checkpoint", ["", "within", "around"])
@pytest.mark.parametrize(
    "place",
    [
        "within the blocks",
        "blocks, then sharded",
        "blocks as another module",
        "sharded blocks",
        "everything",
        "a step",
    ],
)
def test_compiled_modules(place: str, checkpoint: str, fullgraph: bool) -> None:
    run_ranks(compiles, 2, place, checkpoint, fullgraph, timeout=180)


def compiles_with_and_without(rank: int, world: int) -> None:
    """A model that was compiled with funcol runs on without it, and the other way round, and is not compiled
    once more for that."""

    def run(come_and_go: bool) -> tuple[list[Tensor], int]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = compiled("blocks, then sharded", "", fullgraph=True)
        found = []
        for step in range(4):
            if come_and_go:
                funcol.uninstall() if step % 2 else funcol.install()
            found += steps(model, rank, 1)
        return settled(found), torch._dynamo.utils.counters["stats"]["unique_graphs"]

    expected, num_graphs = run(come_and_go=False)
    try:
        found, num_graphs_found = run(come_and_go=True)
    finally:
        funcol.uninstall()
    assert_same(found, expected)
    assert num_graphs_found == num_graphs


def test_a_compiled_model_may_see_funcol_come_and_go() -> None:
    run_ranks(compiles_with_and_without, 2, timeout=180)


def test_a_block_is_uneven_on_every_world_here() -> None:
    sizes = [tuple(parameter.shape) for parameter in Block().parameters()]
    assert (1,) in sizes
    assert all(size[0] % 2 for size in sizes)
