"""Differences between PyTorch releases, named by what they bridge.

:mod:`funcol._compat.fully_shard` has the differences of FSDP2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from contextvars import ContextVar
from functools import partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as stock
from torch import Tensor

# Collectives


def group_in_region(group: Any, tag: str) -> Any:
    """Returns ``group`` as PyTorch uses it in a region that Dynamo traces: a name or a ``ProcessGroup``."""
    resolve = getattr(stock, "_resolve_group", None)
    return stock._resolve_group_name(group, tag) if resolve is None else resolve(group, tag)


def resolved_group_in_graphs(group: Any) -> Any:
    """Returns ``group``, a result of :func:`group_in_region`, as PyTorch puts it in a graph."""
    choose = getattr(stock, "_group_or_group_name", None)
    return group if choose is None else choose(group)


def group_in_graphs(group: Any) -> Any:
    """Returns ``group``, a ``ProcessGroup``, as PyTorch puts it in a graph: its name in older releases."""
    choose = getattr(stock, "_group_or_group_name", None)
    return group.group_name if choose is None else choose(group)


# Each of these properties came in the same PyTorch release as a function, which shows it.
_DYNAMO_LOOKS_INTO_CONCATENATION = hasattr(stock, "all_gather_single")
STOCK_MAKES_CONTIGUOUS = hasattr(stock, "_group_or_group_name")


def concatenate_ranks(gathered: Tensor, group_size: int, dim: int) -> Tensor:
    """Changes the layout after a traced gather, with the operators that PyTorch's graph has for it."""
    if _DYNAMO_LOOKS_INTO_CONCATENATION:
        return torch._utils._maybe_view_chunk_cat(gathered, group_size, dim)
    # Older releases have the same function, but Dynamo does not look into it there.
    sizes = list(gathered.shape)
    if sizes[0] == group_size and math.prod(sizes[1:dim]) == 1:
        return gathered.view([1, *sizes[1:dim], group_size * sizes[dim], *sizes[dim + 1 :]])
    chunk_or_narrow_cat = getattr(torch._utils, "_chunk_or_narrow_cat", None)
    if chunk_or_narrow_cat is not None:
        return cast(Tensor, chunk_or_narrow_cat(gathered, group_size, narrow_dim=0, cat_dim=dim))
    return torch.cat(torch.chunk(gathered, group_size, dim=0), dim=dim)


def split_ranks(tensor: Tensor, group_size: int, dim: int) -> Tensor:
    """Changes the layout before a traced scatter, with the operators that PyTorch's graph has for it."""
    chunk_or_narrow_cat = getattr(torch._utils, "_chunk_or_narrow_cat", None)
    if chunk_or_narrow_cat is not None:
        return cast(Tensor, chunk_or_narrow_cat(tensor, group_size, narrow_dim=dim, cat_dim=0))
    return torch.cat(torch.chunk(tensor, group_size, dim=dim))


# True if PyTorch waits for a list of tensors by one operator. The operator itself proves nothing: funcol
# defines wait_tensors in PyTorch releases that lack it.
STOCK_WAITS_FOR_LISTS = hasattr(stock, "wait_tensors")


