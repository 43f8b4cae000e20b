"""Redistribution of local tensors: the steps of the planner, run as differentiable collectives."""

from mindspore import Tensor, dtype as mstype, ops

from mindformers_core.communication import communicator, process_state, world
from mindformers_core.dtypes import dtype_name, wire_dtype
from mindformers_core.operators import tensor_meta
from mindformers_core.redistribution import plan_redistribution
from mindformers_core.redistribution.device_model import NAMED


def model_of_device(mesh):
    """The `DeviceModel` of eager calls, with the links of a mesh: that of the device, or of the Cell that runs."""
    return (process_state().device_model or NAMED[world().device_target]).on_mesh(mesh)


def meta_of(leaf):
    """The `TensorMeta` of a local tensor, without a layout; any other leaf as it is."""
    return tensor_meta(tuple(leaf.shape), dtype_name(leaf.dtype)) if isinstance(leaf, Tensor) else leaf


def redistribute_local(local, source, target, shape=None, model=None):
    """`local`, this rank's part of a tensor in layout `source`, redistributed to layout `target`; differentiable.

    Args:
        local, source, target: the part, and the two layouts.
        shape: the global shape. Default: that of `local` in `source`.
        model: the `DeviceModel` by which the way is planned. Default: `model_of_device`.
    """
    if source == target:
        return local
    shape = source.global_shape(local.shape) if shape is None else shape
    model = model or model_of_device(source.mesh)
    return steps_local(local, *plan_redistribution(source, target, shape, dtype_name(local.dtype), model).steps)


def steps_local(local, *steps, others=()):
    """`local`, this rank's tensor, after some `Step`s, which send it in its `wire_dtype`; differentiable.

    `others`: further operands of each step. Default: none.
    """
    name = dtype_name(local.dtype)
    is_cast = wire_dtype(name) != name
    sent = ops.cast(local, getattr(mstype, wire_dtype(name))) if is_cast else local
    for step in steps:
        sent = communicator(step.source.mesh).cell(step)(sent, *others)
    return ops.cast(sent, local.dtype) if is_cast else sent
