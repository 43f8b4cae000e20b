"""Redistribution of local tensors: the steps of the planner, run as differentiable collectives."""

from functools import cache

from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.communication import communicator, world
from mindformers_core.operators import tensor_meta
from mindformers_core.redistribution import ASCEND, CPU, GPU, plan_redistribution

_DEVICE_MODELS = {"CPU": CPU, "GPU": GPU, "Ascend": ASCEND}


def device_model():
    """The redistribution device model of the device that this process runs on."""
    return _DEVICE_MODELS[world().device_target]


@cache
def dtype_name(dtype):
    """`"float32"` for `mindspore.float32`."""
    return str(dtype).lower()


def meta_of(leaf):
    """The `TensorMeta` of a local tensor, without a layout; any other leaf as it is."""
    return tensor_meta(tuple(leaf.shape), dtype_name(leaf.dtype)) if isinstance(leaf, Tensor) else leaf


def redistribute_local(local, source, target, shape=None):
    """`local`, this rank's part of a tensor in layout `source`, redistributed to layout `target`; differentiable.

    `shape` is the global shape; default: the global shape of `local` in `source`.
    """
    if source == target:
        return local
    if local.dtype == mstype.bool_:  # no sums of bools on the way
        return ops.cast(redistribute_local(ops.cast(local, mstype.int32), source, target, shape), mstype.bool_)
    shape = source.global_shape(local.shape) if shape is None else shape
    for step in plan_redistribution(source, target, shape, dtype_name(local.dtype), device_model()).steps:
        local = communicator(source.mesh).cell(step)(local)
    return local
