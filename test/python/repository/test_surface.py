"""Names and signatures of PyTorch's functional collectives, and the helpers among them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
from group_forms import FORMS, FORMS_OF_ALL_RANKS, FORMS_OF_SOME_RANKS
from ranks import on_ranks, rejoin
from slow_collectives import same
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import funcol

# Names and signatures

# Signatures in PyTorch since functional collectives got their in-place forms.
REFERENCE: dict[str, str] = {
    "wait_tensor": "tensor",
    "broadcast": "self, src, group, tag=''",
    "all_reduce": "self, reduceOp, group, tag=''",
    "all_gather_tensor": "self, gather_dim, group, tag=''",
    "all_gather_tensor_autograd": "self, gather_dim, group, tag=''",
    "reduce_scatter_tensor": "self, reduceOp, scatter_dim, group, tag=''",
    "reduce_scatter_tensor_autograd": "self, reduceOp, scatter_dim, group, tag=''",
    "all_reduce_coalesced": "self, reduceOp, group, tag=''",
    "all_gather_into_tensor_coalesced": "self, group, tag=''",
    "reduce_scatter_tensor_coalesced": "inputs, reduceOp, scatter_dim, group, tag=''",
    "all_to_all_single": "self, output_split_sizes, input_split_sizes, group, tag=''",
    "all_to_all_single_autograd": "self, output_split_sizes, input_split_sizes, group, tag=''",
    "permute_tensor": "self, src_dst, group, tag=''",
    "_expand_group": "group, tag=''",
    "_resolve_group_name": "group, tag=''",
    "_are_we_tracing": "",
    "_maybe_wrap_tensor": "self",
    "all_gather_tensor_inplace": "output_tensor, input_tensor, group, async_op=False, tag='', gather_dim=0",
    "reduce_scatter_tensor_inplace": (
        "output, input, op='sum', group=None, async_op=False, scatter_dim=0, tag=''"
    ),
    "all_reduce_inplace": "tensor, op='sum', group=None, async_op=False, tag=''",
    "all_to_all_inplace": (
        "output, input, output_split_sizes=None, input_split_sizes=None, group=None, async_op=False, tag=''"
    ),
    "all_gather_inplace": "tensor_list, tensor, group=None, async_op=False, tag=''",
    # The first signatures in PyTorch; later releases make dst and src optional beside a group rank.
    "isend_inplace": "tensor, dst, tag=0, group=None, group_dst=-1",
    "irecv_inplace": "tensor, src, tag=0, group=None, group_src=-1",
    "batch_p2p_ops_inplace": "op_list, peer_list, tag_list, tensors, group_name",
}


def signature_from(text: str) -> list[Parameter]:
    function = eval(f"lambda {text}: None")
    return list(inspect.signature(function).parameters.values())


def is_optional_extra(parameter: Parameter) -> bool:
    return parameter.kind == Parameter.KEYWORD_ONLY and parameter.default is not Parameter.empty


def assert_takes_the_calls_of(expected: list[Parameter], name: str) -> None:
    actual = list(inspect.signature(getattr(funcol, name)).parameters.values())
    for parameter, own in zip(expected, actual, strict=False):
        assert (own.name, own.kind) == (parameter.name, parameter.kind)
        assert parameter.default in (Parameter.empty, own.default)
    assert len(actual) >= len(expected)
    assert all(map(is_optional_extra, actual[len(expected) :]))


@pytest.mark.parametrize("name", REFERENCE)
def test_a_call_that_the_reference_takes_means_the_same_here(name: str) -> None:
    assert_takes_the_calls_of(signature_from(REFERENCE[name]), name)


def is_interface(name: str) -> bool:
    """Returns true if ``name`` of stock's module is for callers, not part of how it registers gradients."""
    value = getattr(stock, name)
    return (
        inspect.isfunction(value)
        and value.__module__ == stock.__name__
        and not name.startswith("_")
        and not name.endswith(("_backward", "_setup_context"))
    )


PUBLIC = sorted(filter(is_interface, dir(stock)))
HELPERS = [
    name
    for name in (
        "_expand_group",
        "_resolve_group",
        "_resolve_group_name",
        "_group_or_group_name",
        "_are_we_tracing",
        "_maybe_wrap_tensor",
        "_maybe_wrap_tensors",
    )
    if hasattr(stock, name)
]


@pytest.mark.parametrize("name", [*PUBLIC, *HELPERS])
def test_a_call_that_the_running_pytorch_takes_means_the_same_here(name: str) -> None:
    assert_takes_the_calls_of(list(inspect.signature(getattr(stock, name)).parameters.values()), name)


