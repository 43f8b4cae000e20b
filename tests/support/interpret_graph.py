"""Runs a captured graph with real tensors, operator by operator: the test that it holds all that the Cell does."""

import inspect
from functools import cache
from importlib import import_module

import mindspore as ms
from mindspore import Tensor
from ranks.direct_calls import Operator

from mindformers_core.program.graph import CallNode
from mindformers_core.program.structure import DType, Value, tree_map

__all__ = ["interpret"]


def interpret(graph, cell, *inputs, **named):
    """The result of `graph`, a capture of `cell`, for other inputs of the same structure, with its parameters."""
    run = _Run(dict(cell.parameters_and_names()), dict(cell.cells_and_names()))
    return run.call(graph, inputs, named)


class _Run:
    def __init__(self, parameters, cells):
        self.parameters = parameters
        self.cells = cells
        self.made = {}  # number of a call -> Value's number -> tensor

    def call(self, graph, inputs, named):
        known = self.made[graph.call] = {}
        construct = inspect.signature(type(self.cells[graph.path]).construct)
        bound = construct.bind(None, *inputs, **named).arguments
        assert list(bound)[1:] == list(graph.arguments)
        for name, structure in graph.arguments.items():
            _match(structure, bound[name], known)
        for use in graph.parameters:
            known[use.value.id] = self.parameters[use.path]
            if use.local is not None:
                own = dict(self.cells[graph.path].parameters_and_names())
                assert own.get(use.local, known[use.value.id]) is known[use.value.id]
        for constant in graph.constants:
            known[constant.value.id] = Tensor(
                constant.array, getattr(ms, constant.value.dtype.replace("bool", "bool_"))
            )
        outer = {use.value.id: use for use in graph.free_variables}

        def fill(leaf):
            if not isinstance(leaf, Value):
                return leaf
            if leaf.id in outer:
                return self.made[outer[leaf.id].call][outer[leaf.id].id]
            return known[leaf.id]

        for node in graph.nodes:
            args, named = tree_map(fill, node.args), tree_map(fill, node.kwargs)
            result = self.call(node.graph, args, named) if isinstance(node, CallNode) else _operate(node, args, named)
            _match(node.outputs, result, known)
        return tree_map(fill, graph.result)


def _match(structure, given, known):
    """Write the tensors in `given` down under the numbers of the Values that stand in their place."""
    if isinstance(structure, Value):
        assert tuple(given.shape) == structure.shape and str(given.dtype).lower() == structure.dtype, structure
        known[structure.id] = given
    elif isinstance(structure, dict):
        assert structure.keys() == given.keys()
        for name, entry in structure.items():
            _match(entry, given[name], known)
    elif isinstance(structure, (tuple, list)):
        assert len(structure) == len(given)
        for entry, other in zip(structure, given):
            _match(entry, other, known)
    else:
        assert structure == given or structure is given


def _operate(node, args, named):
    args, named = tree_map(_dtype, (args, named))
    if node.primitive is not None:
        kind = getattr(import_module(node.primitive.module), node.primitive.name)
        return kind(**tree_map(_dtype, node.primitive.attributes))(*args[: node.primitive.inputs])
    return Operator(node.operator)(*args, **named)


@cache
def _dtype_named(name):
    return getattr(ms, "bool_" if name == "bool" else name)


def _dtype(leaf):
    return _dtype_named(leaf.name) if isinstance(leaf, DType) else leaf
