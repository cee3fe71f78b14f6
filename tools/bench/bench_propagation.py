"""Times sharding propagation: PyTorch's propagator (stock) and funcol's.

Table 1, a decision that is not cached and one that is, by operator and number of mesh axes, in
microseconds; table 2, one transformer block forward and backward on large meshes, in milliseconds; table 3,
the same under funcol.install(), also with partial activations. See docs/performance.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from measure import fake_ranks
from parallel_steps import Block
from runner import Option, Table, each, mark, number, repeat, run, show
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as stock_redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import Placement

import funcol
from funcol import _C, installation
from funcol.sharding import ShardingPropagator

aten = torch.ops.aten

# A miss in C++ and one through Python, of stock's.
LIMITS = {"add": 0.01, "mm": 0.01}
LIMIT = 0.05
WHOLE_LIMIT = 0.05

Layouts = tuple[Placement, ...]


class Operator(NamedTuple):
    """An operator with shapes; placements of each tensor for the first mesh axes, repeated."""

    name: str
    make: Callable[[Callable[..., DTensorSpec]], OpSchema]


def _operators() -> list[Operator]:
    side = 256

    def attention(spec: Callable[..., DTensorSpec]) -> OpSchema:
        x = [spec((16, 16, 64, 32), words) for words in ("S0 R", "S0 R", "R S1")]
        return OpSchema(aten._scaled_dot_product_efficient_attention.default, (*x, None, False), {})

    def layer_norm(spec: Callable[..., DTensorSpec]) -> OpSchema:
        x, weight, bias = spec((side, side), "S0 S1"), spec((side,), "R R"), spec((side,), "R R")
        return OpSchema(aten.native_layer_norm.default, (x, [side], weight, bias, 1e-5), {})

    def adam(spec: Callable[..., DTensorSpec]) -> OpSchema:
        sides = [spec((side, side), "S0 R") for _ in range(100)]
        gradients = [spec((side, side), "S0 S1") for _ in range(100)]
        steps = [spec((), "R R") for _ in range(100)]
        options = {
            "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8,
            "amsgrad": False, "maximize": False,
        }  # fmt: skip
        return OpSchema(aten._fused_adam_.default, (sides, gradients, sides, sides, [], steps), options)

    return [
        Operator("add", lambda spec: OpSchema(
            aten.add.Tensor, (spec((side, side), "S0 R"), spec((side, side), "R S1")), {})),
        Operator("mm", lambda spec: OpSchema(
            aten.mm.default, (spec((side, side), "S0 S1"), spec((side, side), "S0 R")), {})),
        Operator("sum", lambda spec: OpSchema(
            aten.sum.dim_IntList, (spec((side, side), "S0 S1"), [1]), {})),
        Operator("softmax", lambda spec: OpSchema(
            aten._softmax.default, (spec((side, side), "S0 S1"), -1, False), {})),
        Operator("view", lambda spec: OpSchema(
            aten.view.default, (spec((side, side), "S0 S1"), [side, 16, side // 16]), {})),
        Operator("attention", attention),
        Operator("layer_norm", layer_norm),
        Operator("cat", lambda spec: OpSchema(
            aten.cat.default, ([spec((side, side), "S0 R"), spec((side, side), "R S1")], 0), {})),
        Operator("embedding", lambda spec: OpSchema(
            aten.embedding.default, (spec((side, side), "R S1"), spec((side, 8), "S0 R", torch.int64)), {})),
        Operator("fused adam, 100", adam),
    ]  # fmt: skip


def spec_on(mesh: DeviceMesh) -> Callable[..., DTensorSpec]:
    def spec(shape: tuple[int, ...], words: str, dtype: torch.dtype = torch.float32) -> DTensorSpec:
        known: dict[str, Placement] = {"R": Replicate(), "P": Partial()}
        cycle = [known[word] if word in known else Shard(int(word[1:])) for word in words.split()]
        placements = tuple(cycle[axis % len(cycle)] for axis in range(mesh.ndim))
        whole = torch.empty(shape, dtype=dtype, device="meta")
        return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(whole.shape, whole.stride(), dtype))

    return spec


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Returns the least of some rounds, a call a round."""
    best = float("inf")
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
    return best