def _names_in(code: CodeType) -> set[str]:
    """Returns the names that ``code`` and the functions within it look up."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def hide_in_compiled_regions(
    exclude: Callable[[bool], bool],
    after_import: Callable[[str, Callable[[ModuleType], None]], None],
) -> None:
    """Calls ``exclude(True)`` when a callable that ``torch.compile`` made is entered; undoes it on exit.

    ``exclude(is_excluded)`` excludes funcol's dispatch key, or includes it, and returns whether the key was
    excluded. Newer releases save the thread's dispatch keys on entry and restore them on exit, so the key is
    excluded after the save. In older releases, every Dynamo context keeps a list of hooks, which gets one
    when the context is made. Some of those releases enter a guard after the hooks, which on exit restores the
    keys that it found: it has to find funcol's key as it was before.

    ``after_import(name, action)`` runs ``action`` once a program has imported the module. Importing Dynamo
    here would take longer than importing all of funcol.
    """
    save = getattr(torch._C, "_dynamo_save_local_dispatch_key_set", None)
    if save is not None:

        def save_then_hide() -> None:
            save()
            exclude(True)

        setattr(torch._C, "_dynamo_save_local_dispatch_key_set", save_then_hide)  # noqa: B010
        return

    entered = threading.local()
    guard: Any = torch._C._ForceDispatchKeyGuard

    def enter() -> Callable[[], object]:
        entered.before = exclude(True)
        return partial(exclude, entered.before)

    def guard_over_keys_of_before(*keys: Any) -> Any:
        before = vars(entered).pop("before", None)
        if before is not None:
            exclude(before)
        return guard(*keys)

    def extend_contexts(eval_frame: ModuleType) -> None:
        context: Any = eval_frame._TorchDynamoContext
        original = context.__init__
        if guard.__name__ in _names_in(context.__call__.__code__):
            setattr(torch._C, guard.__name__, guard_over_keys_of_before)

        def init_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.enter_exit_hooks.append(enter)

        context.__init__ = init_with_hook

    after_import("torch._dynamo.eval_frame", extend_contexts)


# Names of the reduce ops for which PyTorch's operators have a rule for gradients.
ALL_REDUCE_RULES = frozenset(
    {"sum", "avg", "min", "max"} if hasattr(stock, "_is_reduceop_supported") else {"sum"}
)
REDUCE_SCATTER_RULES = frozenset({"sum"})
BROADCAST_RULES: frozenset[str] = frozenset()


def contiguous(tensor: Tensor) -> Tensor:
    """Returns ``tensor`` as ``_c10d_functional`` operators take it: contiguous in older releases."""
    return tensor if STOCK_MAKES_CONTIGUOUS else tensor.contiguous()


def by_function(module: ModuleType, by_name: Mapping[str, Any]) -> dict[Callable[..., Any], Any]:
    """Returns ``by_name`` keyed by functions of ``module`` instead of their names, without the entries of
    functions that older releases lack."""
    return {getattr(module, name): value for name, value in by_name.items() if hasattr(module, name)}


# Dynamo


def forget_parameters(function: Any) -> None:
    """Makes Dynamo, where it remembers the parameters of functions that it traced, forget ``function``."""
    functions = sys.modules.get("torch._dynamo.variables.functions")
    remembered: MutableMapping[Any, Any] | None = getattr(functions, "_spec_cache", None)
    if remembered is not None:
        remembered.pop(function, None)


def tensor_attributes(tensor_variables: ModuleType) -> dict[str, Any]:
    """Returns the attributes of ``Tensor`` that Dynamo copied into the module
    ``torch._dynamo.variables.tensor``; an empty dict in releases that make no such copy."""
    attributes: dict[str, Any] = getattr(tensor_variables, "all_tensor_attrs", {})
    return attributes


# DTensor


def from_local_options(grad_placements: Any) -> dict[str, Any]:
    """Returns the keyword arguments of ``DTensor.from_local`` that older releases do not know, if they are
    given."""
    return {} if grad_placements is None else {"grad_placements": grad_placements}


# Sharding propagation

# The tables of a propagator that have the rules of operators.
TABLES_OF_RULES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
# The tables of operators whose arguments contain sizes, which become this rank's.
TABLES_OF_SIZES = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
# The tables of arguments on which the dispatcher's cache depends. The first one with the operator counts.
TABLES_OF_SCHEMA_INFO = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")
_TABLES = (*TABLES_OF_RULES, *TABLES_OF_SIZES, *TABLES_OF_SCHEMA_INFO)


def dispatcher_functions() -> dict[str, Any]:
    """Returns the functions that DTensor's dispatcher calls in Python, by the names of their replacements;
    ``None`` for a function that this PyTorch release does not have."""
    from torch.distributed.tensor._dispatch import OpDispatcher

    names = {
        "local_results": "_dispatch_get_local_results_slow_path",
        "tail": "_dispatch_fast_path_python_tail",
    }
    return {ours: getattr(OpDispatcher, theirs, None) for ours, theirs in names.items()}


def forget_decisions() -> None:
    """Clears this thread's cache of decisions in the C++ part of DTensor's dispatcher, if it has one. Must
    not run below a call of that dispatcher, which keeps a pointer into the cache."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def num_decisions() -> int:
    """Returns how many decisions the cache of :func:`forget_decisions` has missed since it was
    cleared: no fewer than it holds. Returns 0 if there is no cache."""
    counts = getattr(torch._C, "_get_DTensor_sharding_propagator_cache_stats", None)
    return 0 if counts is None else int(counts()[1])


