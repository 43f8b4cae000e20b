"""Initial parameter values that don't depend on the mesh: every rank draws the global values of its own slice.

Each value is a pure function of the seed, the parameter's path and the value's flat index in the *global* tensor. A
counter goes through SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014)
to a uniform number, and that through the quantile function of the initializer's distribution. So a slice costs no
more than its own size, whatever the model's size.

A model built under `with mindspore.DeviceCtx("meta"):` allocates nothing and keeps the `Initializer` of each
parameter (`parameter.init`); `materialize` then gives it values. Built the ordinary way, MindSpore draws the values at
once from its own generator and forgets the initializer.
"""

import math
from hashlib import blake2b
from inspect import unwrap

import mindspore as ms
import numpy as np
from mindspore.common import initializer as init
from scipy.special import ndtr, ndtri

from mindformers_core.padding import own_slices, padded_array, padded_shape
from mindformers_core.scopes import errors_at
from mindformers_core.splitmix import GOLDEN, mixed

_CHUNK = 1 << 17  # values drawn at a time: about 1 MB for each temporary, which stays in the cache
_GAINS = {"linear": 1.0, "sigmoid": 1.0, "tanh": 5.0 / 3.0, "relu": math.sqrt(2.0)}
_CONSTANTS = {init.Zero: lambda _: 0, init.One: lambda _: 1, init.Constant: lambda given: given.value}
_QUANTILES = {
    init.Normal: lambda given, shape: _normal(given.mean, given.sigma),
    init.TruncatedNormal: lambda given, shape: _truncated_normal(given.mean, given.sigma, given.a, given.b),
    init.Uniform: lambda given, shape: _uniform(given.scale),
    init.XavierNormal: lambda given, shape: _normal(0.0, given.gain * math.sqrt(2.0 / sum(_fans(shape)))),
    init.XavierUniform: lambda given, shape: _uniform(given.gain * math.sqrt(6.0 / sum(_fans(shape)))),
    init.HeNormal: lambda given, shape: _normal(0.0, _he_deviation(given, shape)),
    init.HeUniform: lambda given, shape: _uniform(math.sqrt(3.0) * _he_deviation(given, shape)),
}


def initializers(cell):
    """`(path, parameter, Initializer)` of all parameters; in its place None where a parameter has values already.

    Raises:
        ValueError: a parameter on the meta device that was made from values: they are lost.
    """
    owners = {id(own): type(each) for _, each in cell.cells_and_names() for own in each.get_parameters(expand=False)}
    for path, parameter in cell.parameters_and_names():
        if parameter.is_meta and not parameter.has_init:
            owner = owners[id(parameter)]
            made = unwrap(owner.__init__).__code__
            raise ValueError(
                f"{path}: parameter '{parameter.name}' of {owner.__name__} ({made.co_filename}:{made.co_firstlineno}), "
                f"shape {tuple(parameter.shape)}, is on the meta device without an initializer; its values are lost. "
                "Declare it as Parameter(initializer(Normal(0.02), shape, dtype)), or build it on another device"
            )
        yield path, parameter, parameter.init if parameter.has_init else None


def draw_slice(initializer, global_shape, slices, seed, path, dtype=np.float32):
    """Initial values of a slice of a parameter: those that the whole parameter has there, bit for bit.

    Temporaries take about 10 MB, whatever the slice.

    Args:
        initializer: a MindSpore `Initializer`: Zero, One, Constant, Normal, TruncatedNormal, Uniform, Xavier… or He….
        global_shape: shape of the whole parameter, which also gives the fans of Xavier and He.
        slices: one `slice` of step 1 for every dim.
        seed: any int.
        path: the parameter's path; another path draws other values.
        dtype: NumPy dtype of the result.

    Raises:
        ValueError: an initializer that can't be drawn slice by slice.
    """
    global_shape = tuple(global_shape)
    bounds = [part.indices(size) for part, size in zip(slices, global_shape)]
    assert len(slices) == len(global_shape) and all(step == 1 for _, _, step in bounds), (slices, global_shape)
    starts = [start for start, _, _ in bounds]
    local_shape = tuple(stop - start for start, stop, _ in bounds)
    if type(initializer) in _CONSTANTS:
        value = np.broadcast_to(_CONSTANTS[type(initializer)](initializer), global_shape)
        return value[tuple(slices)].astype(dtype)
    if type(initializer) not in _QUANTILES:
        known = ", ".join(kind.__name__ for kind in (*_CONSTANTS, *_QUANTILES))
        raise ValueError(
            f"initializer {type(initializer).__name__} can't be drawn slice by slice: use one of {known}, "
            "or build the Cell outside the meta device"
        )
    quantile = _QUANTILES[type(initializer)](initializer, global_shape)
    key = np.uint64(int.from_bytes(blake2b(f"{seed}:{path}".encode(), digest_size=8).digest(), "little"))
    values = np.empty(math.prod(local_shape), dtype)
    for first in range(0, values.size, _CHUNK):
        last = min(first + _CHUNK, values.size)
        values[first:last] = quantile(_uniforms(key, _global_index(first, last, local_shape, starts, global_shape)))
    return values.reshape(local_shape)