def miss_and_hit(propagator: Any, make: Callable[[], OpSchema], rounds: int) -> tuple[float, float]:
    """Returns seconds of a decision that is not cached and of one that is, for a new schema."""
    missing = [make() for _ in range(rounds)]
    begun = []
    for schema in missing:
        propagator.propagate_op_sharding.cache_clear()
        begin = time.perf_counter()
        propagator.propagate_op_sharding_non_cached(schema)
        begun.append(time.perf_counter() - begin)
    propagator.propagate_op_sharding(make())
    schemas = iter([make() for _ in range(200)])
    hit = seconds(lambda: propagator.propagate_op_sharding(next(schemas)), 200)
    return min(begun), hit


def bench_operators(names: list[str], most_axes: int, rounds: int) -> list[dict[str, Any]]:
    operators = [operator for operator in _operators() if not names or operator.name in names]
    records = []
    for axes in range(1, most_axes + 1):
        spec = spec_on(init_device_mesh("cpu", (2,) * axes))
        for operator in each(f"{axes} axes", operators):
            stock, ours = DTensor._op_dispatcher.sharding_propagator, ShardingPropagator()

            def make(operator: Operator = operator, spec: Any = spec) -> OpSchema:
                schema = operator.make(spec)
                schema.schema_info = schema_info(schema.op)
                return OpSchema(schema.op, schema.args_schema, schema.kwargs_schema, schema.schema_info)

            times: dict[str, Any] = {}
            # Stock takes seconds for some on four axes: once is enough there.
            times["stock"], times["stock_hit"] = miss_and_hit(stock, make, rounds if axes < 3 else 1)
            times["funcol"], times["funcol_hit"] = miss_and_hit(ours, make, 5 * rounds)
            schema = make()
            decide = ours._engine.time_decision
            times["cpp"] = decide(schema, 5 * rounds) if is_in_cpp(schema) else float("nan")
            records.append(
                {"name": operator.name, "axes": axes, "us": {k: 1e6 * v for k, v in times.items()}}
            )
    return records


def is_in_cpp(schema: OpSchema) -> bool:
    return bool(_C.has_rule(schema.op.name()))


def schema_info(op: Any) -> Any:
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(op)
    return info or getattr(propagator, "op_to_schema_info_for_single_dim_strategy", {}).get(op)


def print_operators(records: list[dict[str, Any]]) -> None:
    def row(record: dict[str, Any]) -> list[str]:
        us, limit = record["us"], LIMITS.get(record["name"], LIMIT)
        whole, in_cpp = us["funcol"] / us["stock"], us["cpp"] / us["stock"]
        text = f"Python <= {WHOLE_LIMIT} {mark(whole <= WHOLE_LIMIT)}"
        has_cpp = us["cpp"] == us["cpp"]
        if has_cpp and (record["name"] not in LIMITS or record["axes"] in (2, 3)):
            text += f", C++ <= {limit} {mark(in_cpp <= limit)}"
        times = (f"{us[side]:.1f}" for side in ("stock", "funcol", "cpp"))
        hits = (f"{us[side]:.2f}" for side in ("stock_hit", "funcol_hit"))
        return [record["name"], record["axes"], *times, f"{whole:.4f}", f"{in_cpp:.4f}", *hits, text]

    show(
        "A decision in us, best: not remembered (stock, funcol through Python, funcol in C++), remembered",
        "{:<18}{:>5}{:>12}{:>11}{:>11}{:>11}{:>10}{:>9}{:>9}   {}",
        ("", "axes", "stock", "Python", "C++", "Python/", "C++/", "stock", "funcol", "limits"),
        map(row, records),
    )


# A transformer block


