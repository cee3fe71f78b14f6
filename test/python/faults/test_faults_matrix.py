"""A rank is killed, stopped, leaves or raises in the middle of a program: each survivor gets an error that
names the collective.

By default a few cases run; all of them are marked ``long``.
"""

from __future__ import annotations

import itertools
import re

import pytest
from failing_ranks import ENDS, FAULTS, GRACE_S, TIMEOUT_S, run_with_fault
from fault_programs import PROGRAMS, runs_fsdp2

# Each fault and each program.
ALWAYS = {
    ("SIGKILL", "pending_collective", 4),
    ("SIGKILL", "fsdp2_backward", 2),
    ("SIGKILL", "local_map", 2),
    ("SIGSTOP", "three_steps", 4),
    ("SIGSTOP", "compiled", 2),
    ("exit", "tensor_parallel", 2),
    ("exit", "three_redistributions", 2),
    ("exception", "redistribute_many", 4),
    ("exception", "fsdp2_forward", 2),
    ("out_of_memory", "view", 2),
}


def _marks(case: tuple[str, str, int]) -> list[pytest.MarkDecorator]:
    marks = [] if case in ALWAYS else [pytest.mark.long]
    return [*marks, runs_fsdp2] if case[1].startswith("fsdp2") else marks


CASES = [
    pytest.param(*case, marks=_marks(case), id="-".join(map(str, case)))
    for fault, (program, made) in itertools.product(FAULTS, PROGRAMS.items())
    for case in ((fault, program, world) for world in made.worlds)
]


@pytest.mark.parametrize(("fault", "program", "world"), CASES)
def test_each_survivor_gets_an_error_that_names_op_group_and_shape_and_ends(
    fault: str, program: str, world: int
) -> None:
    ended = run_with_fault(program, fault, world)
    for outcome in ended.outcomes:
        assert outcome.error == "DistBackendError", outcome
        groups = "|".join(map(re.escape, outcome.groups))
        named = rf"funcol::\w+ failed on group '({groups})'; result of shape .*\[[\d, ]+\].* has no data"
        assert re.search(named, outcome.text), outcome
        assert outcome.seconds < TIMEOUT_S + GRACE_S
    exit_code, words = ENDS[fault]
    assert ended.exit_codes == [0] * (world - 1) + [exit_code]
    assert words in ended.last_words
    assert bool(words) == bool(ended.last_words)
