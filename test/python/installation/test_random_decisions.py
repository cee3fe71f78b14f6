"""With funcol under DTensor, decisions are PyTorch's own, for calls that are drawn: any operator with a rule,
any placements, strided shards, partials of every kind, even and uneven sizes, one to three axes."""

from __future__ import annotations

import functools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from operator_samples import INFOS, calls_of
from sharded import Layout
from simulated import Call, Simulation, specs_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import _MaskPartial
from versions import needs_decisions_in_cpp
from wrong_in_pytorch import WRONG_IN_PYTORCH

from funcol import _compat
from funcol.installation.dtensor import redistribute_cost
from funcol.installation.propagation import InstalledPropagator

WORLD = 8

pytestmark = [
    pytest.mark.usefixtures("fake_world"),
    needs_decisions_in_cpp,
]

MESHES = {1: [0, 1], 2: [[0, 1], [2, 3]], 3: [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]}
LONG, SHORT = 20_000, 100
PARTS = 20  # of the long test


class Drawn(NamedTuple):
    """A call with the layouts of its tensors, on a mesh of so many axes."""

    call: Call
    layouts: list[Layout]
    axes: int


def partials_of(tensor: Tensor) -> list[str]:
    kinds = ["Psum", "Pavg", "Pmax", "Pmin", "Pproduct"]
    return kinds if tensor.dtype.is_floating_point else [*kinds, "Pband", "Pbor", "Pbxor"]


def draw_layout(choose: random.Random, tensor: Tensor, axes: int) -> Layout:
    """On an axis replicated, cut, at times in pieces, or partial, mostly in one way on all axes."""
    shards = [f"S{dim}" for dim in range(tensor.dim())] or ["R"]
    strided = [f"_S{dim}/2" for dim in range(tensor.dim())] or ["R"]
    kind = choose.choice(partials_of(tensor))

    def word() -> str:
        drawn = choose.random()
        if drawn < 0.3:
            return "R"
        if drawn < 0.7:
            return choose.choice(shards if drawn < 0.65 else strided)
        return kind if drawn < 0.95 else choose.choice(partials_of(tensor))

    return Layout(tuple(word() for _ in range(axes)))


@functools.cache
def known_calls(name: str, num_samples: int = 12) -> list[Call]:
    """Returns the calls of operators with rules in samples of ``name`` of PyTorch's operator database."""
    stock = DTensor._op_dispatcher.sharding_propagator
    torch.manual_seed(0)
    calls = [call for info in INFOS[name] for call in calls_of(info, num_samples)]
    return [call for call in calls if _compat.has_rule(stock, call.op) and not is_left_out(call)]


def is_left_out(call: Call) -> bool:
    """Reshapes with several sizes of 0, for which PyTorch's rule does not end; and gathers of nothing, which
    nobody can decide wrongly."""
    name = call.op.name().partition("::")[2]
    is_empty = not all(tensor.numel() for tensor in call.tensors())
    return is_empty and name in ("view", "view_copy", "reshape", "_unsafe_view", "gather")


def drawn_from(calls: list[Call], choose: random.Random, most_axes: int = 3) -> Drawn:
    call = choose.choice(calls)
    axes = min(choose.choices([1, 2, 3], weights=[9, 8, 3])[0], most_axes)
    return Drawn(call, [draw_layout(choose, one, axes) for one in call.tensors()], axes)


def evenly_drawn_from(calls: list[Call], choose: random.Random) -> Drawn:
    """Returns a call whose tensors are placed alike on both axes, each in its own way."""
    call = choose.choice(calls)
    layouts = [Layout(draw_layout(choose, one, 1).words * 2) for one in call.tensors()]
    return Drawn(call, layouts, 2)


def draws(count: int, seed: int, num_samples: int = 12) -> Iterator[Drawn]:
    """Yields ``count`` calls, the same for a seed. An operator is drawn first, then one of its calls."""
    choose = random.Random(seed)
    names = sorted(INFOS)
    while count:
        calls = known_calls(choose.choice(names), num_samples)
        if calls:
            yield drawn_from(calls, choose)
            count -= 1


def placements_of(specs: Any) -> list[Any]:
    """Masks as text, since every decision has a mask of its own."""

    def comparable(placement: Placement) -> object:
        return str(placement) if isinstance(placement, _MaskPartial) else placement

    listed = list(specs) if isinstance(specs, (list, tuple)) else [specs]
    return [None if spec is None else list(map(comparable, spec.placements)) for spec in listed]


def answer(schema: OpSchema, sharding: OutputSharding) -> tuple[list[Any], list[Any]]:
    wanted = (sharding.redistribute_schema if sharding.needs_redistribute else None) or schema
    return placements_of(sharding.output_spec), placements_of(specs_of(wanted))


