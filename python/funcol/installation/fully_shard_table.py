"""FSDP2's functions that funcol replaces, the functions that each replacement bypasses, and their sources.

This is the one table of them: :mod:`funcol.installation.fully_shard` installs the replacements by it, and
registers with C++ the methods that each of them bypasses. It imports FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from .. import _C
from . import fully_shard_calls as calls
from .patching import digest_of

ABSENT = "absent"  # the digest of a function that a PyTorch release does not have


class Function(NamedTuple):
    """A function of FSDP2.

    ``digests`` are those of the sources that funcol was written for, of all PyTorch releases. ``replacement``
    has the function's signature and returns ``NotImplemented`` for a call that PyTorch's own function has to
    run. ``bypasses`` names the functions that PyTorch's function calls and the replacement does not. A
    replacement that ``omits_ranges`` makes no ranges of ``record_function`` unless a profiler sees them.
    """

    digests: tuple[str, ...]
    replacement: Callable[..., Any] | None = None
    bypasses: tuple[str, ...] = ()
    omits_ranges: bool = False

    def has_source_of(self, found: Any) -> bool:
        """Returns true if the source of ``found`` is known; ``None`` represents an absent function."""
        if found is None:
            return ABSENT in self.digests
        return isinstance(found, FunctionType) and digest_of(found.__code__) in self.digests


_STORAGE = ("alloc_storage", "free_storage")
_SETTERS = ("FSDPParam._setattr_on_modules", "unsafe_setattr_param")

_GATHER_INPUTS = (
    "_get_param_all_gather_inputs",
    "_get_all_gather_input_metadatas",
    "all_gather_copy_in_cuda",
    "FSDPParam.all_gather_inputs",
    "_to_dtype_if_needed",
)
_GATHER_OUTPUTS = (
    "FSDPParam.init_all_gather_outputs",
    "FSDPParam.alloc_all_gather_outputs",
    "_copy_all_gather_outputs",
    "split_with_sizes_copy",
    *_STORAGE,
)
_SHARDING = ("FSDPParam.to_sharded", "FSDPParam.free_unsharded_param", *_SETTERS, *_STORAGE)
_UNSHARDING = ("FSDPParam.to_unsharded", "set_requires_grad_if_needed", *_SETTERS)
_UNSHARDED_GRADIENTS = (
    "FSDPParamGroup._get_unsharded_grad_to_reduce",
    "FSDPParam.unsharded_grad_data",
    "FSDPParam._get_grad_inner_tensor",
)
_SHARDED_GRADIENTS = (
    "foreach_reduce",  # the caller, whose rest relies on what the replacement returns
    "FSDPParam.to_sharded_dtensor",
    "_from_local_no_grad",
    "_get_dtensor_spec_with_dtype",
    "_to_dtype_if_needed",
)
# Functions between a group and its process group. If a program has replaced one of them, C++ calls the
# group's all_gather or reduce_scatter object, and bypasses the rest.
COLLECTIVES = (
    "DefaultAllGather.allocate",
    "DefaultAllGather.__call__",
    "DefaultReduceScatter.allocate",
    "DefaultReduceScatter.__call__",
    "all_gather_single",
    "all_reduce",
    "reduce_scatter_single",
)

FUNCTIONS: dict[str, Function] = {
    "FSDPState._root_pre_forward": Function(
        ("2541c7ee",), calls.root_pre_forward, ("FSDPState._lazy_init",), omits_ranges=True
    ),
    "FSDPState._root_post_backward_final_callback": Function(
        ("efa3d815",), calls.root_post_backward_final_callback, omits_ranges=True
    ),
    "FSDPState._register_pre_backward_hook": Function(
        ("6ebf295f",), calls.register_pre_backward_hook, ("collect_grad_tensors",)
    ),
    "FSDPState._cast_forward_inputs": Function(
        ("e1f1e34b",), calls.cast_forward_inputs, ("_apply_to_tensors",), omits_ranges=True
    ),
    "FSDPState._cast_output_dtype": Function(
        ("5a765e45",), calls.cast_output_dtype, ("_apply_to_tensors",), omits_ranges=True
    ),
    "FSDPParamGroup.pre_forward": Function(
        ("9d593b55",),
        calls.pre_forward,
        ("FSDPParam._restore_spmd_types", "FSDPParamGroup.unshard", "FSDPParamGroup.wait_for_unshard"),
        omits_ranges=True,
    ),
    "FSDPParamGroup.post_forward": Function(
        ("fb1e6e5d",),
        calls.post_forward,
        (
            "FSDPParamGroup._record_post_forward",
            "FSDPParamGroup._reshard_after_forward",
            "FSDPParamGroup._to_sharded",
            "FSDPParamGroup._use_post_forward_mesh",
            "FSDPParamGroup.reshard",
            "is_bw",
            *_SHARDING,
        ),
        omits_ranges=True,
    ),
    "FSDPParamGroup.pre_backward": Function(
        ("4071d9a9",),
        calls.pre_backward,
        (
            "FSDPParamGroup._backward_prefetch",
            "FSDPParamGroup._prefetch_unshard",
            "FSDPParamGroup._set_unsharded_grad_dtypes",
            "FSDPParamGroup.unshard",
            "FSDPParamGroup.use_training_state",
            "FSDPParamGroup.wait_for_unshard",
        ),
        omits_ranges=True,
    ),
    "FSDPParamGroup.unshard": Function(
        ("04fc7d72",),
        calls.unshard,
        (
            "foreach_all_gather",
            "FSDPParamGroup._all_gather_process_group",
            "FSDPParamGroup.is_unsharded",
            "FSDPCommContext.get_all_gather_streams",
            *COLLECTIVES,
            *_GATHER_INPUTS,
        ),
        omits_ranges=True,
    ),
    "FSDPParamGroup.wait_for_unshard": Function(
        ("3d7aa42e",),
        calls.wait_for_unshard,
        (
            "foreach_all_gather_copy_out",
            "_default_all_gather_output_fn",
            "FSDPCommContext.release_all_gather_state_for_comm_reuse",
            "FSDPCommContext.wait_all_gather_streams_on_event",
            "FSDPParam.init_unsharded_param",
            "FSDPParamGroup._to_unsharded",
            *_GATHER_OUTPUTS,
            *_UNSHARDING,
        ),
        omits_ranges=True,
    ),
    "FSDPParamGroup.post_backward": Function(
        ("aef04ac7",),
        calls.post_backward,
        (
            "foreach_reduce",
            "foreach_reduce_scatter_copy_in",
            "_cast_and_view_sharded_grads",
            "_default_reduce_scatter_input_fn",
            "_get_gradient_divide_factors",
            "FSDPParamGroup._all_reduce_process_group",
            "FSDPParamGroup._get_reduce_dtype",
            "FSDPParamGroup._reduce_scatter_process_group",
            "FSDPParamGroup._set_unsharded_grad_dtypes",
            "FSDPParamGroup._take_unsharded_grads_to_reduce",
            "FSDPParamGroup._to_sharded",
            "FSDPParamGroup._validate_unused_param_grad_dtypes",
            "FSDPParamGroup._wait_for_post_backward",
            "FSDPParamGroup.reshard",
            "FSDPParam.unsharded_grad_dtype",
            *COLLECTIVES,
            *_SHARDING,
            *_UNSHARDED_GRADIENTS,
            *_SHARDED_GRADIENTS,
        ),
        omits_ranges=True,
    ),
    "foreach_all_gather": Function(("1f28bd1d",), calls.foreach_all_gather, _GATHER_INPUTS),
    "_default_all_gather_output_fn": Function(
        ("28e3dde8", ABSENT), calls.all_gather_output_fn, _GATHER_OUTPUTS
    ),
    "FSDPParamGroup._to_sharded": Function(("4f3ed7c7",), _C.fsdp_to_sharded, _SHARDING),
    "FSDPParamGroup._to_unsharded": Function(("bd935f4e",), _C.fsdp_to_unsharded, _UNSHARDING),
    "FSDPParamGroup._take_unsharded_grads_to_reduce": Function(
        ("ca436c2a", ABSENT), _C.fsdp_take_gradients, _UNSHARDED_GRADIENTS
    ),
    "_default_reduce_scatter_input_fn": Function(
        ("20005573", ABSENT), calls.reduce_scatter_input_fn, ("_get_dim0_padded_size",)
    ),
    "_cast_and_view_sharded_grads": Function(
        ("c195eba8", ABSENT), calls.cast_and_view_sharded_grads, _SHARDED_GRADIENTS
    ),
    "foreach_reduce_scatter_copy_in": Function(("2185bb5e", "18cd2ea6"), calls.reduce_scatter_copy_in),
    "FSDPParamGroup._register_post_backward_hook": Function(
        ("ecb84435",),
        calls.register_post_backward_hook,
        (
            "RegisterPostBackwardFunction.forward",
            "RegisterPostBackwardFunction.setup_context",
            "RegisterPostBackwardFunction.backward",
        ),
    ),
    "FSDPParam.to_sharded_dtensor": Function(
        ("0f84dca2", "ba720aa5"),
        calls.to_sharded_dtensor,
        ("_from_local_no_grad", "_get_dtensor_spec_with_dtype"),
    ),
    "_spmd_no_typecheck": Function(("18a10921", ABSENT), calls.no_typecheck),
    # Bypassed
    "DefaultAllGather.__call__": Function(("8aaf2a35",)),
    "DefaultAllGather.allocate": Function(("efdb134b",)),
    "DefaultReduceScatter.__call__": Function(("103521e4", "fe5a273c")),
    "DefaultReduceScatter.allocate": Function(("efdb134b",)),
    "FSDPCommContext.get_all_gather_streams": Function(("deda0184",)),
    "FSDPCommContext.release_all_gather_state_for_comm_reuse": Function(("902bc38c",)),
    "FSDPCommContext.wait_all_gather_streams_on_event": Function(("bdac0601",)),
    "FSDPParam._get_grad_inner_tensor": Function(("f3b1e183", "c34beeca", "65d2f32e")),
    "FSDPParam._restore_spmd_types": Function(("222fbfdc",)),
    "FSDPParam._setattr_on_modules": Function(("dc6b393a",)),
    "FSDPParam.all_gather_inputs": Function(("45a30a6b", "fdd00b64")),
    "FSDPParam.alloc_all_gather_outputs": Function(("e087df5c",)),
    "FSDPParam.free_unsharded_param": Function(("ff3bad13", "8624646b", "de979c36")),
    "FSDPParam.init_all_gather_outputs": Function(("02402b08", "ae60bc48")),
    "FSDPParam.init_unsharded_param": Function(("5cdd3ac0",)),
    "FSDPParam.to_sharded": Function(("19453120", "3e63e9a4")),
    "FSDPParam.to_unsharded": Function(("85735d90",)),
    "FSDPParam.unsharded_grad_data": Function(("e16c8010",)),
    "FSDPParam.unsharded_grad_dtype": Function(("49eb47d2", ABSENT)),
    "FSDPParamGroup._all_gather_process_group": Function(("c78c4301",)),
    "FSDPParamGroup._all_reduce_process_group": Function(("0bd38a41",)),
    "FSDPParamGroup._backward_prefetch": Function(("ae87b225",)),
    "FSDPParamGroup._get_reduce_dtype": Function(("fc22d956",)),
    "FSDPParamGroup._get_unsharded_grad_to_reduce": Function(("978aba3e", ABSENT)),
    "FSDPParamGroup._prefetch_unshard": Function(("5833ae67",)),
    "FSDPParamGroup._record_post_forward": Function(("fa814a18",)),
    "FSDPParamGroup._reduce_scatter_process_group": Function(("52e71411",)),
    "FSDPParamGroup._reshard_after_forward": Function(("9afe0cea",)),
    "FSDPParamGroup._set_unsharded_grad_dtypes": Function(("1d77420e",)),
    "FSDPParamGroup._use_post_forward_mesh": Function(("6949a4ed",)),
    "FSDPParamGroup._validate_unused_param_grad_dtypes": Function(("7e77e7f8",)),
    "FSDPParamGroup._wait_for_post_backward": Function(("a7bdd6ae",)),
    "FSDPParamGroup.is_unsharded": Function(("cfe820a4",)),
    "FSDPParamGroup.reshard": Function(("02cf68ae",)),
    "FSDPParamGroup.use_training_state": Function(("8575d6cd",)),
    "FSDPState._lazy_init": Function(("73854a6c",)),
    "RegisterPostBackwardFunction.backward": Function(("559292e2", "cab3bb3a")),
    "RegisterPostBackwardFunction.forward": Function(("3819f78e", "cddb3b59", "5b0847b8")),
    "RegisterPostBackwardFunction.setup_context": Function(("4c933009", ABSENT)),
    "_apply_to_tensors": Function(("c2aaa0cf",)),
    "_copy_all_gather_outputs": Function(("4a13579c", ABSENT)),
    "_dynamo_disable": Function(("5e21801e", "370c35a7", ABSENT)),
    "_from_local_no_grad": Function(("a419ea55", "f6e3b409")),
    "_get_all_gather_input_metadatas": Function(("3d42e633",)),
    "_get_dim0_padded_size": Function(("0eee35f0",)),
    "_get_dtensor_spec_with_dtype": Function(("a1bb41c6", ABSENT)),
    "_get_gradient_divide_factors": Function(("367052d2",)),
    "_get_param_all_gather_inputs": Function(("fa33b652", "b58a4b45")),
    "_to_dtype_if_needed": Function(("90d9090b",)),
    "all_gather_copy_in_cuda": Function(("e6b95d6c",)),
    "all_gather_single": Function(("85da4411",)),
    "all_reduce": Function(("c0033a91",)),
    "alloc_storage": Function(("20a814d5",)),
    "collect_grad_tensors": Function(("25ddc731",)),
    "disable_if_config_true": Function(("143a9c74", ABSENT)),
    "foreach_all_gather_copy_out": Function(("7dcfacad", "e20491bc", "c17db8a2")),
    "foreach_reduce": Function(("3e7a772a", "69e1a276", "e2d4ce82", "d4593313")),
    "free_storage": Function(("2d095ebb",)),
    "is_bw": Function(("7f9a72e5",)),
    "reduce_scatter_single": Function(("ee63fb0a",)),
    "set_requires_grad_if_needed": Function(("d58e9ff5",)),
    "split_with_sizes_copy": Function(("4be3a44b",)),
    "unsafe_setattr_param": Function(("f31545f1",)),
}
"""By name, or ``Class.method``."""

REPLACED = tuple(name for name, function in FUNCTIONS.items() if function.replacement is not None)

# Decorated with torch.no_grad(), which the backward pass, where no gradients are recorded, need not enter.
WITHOUT_GRADIENTS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")

# Hooks within a wrapper that keeps Dynamo away by a function that each call makes again.
HOOKS = (
    "FSDPState._pre_forward",
    "FSDPState._post_forward",
    "FSDPState._pre_backward",
    "FSDPState._root_post_backward_final_callback",
    "FSDPParamGroup.pre_backward",
    "FSDPParamGroup.post_backward",
)
HOOK_WRAPPERS = ("_dynamo_disable", "disable_if_config_true")
