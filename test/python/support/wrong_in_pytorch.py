"""Operators for which PyTorch's propagator decides wrongly for some calls, where funcol's rule decides."""

from __future__ import annotations

from typing import NamedTuple


class Wrong(NamedTuple):
    """``sample``: the name in PyTorch's operator database whose samples show by numbers that PyTorch is
    wrong; ``None`` if numbers on the CPU cannot show it."""

    sample: str | None
    reason: str


_WRITTEN = "the running statistics move to other ranks, and the operator writes to the copies"
_NO_ORDER = "Fourier transforms keep no order: the maximum of the parts' transforms is another number"
_BROADCAST = "a dim of size 1, which is broadcast, is cut, or a dim that one of the tensors lacks"
_ONE_NAN = "a value is NaN if one of its parts is, which the samples' parts never are alone"
_NO_CHANNELS = "the operator runs on no rank without channels"
_EMPTY = "a rank without elements has no extreme"

WRONG_IN_PYTORCH = {
    "aten::_batch_norm_with_update": Wrong("_batch_norm_with_update", _WRITTEN),
    "aten::_fft_c2c": Wrong("fft.hfftn", _NO_ORDER),
    "aten::_fft_c2r": Wrong("fft.irfftn", _NO_ORDER),
    "aten::_fft_r2c": Wrong("fft.rfftn", _NO_ORDER),
    "aten::_native_batch_norm_legit": Wrong("_native_batch_norm_legit", _WRITTEN),
    "aten::_to_copy": Wrong("fft.hfft", "complex numbers, and truths, keep no order"),
    "aten::amax": Wrong("masked.amax", _EMPTY),
    "aten::amin": Wrong("amin", _EMPTY),
    "aten::avg_pool2d": Wrong("nn.functional.avg_pool2d", _NO_CHANNELS),
    "aten::avg_pool3d": Wrong("nn.functional.avg_pool3d", _NO_CHANNELS),
    "aten::fill_.Scalar": Wrong(
        "nn.functional.hinge_embedding_loss", "each part of a sum becomes the number that the sum should be"
    ),
    "aten::index_put": Wrong(
        None,
        "of several values for one element, ranks may keep different ones; the CPU keeps the last one",
    ),
    "aten::linalg_cross": Wrong("linalg.cross", _BROADCAST),
    "aten::linalg_ldl_solve": Wrong("linalg.ldl_solve", _BROADCAST),
    "aten::linalg_pinv.atol_rtol_tensor": Wrong("pinverse", "tolerances given by keyword are partial sums"),
    "aten::linalg_vector_norm": Wrong("norm", "norms keep no order where numbers have signs"),
    "aten::max_pool2d_with_indices": Wrong("nn.functional.max_pool2d", _NO_CHANNELS),
    "aten::max_pool3d_with_indices": Wrong("nn.functional.max_pool3d", _NO_CHANNELS),
    "aten::mul.Tensor": Wrong("isfinite", "averages of integers are rounded, and their products, too"),
    "aten::nan_to_num": Wrong(None, _ONE_NAN),
    "aten::nansum": Wrong(None, _ONE_NAN),
    "aten::native_batch_norm": Wrong("native_batch_norm", _WRITTEN),
    "aten::sum.dim_IntList": Wrong("nanmean", "truths are counted, and their parts are not sums"),
    "aten::threshold": Wrong("nn.functional.threshold", "a threshold with another value keeps no order"),
    "aten::view": Wrong(
        "unflatten", "several axes cut a dim into shards that are not parts of the dims it becomes"
    ),
    "aten::view_as_real": Wrong("imag", "the parts of a product are not products of parts"),
}
