"""Every collective with every kind of tensor: what stock does, what a plain tensor gives, or an error.

Ranks are processes of their own, so that a crash is a failed test. ``tensor_kinds.py`` has kinds and calls.
"""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from differential import finished
from ranks import on_ranks
from slow_collectives import SlowCollective, values
from tensor_kinds import (
    BEYOND_STOCK,
    DENSE,
    FOREIGN,
    IN_PLACE,
    NOT_DENSE,
    OF_STOCK,
    OPERATORS,
    Dispatching,
    Wrapping,
)
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo

import funcol

ON_DEVICES = True

KINDS = {**DENSE, **NOT_DENSE, **FOREIGN}
CALLS = {**OF_STOCK, **BEYOND_STOCK, **IN_PLACE, **OPERATORS}
ERRORS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)

# Of one rank on the CPU alone: what becomes of a kind before and after it is sent is the same there.
worlds = pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.cpu_only), 2])


def target(call: str) -> Any:
    return torch.ops.funcol if call in OPERATORS else funcol


def plain(x: Tensor) -> Tensor:
    """Returns the values of ``x`` in a plain tensor."""
    if x._is_zerotensor():
        return torch.zeros(x.shape)
    with torch._C.DisableTorchFunctionSubclass():
        inner = x.inner if isinstance(x, Wrapping) else x
        return inner.detach().as_subclass(Tensor).resolve_conj().resolve_neg().clone()


def outcome(call: str, module: Any, x: Tensor) -> Any:
    """Returns the finished result, or the error."""
    try:
        result = CALLS[call](module, x)
        if isinstance(result, stock.AsyncCollectiveTensor):
            return result.wait()
        if isinstance(result, Wrapping):  # in flight, in stock: see finished() in differential.py
            finished(result.inner)
        return torch.ops.funcol.wait_tensor(result) if call in OPERATORS else result
    except ERRORS as error:
        return error


def are_same(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and torch.equal(
        *(torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1)).view(torch.uint8) for x in (one, other))
    )


@pytest.mark.sampled(6)
@worlds
@pytest.mark.parametrize("call", OF_STOCK)
@pytest.mark.parametrize("kind", [*DENSE, *FOREIGN])
@on_ranks()
def test_a_call_gives_what_stock_gives(rank: int, world: int, kind: str, call: str) -> None:
    expected = outcome(call, stock, KINDS[kind]())
    actual = outcome(call, funcol, KINDS[kind]())
    if isinstance(expected, Exception):
        # funcol may give a result where stock raises because of a bug.
        assert isinstance(actual, Exception) or kind in DENSE
        return
    assert not isinstance(actual, Exception), actual
    assert type(actual) is type(expected)
    assert actual.requires_grad == expected.requires_grad
    if kind in DENSE:
        assert are_same(plain(actual), plain(expected))
    else:
        assert actual.shape == expected.shape


@pytest.mark.sampled(4)
@worlds
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", DENSE)
@on_ranks()
def test_a_result_has_the_values_that_a_plain_tensor_gives(
    rank: int, world: int, kind: str, call: str
) -> None:
    actual = outcome(call, target(call), DENSE[kind]())
    expected = outcome(call, target(call), plain(DENSE[kind]()))
    if not isinstance(actual, Exception):
        assert are_same(plain(actual), plain(expected))


@pytest.mark.parametrize("call", [*OF_STOCK, *OPERATORS, *BEYOND_STOCK])
@pytest.mark.parametrize("kind", NOT_DENSE)
@on_ranks(2)
def test_what_is_not_dense_is_refused_before_anything_is_sent(
    rank: int, world: int, kind: str, call: str
) -> None:
    if rank == 0:
        refused = outcome(call, target(call), NOT_DENSE[kind]())
        assert isinstance(refused, NotImplementedError), refused
    dist.barrier()  # which would wait for ever, or mix with it, had rank 0 sent anything


# PyTorch copies numbers into a quantized tensor, on devices into one by channel, too.
REFUSED_IN_PLACE = [
    (kind, call)
    for kind in NOT_DENSE
    for call in IN_PLACE
    if "quantized" not in kind or "into it" not in call
]


@worlds
@pytest.mark.parametrize(("kind", "call"), REFUSED_IN_PLACE)
@on_ranks()
def test_what_is_not_dense_is_refused_by_in_place_forms(rank: int, world: int, kind: str, call: str) -> None:
    assert isinstance(outcome(call, target(call), NOT_DENSE[kind]()), ERRORS)


@pytest.mark.parametrize("kind", NOT_DENSE)
@on_ranks(2)
def test_only_dense_tensors_are_sent_and_received(rank: int, world: int, kind: str) -> None:
    if rank == 0:
        group = dist.group.WORLD.group_name
        for send_or_receive in (torch.ops.funcol.isend, torch.ops.funcol.irecv):
            with pytest.raises(NotImplementedError):
                send_or_receive(NOT_DENSE[kind](), 1, 0, group)
        for op in ("isend", "irecv"):
            with pytest.raises(NotImplementedError):
                torch.ops.funcol.batch_p2p_ops([op], [1], [0], [NOT_DENSE[kind]()], group)
    dist.barrier()


@on_ranks(2)
def test_nothing_is_received_into_zeros_without_memory(rank: int, world: int) -> None:
    if rank == 0:
        with pytest.raises(ValueError, match="has no memory"):
            funcol._C.irecv(torch._efficientzerotensor(1), 1, 0, dist.group.WORLD, "")
    dist.barrier()


