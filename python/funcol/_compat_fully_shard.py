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
    """Whether ``function`` of FSDP2 is one that funcol was made for; spaces and comments do not count."""
    function = function.fget if isinstance(function, property) else function
    return (_digest(function.__code__) if isinstance(function, FunctionType) else "") in KNOWN[path]


def switches() -> list[tuple[ModuleType, str, Any]]:
    """Variables, and the values that they have where FSDP2 runs as usual."""
    common = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_common"]
    name = "_compiled_autograd_enabled"
    return [(common, name, False)] if hasattr(common, name) else []


@functools.cache
def _digest(code: CodeType) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(code))
    except (OSError, TypeError):
        return "no source"
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = "".join(token.string for token in tokens if token.type != tokenize.COMMENT)
    return f"{zlib.crc32(''.join(text.split()).encode()):08x}"


# By function, the digests of what minors have; none where one does not have it.
KNOWN: dict[str, tuple[str, ...]] = {
    "FSDPParam._get_grad_inner_tensor": ("f3b1e183", "c34beeca", "65d2f32e"),
    "FSDPParam._setattr_on_modules": ("dc6b393a",),
    "FSDPParam.all_gather_inputs": ("b969a683", "ba5d57b6"),
    "FSDPParam.alloc_all_gather_outputs": ("e087df5c",),
    "FSDPParam.free_unsharded_param": ("ff3bad13", "8624646b", "de979c36"),
    "FSDPParam.init_all_gather_outputs": ("53f2e056", "8abb9811"),
    "FSDPParam.to_sharded": ("19453120", "3e63e9a4"),
    "FSDPParam.to_sharded_dtensor": ("0f84dca2", "ba720aa5"),
    "FSDPParam.to_unsharded": ("009100f3",),
    "FSDPParam.unsharded_grad_data": ("e16c8010",),
    "FSDPParamGroup._get_unsharded_grad_to_reduce": ("978aba3e", ""),
    "FSDPParamGroup._register_post_backward_hook": ("ecb84435",),
    "FSDPParamGroup._take_unsharded_grads_to_reduce": ("ca436c2a", ""),
    "FSDPParamGroup._to_sharded": ("4f3ed7c7",),
    "FSDPParamGroup._to_unsharded": ("bd935f4e",),
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
    "alloc_storage": ("20a814d5",),
    "disable_if_config_true": ("", "143a9c74"),
    "foreach_all_gather": ("1f28bd1d",),
    "foreach_all_gather_copy_out": ("92384730", "22abfc08", "ba13be15"),
    "foreach_reduce": ("80625110", "d789179a", "7ef15f77", "9d48eb6a"),
    "foreach_reduce_scatter_copy_in": ("2185bb5e", "18cd2ea6"),
    "free_storage": ("2d095ebb",),
    "set_requires_grad_if_needed": ("d58e9ff5",),
    "split_with_sizes_copy": ("4be3a44b",),
    "unsafe_setattr_param": ("c2ab82a7",),
}
