"""How FSDP2 differs between PyTorch minors: which of its functions funcol was made for."""

from __future__ import annotations

import functools
import inspect
import io
import sys
import textwrap
import tokenize
import zlib
from types import CodeType, FunctionType, ModuleType
from typing import Any


def is_known(path: str, function: Any) -> bool:
    """Whether ``function`` of FSDP2, or None for none, is one that funcol was made for; spaces and comments
    do not count."""
    if function is None:
        return "" in KNOWN[path]
    return isinstance(function, FunctionType) and _digest(function.__code__) in KNOWN[path]


def switches() -> list[tuple[ModuleType, str, Any]]:
    """Variables, and the values that they have where FSDP2 runs as usual."""
    known = [
        ("torch.distributed.fsdp._fully_shard._fsdp_common", "_compiled_autograd_enabled", False),
        ("torch.autograd.profiler", "_active_cuspy_profiler_observer", None),
    ]
    return [
        (sys.modules[module], name, value)
        for module, name, value in known
        if hasattr(sys.modules[module], name)
    ]


def source_of(code: CodeType) -> str:
    try:
        return textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return ""


@functools.cache
def _digest(code: CodeType) -> str:
    source = source_of(code)
    if not source:
        return "no source"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = "".join(token.string for token in tokens if token.type != tokenize.COMMENT)
    return f"{zlib.crc32(''.join(text.split()).encode()):08x}"


# By function, the digests of what minors have; none where one does not have it.
KNOWN: dict[str, tuple[str, ...]] = {
    "DefaultAllGather.__call__": ("8aaf2a35",),
    "DefaultAllGather.allocate": ("efdb134b",),
    "DefaultReduceScatter.__call__": ("fe5a273c",),
    "DefaultReduceScatter.allocate": ("efdb134b",),
    "FSDPCommContext.get_all_gather_streams": ("deda0184",),
    "FSDPCommContext.release_all_gather_state_for_comm_reuse": ("902bc38c",),
    "FSDPCommContext.wait_all_gather_streams_on_event": ("bdac0601",),
    "FSDPParam._get_grad_inner_tensor": ("f3b1e183", "c34beeca", "65d2f32e"),
    "FSDPParam._restore_spmd_types": ("222fbfdc",),
    "FSDPParam._setattr_on_modules": ("dc6b393a",),
    "FSDPParam.all_gather_inputs": ("b969a683", "ba5d57b6"),
    "FSDPParam.alloc_all_gather_outputs": ("e087df5c",),
    "FSDPParam.free_unsharded_param": ("ff3bad13", "8624646b", "de979c36"),
    "FSDPParam.init_all_gather_outputs": ("53f2e056", "8abb9811"),
    "FSDPParam.init_unsharded_param": ("b6a07ac7",),
    "FSDPParam.to_sharded": ("19453120", "3e63e9a4"),
    "FSDPParam.to_sharded_dtensor": ("0f84dca2", "ba720aa5"),
    "FSDPParam.to_unsharded": ("009100f3",),
    "FSDPParam.unsharded_grad_data": ("e16c8010",),
    "FSDPParamGroup._all_gather_process_group": ("c78c4301",),
    "FSDPParamGroup._backward_prefetch": ("ae87b225",),
    "FSDPParamGroup._get_unsharded_grad_to_reduce": ("978aba3e", ""),
    "FSDPParamGroup._prefetch_unshard": ("5833ae67",),
    "FSDPParamGroup._record_post_forward": ("fa814a18",),
    "FSDPParamGroup._reduce_scatter_process_group": ("52e71411",),
    "FSDPParamGroup._register_post_backward_hook": ("ecb84435",),
    "FSDPParamGroup._reshard_after_forward": ("9afe0cea",),
    "FSDPParamGroup._set_unsharded_grad_dtypes": ("1d77420e",),
    "FSDPParamGroup._take_unsharded_grads_to_reduce": ("ca436c2a", ""),
    "FSDPParamGroup._to_sharded": ("4f3ed7c7",),
    "FSDPParamGroup._to_unsharded": ("bd935f4e",),
    "FSDPParamGroup._use_post_forward_mesh": ("6949a4ed",),
    "FSDPParamGroup._validate_unused_param_grad_dtypes": ("7e77e7f8",),
    "FSDPParamGroup._wait_for_post_backward": ("a7bdd6ae",),
    "FSDPParamGroup.is_unsharded": ("cfe820a4",),
    "FSDPParamGroup.post_backward": ("8119c264",),
    "FSDPParamGroup.post_forward": ("fb1e6e5d",),
    "FSDPParamGroup.pre_backward": ("d59ccc79",),
    "FSDPParamGroup.pre_forward": ("9d593b55",),
    "FSDPParamGroup.reshard": ("02cf68ae",),
    "FSDPParamGroup.unshard": ("f1498d72",),
    "FSDPParamGroup.use_training_state": ("8575d6cd",),
    "FSDPParamGroup.wait_for_unshard": ("ff867def",),
    "FSDPState._lazy_init": ("6138b3ae",),
    "FSDPState._register_pre_backward_hook": ("6ebf295f",),
    "FSDPState._root_post_backward_final_callback": ("efa3d815",),
    "FSDPState._root_pre_forward": ("7a40b563",),
    "RegisterPostBackwardFunction.backward": ("559292e2", "cab3bb3a"),
    "RegisterPostBackwardFunction.forward": ("3819f78e", "cddb3b59", "5b0847b8"),
    "RegisterPostBackwardFunction.setup_context": ("4c933009", ""),
    "_cast_and_view_sharded_grads": ("a01e880a", ""),
    "_copy_all_gather_outputs": ("4a13579c", ""),
    "_default_all_gather_output_fn": ("28e3dde8", ""),
    "_default_reduce_scatter_input_fn": ("20005573", ""),
    "_dynamo_disable": ("5e21801e", "370c35a7", ""),
    "_from_local_no_grad": ("a419ea55", "f6e3b409"),
    "_get_all_gather_input_metadatas": ("3d42e633",),
    "_get_dim0_padded_size": ("0eee35f0",),
    "_get_dtensor_spec_with_dtype": ("a1bb41c6", ""),
    "_get_param_all_gather_inputs": ("fa33b652", "b58a4b45"),
    "_spmd_no_typecheck": ("18a10921", ""),
    "_to_dtype_if_needed": ("90d9090b",),
    "all_gather_copy_in_cuda": ("e6b95d6c",),
    "all_gather_single": ("839d65bf",),
    "alloc_storage": ("20a814d5",),
    "collect_grad_tensors": ("25ddc731",),
    "disable_if_config_true": ("", "143a9c74"),
    "foreach_all_gather": ("1f28bd1d",),
    "foreach_all_gather_copy_out": ("92384730", "22abfc08", "ba13be15"),
    "foreach_reduce": ("80625110", "d789179a", "7ef15f77", "9d48eb6a"),
    "foreach_reduce_scatter_copy_in": ("2185bb5e", "18cd2ea6"),
    "free_storage": ("2d095ebb",),
    "is_bw": ("7f9a72e5",),
    "reduce_scatter_single": ("81bedc0d",),
    "set_requires_grad_if_needed": ("d58e9ff5",),
    "split_with_sizes_copy": ("4be3a44b",),
    "unsafe_setattr_param": ("c2ab82a7",),
}
