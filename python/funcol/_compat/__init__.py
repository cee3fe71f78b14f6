"""Every difference between PyTorch minors that the Python side has to bridge, named by what it bridges."""

from __future__ import annotations

import functools
import gc
import inspect
import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from itertools import combinations, pairwise, product
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as stock
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed import device_mesh


def simulates_ranks() -> bool:
    """Whether PyTorch's ``LocalTensorMode`` is active: one process stands for all ranks, and rank and sizes
    are symbols."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.local_tensor_mode() is not None


def mesh_group_name(mesh: dist.device_mesh.DeviceMesh, mesh_dim: int) -> str:
    """Name of the group of ``mesh`` along ``mesh_dim``, without looking the group up."""
    return cast(str, mesh._dim_group_names[mesh_dim])


def mesh_axes(mesh: dist.device_mesh.DeviceMesh) -> tuple[list[int], list[str], list[int], int]:
    """Sizes and names of the axes of ``mesh``, the sets of axes that have a group, a bit an axis, and how
    many of its devices a host has."""
    names = list(mesh.mesh_dim_names or ())
    per_host = device_mesh._mesh_resources.num_devices_per_host(mesh.device_type)
    return list(mesh.shape), names, sorted(merged_groups(mesh)), per_host


def merged_groups(mesh: dist.device_mesh.DeviceMesh) -> dict[int, str]:
    """Names of the groups that ranks along two or more axes of ``mesh`` have by now, by their set of axes.

    A set has a bit for each of its axes and names only axes of several ranks. In these groups ranks count up
    along the last axis first. Their sources are the submeshes that have been flattened, and the world.
    """
    layout: Any = mesh._layout
    offsets = [layout[axis].all_ranks_from_zero() for axis in range(mesh.ndim)]
    merged = [axis for axis in range(mesh.ndim) if len(offsets[axis]) > 1]
    if len(merged) < 2:
        return {}
    ranks = mesh._flatten_rank_map
    all_offsets = _row_major(offsets)
    if any(a >= b for a, b in pairwise(ranks)) or any(a >= b for a, b in pairwise(all_offsets)):
        return {}  # A group counts its ranks in the order of the world, which is another one here.
    groups: dict[int, str] = {}
    if (
        dist.is_initialized()
        and len(all_offsets) == dist.get_world_size()
        and [ranks[offset] for offset in all_offsets] == list(range(dist.get_world_size()))
        and torch.device(mesh.device_type) in dist.group.WORLD._device_types  # type: ignore[union-attr]
    ):
        groups[sum(1 << axis for axis in merged)] = dist.group.WORLD.group_name  # type: ignore[union-attr]
    flattened = {
        tuple(submesh._layout[0].all_ranks_from_zero()): submesh._dim_group_names[0]
        for submesh in mesh._get_root_mesh()._flatten_mapping.values()
        if getattr(submesh, "_dim_group_names", None)
    }
    for count in range(2, len(merged) + 1) if flattened else ():
        for axes in combinations(merged, count):
            name = flattened.get(tuple(_row_major([offsets[axis] for axis in axes])))
            if name is not None:
                groups[sum(1 << axis for axis in axes)] = name
    return groups


def _row_major(offsets: Sequence[Sequence[int]]) -> list[int]:
    """Offsets of ranks along all of the axes, the last axis counting first, from those along each."""
    return [sum(parts) for parts in product(*offsets)]


def own_ranks(lists: list[list[int]]) -> list[int] | None:
    """That of the ``lists`` of ranks which this rank is in. Dynamo can trace it."""
    rank = dist.get_rank()
    for ranks in lists:
        if rank in ranks:
            return ranks
    return None


def traced_group(group: Any, tag: str) -> Any:
    """The name of ``group``, or the ``ProcessGroup``, as Dynamo finds it in a region that it traces."""
    if isinstance(group, list) and group and isinstance(group[0], list):  # stock traces one list
        own = own_ranks(group)
        if own is None:
            raise ValueError(
                f"funcol: rank {dist.get_rank()} is not in {group}. Call the collective on the ranks in the "
                "lists only."
            )
        group = own
    resolve = getattr(stock, "_resolve_group", None)
    return stock._resolve_group_name(group, tag) if resolve is None else resolve(group, tag)


def traceable_group(group: Any, tag: str) -> Any:
    """``group`` as stock puts it in a graph: a name, or an object where stock traces one."""
    found = traced_group(group, tag)
    choose = getattr(stock, "_group_or_group_name", None)
    return found if choose is None else choose(found)


def group_in_graphs(group: Any) -> Any:
    """``group``, an object, as stock puts it in a graph. Older minors know names only."""
    choose = getattr(stock, "_group_or_group_name", None)
    return group.group_name if choose is None else choose(group)


# By what else came in the same minor.
_DYNAMO_LOOKS_INTO_CONCATENATION = hasattr(stock, "all_gather_single")
STOCK_MAKES_CONTIGUOUS = hasattr(stock, "_group_or_group_name")


def concatenate_ranks(gathered: Tensor, group_size: int, dim: int) -> Tensor:
    """Traced layout change after a gather: the ops that stock's graph holds for it."""
    if _DYNAMO_LOOKS_INTO_CONCATENATION:
        return torch._utils._maybe_view_chunk_cat(gathered, group_size, dim)
    # Older minors have the same function, but Dynamo does not look into it there.
    sizes = list(gathered.shape)
    if sizes[0] == group_size and math.prod(sizes[1:dim]) == 1:
        return gathered.view([1, *sizes[1:dim], group_size * sizes[dim], *sizes[dim + 1 :]])
    chunk_or_narrow_cat = getattr(torch._utils, "_chunk_or_narrow_cat", None)
    if chunk_or_narrow_cat is not None:
        return cast(Tensor, chunk_or_narrow_cat(gathered, group_size, narrow_dim=0, cat_dim=dim))
    return torch.cat(torch.chunk(gathered, group_size, dim=0), dim=dim)


