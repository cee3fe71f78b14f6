"""A call whose operator has no result for its shapes fails as on PyTorch alone, with no more text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import pytest
import torch
from programs import mesh_of
from ranks import on_ranks
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import funcol

MOST_OWN_FRAMES = 5


def held(placement: Placement, *shape: int) -> DTensor:
    if isinstance(placement, Partial):
        return DTensor.from_local(torch.ones(shape), mesh_of(2), [placement])
    return distribute_tensor(torch.ones(shape), mesh_of(2), [placement])


cut, whole, summed = Shard(0), Replicate(), Partial()

CALLS: dict[str, Callable[[], Any]] = {
    "product": lambda: held(cut, 4, 2) @ held(whole, 3, 2),
    "product of sums": lambda: held(summed, 4, 2) @ held(whole, 3, 2),
    "batches": lambda: torch.bmm(held(cut, 4, 2, 3), held(cut, 4, 2, 3)),
    "linear": lambda: torch.nn.functional.linear(held(cut, 4, 2), held(whole, 3, 5)),
    "sum of two": lambda: held(cut, 4, 2) + held(cut, 4, 3),
    "in place": lambda: held(cut, 4, 2).add_(held(cut, 4, 3)),
    "in place on a sum": lambda: held(summed, 4, 2).mul_(held(cut, 4, 3)),
    "view": lambda: held(cut, 4, 2).view(3, 3),
    "join": lambda: torch.cat([held(cut, 4, 2), held(cut, 4, 3)], dim=0),
    "stack": lambda: torch.stack([held(cut, 4, 2), held(cut, 4, 3)]),
    "normalized": lambda: torch.nn.functional.layer_norm(held(cut, 4, 2), [3]),
    "list": lambda: torch._foreach_add([held(cut, 4, 2)], [held(cut, 4, 3)]),
    "no rule": lambda: torch.ops.aten.addbmm(held(cut, 2, 2), held(cut, 4, 2, 3), held(cut, 4, 2, 3)),
}


class Failure(NamedTuple):
    kind: type[BaseException]
    text: str
    num_frames: int
    num_own_frames: int
    num_records: int


class _Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += 1


@contextmanager
def records_of_fake_tensors() -> Iterator[_Records]:
    """Counts what PyTorch logs of operators that fail on fake tensors."""
    records, logger = _Records(), logging.getLogger("torch._subclasses.fake_tensor")
    others, logger.handlers = logger.handlers, [records]
    before, logger.propagate = logger.propagate, False
    try:
        yield records
    finally:
        logger.handlers, logger.propagate = others, before


def frames_of(error: BaseException | None) -> Iterator[TracebackType]:
    """Yields the frames that Python prints for ``error``, those of its causes included."""
    while error is not None:
        frames = error.__traceback__
        while frames is not None:
            yield frames
            frames = frames.tb_next
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def is_own(frames: TracebackType) -> bool:
    return frames.tb_frame.f_globals.get("__name__", "").startswith("funcol")


def failure_of(call: Callable[[], Any]) -> Failure:
    with records_of_fake_tensors() as records, pytest.raises(Exception) as raised:  # noqa: PT011
        call()
    frames = list(frames_of(raised.value))
    return Failure(
        type(raised.value), str(raised.value), len(frames), sum(map(is_own, frames)), records.count
    )


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_wrong_shapes_raise_pytorchs_error_with_no_more_text(rank: int, world: int, name: str) -> None:
    theirs = failure_of(CALLS[name])
    with funcol.installed():
        funcol.installation.forget_operator_counts()
        for _ in range(2):
            ours = failure_of(CALLS[name])
            assert issubclass(ours.kind, theirs.kind)
            assert ours.text.split("\n")[0] == theirs.text.split("\n")[0]
            assert ours.num_records <= theirs.num_records
            assert ours.num_own_frames <= MOST_OWN_FRAMES
            assert ours.num_frames <= theirs.num_frames + MOST_OWN_FRAMES
        # A right call afterwards is right.
        assert (held(cut, 4, 2) @ held(whole, 2, 3)).full_tensor().tolist() == [[2.0] * 3] * 4


@on_ranks(2)
def test_the_failing_shape_function_is_asked_once_a_call(rank: int, world: int) -> None:
    with funcol.installed():
        propagator = DTensor._op_dispatcher.sharding_propagator
        asked = []
        base = propagator._base  # type: ignore[attr-defined]
        original = base._propagate_tensor_meta_non_cached

        def asking(schema: Any) -> Any:
            asked.append(schema)
            return original(schema)

        base._propagate_tensor_meta_non_cached = asking
        try:
            with records_of_fake_tensors():
                for number in (1, 2):
                    with pytest.raises(RuntimeError, match="same reduction dim"):
                        held(cut, 4, 2) @ held(whole, 3, 2)
                    assert len(asked) == number
        finally:
            del base._propagate_tensor_meta_non_cached