def is_wrong(simulation: Simulation) -> bool:
    """Returns true if PyTorch's decision gives a wrong result or an operator that does not run."""
    try:
        simulation.check()
    except Exception:  # a WrongResultError, or what PyTorch's decision raises on another rank
        return True
    return False


def compare(drawn: Drawn, meshes: dict[int, DeviceMesh], ours: InstalledPropagator) -> str:
    """Returns ``"equal"``, ``"refused"`` by PyTorch, ``"unreachable"`` for PyTorch, which has no way to its
    decision, or a text about what differs."""
    stock = DTensor._op_dispatcher.sharding_propagator
    simulation = Simulation(stock, meshes[drawn.axes], drawn.call, drawn.layouts)
    schema = simulation.schema()
    try:
        theirs = stock.propagate_op_sharding_non_cached(schema)
    except Exception:  # rules raise anything for calls that they refuse
        return "refused"
    try:
        mine: Any = answer(schema, ours.propagate_op_sharding_non_cached(schema))
    except ValueError as error:
        mine = error
    if mine == answer(schema, theirs):
        return "equal"
    wanted = (theirs.redistribute_schema if theirs.needs_redistribute else None) or schema
    if math.inf in map(redistribute_cost, specs_of(schema), specs_of(wanted)):
        return "unreachable"
    text = f"{simulation}: {mine}, PyTorch decides {answer(schema, theirs)}"
    return f"{text}; PyTorch is {'wrong' if is_wrong(simulation) else 'right'}"


def outcomes(calls: Iterable[Drawn]) -> tuple[Counter[str], list[str]]:
    """Returns how often what came out, and the texts about calls of operators that are not on the list."""
    meshes = meshes_of_axes()
    ours = InstalledPropagator(DTensor._op_dispatcher.sharding_propagator)
    counts: Counter[str] = Counter()
    different = []
    for drawn in calls:
        outcome = compare(drawn, meshes, ours)
        if outcome in ("equal", "refused", "unreachable"):
            counts[outcome] += 1
        elif drawn.call.op.name() in WRONG_IN_PYTORCH:
            counts["wrong" if outcome.endswith("wrong") else "right by chance"] += 1
        else:
            different.append(outcome)
    return counts, different


def meshes_of_axes() -> dict[int, DeviceMesh]:
    return {axes: DeviceMesh("cpu", ranks) for axes, ranks in MESHES.items()}


def test_drawn_calls_are_decided_as_pytorch_decides_them() -> None:
    counts, different = outcomes(draws(SHORT, seed=0, num_samples=2))
    assert different == []
    assert counts["equal"] > SHORT / 2


@pytest.mark.parametrize(
    ("shape", "words"), [((1, 2, 4), ("_S1/2", "R")), ((3, 4), ("_S0/2", "Pavg")), ((5, 5), ("_S0/2",))]
)
def test_strided_shards_that_pytorch_flattens_wrongly_move_first(
    shape: tuple[int, ...], words: tuple[str, ...]
) -> None:
    flattened = Call(torch.ops.aten.view.default, (torch.zeros(shape), [math.prod(shape)]), {})
    ours = InstalledPropagator(DTensor._op_dispatcher.sharding_propagator)
    outcome = compare(Drawn(flattened, [Layout(words)], len(words)), meshes_of_axes(), ours)
    assert outcome.endswith("PyTorch is wrong")


def test_moves_beside_strided_shards_cost_what_they_cost_alone() -> None:
    """The second tensor moves to S1 R and to R R at one price: the first of the rows decides."""
    compared = Call(torch.ops.aten.gt.Tensor, (torch.zeros(10, 1, 5), torch.zeros(1, 10, 5)), {})
    layouts = [Layout(("R", "_S0/2")), Layout(("R", "S0"))]
    ours = InstalledPropagator(DTensor._op_dispatcher.sharding_propagator)
    assert compare(Drawn(compared, layouts, 2), meshes_of_axes(), ours) == "equal"


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_many_drawn_calls_are_decided_as_pytorch_decides_them(part: int, record_property: Any) -> None:
    counts, different = outcomes(draws(LONG // PARTS, seed=1 + part))
    for outcome, count in counts.items():
        record_property(outcome, count)
    assert different == []


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [name for name, wrong in WRONG_IN_PYTORCH.items() if wrong.sample])
def test_pytorch_decides_wrongly_for_an_operator_on_the_list(name: str) -> None:
    meshes = meshes_of_axes()
    ours = InstalledPropagator(DTensor._op_dispatcher.sharding_propagator)
    sample = WRONG_IN_PYTORCH[name].sample
    assert sample is not None
    calls = [call for call in known_calls(sample) if call.op.name() == name]
    choose = random.Random(name)
    drawn = (
        evenly_drawn_from(calls, choose) if number % 2 else drawn_from(calls, choose, most_axes=2)
        for number in range(400)
    )
    assert any(compare(one, meshes, ours).endswith("PyTorch is wrong") for one in drawn)