def split_ranks(tensor: Tensor, group_size: int, dim: int) -> Tensor:
    """Traced layout change before a scatter: the ops that stock's graph holds for it."""
    chunk_or_narrow_cat = getattr(torch._utils, "_chunk_or_narrow_cat", None)
    if chunk_or_narrow_cat is not None:
        return cast(Tensor, chunk_or_narrow_cat(tensor, group_size, narrow_dim=dim, cat_dim=0))
    return torch.cat(torch.chunk(tensor, group_size, dim=dim))


# Stock waits for a list at once where it has an op for that. (funcol defines wait_tensors in minors that
# lack it, so the op itself is no sign.)
STOCK_WAITS_FOR_LISTS = hasattr(stock, "wait_tensors")


def mark_side_effects() -> None:
    """Keeps the ops that funcol added to ``_c10d_functional`` from being removed as dead code."""
    for name in ("wait_tensor", "wait_tensors", "isend", "irecv", "batch_p2p_ops"):
        packet = getattr(torch.ops._c10d_functional, name)
        torch.fx.node.has_side_effect(packet)
        torch.fx.node.has_side_effect(packet.default)
    for name in torch.ops.funcol.__dir__():
        packet = getattr(torch.ops.funcol, name, None)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            torch.fx.node.has_side_effect(packet.default)


