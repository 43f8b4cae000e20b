"""Captured operators called by their sources, with one floating dtype in the place of every other."""

import re

from mindspore import Tensor, ops

from mindformers_core.dtensor.move import dtype_name
from mindformers_core.dtensor.operator_source import operator_function
from mindformers_core.operators.signature import is_float
from mindformers_core.program.structure import tree_leaves, tree_map


def widened(name, dtype):
    """The dtype's name in the place of that of a float: `dtype`, or the complex one of the same digits."""
    return dtype if "complex" not in name else "complex128" if dtype == "float64" else "complex64"


def widened_text(text, dtype):
    """Python source with one floating dtype in the place of every other."""
    return re.sub(r"ms\.(b?float16|float32|complex64)", lambda found: f"ms.{widened(found[1], dtype)}", text)


class OperatorCalls:
    """The operators of captured programs, as functions of their arguments.

    Args:
        dtype: name of the dtype of all floating tensors.
    """

    def __init__(self, dtype):
        self.dtype, self._functions = dtype, {}  # id of a node -> function

    def __call__(self, node, args, kwargs):
        """The results of an operator."""
        if id(node) not in self._functions:  # the graphs keep their nodes
            self._functions[id(node)] = self.function(node, args, kwargs)
        return tree_map(_without_gradient, self._functions[id(node)](*tree_leaves((args, kwargs), Tensor)))

    def function(self, node, args, kwargs):
        """The function of the tensors among its arguments that calls an operator."""
        return operator_function(node, args, kwargs, self._spelled)

    def _spelled(self, text):
        drawing = text.replace("dtensor.dropout import next_r", "verification.drawing import next_r")
        return widened_text(drawing, self.dtype)


def _without_gradient(leaf):
    """A result; MindSpore records integers, too, and takes gradients of casts from them."""
    return leaf if not isinstance(leaf, Tensor) or is_float(dtype_name(leaf.dtype)) else ops.stop_gradient(leaf)