def has_rules_of_an_axis(propagator: Any) -> bool:
    """Returns true if nearly all operators have rules of one mesh axis. In older PyTorch releases, rules are
    of the full mesh and follow the placements of the first tensor."""
    return len(getattr(propagator, "op_single_dim_strategy_funcs", ())) > 1000


_KEEPS_SCHEMAS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 15)


def schema_of_call(dispatcher: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the ``OpSchema`` of a call. In older releases, the arguments in it, and with them the mesh, are
    never freed unless the propagator's tables have a list of keywords of the operator, even an empty one."""
    if not _KEEPS_SCHEMAS:
        return dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo

    table = dispatcher.sharding_propagator.op_to_schema_info
    before = table.get(op)
    infos = (getattr(dispatcher.sharding_propagator, name, {}).get(op) for name in TABLES_OF_SCHEMA_INFO)
    info = next((one for one in infos if one is not None), None) or RuntimeSchemaInfo()
    if info.static_kwargkey is not None:
        return dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    table[op] = dataclasses.replace(info, static_kwargkey=[])
    try:
        return dispatcher.unwrap_to_op_info(op, args, kwargs).schema
    finally:
        table.pop(op, None)
        if before is not None:
            table[op] = before


def is_own_rule(rule: Any) -> bool:
    """Returns true if a rule in a propagator's tables came with PyTorch, false if a program has registered
    it."""
    function = getattr(rule, "func", rule) if type(rule).__name__ == "_SingleDimStrategyInfo" else rule
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, FunctionType) and module.startswith("torch.distributed.tensor._ops.")


def has_single_strategy(strategy: Any) -> bool:
    """Returns true if a rule of the full mesh is PyTorch's for views or ``stack``, which gives one way to
    run a call."""
    return is_own_rule(strategy) and (
        strategy.__module__.endswith("._view_ops") or strategy.__name__ == "stack_strategy"
    )


def operator_of_elements(op: Any) -> Any:
    """Returns the operator whose rule PyTorch uses for an element of the lists of ``op``, such as
    ``add.Tensor`` for ``_foreach_add.List``."""
    from torch.distributed.tensor._ops import single_dim_strategy

    resolve = getattr(single_dim_strategy, "_resolve_foreach_elementwise_overload", None)
    resolved = None if resolve is None else resolve(op)
    return op if resolved is None else resolved


def dims_cut_evenly(accepts: Any, args: tuple[Any, ...]) -> list[int] | None:
    """Returns the dims of the first tensor that have to be cut evenly if ``accepts``, a filter of decisions,
    is PyTorch's filter for means, which have the arguments ``args``; ``None`` for another filter."""
    from torch.distributed.tensor._ops import _math_ops

    if accepts is not getattr(_math_ops, "_mean_full_mesh_strategy_filter", None):
        return None
    num_dims = len(args[0].shape)
    dims: Any = _math_ops._infer_reduction_dims(args[1], num_dims) if len(args) > 1 else None
    return [dim % num_dims for dim in (range(num_dims) if dims is None else dims)]


def sort_candidate_placements(propagator: Any) -> Callable[[], None]:
    """Makes ``propagator``, where it derives rules from decompositions, try placements in the same order on
    all ranks. Returns the function that undoes it.

    PyTorch tries them in the order of a set, which differs between ranks, so that ranks would choose
    differently among decisions of equal cost. Older releases derive no rules.
    """
    derived = getattr(propagator, "decomp_strategy", None)
    listed = getattr(derived, "_get_candidate_placements", None)
    if derived is None or listed is None:
        return lambda: None
    derived._get_candidate_placements = lambda op_schema: sorted(listed(op_schema), key=str)

    def undo() -> None:
        vars(derived).pop("_get_candidate_placements", None)

    return undo


def rule_tables(propagator: Any) -> list[str]:
    """Returns the names of the tables in which ``propagator`` has rules."""
    return [name for name in TABLES_OF_RULES if hasattr(propagator, name)]


def tables(propagator: Any) -> dict[str, dict[Any, Any]]:
    """Returns the tables by operator that ``propagator`` has, by the names of its attributes."""
    return {name: getattr(propagator, name) for name in _TABLES if hasattr(propagator, name)}


def has_rule(propagator: Any, op: Any) -> bool:
    """Returns true if ``propagator`` has a rule of any kind for ``op``."""
    return any(op in getattr(propagator, name, ()) for name in TABLES_OF_RULES)