def watch_group_registry(
    *,
    added: Callable[[str], None],
    removing: Callable[[str], None],
    removing_all: Callable[[], None],
    changed: Callable[[], None],
    remember: Callable[[bool], None],
) -> None:
    """Tells what ``torch.distributed`` does to c10d's registry of groups.

    Calls ``added(name)`` for each group that it adds, and for those that are there by now; ``removing(name)``
    or ``removing_all()`` before it removes any, which is a part of destroying them; ``changed()`` after each
    change; and ``remember(False)`` while each thread has a registry of its own (simulated ranks in threads).
    """

    def watched(
        change: Callable[..., Any], before: Callable[..., None] | None, after: Callable[..., None] | None
    ) -> Callable[..., Any]:
        def change_and_tell(*args: Any, **kwargs: Any) -> Any:
            name = (*args, *kwargs.values())[:1]
            if before is not None:
                before(*name)
            try:
                result = change(*args, **kwargs)
            finally:
                changed()
            if after is not None:
                after(*name)
            return result

        return change_and_tell

    def then_remember(isolate: Callable[[bool], None]) -> Callable[[bool], None]:
        def isolate_and_remember(enable: bool) -> None:
            isolate(enable)
            remember(not enable)

        return isolate_and_remember

    registry: Any = torch._C._distributed_c10d
    for name, before, after in (
        ("_register_process_group", None, added),
        ("_unregister_process_group", removing, None),
        ("_unregister_all_process_groups", removing_all, None),
    ):
        for module in (c10d, registry):
            change = getattr(module, name, None)
            if change is not None:
                setattr(module, name, watched(change, before, after))
    registry._set_thread_isolation_mode = then_remember(registry._set_thread_isolation_mode)
    for group_name in c10d._world.pg_names.values():
        added(group_name)
    remember(True)


def settle_before_higher_order_ops(settle: Callable[[Any], None], wake_key_name: str) -> None:
    """Calls ``settle`` for each tensor that a higher-order operator, such as ``cond``, is called with.

    Those operators are dispatched in Python, by the highest key of their tensors, past every C++ fallback.
    The wake key, which a tensor may have without being pending, is none that they know.
    """
    ops: Any = torch._ops
    original = ops.key_extractor
    wake_key = torch._C._dispatch_key_parse(wake_key_name)

    def key_extractor(tensors: Any, key_mask: Any) -> Any:
        for tensor in tensors:
            settle(tensor)
        return original(tensors, key_mask).remove(wake_key)

    ops.key_extractor = key_extractor