def materialize(cell, seed, layouts=None, rank=None):
    """Gives values to all meta parameters of `cell`, in place: each stays the same object with the same name.

    Parameters that have values are left alone.

    Args:
        cell: a Cell built under `DeviceCtx("meta")`.
        seed: any int; the same seed gives the same global values on any mesh.
        layouts: `Layout`s by parameter path; a parameter without one is whole. Default: all whole.
        rank: the global rank whose slices to draw; needed with `layouts`.

    Raises:
        ValueError: a parameter without an initializer, with one that can't be drawn slice by slice, or that its layout
            doesn't divide; named by its path.
    """
    layouts = layouts or {}
    for path, parameter, initializer in initializers(cell):
        if initializer is not None:
            with errors_at(f"{path}: "):
                _set_values(parameter, initializer, layouts.get(path), rank, seed, path)


def _set_values(parameter, initializer, layout, rank, seed, path):
    dtype, shape, sizes = parameter.dtype, tuple(parameter.shape), getattr(parameter, "part_sizes", ())
    whole = tuple(slice(0, size) for size in shape)
    slices = whole if layout is None else layout.local_slices(padded_shape(shape, sizes), rank)
    is_bfloat16 = dtype == ms.bfloat16  # NumPy has none: through float32
    drawn_dtype = np.float32 if is_bfloat16 else np.dtype(str(dtype).lower()).type
    drawn = draw_slice(initializer, shape, own_slices(slices, sizes), seed, path, drawn_dtype)
    tensor = ms.Tensor(padded_array(drawn, [each.stop - each.start for each in slices]))
    parameter.set_data(tensor.astype(dtype) if is_bfloat16 else tensor, slice_shape=True)
    parameter.init_mode = None  # set_data keeps it, and init_data() would draw again


def _global_index(first, last, local_shape, starts, global_shape):
    """Flat index in the global tensor of the values `first`:`last` of the slice that begins at `starts`."""
    local = np.unravel_index(np.arange(first, last), (1, *local_shape))  # a scalar has no dim to unravel
    index = [coordinate + start for coordinate, start in zip(local, (0, *starts))]
    return np.ravel_multi_index(index, (1, *global_shape)).astype(np.uint64)


def _uniforms(key, index):
    """Uniform numbers in the open interval (0, 1), one for every counter of `index`: SplitMix64's output function."""
    state = mixed(key + (index + np.uint64(1)) * np.uint64(GOLDEN))
    return ((state >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _normal(mean, sigma):
    return lambda uniform: mean + sigma * ndtri(uniform)


def _truncated_normal(mean, sigma, low, high):
    """MindSpore's bounds are values, not multiples of sigma."""
    below, above = ndtr((low - mean) / sigma), ndtr((high - mean) / sigma)
    return lambda uniform: mean + sigma * ndtri(below + uniform * (above - below))


def _uniform(bound):
    return lambda uniform: bound * (2.0 * uniform - 1.0)


def _fans(shape):
    """Number of inputs and of outputs of a weight (out, in, …), as MindSpore's initializers count them."""
    if len(shape) < 2:
        raise ValueError(f"a parameter of shape {shape} has no fan in and fan out: Xavier and He need 2 dims")
    field = math.prod(shape[2:])
    return shape[1] * field, shape[0] * field


def _he_deviation(given, shape):
    """Standard deviation of He et al., "Delving deep into rectifiers" (2015)."""
    fan_in, fan_out = _fans(shape)
    slope = given.negative_slope
    gain = math.sqrt(2.0 / (1.0 + slope * slope)) if given.nonlinearity == "leaky_relu" else _GAINS[given.nonlinearity]
    return gain / math.sqrt(fan_out if given.mode.lower() == "fan_out" else fan_in)