def block_on(mesh: DeviceMesh) -> tuple[Block, DTensor]:
    """Returns a block with weights cut by columns and rows along the last axis, and activations cut by the
    batch along the others."""
    with torch.device("meta"):
        block = Block(4096, 32)
        x = torch.empty(2 * mesh.size() // mesh.size(mesh.ndim - 1), 128, 4096)
    columns = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
    rows = (*[Replicate()] * (mesh.ndim - 1), Shard(1))
    whole = (Replicate(),) * mesh.ndim
    for name, weight in list(block.named_parameters()):
        path, _, leaf = name.rpartition(".")
        is_by_columns = path.endswith(("query", "key", "value", "up"))
        placements = whole if "norm" in path else columns if is_by_columns else rows
        setattr(block.get_submodule(path), leaf, torch.nn.Parameter(shard(weight, mesh, placements)))
    return block, shard(x, mesh, (*[Shard(0)] * (mesh.ndim - 1), Replicate())).requires_grad_()


def shard(whole: torch.Tensor, mesh: DeviceMesh, placements: Layouts) -> DTensor:
    sizes = list(whole.shape)
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            sizes[placement.dim] //= mesh.size(axis)  # type: ignore[attr-defined]
    local = torch.empty(sizes, device="meta")
    return DTensor.from_local(local, mesh, placements, run_check=False)


class Timed:
    """A propagator that times its decisions and replaces the dispatcher's."""

    def __init__(self, propagator: Any) -> None:
        self._propagator = propagator
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._propagator, name)

    def _timed(self, call: Callable[[OpSchema], Any], schema: OpSchema) -> Any:
        begin = time.perf_counter()
        try:
            return call(schema)
        finally:
            self.seconds += time.perf_counter() - begin

    def propagate_op_sharding(self, schema: OpSchema) -> Any:
        return self._timed(self._propagator.propagate_op_sharding, schema)

    def propagate_op_sharding_non_cached(self, schema: OpSchema) -> Any:
        # The dispatcher has looked in a cache of its own before.
        return self._timed(self._propagator.propagate_op_sharding, schema)


def bench_blocks(stock_too: bool) -> Iterator[dict[str, Any]]:
    """Yields cold and warm seconds in propagation, for each mesh."""
    limits = {(32,): 0.1, (32, 16): 0.2, (8, 8, 8): 0.5}
    for shape, limit in each("blocks", limits.items()):
        mesh = init_device_mesh("cpu", shape)
        record: dict[str, Any] = {"mesh": "x".join(map(str, shape)), "limit": limit}
        for side in ("funcol", "stock") if stock_too and len(shape) < 3 else ("funcol",):
            dispatcher = DTensor._op_dispatcher
            own = dispatcher.sharding_propagator
            timed = Timed(ShardingPropagator() if side == "funcol" else own)
            forget_native()
            if side == "stock":
                own.propagate_op_sharding.cache_clear()
            dispatcher.sharding_propagator = timed
            try:
                for when in ("cold", "warm"):
                    block, x = block_on(mesh)
                    timed.seconds = 0.0
                    forget_native()
                    block(x).sum().backward()
                    record[f"{side}_{when}"] = timed.seconds
            finally:
                dispatcher.sharding_propagator = own
        yield record


# Cold blocks under install()

PARTIAL_BLOCK_LIMITS = {(32,): 0.1, (32, 16): 0.2, (8, 8, 8): 0.4}


def bench_partial_blocks(rounds: int) -> Iterator[dict[str, Any]]:
    """Yields seconds of the processor for a whole block, forward and backward, under ``funcol.install()``.
    ``partial``: the activations come as partial sums along the last axis. ``whole``: they are replicated
    there, and only the block makes partial sums."""
    with funcol.installed():
        for shape, limit in each("blocks under install()", PARTIAL_BLOCK_LIMITS.items()):
            mesh = init_device_mesh("cpu", shape)
            record: dict[str, Any] = {"mesh": "x".join(map(str, shape)), "limit": limit}
            for name, last in (("partial", Partial()), ("whole", Replicate())):
                for when in ("cold", "warm"):
                    record[f"{name}_{when}"] = min(
                        seconds_of_block(mesh, last, when == "cold") for _ in range(rounds)
                    )
            counts = installation.decision_counts()
            reasons = {reason for of_operator in counts.values() for reason in of_operator} - {"C++"}
            record["left"] = sum(
                of_operator.get(reason, 0) for of_operator in counts.values() for reason in reasons
            )
            yield record