class _AfterImport(MetaPathFinder, Loader):
    """Runs ``action(module)`` once module ``name`` has been imported; leaves nothing behind."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._action = action
        self._loader: Loader | None = None

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        assert self._loader is not None
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert self._loader is not None
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


def after_import(name: str, action: Callable[[ModuleType], None]) -> None:
    """Runs ``action`` on module ``name``: now if it is imported, else when somebody imports it."""
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _AfterImport(name, action))


def _names_in(code: CodeType) -> set[str]:
    """The names that ``code`` and the functions within it look up."""
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def hide_in_compiled_regions(exclude: Callable[[bool], bool]) -> None:
    """Calls ``exclude(True)`` when a callable that ``torch.compile`` made is entered; undoes it on exit.

    Newer minors save the thread's dispatch keys on entry and restore them on exit: hiding the key after the
    save is enough. In older ones every Dynamo context keeps a list of hooks; ours joins it when the context
    is made. Some of those enter a guard after the hooks, which on exit brings back the keys that it found:
    it has to find ours as it was before. Dynamo is not imported for this, which would cost more than all of
    funcol.
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

    def guard_that_finds_it_as_before(*keys: Any) -> Any:
        before = vars(entered).pop("before", None)
        if before is not None:
            exclude(before)
        return guard(*keys)

    def extend_contexts(eval_frame: ModuleType) -> None:
        context: Any = eval_frame._TorchDynamoContext
        original = context.__init__
        if guard.__name__ in _names_in(context.__call__.__code__):
            setattr(torch._C, guard.__name__, guard_that_finds_it_as_before)

        def init_with_hook(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            self.enter_exit_hooks.append(enter)

        context.__init__ = init_with_hook

    after_import("torch._dynamo.eval_frame", extend_contexts)


# The reduce ops for which PyTorch's ops have a rule for gradients; "" stands for an op that reduces nothing.
ALL_REDUCE_RULES = frozenset(
    {"sum", "avg", "min", "max"} if hasattr(stock, "_is_reduceop_supported") else {"sum"}
)
REDUCE_SCATTER_RULES = frozenset({"sum"})
BROADCAST_RULES: frozenset[str] = frozenset()


def traceable_reduce_op(reduce_op: Any) -> Any:
    """``reduce_op``, an object, as stock puts it in a graph: by name if it has one."""
    return stock.REDUCE_OP_TO_STR.get(getattr(reduce_op, "op", reduce_op), reduce_op)


def group_named(name: str) -> dist.ProcessGroup:
    """The group of this name."""
    resolve: Any = torch._C._distributed_c10d._resolve_process_group
    return cast(dist.ProcessGroup, resolve(name))


def rank_in_group(group: Any) -> int:
    """This process's rank in ``group``, a name or an object."""
    return dist.get_rank(group_named(group) if isinstance(group, str) else group)


def rank_of_peer(group_name: str, global_rank: int) -> int:
    """The rank within a group of the process that is ``global_rank`` in the world."""
    return dist.get_group_rank(group_named(group_name), global_rank)


# As torch.compiler.assume_constant_result does, which would import Dynamo.
rank_in_group._dynamo_marked_constant = True  # type: ignore[attr-defined]
rank_of_peer._dynamo_marked_constant = True  # type: ignore[attr-defined]


def contiguous(tensor: Tensor) -> Tensor:
    """``tensor`` as ``_c10d_functional`` ops take it: older minors refuse one that is not contiguous."""
    return tensor if STOCK_MAKES_CONTIGUOUS else tensor.contiguous()


# Sharding propagation

# Of a propagator: the tables in which an operator's rule may be.
TABLES_OF_RULES = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
# And those of operators whose sizes among the arguments it makes this rank's.
TABLES_OF_SIZES = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant")
# And what the dispatcher has to know of an operator's arguments; the first that has the operator counts.
TABLES_OF_SCHEMA_INFO = ("op_to_schema_info", "op_to_schema_info_for_single_dim_strategy")
_TABLES = (*TABLES_OF_RULES, *TABLES_OF_SIZES, *TABLES_OF_SCHEMA_INFO)


def dispatcher_functions() -> dict[str, Any]:
    """What DTensor's dispatcher calls in Python, by our names; ``None`` for what this minor does not have."""
    from torch.distributed.tensor._dispatch import OpDispatcher

    names = {
        "local_results": "_dispatch_get_local_results_slow_path",
        "tail": "_dispatch_fast_path_python_tail",
        "unwrap_to_op_info": "_unwrap_to_op_info_impl",
        "wrap": "wrap",
    }
    return {ours: getattr(OpDispatcher, theirs, None) for ours, theirs in names.items()}


def is_own(found: Any) -> bool:
    """Whether ``found`` is a function of PyTorch, with the code that the module it comes from has for it."""
    if type(found) is not FunctionType:
        return False
    names, code = found.__globals__, found.__code__
    module = sys.modules.get(names.get("__name__", ""))
    return (
        module is not None
        and vars(module) is names
        and module.__name__.split(".")[0] == "torch"
        and code.co_filename == module.__file__
        and code.co_qualname == found.__qualname__
    )


def own_function(found: Any) -> Any:
    """PyTorch's own function in ``found``: itself, or what a program put wrappers around that name what they
    wrap; None if there is none."""
    while found is not None and not is_own(found):
        found = found.func if isinstance(found, partial) else getattr(found, "__wrapped__", None)
    return found


def is_own_context(found: Any) -> bool:
    """Whether ``found`` is a generator function of PyTorch that PyTorch made a context of."""
    code = getattr(found, "__code__", None)
    return code is not None and code is _CONTEXT_CODE and is_own(getattr(found, "__wrapped__", None))


_CONTEXT_CODE = contextmanager(lambda: iter(())).__code__


def own_function_of(module: ModuleType, name: str) -> Any:
    """PyTorch's own function ``name`` of ``module``, also where a program put something else in its place;
    None if nobody has it any more."""
    found = own_function(vars(module).get(name))
    if found is not None and found.__qualname__ == name and found.__globals__ is vars(module):
        return found
    # A wrapper may have it anywhere; what every function of the module has is the module's dict.
    holders = gc.get_referrers(vars(module))
    return next((one for one in holders if is_own(one) and one.__qualname__ == name), None)


@functools.cache
def codes_of(module: ModuleType) -> dict[str, list[CodeType]]:
    """What the source of ``module`` has for its functions and methods, by their qualified names."""
    codes: dict[str, list[CodeType]] = {}

    def collect(code: CodeType) -> None:
        for one in code.co_consts:
            if isinstance(one, CodeType) and not one.co_qualname.endswith((">", "<locals>")):
                codes.setdefault(one.co_qualname, []).append(one)
                if "__qualname__" in one.co_names:  # the body of a class
                    collect(one)

    code = module.__loader__.get_code(module.__name__)  # type: ignore[union-attr]
    if code is not None:
        collect(code)
    return codes


def looked_up(module: ModuleType, path: str) -> Any:
    """The function ``path``, a name or ``Class.method``, as ``module`` has it now; None if it has none."""
    first, _, method = path.partition(".")
    found = vars(module).get(first)
    if method:
        found = vars(found).get(method) if isinstance(found, type) else None
    if isinstance(found, (staticmethod, classmethod)):
        return found.__func__
    return found.fget if isinstance(found, property) else found


def has_code(found: Any, codes: list[CodeType]) -> bool:
    """Whether ``found`` does what PyTorch's source says, ``codes``; also in decorators of PyTorch, and where
    funcol redirected it."""
    while not isinstance(found, type):  # that of a class is the code of its body
        code = getattr(found, "__code__", None)
        if code in codes or (code is not None and code.co_filename == __file__):
            return True
        wrapped = getattr(found, "__wrapped__", None)
        if wrapped is None or not _is_from_decorator(found):
            return False
        found = wrapped
    return True


def _is_from_decorator(found: Any) -> bool:
    """Whether a decorator of PyTorch or of the standard library made ``found``."""
    if type(found) is not FunctionType:
        return isinstance(found, functools._lru_cache_wrapper)
    module = str(found.__globals__.get("__name__"))
    return module.split(".")[0] in ("torch", "contextlib", "functools", "typing_extensions", "warnings")


def described(found: Any) -> str:
    """What ``found``, in the place of a function of PyTorch, is called by its program."""
    while isinstance(found, partial):
        found = found.func
    if type(found) is FunctionType:
        return f"{found.__globals__.get('__name__')}.{found.__code__.co_qualname}"
    named = found if isinstance(found, type) else type(found)
    return f"{named.__module__}.{named.__qualname__}"


def copied(function: Any) -> Any:
    """A function that does what ``function``, PyTorch's own in it, does now; ``None`` for ``None``."""
    function = own_function(function) or function
    return _copy(function) if type(function) is FunctionType else function


def _copy(function: FunctionType) -> FunctionType:
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__ and dict(function.__kwdefaults__)
    return copy


def redirected(function: Any, ours: Callable[..., Any]) -> Callable[[], None]:
    """Makes ``function`` call ``ours`` until what is returned is called.

    The function stays the same object: whoever holds it sees the change, modules that imported it by name,
    Dynamo's tables, and PyTorch's C++, which looks some up once and keeps them. Of a wrapper that a program
    put around a function of PyTorch, that function: the wrapper stays. Does nothing to what is not PyTorch's.
    """
    function = own_function(function)
    if function is None or function.__code__.co_freevars:
        return lambda: None
    return redirected_of_package(function, ours)


def redirected_of_package(function: Any, ours: Callable[..., Any]) -> Callable[[], None]:
    """:func:`redirected` for a function of another package, which has no closure."""
    signature = inspect.signature(function)
    put_back = _swapped(function, _redirect.__code__, _funcol=ours)
    function.__signature__ = signature

    def undo() -> None:
        put_back()
        del function.__signature__

    return undo


def _swapped(function: Any, code: CodeType, **defaults: Any) -> Callable[[], None]:
    """Gives ``function`` other code, whose additional keywords are ``defaults``, until what is returned is
    called."""
    own_code, own = function.__code__, function.__kwdefaults__

    def undo() -> None:
        function.__code__ = own_code
        function.__kwdefaults__ = own
        _forget_parameters(function)

    # In this order, as other threads may call it meanwhile; defaults of either code are there for both.
    function.__kwdefaults__ = {**(own or {}), **defaults}
    function.__code__ = code
    _forget_parameters(function)
    return undo


def _forget_parameters(function: Any) -> None:
    """Makes Dynamo, which remembers the parameters of the functions that it looked into, look anew."""
    functions = sys.modules.get("torch._dynamo.variables.functions")
    remembered = getattr(functions, "_spec_cache", None)
    if remembered is not None:
        remembered.pop(function, None)


def _redirect(*args: Any, _funcol: Callable[..., Any], **kwargs: Any) -> Any:
    return _funcol(*args, **kwargs)


def called_directly(wrapper: Any, when: Callable[[], bool]) -> Callable[[], None]:
    """Makes ``wrapper``, which has ``func`` in its closure, call that alone where ``when()`` says so, until
    what is returned is called. The wrapper stays the same object.

    Dynamo begins no graph in the wrapper, as it begins none in PyTorch's modules, nor in ``when``; it does
    look into both where a graph that it has begun calls them.
    """
    assert wrapper.__code__.co_freevars == ("func",)
    code = _direct_call(None).__code__
    for skipped in (code, cast(FunctionType, when).__code__):
        _begin_no_graph(skipped)
    return _swapped(wrapper, code, _funcol=when, _stock=_copy(wrapper))


def _begin_no_graph(code: CodeType) -> None:
    """As ``skip_code`` of ``torch._dynamo.eval_frame``, which would import Dynamo."""
    frames: Any = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        code, frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.DEFAULT)
    )


