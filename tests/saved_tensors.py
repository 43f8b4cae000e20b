"""Measures what PyNative keeps for the backward pass of a function, through hooks on saved tensors."""

import mindspore as ms
from mindspore import Tensor, ops

__all__ = ["measured", "scalar_of"]


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
    others = {_address(one) for one in (*inputs, *exclude) if isinstance(one, Tensor)}
    sizes = {_address(one): one.untyped_storage().nbytes() for one in packed}
    return sum(size for address, size in sizes.items() if address not in others)


def scalar_of(result):
    """A number of all floating tensors in a structure, whose gradient keeps nothing."""
    found = []

    def collect(one):
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (tuple, list)):
            for entry in one:
                collect(entry)
        elif isinstance(one, dict):
            collect(tuple(one.values()))

    collect(result)
    return sum(ops.cast(one, ms.float32).sum() for one in found if one.dtype.is_floating_point)


def _address(tensor):
    return tensor.untyped_storage().data_ptr()
