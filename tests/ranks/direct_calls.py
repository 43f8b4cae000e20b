"""Operators called by the name of their rule, on tensors or DTensors: what an author can't call on CPU by that name."""

import numpy as np
from mindspore import Tensor
from operator_calls import local

from mindformers_core.lowering.operator_source import operator_source
from mindformers_core.operators import signature_of, tensor_meta
from mindformers_core.tensor_parallel import DTensor

_COMPILED: dict = {}


class Operator:
    """What MindSpore hands to `__fallback__`: a name, and a call on local tensors, here by the operator's source."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args, **kwargs):
        tensors = {}
        replaced((args, kwargs), Tensor, lambda tensor: tensors.setdefault(id(tensor), tensor))
        places = {each: place for place, each in enumerate(tensors)}
        shown = replaced((args, kwargs), Tensor, lambda tensor: f"{places[id(tensor)]} {tensor.shape} {tensor.dtype}")
        key = self.name, str(shown)
        if key not in _COMPILED:
            _COMPILED[key] = _compiled(operator_source(self.name, args, kwargs), tensors.values())
        return _COMPILED[key](*tensors.values())


def _compiled(call, tensors):
    """`call` as a function of its tensors."""
    space = {}
    for line in call.imports:
        exec(line, space)
    if call.instance is not None:
        exec(f"{call.instance[0]} = {call.instance[1]}", space)
    names = {id(tensor): f"a{place}" for place, tensor in enumerate(tensors)}
    return eval(f"lambda {', '.join(names.values())}: {call.expression(lambda tensor: names[id(tensor)])}", space)


def replaced(value, kind, replacement):
    """`value` with what `replacement` makes of them in the place of all instances of `kind`."""
    if isinstance(value, kind):
        return replacement(value)
    if isinstance(value, (tuple, list)):
        return type(value)([replaced(entry, kind, replacement) for entry in value])
    if isinstance(value, dict):
        return {name: replaced(entry, kind, replacement) for name, entry in value.items()}
    return value


class DirectCall:
    """A `Call` of `operator_calls` as a function of its tensors, `values`, with the `signature` of its rule."""

    def __init__(self, call):
        self.operator, self.call, self.values = Operator(call.name), call, []
        kinds = (np.ndarray, np.generic)
        replaced((tuple(call.args), call.named), kinds, lambda array: self.values.append(Tensor(local(array))))
        metas = iter([tensor_meta(value.shape, str(value.dtype).lower()) for value in self.values])
        args, named = replaced((tuple(call.args), call.named), kinds, lambda _: next(metas))
        self.signature = signature_of(call.name, args, named)

    def __call__(self, *tensors):
        rest = iter(tensors)
        arguments = tuple(self.call.args), self.call.named
        args, named = replaced(arguments, (np.ndarray, np.generic), lambda _: next(rest))
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return self.operator(*args, **named)
        return DTensor.__fallback__(self.operator, args, named)