def _direct_call(func: Any) -> FunctionType:
    def call(*args: Any, _funcol: Callable[[], bool], _stock: Callable[..., Any], **kwargs: Any) -> Any:
        if _funcol():
            return func(*args, **kwargs)
        return _stock(*args, **kwargs)

    return cast(FunctionType, call)


def is_in_context(function: Any) -> bool:
    """Whether ``function`` is one that ``torch.no_grad()``, or another context of its kind, decorates."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_freevars == ("ctx_factory", "func")


def entered_if(wrapper: Any, when: Callable[[], bool]) -> Callable[[], None]:
    """Makes ``wrapper``, a function decorated with a context, enter that only if ``when()``, until what is
    returned is called. The wrapper stays the same object."""
    assert is_in_context(wrapper)
    return _swapped(wrapper, _context_if(None, None).__code__, _funcol=when)


def _context_if(ctx_factory: Any, func: Any) -> FunctionType:
    def call(*args: Any, _funcol: Callable[[], bool], **kwargs: Any) -> Any:
        if _funcol():
            with ctx_factory():
                return func(*args, **kwargs)
        return func(*args, **kwargs)

    return cast(FunctionType, call)


def forget_decisions() -> None:
    """Empties this thread's cache of decisions that DTensor's dispatcher has in C++, where it has one."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()