def single_axis_rule(propagator: Any, op: Any) -> Callable[..., Any] | None:
    """Returns the rule of one mesh axis that ``propagator`` has for ``op``; ``None`` if there is none, or if
    PyTorch composes it over the mesh in a way that funcol does not."""
    info = getattr(propagator, "op_single_dim_strategy_funcs", {}).get(op)
    if info is None or any(
        getattr(info, name, None)
        for name in ("full_mesh_strategy_filter", "different_mesh_args", "allow_unbacked_sharding")
    ):
        return None
    return cast(Callable[..., Any], getattr(info, "func", info))


def makes_sizes_local(propagator: Any, op: Any) -> bool:
    """Returns true if ``propagator`` itself replaces the sizes among the arguments of ``op`` with those of
    this rank, or has a rule that also covers the arguments."""
    return any(op in getattr(propagator, name, ()) for name in (*TABLES_OF_SIZES, "op_to_rules"))


def scalar_adjuster(propagator: Any, op: Any) -> Callable[[list[Any], Any], Any] | None:
    """Returns the function of ``propagator`` that takes specs and a schema of ``op`` and returns the schema
    with this rank's numbers; ``None`` if there is none."""
    adjusters: dict[Any, Any] = getattr(propagator, "op_to_scalar_shape_adjuster", {})
    return adjusters.get(op)


def make_spec(
    mesh: Any,
    placements: Any,
    order: Any,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    strided_as_order: bool,
) -> Any:
    """Returns a ``DTensorSpec``, made in a tenth of the constructor's time.

    ``order`` lists pairs of a dim and the axes that cut it. ``strided_as_order`` is true if strided shards
    represent an order of axes.
    """
    spec_type, entry_type, meta_type = _spec_types()
    spec = spec_type.__new__(spec_type)
    fields = vars(spec)
    fields.update(_SPEC_FIELDS, mesh=mesh, placements=placements)
    fields["tensor_meta"] = meta_type(torch.Size(shape), stride, dtype)
    fields["shard_order"] = tuple(map(entry_type._make, order))
    if strided_as_order and "use_strided_shard_as_shard_order" in _SPEC_FIELDS:
        fields.update(use_strided_shard_as_shard_order=True, shard_order=None)
    return spec


@functools.cache
def _spec_types() -> tuple[Any, Any, Any]:
    """Returns the types of a spec and its parts. The first call fills ``_SPEC_FIELDS`` from an example."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta

    known = {"mesh", "placements", "tensor_meta", "shard_order"}
    made = vars(DTensorSpec(None, (Replicate(),)))  # type: ignore[arg-type]
    _SPEC_FIELDS.update({name: value for name, value in made.items() if name not in known})
    return DTensorSpec, ShardOrderEntry, TensorMeta


_SPEC_FIELDS: dict[str, Any] = {}  # attributes that every spec of this release has, beside the four above


# Groups


def new_group_by_name(ranks: list[int], name: str) -> Any:
    """Makes a group of ``ranks``, which all call this with one ``name``; other ranks do not call it.

    ``new_group(use_local_synchronization=True)`` names a group by a counter, which differs between ranks once
    some have made groups without the others. Where a device is bound to the world's group it splits the
    world's communicator, for which every rank has to call.
    """
    from torch.distributed import distributed_c10d

    caller = threading.get_ident()

    def in_place_of(function: Callable[..., Any], result: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: (
            result if threading.get_ident() == caller else function(*args, **kwargs)
        )

    replaced = {"_process_group_name": name, "_get_split_source": None}
    originals = {function: getattr(distributed_c10d, function) for function in replaced}
    for function, result in replaced.items():
        setattr(distributed_c10d, function, in_place_of(originals[function], result))
    try:
        return distributed_c10d.new_group(ranks, use_local_synchronization=True)
    finally:
        for function, original in originals.items():
            setattr(distributed_c10d, function, original)


# Tracers


def decompositions_of(proxy_mode: Any) -> dict[Any, Callable[..., Any]]:
    """Returns the decompositions of a tracer, by operator. Older releases keep those of the innermost tracer
    in a global variable, a table or a context variable."""
    table = getattr(proxy_mode, "decomposition_table", None)
    if table is None:
        from torch.fx.experimental import proxy_tensor

        table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})
        if isinstance(table, ContextVar):
            table = table.get({})
    return dict(table)
