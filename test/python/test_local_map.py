"""Functions on local tensors in eager mode: values, gradients and errors, on real ranks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from local_programs import (
    PROGRAMS,
    P,
    R,
    S,
    applied,
    check,
    expected,
    sharded_leaves,
    tensors_of,
    weighted,
    whole_tensors,
)
from ranks import run_ranks
from sharded import mesh_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import funcol
from funcol import apply_local_map


def runs_as_a_whole(rank: int, world: int, name: str) -> None:
    program = PROGRAMS[name]
    mesh = mesh_of(program.mesh_shape)
    leaves = sharded_leaves(program, mesh)
    results = tensors_of(applied(program, mesh)(*leaves))
    gradients = torch.autograd.grad(weighted([one.full_tensor() for one in results]), leaves)
    check(program, results, gradients)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_are_those_of_one_process(name: str) -> None:
    run_ranks(runs_as_a_whole, PROGRAMS[name].world(), name)
