"""Measures what PyNative keeps for the backward pass of a function, through hooks on saved tensors."""

import mindspore as ms
from mindspore import Tensor, ops

from mindformers_core.analysis.prediction import Prediction

__all__ = ["constants_of", "distinct", "measured", "saved_activations", "saved_bytes", "scalar_of", "tensors_in"]


def measured(function, *inputs, exclude=()):
    """Bytes of all distinct pieces of memory that are kept for the gradient of a function.

    Args:
        function: of `inputs`, to be differentiated with regard to `exclude`; gives anything that holds tensors.
        inputs: what it is called with; memory of tensors among them isn't counted.
        exclude: Parameters to differentiate with regard to, and other tensors whose memory isn't counted.
    """
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    def forward(*given):
        with ms.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = function(*given)
        return scalar_of(result)

    parameters = [one for one in exclude if isinstance(one, ms.Parameter) and one.requires_grad]
    ms.value_and_grad(forward, None, parameters)(*inputs)
    return sum(one.untyped_storage().nbytes() for one in distinct(packed, (*inputs, *exclude)))


def saved_activations(plan, dropped=frozenset(), algorithm=None, arguments_need=True):
    """What a plan predicts of it: see `Prediction`."""
    return Prediction(plan, algorithm, arguments_need).saved(frozenset(dropped))


def saved_bytes(*given, **settings):
    """The sum of `saved_activations` in bytes."""
    return sum(one.nbytes for one in saved_activations(*given, **settings))


def distinct(tensors, exclude):
    """The tensors, those that share memory once, without those whose memory is that of tensors in `exclude`."""
    others = {_address(one) for one in exclude if isinstance(one, Tensor)}
    return list({_address(one): one for one in tensors if _address(one) not in others}.values())


def scalar_of(result):
    """A number of all floating tensors in a structure, whose gradient keeps nothing."""
    floats = [one for one in tensors_in(result) if one.dtype.is_floating_point]
    return sum(ops.cast(one, ms.float32).sum() for one in floats)


def tensors_in(structure):
    """The tensors in tuples, lists and dicts."""
    if isinstance(structure, dict):
        structure = tuple(structure.values())
    if isinstance(structure, (tuple, list)):
        return [tensor for entry in structure for tensor in tensors_in(entry)]
    return [structure] if isinstance(structure, Tensor) else []


def constants_of(program):
    """What a program keeps of constants, which are there anyway."""
    found = [function.__globals__.items() for function in program.functions.values()]
    return [value for items in found for name, value in items if name.startswith("constant_")]


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
