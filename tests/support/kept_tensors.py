"""What PyNative keeps between forward and backward pass of a call, measured as it runs."""

import gc

import mindspore as ms
from mindspore import Tensor
from support.recomputations import count_recomputations
from support.saved_tensors import constants_of, distinct, scalar_of

from mindformers_core.recompute import keeping
from mindformers_core.recompute.keeping import Handle
from mindformers_core.tensor_parallel import programs


def kept_tensors(monkeypatch, net, inputs):
    """A function that gives all tensors that are kept between forward and backward pass of a call, and the gradient."""
    packed, found = [], []
    pack = keeping._pack
    monkeypatch.setattr(keeping, "_pack", lambda tensor: packed.append(pack(tensor)) or packed[-1])

    def forward(*inputs):
        result = scalar_of(net(*inputs))
        gc.collect()
        found.extend(tensors_in(packed, set()))
        return result

    with count_recomputations() as counted:
        ms.value_and_grad(forward, None, net.trainable_params())(*inputs)
    return found, sum(counted.values())


def tensors_in(kept, seen):
    """All tensors in what autograd keeps: those as they are, and what calls need that will be made again."""
    if isinstance(kept, Tensor):
        return [kept]
    if isinstance(kept, (list, tuple)):
        return [tensor for entry in kept for tensor in tensors_in(entry, seen)]
    if isinstance(kept, keeping._Saved):
        return [kept.tensor] if kept.handle is None else tensors_in(kept.handle, seen)
    if type(kept) is Handle and id(kept.call) not in seen:
        seen.add(id(kept.call))
        return tensors_in(getattr(kept.call, "inputs", []), seen)  # what waits on the host has none
    return []


def others(net, inputs):
    """What is there anyway: inputs, parameters, and constants of the program."""
    return [*inputs, *net.trainable_params(), *constants_of(programs(net)[-1])]


def bytes_of(tensors, net, inputs):
    """Bytes of tensors, without what is there anyway."""
    return sum(tensor.untyped_storage().nbytes() for tensor in distinct(tensors, others(net, inputs)))