def seconds_of_block(mesh: DeviceMesh, last: Placement, is_cold: bool) -> float:
    block, x = block_on(mesh)
    x = shard(torch.empty(x.shape, device="meta"), mesh, (*x.placements[:-1], last)).requires_grad_()
    if is_cold:
        installation.forget_decision_counts()
        forget_decisions()
    begin = time.process_time()
    block(x).sum().backward()
    return time.process_time() - begin


def print_partial_blocks(records: list[dict[str, Any]]) -> None:
    print_times(
        "All of such a block under install(), activations partial or whole: ms; decisions left to PyTorch",
        [f"{name}_{when}" for when in ("cold", "warm") for name in ("partial", "whole")],
        records,
        limited=("partial_cold", "whole_cold"),
        limit="limit of cold",
        with_left=True,
    )


def forget_decisions() -> None:
    """Empties all caches of decisions, funcol's and PyTorch's, and PyTorch's of plans."""
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    _C.forget_call_plans()
    forget_native()
    stock_redistribute._gen_transform_infos.cache_clear()


def forget_native() -> None:
    """Empties the dispatcher's own cache, where it has one."""
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is None:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache as clear
    clear()


def print_blocks(records: list[dict[str, Any]]) -> None:
    print_times(
        "A transformer block, forward and backward: ms in propagation",
        [f"{side}_{when}" for side in ("stock", "funcol") for when in ("cold", "warm")],
        records,
        limited=("funcol_cold",),
        limit="limit of funcol cold",
    )


def print_times(
    title: str,
    sides: list[str],
    records: list[dict[str, Any]],
    limited: tuple[str, ...],
    limit: str,
    with_left: bool = False,
) -> None:
    """Prints seconds of ``sides`` in ms, a mesh a row. The limit is for the longest of ``limited``."""

    def row(record: dict[str, Any]) -> list[str]:
        times = (f"{1e3 * record[side]:.1f}" if side in record else "-" for side in sides)
        left = [record["left"]] if with_left else []
        met = max(record[side] for side in limited) <= record["limit"]
        return [record["mesh"], *times, *left, f"{1e3 * record['limit']:.0f} {mark(met)}"]

    form = "{:<10}" + "{:>14}" * len(sides) + "{:>10}" * with_left + "   {}"
    header = [side.replace("_", " ") for side in sides] + ["left"] * with_left
    show(title, form, ("mesh", *header, limit), map(row, records))


def on_ranks(num_ranks: int, bench: Callable[[], Any]) -> list[dict[str, Any]]:
    with fake_ranks(num_ranks):
        return list(bench())


TABLES = [
    Table(
        "operators",
        lambda args: on_ranks(16, lambda: bench_operators(args.operators, args.axes, args.repeat)),
        print_operators,
    ),
    Table("blocks", lambda args: on_ranks(512, lambda: bench_blocks(not args.no_stock_blocks)), print_blocks),
    Table(
        "partial_blocks",
        lambda args: on_ranks(512, lambda: bench_partial_blocks(args.repeat)),
        print_partial_blocks,
    ),
]

if __name__ == "__main__":
    operators = {"type": lambda text: text.split(","), "default": [], "help": "only these of table 1: add,mm"}
    run(
        __doc__,
        TABLES,
        repeat(5),
        number("--axes", 3, "most mesh axes of table 1 (default %(default)s)"),
        Option("--operators", operators),
        Option("--no-stock-blocks", {"action": "store_true", "help": "table 2 of funcol alone"}),
    )