@pytest.mark.parametrize("name", PUBLIC)
def test_each_public_function_of_pytorch_is_exported(name: str) -> None:
    assert name in funcol.__all__


NEWER = [
    "wait_tensors",
    "all_gather_single",
    "all_gather_single_autograd",
    "all_gather_single_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_autograd",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_inplace",
    "isend_inplace",
    "irecv_inplace",
    "batch_p2p_ops_inplace",
    "allow_inflight_collective_as_graph_input_ctx",
]


@pytest.mark.parametrize("name", NEWER)
def test_names_of_newer_minors_exist_in_all(name: str) -> None:
    assert name in funcol.__all__


SAME = {
    "all_gather_tensor_autograd": "all_gather_tensor",
    "all_gather_single": "all_gather_tensor",
    "all_gather_single_autograd": "all_gather_tensor",
    "reduce_scatter_tensor_autograd": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_autograd": "reduce_scatter_tensor",
    "all_to_all_single_autograd": "all_to_all_single",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
}


@pytest.mark.parametrize(("name", "base"), SAME.items())
def test_other_names_are_the_same_function(name: str, base: str) -> None:
    assert getattr(funcol, name) is getattr(funcol, base)


def test_reduce_ops_have_the_names_that_pytorch_gives_them() -> None:
    assert funcol.compiled.REDUCE_OP_TO_STR == stock.REDUCE_OP_TO_STR


POINT_TO_POINT = {getattr(dist, name) for name in ("isend", "irecv", "batch_isend_irecv")}


def test_each_collective_that_pytorch_can_trace_has_a_form_here() -> None:
    assert set(stock.traceable_collective_remaps) - POINT_TO_POINT <= set(
        funcol.compiled.traceable_collective_remaps
    )


@pytest.mark.parametrize("collective", funcol.compiled.traceable_collective_remaps, ids=lambda f: f.__name__)
def test_a_form_takes_the_arguments_of_the_collective_it_stands_for(collective: Callable[..., Any]) -> None:
    form = inspect.signature(funcol.compiled.traceable_collective_remaps[collective]).parameters
    for parameter in inspect.signature(collective).parameters.values():
        required = parameter.default is Parameter.empty
        assert (form[parameter.name].default is Parameter.empty) == required


@pytest.mark.parametrize("op", ["wait_tensor", "wait_tensors", "isend", "batch_p2p_ops"])
def test_a_wait_is_not_removed_as_dead_code(op: str) -> None:
    packet = getattr(torch.ops._c10d_functional, op)
    assert {packet, packet.default} <= torch.fx.node._side_effectful_functions


# Groups


def test_rank_types_is_one_type() -> None:
    assert funcol.collectives.RANK_TYPES is funcol.groups.RankTypes


FORMS_ON_RANKS = [
    *[(form, 2) for form in FORMS_OF_ALL_RANKS],
    *[(form, 4) for form in FORMS_OF_SOME_RANKS],
]
each_form = pytest.mark.parametrize(("form", "world"), FORMS_ON_RANKS)


@each_form
@on_ranks()
def test_a_group_expands_to_its_tag_ranks_and_size(rank: int, world: int, form: str) -> None:
    group, meant = FORMS[form]()
    actual = funcol._expand_group(group)
    is_new_form = group is None or isinstance(group, str) or (type(group) is tuple and type(group[1]) is str)
    assert actual == stock._expand_group(meant if is_new_form else group)


@each_form
@on_ranks()
def test_every_form_of_a_group_has_the_name_of_the_group_it_means(rank: int, world: int, form: str) -> None:
    rejoin()  # else a list of ranks may mean a group of the same ranks that a case before this one made
    group, meant = FORMS[form]()
    assert funcol._resolve_group_name(group) == meant.group_name
    resolved = funcol._resolve_group(group)
    assert resolved is meant or resolved == meant.group_name
    assert funcol._group_or_group_name(resolved) == meant.group_name


@pytest.mark.skipif(
    not hasattr(stock, "_group_or_group_name"), reason="graphs of older releases hold names of groups only"
)
@on_ranks(1)
def test_a_graph_for_all_ranks_holds_the_group_itself(rank: int, world: int) -> None:
    group: Any = dist.group.WORLD
    config: Any = dist.config
    with config.patch(compile_on_one_rank=True):
        assert funcol._group_or_group_name(group) is stock._group_or_group_name(group) is group


