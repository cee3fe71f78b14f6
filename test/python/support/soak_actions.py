"""Actions that the ranks of a soak repeat: each is a call that checks its own numbers.

All ranks make and call the same actions in the same order. Shapes and layouts are few, so that tables fill up
early, but for 300 lengths, of which full tables hold some. State cached for a mesh goes with its groups.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from dtensor_programs import OPERATORS, Input, Program, Step, difference, is_finite, outcome
from fault_programs import PROGRAMS
from sharded import placed
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import funcol

Action = Callable[[], object]

NUM_PROGRAMS = 30
WORLD = 4
SHAPES = [(8, 12), (5, 3)]
LAYOUTS: list[tuple[Placement, ...]] = [
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
]


def world_group() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def expect(holds: bool, what: object) -> None:
    if not holds:
        raise AssertionError(f"wrong numbers: {what}")


def whole_of(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(float(shape[0] * shape[1])).reshape(shape)


class Actions:
    def __init__(self, rank: int, chosen: random.Random) -> None:
        self.rank, self.chosen = rank, chosen
        self.square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        self.line = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("c",))
        self.programs = list(itertools.islice(self.drawn_programs(), NUM_PROGRAMS))
        self.model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
        fully_shard(self.model, mesh=self.line)

    def all(self) -> dict[str, Action]:
        made = {
            name: program.make(self.rank, WORLD, dist.new_group)
            for name, program in PROGRAMS.items()
            if WORLD in program.worlds and name != "fsdp2_backward"  # the same step as that of fsdp2_forward
        }
        own = [
            self.redistributes,
            self.redistributes_many,
            self.moves_to_another_mesh,
            self.moves_to_owners,
            self.moves_weights,
            self.runs_a_drawn_program,
            self.varies_lengths,
            self.drops_results,
            self.makes_a_group,
            self.makes_a_mesh,
            self.makes_mistakes,
            self.watches,
            self.checks_agreement,
            self.uses_threads,
        ]
        return made | {action.__name__: action for action in own}

    def drawn_programs(self) -> Iterator[tuple[Program, list[Tensor]]]:
        """Yields programs of operators on DTensors, with what one process gives."""
        names, words = sorted(OPERATORS), ("R", "S0", "S1", "Psum")
        pick, number = self.chosen.choice, self.chosen.randrange
        while True:
            inputs = tuple(Input(pick(SHAPES), (pick(words),), number(100)) for _ in range(2))
            steps = tuple(Step(pick(names), number(12), number(12), number(12)) for _ in range(10))
            program = Program(inputs, steps, number(2) == 0)
            expected = outcome(program, lambda whole, _: whole)
            if is_finite(expected):
                assert not isinstance(expected, str)
                yield program, expected

    def dtensor(self) -> tuple[Tensor, DTensor]:
        whole = whole_of(self.chosen.choice(SHAPES))
        return whole, distribute_tensor(whole, self.square, self.chosen.choice(LAYOUTS))

    def redistributes(self) -> None:
        whole, dtensor = self.dtensor()
        moved = funcol.redistribute(dtensor, placements=self.chosen.choice(LAYOUTS))
        expect(torch.equal(moved.full_tensor(), whole), moved)

    def redistributes_many(self) -> None:
        wholes, dtensors = zip(*[self.dtensor() for _ in range(4)], strict=True)
        moved = funcol.redistribute_many(dtensors, [Replicate(), Replicate()], async_op=True)
        expect(all(map(torch.equal, [one.to_local() for one in moved], wholes)), moved)

    def moves_to_another_mesh(self) -> None:
        whole, dtensor = self.dtensor()
        moved = funcol.redistribute(dtensor, self.line, [Shard(self.chosen.randrange(2))])
        expect(torch.equal(moved.full_tensor(), whole), moved)

    def moves_to_owners(self) -> None:
        wholes, dtensors = zip(*[self.dtensor() for _ in range(4)], strict=True)
        owners = [self.chosen.randrange(WORLD) for _ in dtensors]
        owned = funcol.redistribute_many(dtensors, [funcol.redistribution.Owned(owner) for owner in owners])
        held = [(one.whole, whole) for one, whole in zip(owned, wholes, strict=True) if one.whole is not None]
        expect(len(held) == owners.count(self.rank) and all(torch.equal(*pair) for pair in held), owned)

    def moves_weights(self) -> None:
        source = self.chosen.randrange(WORLD)
        whole = funcol.full_state_dict(self.model, to=source)
        funcol.load_full_state_dict(self.model, whole if self.rank == source else None, src=source)
        again = funcol.full_state_dict(self.model, to=source)
        expect(
            whole.keys() == again.keys() and all(torch.equal(whole[name], again[name]) for name in whole),
            again,
        )

    def runs_a_drawn_program(self) -> None:
        program, expected = self.chosen.choice(self.programs)
        actual = outcome(program, lambda whole, layout: placed(whole, layout, self.line))
        if not isinstance(actual, str):  # else a refusal
            expect(difference(actual, expected) is None, program)

    def varies_lengths(self) -> None:
        for length in [self.chosen.randrange(1, 300) for _ in range(30)]:
            whole = torch.arange(2.0 * length).reshape(length, 2) / length
            dtensor = distribute_tensor(whole, self.line, [Shard(0)])
            result = (dtensor * 2 + 1).softmax(1)
            moved = funcol.redistribute(result, placements=[Shard(1)]).full_tensor()
            expect(torch.equal(moved, (whole * 2 + 1).softmax(1)), length)

    def drops_results(self) -> None:
        for _ in range(5):
            funcol.all_reduce(torch.ones(300), "sum", world_group())
        kept = funcol.all_gather_tensor(torch.ones(2, 2), 0, world_group())
        funcol.redistribute_many([self.dtensor()[1]], [Replicate(), Replicate()], async_op=True)
        expect(kept.view(-1)[1:].sum().item() == 15, kept)

    def makes_a_group(self) -> None:
        group = dist.new_group(timeout=timedelta(seconds=60))
        total = funcol.all_reduce(torch.full((3,), float(self.rank)), "sum", group)
        funcol.all_reduce(torch.ones(3), "sum", group)  # dropped before its group goes
        expect(total.tolist() == [6.0] * 3, total)
        dist.destroy_process_group(group)

    def makes_a_mesh(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        whole = whole_of(self.chosen.choice(SHAPES))
        moved = distribute_tensor(whole, mesh, [Shard(0), Shard(1)]).redistribute(
            placements=[Shard(1), Shard(0)]
        )
        expect(torch.equal((moved * 2).sum(0).full_tensor(), (whole * 2).sum(0)), moved)
        for group in mesh.get_all_groups():
            dist.destroy_process_group(group)

    def makes_mistakes(self) -> None:
        mistakes: list[Callable[[], object]] = [
            lambda: funcol.reduce_scatter_tensor(torch.ones(5), "sum", 0, world_group()),
            lambda: funcol.all_reduce(torch.ones(5), "no such op", world_group()),
            lambda: funcol.redistribute(self.dtensor()[1], placements=[Replicate()]),
        ]
        for mistake in mistakes:
            try:
                mistake()
            except (ValueError, RuntimeError):
                continue
            raise AssertionError("a mistake was not noticed")

    def watches(self) -> None:
        funcol.collectives.record_callers()
        try:
            result = funcol.all_reduce(torch.ones(4), "sum", world_group())
            lines = [str(one) for one in funcol.pending()]
            expect(result.sum().item() == 16, lines)
            with Path("/dev/null").open("w") as nowhere:
                funcol.collectives.dump_pending(nowhere)
        finally:
            funcol.collectives.record_callers(False)

    def checks_agreement(self) -> None:
        with funcol.check_agreement():
            total = funcol.all_reduce(torch.ones(4), "sum", world_group())
            expect(total.sum().item() == 16, total)

    def uses_threads(self) -> None:
        """Started here, used in another thread."""
        seen: list[Any] = []
        result = funcol.all_gather_tensor(torch.full((2,), float(self.rank)), 0, world_group())
        thread = threading.Thread(target=lambda: seen.append(result.tolist()))
        thread.start()
        thread.join()
        expect(seen == [[0.0, 0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0]], seen)
