"""Which rules a function meets: its operators' signatures, with the inputs of the function that they get."""

from unittest.mock import patch

from one_card import is_float

from mindformers_core.communication.world import process_state
from mindformers_core.dtensor import dispatch
from mindformers_core.operators import signature_of
from mindformers_core.tensor_parallel import distribute_tensor


def rules_met(function, values, layouts):
    """`(places, floats, signature)` of every operator called on inputs of `function`.

    `places` says for each of the operator's tensors which input of the function it is, or None; `floats` whether it
    is of a floating dtype.
    """
    given = [distribute_tensor(value, layout) for value, layout in zip(values, layouts)]
    number = {id(tensor): place for place, tensor in enumerate(given)}
    tensors_of, met = [], []

    class Recorded(dispatch._Program):
        def __init__(self, name, args, kwargs, attributes, tensors, *others):
            tensors_of.append(tensors)
            super().__init__(name, args, kwargs, attributes, tensors, *others)

    def recorded_signature_of(*call):
        signature, tensors = signature_of(*call), tensors_of.pop()
        places = [number.get(id(tensor)) for tensor in tensors]
        if any(place is not None for place in places):
            met.append((places, list(map(is_float, tensors)), signature))
        return signature

    process_state().calls.clear()
    with patch.object(dispatch, "_Program", Recorded), patch.object(dispatch, "signature_of", recorded_signature_of):
        function(*given)
    process_state().calls.clear()
    return met