def has_rules_of_an_axis(propagator: Any) -> bool:
    """Whether nearly all operators have rules of one mesh axis; those of older minors are of the whole mesh,
    and follow what the first tensor has."""
    return len(getattr(propagator, "op_single_dim_strategy_funcs", ())) > 1000


def decides_for_whole_mesh(propagator: Any, op: Any) -> bool:
    """Whether ``propagator`` has a rule of the whole mesh for ``op``, which may decide otherwise than axis by
    axis: it follows what the first tensor has, or is right for some numbers only.

    Those for views and ``stack`` do not. An operator that has a rule of either kind counts, too.
    """
    rule = propagator.op_strategy_funcs.get(op)
    return rule is not None and not (
        is_own_rule(rule) and (rule.__module__.endswith("._view_ops") or rule.__name__ == "stack_strategy")
    )


def is_own_rule(rule: Any) -> bool:
    """Whether a rule that is in a propagator's tables came with PyTorch; else a program has registered it."""
    function = getattr(rule, "func", rule) if type(rule).__name__ == "_SingleDimStrategyInfo" else rule
    module = getattr(function, "__module__", None) or ""
    return isinstance(function, FunctionType) and module.startswith("torch.distributed.tensor._ops.")


def candidates_in_order(propagator: Any) -> Callable[[], None]:
    """Makes ``propagator`` try placements in one order where it derives rules from decompositions, until what
    is returned is called.

    It lists them in the order of a set, which is another one on each rank: of decisions that cost the same
    each rank took its own.
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
    """Names of the tables in which ``propagator`` has rules."""
    return [name for name in TABLES_OF_RULES if hasattr(propagator, name)]


def tables(propagator: Any) -> dict[str, dict[Any, Any]]:
    """The tables by operator that ``propagator`` has, by the name of their attribute."""
    return {name: getattr(propagator, name) for name in _TABLES if hasattr(propagator, name)}


def single_axis_rule(propagator: Any, op: Any) -> Callable[..., Any] | None:
    """The rule of one mesh axis that ``propagator`` has for ``op``, if funcol composes it as PyTorch does."""
    info = getattr(propagator, "op_single_dim_strategy_funcs", {}).get(op)
    if info is None or any(
        getattr(info, name, None)
        for name in ("full_mesh_strategy_filter", "different_mesh_args", "allow_unbacked_sharding")
    ):
        return None
    return cast(Callable[..., Any], getattr(info, "func", info))


def scalar_adjuster(propagator: Any, op: Any) -> Callable[[list[Any], Any], Any] | None:
    """A function from specs and a schema to the schema with sizes that are numbers made this rank's."""
    adjusters: dict[Any, Any] = getattr(propagator, "op_to_scalar_shape_adjuster", {})
    return adjusters.get(op)