@pytest.mark.parametrize("form", ["group", "none", "mesh", "mesh and its name", "ranks"])
@on_ranks(2)
def test_group_helpers_can_be_traced(rank: int, world: int, form: str) -> None:
    group, _ = FORMS[form]()

    @torch.compile(backend="eager", fullgraph=True)
    def region(x: torch.Tensor) -> Any:
        return x + 1, funcol._expand_group(group), funcol._resolve_group_name(group)

    torch._dynamo.reset()
    _, expanded, name = region(torch.ones(1))
    assert (expanded, name) == (funcol._expand_group(group), funcol._resolve_group_name(group))


@on_ranks(1)
def test_a_tag_is_kept(rank: int, world: int) -> None:
    assert funcol._expand_group([0], "mine") == ("mine", [0], 1)
    assert funcol._expand_group(dist.group.WORLD, "mine") == ("mine", [0], 1)


BAD_GROUPS = {
    "sizes": ([[0, 1], [2]], ValueError, "one size"),
    "number": (3, TypeError, "int"),
    "tuple": ((1, 2), ValueError, "DeviceMesh"),
}


@pytest.mark.parametrize(("group", "error", "says"), BAD_GROUPS.values(), ids=BAD_GROUPS.keys())
def test_what_is_no_group_does_not_expand(group: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        funcol._expand_group(group)


# Tracing


@contextmanager
def python_dispatcher() -> Iterator[None]:
    with torch._dispatch.python.enable_python_dispatcher():
        yield


MODES: dict[str, Callable[[], Any]] = {
    "fake": FakeTensorMode,
    "functional": FunctionalTensorMode,
    "python_dispatcher": python_dispatcher,
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_a_mode_that_records_is_noticed_while_it_is_active(mode: Callable[[], Any]) -> None:
    assert not funcol._are_we_tracing()
    with mode():
        assert funcol._are_we_tracing()
    assert not funcol._are_we_tracing()


def test_make_fx_is_noticed() -> None:
    seen = []
    make_fx(lambda x: (seen.append(funcol._are_we_tracing()), x + 1)[1])(torch.ones(1))
    assert seen == [True]


def test_dynamo_is_noticed() -> None:
    torch._dynamo.reset()
    region = torch.compile(lambda x: (x + 1, funcol._are_we_tracing()), backend="eager", fullgraph=True)
    assert region(torch.ones(1))[1] is True


@on_ranks(2)
def test_a_result_of_a_core_op_can_be_made_to_wait_by_itself(rank: int, world: int) -> None:
    ops = torch.ops._c10d_functional
    name = dist.group.WORLD.group_name
    x = torch.full((3,), rank + 1.0)
    wrapped = funcol._maybe_wrap_tensor(ops.all_reduce(x, "sum", name))
    assert funcol.is_pending(wrapped)
    assert same(wrapped, torch.full((3,), 3.0))
    parts = funcol._maybe_wrap_tensors(ops.all_reduce_coalesced([x, x * 2], "sum", name))
    assert [funcol.is_pending(part) for part in parts] == [True, True]
    assert [part.tolist() for part in parts] == [[3.0] * 3, [6.0] * 3]


def test_a_traced_result_is_waited_for_in_the_graph() -> None:
    graph = make_fx(lambda x: [funcol._maybe_wrap_tensor(x), *funcol._maybe_wrap_tensors([x * 2])])(
        torch.ones(2)
    )
    waits = [node for node in graph.graph.nodes if "wait_tensor" in str(node.target)]
    assert len(waits) == 2


def inflight_allowed() -> bool:
    return torch._C._distributed_c10d._allow_inflight_collective_as_graph_input()


@pytest.mark.parametrize("fails", [False, True])
def test_inflight_graph_inputs_are_allowed_inside_the_context_only(fails: bool) -> None:
    try:
        with funcol.allow_inflight_collective_as_graph_input_ctx():
            assert inflight_allowed()
            with funcol.allow_inflight_collective_as_graph_input_ctx(False):
                assert not inflight_allowed()
            assert inflight_allowed()
            if fails:
                raise KeyError("on purpose")
    except KeyError:
        assert fails
    assert not inflight_allowed()


@on_ranks(2)
def test_a_region_waits_for_a_collective_that_was_started_outside(rank: int, world: int) -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def region(y: torch.Tensor) -> torch.Tensor:
        return funcol.wait_tensor(y) * 2

    y = torch.full((1000,), rank + 1.0)
    with funcol.allow_inflight_collective_as_graph_input_ctx():
        work = dist.all_reduce(y, async_op=True)
        assert same(region(y), torch.full((1000,), 6.0))
    assert work.is_completed()
