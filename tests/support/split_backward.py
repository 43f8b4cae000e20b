"""Gradients of several micro-batches that are outstanding together, with the backward pass whole and in two parts."""

import mindspore as ms
import numpy as np
from mindspore import ParameterTuple, Tensor, nn, ops

from mindformers_core.passes.weight_split import split_weight_gradients
from mindformers_core.tensor_parallel import prepare

__all__ = ["Compiled", "Interpreted", "assert_same", "filled", "gradients"]


class Interpreted(nn.Cell):
    """Runs a sharded Cell in PyNative; gives the local result."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def construct(self, *inputs):
        return self.net(*inputs).to_local()


class Compiled(nn.Cell):
    """Runs a sharded Cell as a compiled graph."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    @ms.jit
    def construct(self, *inputs):
        return self.net(*inputs)


def filled(cell):
    """The Cell, with values that differ from parameter to parameter, the same at every call."""
    random = np.random.default_rng(5)
    for parameter in cell.get_parameters():
        values = random.normal(size=parameter.shape).astype(np.float32) * 0.3
        parameter.set_data(Tensor(values + 1 if parameter.ndim == 1 else values))
    return cell


def gradients(net, micro_batches, compiled, split, order=None):
    """What all forward calls, then all backward calls give; with `split`, last of all the weights' gradients.

    Args:
        net: a sharded Cell with one tensor as its result.
        micro_batches: tuples of inputs.
        compiled: whether it runs compiled.
        split: whether the backward pass is split.
        order: of the backward calls; those of the weights run the other way round. Default: last first.

    Returns:
        For every micro-batch a dict: name of a parameter, or `input N`, -> gradient, an array.
    """
    order = range(len(micro_batches))[::-1] if order is None else order
    deferred = split_weight_gradients(net) if split else None
    for inputs in micro_batches:
        prepare(net, *inputs, compiled=compiled)
    stage = (Compiled if compiled else Interpreted)(net)
    stage.set_grad(True)
    results = [stage(*inputs) for inputs in micro_batches]
    ordinary = deferred.ordinary_parameters if split else tuple(net.trainable_params())
    collectors = deferred.collectors if split else ()
    gradient = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)
    backward = gradient(stage, ParameterTuple((*ordinary, *collectors)))
    found, pending = {}, {}
    for number in order:
        slope = np.random.default_rng(number).normal(size=results[number].shape).astype(np.float32)
        of_inputs, of_weights = backward(*micro_batches[number], Tensor(slope))
        floats = [place for place, tensor in enumerate(micro_batches[number]) if "Float" in str(tensor.dtype)]
        found[number] = {f"input {place}": of_inputs[floats.index(place)].asnumpy().copy() for place in floats}
        found[number] |= {p.name: value.asnumpy().copy() for p, value in zip(ordinary, of_weights)}
        pending[number] = deferred.take(of_weights[len(ordinary) :]) if split else None
    for number in [*order][::-1] if split else ():
        for parameter, value in deferred.weight_gradients(pending[number]):
            found[number][parameter.name] = found[number].get(parameter.name, 0) + value.asnumpy()
    return [found[number] for number in range(len(micro_batches))]


def assert_same(found, expected, tolerance=1e-6):
    """Two results of `gradients`, to one part in a million of the largest entry."""
    for number, (mine, whole) in enumerate(zip(found, expected, strict=True)):
        assert mine.keys() == whole.keys()
        for name, value in whole.items():
            assert mine[name].shape == value.shape and np.abs(value).max() > 0, name
            message = f"{name}, micro-batch {number}"
            np.testing.assert_allclose(mine[name], value, tolerance, tolerance * np.abs(value).max(), err_msg=message)