def make_spec(mesh: Any, placements: Any, meta: Any, order: Any, strided_as_order: bool | None) -> Any:
    """A ``DTensorSpec``; ``order`` lists pairs of a dim and the axes that cut it. ``strided_as_order`` tells
    whether strided shards stand for an order; None where there are none.
    """
    if strided_as_order is not None:
        return _made_spec(mesh, placements, meta, order, strided_as_order)
    spec_type, entry_type = _spec_types()
    spec = spec_type.__new__(spec_type)
    vars(spec).update(
        _SPEC_FIELDS,
        mesh=mesh,
        placements=placements,
        tensor_meta=meta,
        shard_order=tuple(map(entry_type._make, order)),
    )
    return spec


def _made_spec(mesh: Any, placements: Any, meta: Any, order: Any, strided_as_order: bool) -> Any:
    """By the constructor, which takes ten times as long."""
    spec_type, entry_type = _spec_types()
    how: dict[str, Any] = {"shard_order": tuple(map(entry_type._make, order))}
    if "use_strided_shard_as_shard_order" in spec_type.__dataclass_fields__:
        how = (
            {"use_strided_shard_as_shard_order": True}
            if strided_as_order
            else {**how, "use_strided_shard_as_shard_order": False}
        )
    return spec_type(mesh, placements, tensor_meta=meta, **how)


@functools.cache
def _spec_types() -> tuple[Any, Any]:
    """``DTensorSpec`` and ``ShardOrderEntry``; what every spec has beside its fields is learned from one."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry

    known = {"mesh", "placements", "tensor_meta", "shard_order"}
    made = vars(DTensorSpec(None, (Replicate(),)))  # type: ignore[arg-type]
    _SPEC_FIELDS.update({name: value for name, value in made.items() if name not in known})
    return DTensorSpec, ShardOrderEntry


_SPEC_FIELDS: dict[str, Any] = {}


def are_we_tracing() -> bool:
    """Whether a compiler or a tracer is at work, whose sizes may be symbols."""
    return stock._are_we_tracing()


# Tracers


def decompositions_of(proxy_mode: Any) -> dict[Any, Callable[..., Any]]:
    """What a tracer decomposes, and how. Older minors keep those of the innermost tracer in a global, a table
    or a context variable."""
    table = getattr(proxy_mode, "decomposition_table", None)
    if table is None:
        from torch.fx.experimental import proxy_tensor

        table = getattr(proxy_tensor, "CURRENT_DECOMPOSITION_TABLE", {})
        if isinstance(table, ContextVar):
            table = table.get({})
    return dict(table)
