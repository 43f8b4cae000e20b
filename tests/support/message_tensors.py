"""Tensors that the tests of messages send, and how they are compared."""

import mindspore as ms
import numpy as np

from mindformers_core.communication import point_to_point_native as native


def tensor(size=4, value=1.0):
    return ms.Tensor(np.full(size, value, np.float32))


def random_tensor(dtype, shape, seed):
    """A tensor of random bits, NaNs and all."""
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, 16)).astype(np.uint8)
    if dtype == ms.bool_:
        return ms.Tensor.from_numpy(np.asarray(bits[..., 0] > 99))
    if dtype in native.UNKNOWN and "Complex" not in str(dtype):  # unknown to NumPy, too; a byte each
        x = ms.Tensor(np.zeros(shape), dtype)
        bits_of(x)[:] = bits[..., 0].reshape(-1)
        return x
    numpy_type = np.dtype(ms.dtype_to_nptype(dtype))
    return ms.Tensor.from_numpy(np.asarray(bits.view(numpy_type)[..., 0], order="C"))


def bits_of(x):
    return x.asnumpy().reshape(-1).view(np.uint8)