ADVICE = {
    "quantized": r"funcol::all_gather.* quantized \(QUInt8\).*int_repr",
    "coo": r"funcol::all_gather.* layout Sparse.*to_dense",
    "nested": r"funcol::all_gather.* nested.*values\(\)",
}


@pytest.mark.parametrize(("kind", "words"), ADVICE.items(), ids=ADVICE.keys())
@on_ranks(1)
def test_the_error_says_what_to_pass_instead(rank: int, world: int, kind: str, words: str) -> None:
    with pytest.raises(NotImplementedError, match=words):
        funcol.all_gather_tensor(NOT_DENSE[kind](), 0, dist.group.WORLD)


class Reading(Dispatching):
    """Looks at its values in every operator, and keeps its class."""

    seen: ClassVar[list[Any]] = []

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
            cls.seen.append(args[0].as_subclass(Tensor).tolist())
        return torch.Tensor._make_subclass(cls, result) if isinstance(result, Tensor) else result


ON_A_SUBCLASS = {
    "view": lambda x: x.view(-1),
    "t": lambda x: x.t(),
    "detach": lambda x: x.detach(),
    "alias": torch.ops.aten.alias,
    "add": lambda x: x + 1,
    "divide": lambda x: x / 2,
    "in place": lambda x: x.detach().mul_(3),
    "clone": lambda x: x.clone(),
    "sum": lambda x: x.sum(),
    "data": lambda x: x.data,
    "Parameter": torch.nn.Parameter,
}


@pytest.mark.cpu_only  # no ranks
@pytest.mark.parametrize("requires_grad", [False, True], ids=["plain", "requires_grad"])
@pytest.mark.parametrize("use", ON_A_SUBCLASS.values(), ids=ON_A_SUBCLASS.keys())
def test_a_pending_subclass_sees_its_data_and_stays_of_its_class(use: Any, requires_grad: bool) -> None:
    x = Reading(SlowCollective(values()).tensor).requires_grad_(requires_grad)
    Reading.seen.clear()
    assert type(use(x)) is Reading
    assert Reading.seen[0] == values().tolist()


# Layouts and classes that a pending tensor is turned into give what a plain one gives.
TURNED = {
    "coo": lambda x: x.to_sparse().to_dense(),
    "csr": lambda x: x.to_sparse_csr().values(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 1.0, 0, torch.quint8).int_repr(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]).to_padded_tensor(0.0),
    "jagged": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged).values(),
    "nested as jagged": lambda x: torch.nested.as_nested_tensor([x, x], layout=torch.jagged).values(),
    "masked": lambda x: torch.masked.masked_tensor(x, x > 3).to_tensor(0.0),
    "conjugate": lambda x: torch.complex(x, x).conj().resolve_conj(),
    "parameter": lambda x: torch.nn.Parameter(x).detach(),
    "buffer": lambda x: torch.nn.Buffer(x) * 1,
    "coo values": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]), x, (3, 4)).to_dense(),
}


@pytest.mark.cpu_only  # no ranks
@pytest.mark.parametrize("turn", TURNED.values(), ids=TURNED.keys())
def test_what_is_made_of_a_pending_tensor_has_its_data(turn: Any) -> None:
    assert turn(SlowCollective(values()).tensor).tolist() == turn(values()).tolist()


PER_OPERATOR = 6
RANDOM = {
    "partial_views",
    "normal",
    "multinomial",
    "bernoulli",
    "empty",
    "rand",
    "dropout",
    "svd",
    "rrelu",
    "pca",
    "cauchy",
}


def pending(x: Any) -> Any:
    return SlowCollective(x).tensor.requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def dense_results(results: Any) -> list[Tensor]:
    tensors = [x for x in torch.utils._pytree.tree_leaves(results) if isinstance(x, Tensor)]
    return [plain(x) for x in tensors if x.layout == torch.strided]


@pytest.mark.cpu_only  # no ranks
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "key hidden"])
@pytest.mark.parametrize("op", op_db, ids=lambda op: op.formatted_name)
def test_an_operator_on_pending_tensors_gives_what_it_gives_on_plain_ones(op: OpInfo, compiled: bool) -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    is_random = any(name in op.name for name in RANDOM)
    for dtype in sorted(op.dtypes & {torch.float32, torch.int64}, key=str):
        torch.manual_seed(seed)
        samples = list(op.sample_inputs("cpu", dtype))
        for sample in random.Random(seed).sample(samples, min(PER_OPERATOR, len(samples))):
            torch.manual_seed(seed)
            copied = sample.transform(lambda x: x.clone() if isinstance(x, Tensor) and is_plain(x) else x)
            try:
                expected = op(copied.input, *copied.args, **copied.kwargs)
            except (*ERRORS, AssertionError):
                continue
            waiting = sample.transform(lambda x: pending(x) if isinstance(x, Tensor) and is_plain(x) else x)
            before = funcol._C.exclude_wake_key(compiled)
            try:
                torch.manual_seed(seed)
                actual = op(waiting.input, *waiting.args, **waiting.kwargs)
            finally:
                funcol._C.exclude_wake_key(before)
            for one, other in zip(dense_results(actual), dense_results(expected), strict=True):
                assert one.shape == other.shape
                assert one.dtype == other.dtype
                assert is_random or are_same(one, other)


def is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.layout == torch.strided and not x.is_quantized and x.is_contiguous()
