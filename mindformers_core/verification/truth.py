"""The program of one card: captured graphs, interpreted on whole tensors, with the gradient of every value."""

import re
from collections import Counter
from functools import cache, cached_property, partial

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from mindformers_core.communication.world import process_state
from mindformers_core.dtypes import dtype_name
from mindformers_core.lowering.operator_source import operator_function
from mindformers_core.mindspore_private import get_user_data, needs_gradient, set_user_data
from mindformers_core.operators import facts_of, is_float
from mindformers_core.passes.thread_tape import ThreadTape, custom_gradients
from mindformers_core.program.graph import CallNode, match_arguments
from mindformers_core.program.structure import Value, tree_leaves, tree_map
from mindformers_core.scopes import errors_at
from mindformers_core.verification.comparison import largest
from mindformers_core.verification.drawing import begin_draws, draw_of
from mindformers_core.verification.rounding import factors

_KNOWN = "mindformers_core.verify"
_FLOATS = ("float16", "bfloat16", "float32")


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
        drawing = text.replace("algorithms.dropout import next_r", "verification.drawing import next_r")
        return widened_text(drawing, self.dtype)


def _without_gradient(leaf):
    """A result; MindSpore records integers, too, and takes gradients of casts from them."""
    return leaf if not isinstance(leaf, Tensor) or is_float(dtype_name(leaf.dtype)) else ops.stop_gradient(leaf)


def floating(structure):
    """The floating tensors in a structure, a tuple."""
    return tuple(leaf for leaf in tree_leaves(structure, Tensor) if is_float(dtype_name(leaf.dtype)))


def differentiated(cell, args, kwargs, slopes, weights):
    """This rank's parts of a call's floating results, and the gradients of weights: two sequences of Tensors.

    `slopes` is a function of the results that returns their gradients, an iterable of arrays.
    """
    tape, results, inputs, observer = ThreadTape(), [], floating((args, kwargs)), process_state().observer
    with observer.in_pass((0, 0), "forward"):
        tape.record(lambda *_: results.extend(floating(cell(*args, **kwargs))), inputs)
    local = [getattr(result, "_local", result) for result in results]
    sens = [Tensor(slope, each.dtype) for slope, each in zip(slopes(results), local, strict=True)]
    with observer.in_pass((0, 0), "backward"):
        _, gradients = tape.gradients(inputs, local, sens, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            observer.weight_gradient(weight, gradient)
    return local, gradients


def is_known(tensor):
    """Whether this was asked of a tensor before."""
    before = get_user_data(tensor, _KNOWN)
    set_user_data(tensor, _KNOWN, True)
    return before is not None


def part_sizes(graphs):
    """Path -> the `part_sizes` of each Parameter that captured programs use."""
    return {use.path: use.part_sizes for graph in graphs for use in graph.uses.parameters.values()}


class OneCard:
    """The stages of a model on one card, after all passes.

    Args:
        graphs: number of a stage -> its `CellGraph`, in order.
        parameters: path -> array with the global values.
        dtype: name of the dtype of all floating tensors, whatever their dtypes in the graphs.
        divisor: of the sum of all passes' gradients; None: the number of labels, the last stage's second results.
        passes: the arguments of `run` for every pass.
        noise: function of the dtype's name of a Parameter or result in the model, and of the operator, None for a
            Parameter: the relative size of the changes that are made to it; see `rounding`. Default: none.

    Attributes:
        values, gradients: (stage, label of a pass) -> (`CellGraph.call`, number of a Value) -> array.
        weight_gradients: label -> path -> gradient of the pass.
        trained: paths of the parameters that get gradients.
        tied: paths of the parameters of several stages.
        outputs: label -> arrays of the floating results of the last stage.
        labels: number of all labels, where the last stage returns it.
        part_sizes: path -> those of a padded parameter, see `padding`; () for others.
        updates: what optimizers add to the parameters, as `stepping` knows it by then.
        written: label -> path -> array: the parameters that the pass wrote, after it.
        largest: function of "value" or "gradient" and a label: the largest magnitude among all tensors of the pass.
    """

    def __init__(self, graphs, parameters, dtype, divisor, passes, noise=lambda *_: 0.0):
        self.graphs, self.dtype, self.divisor, self._noise = graphs, dtype, divisor, noise
        self._draw = np.random.default_rng(0)
        uses = [use for graph in graphs.values() for use in graph.uses.parameters.values()]
        trained = {use.path for use in uses if use.trainable and is_float(use.value.dtype)}
        stages, self.part_sizes = Counter(use.path for use in uses), part_sizes(graphs.values())
        given = ((path, self._noisy(self._tensor(parameters[path]), parameters[path].dtype.name)) for path in stages)
        self.parameters = {path: Parameter(one, name=path, requires_grad=path in trained) for path, one in given}
        self.values, self.gradients, self.weight_gradients, self.outputs, self.written = {}, {}, {}, {}, {}
        self.labels, self.updates = 0, {}
        self.trained = [path for path in stages if path in trained]
        self.tied = {path for path, count in stages.items() if count > 1}
        self._operators, self.largest = OperatorCalls(dtype), cache(self._largest)
        numbers, _, replicas = (max(places) + 1 for places in zip(*(label for label, *_ in passes)))
        for label, *given in passes:
            begin_draws((label[1] * replicas + label[2]) * numbers + label[0])  # the block of its rows
            self.run(label, *given)

    def run(self, label, args, kwargs, slopes):
        """One pass through all stages, forward and backward.

        Args:
            label: of the pass.
            args, kwargs: global inputs: of the first stage the positional arguments, and all keyword arguments.
            slopes: function of the floating results of the last stage, a list of arrays, that returns their gradients.
        """
        tape, flowing, written = ThreadTape(), [], {}
        args, kwargs = tree_map(lambda one: self._tensor(one) if isinstance(one, np.ndarray) else one, (args, kwargs))
        inputs = floating((args, kwargs))

        def forward(*_):
            passed = args
            for stage, graph in self.graphs.items():
                values, gradients = self.values[stage, label], self.gradients[stage, label] = {}, {}
                result = _Pass(self, values, gradients, written).root(graph, _bound(graph, passed, kwargs))
                passed = tuple(tree_leaves(result, Tensor))
            flowing.extend(floating(passed))
            self.labels += int(passed[1].asnumpy()) if self.divisor is None else 0

        with custom_gradients():  # an operator of a user's may be a Cell with a bprop
            tape.record(forward, inputs)
        outputs = self.outputs[label] = [tensor.asnumpy() for tensor in flowing]
        sens = tuple(map(self._tensor, slopes(outputs)))
        self.written[label] = {path: tensor.asnumpy().copy() for path, tensor in written.items()}
        weights = [self.parameters[path] for path in self.trained]
        for path, array in self.written[label].items():  # the next pass reads them
            self.parameters[path] = Parameter(Tensor(array), name=path, requires_grad=path in self.trained)
        _, gradients = tape.gradients(inputs, flowing, sens, weights)  # inputs: without weights, too
        arrays = [gradient.asnumpy() for gradient in gradients]
        self.weight_gradients[label] = dict(zip(self.trained, arrays, strict=True))
        for stage in self.graphs:
            values = self.values[stage, label]
            values.update((place, tensor.asnumpy()) for place, tensor in values.items())

    @cached_property
    def step_gradients(self):
        """Path -> gradient of the step, after all passes."""
        passes = self.weight_gradients.values()
        divisor = self.divisor or max(self.labels, 1)
        return {path: sum(gradients[path] for gradients in passes) / divisor for path in self.trained}

    def _largest(self, what, label):
        """The largest magnitude among all tensors of a pass: "value", or "gradient"."""
        table = self.values if what == "value" else self.gradients
        arrays = [array for stage in self.graphs for array in table[stage, label].values()]
        return largest([*arrays, *self.weight_gradients[label].values()])

    def _tensor(self, value):
        array = value.asnumpy() if isinstance(value, Tensor) else np.asarray(value)
        floats = array.dtype.kind in "fc"
        return Tensor(array.astype(widened(array.dtype.name, self.dtype)) if floats else array)

    def constant(self, constant):
        """The tensor of a `Constant`."""
        tensor = Tensor(constant.array, getattr(ms, constant.value.dtype.replace("bool", "bool_")))
        return tensor.astype(getattr(ms, self.dtype)) if constant.value.dtype in _FLOATS else tensor

    def results(self, node, args, kwargs):
        """The results of an operator, changed by `noise`."""
        draw, values = draw_of(node, self.dtype), iter(tree_leaves(node.outputs, object))
        result = self._operators(node, args, kwargs) if draw is None else draw(args, kwargs)
        return tree_map(lambda leaf: self._noisy(leaf, getattr(next(values), "dtype", ""), node.operator), result)

    def _noisy(self, tensor, dtype, operator=None):
        """A tensor of a dtype of the model, and its gradient, changed by `noise`."""
        eps = self._noise(dtype, operator) if isinstance(tensor, Tensor) and is_float(dtype) else 0.0
        return tensor * Tensor(factors(tensor.shape, eps, self._draw).astype(self.dtype)) if eps else tensor


def _bound(graph, passed, kwargs):
    """Name -> argument of a graph; `*args` has the positional ones that are left, `**kwargs` the named ones."""
    given, left, named = {}, list(passed), dict(kwargs)
    for name, structure in graph.arguments.items():
        if name in named:
            given[name] = named.pop(name)
        elif isinstance(structure, tuple) and left and not isinstance(left[0], (tuple, list)):
            given[name], left = tuple(left), []
        elif left:
            given[name] = left.pop(0)
        else:
            given[name] = named
    return given


class _Pass:
    """One pass through one stage: the tensors of all its calls, and the gradients that come; see `OneCard`."""

    def __init__(self, card, values, gradients, written):
        self.card, self.values, self.gradients, self.written = card, values, gradients, written

    def root(self, graph, given):
        """The result of a stage for its global inputs, by name."""
        assert given.keys() == graph.arguments.keys(), (list(given), list(graph.arguments))
        for name, structure in graph.arguments.items():
            self._match(graph.call, structure, given[name])
        return self._run(graph)

    def _run(self, graph):
        """The result of a call whose arguments are known."""
        for use in graph.parameters:
            self._match(graph.call, use.value, self.written.get(use.path, self.card.parameters[use.path]))
        for constant in graph.constants:
            self._match(graph.call, constant.value, self.card.constant(constant))
        self._match_free(graph)

        def filled(structure):
            return tree_map(lambda leaf: self.values[graph.call, leaf.id] if type(leaf) is Value else leaf, structure)

        for node in graph.nodes:
            if isinstance(node, CallNode):
                for inner, outer in match_arguments(node).items():
                    self._match(node.graph.call, inner, self.values[graph.call, outer.id])
                result = self._run(node.graph)
                self._match_free(graph)
            elif facts_of(node.operator).writes:
                result, path = filled(node.args[1]), graph.names[node.args[0].id]
                kept = self.card.parameters[path]
                self.written[path] = result + (kept - ops.stop_gradient(kept)) if kept.requires_grad else result
            else:
                with errors_at(f"in {graph.label}, {node.source}, operator '{node.operator}': ", kinds=(RuntimeError,)):
                    result = self.card.results(node, filled(node.args), filled(node.kwargs))
            self._match(graph.call, node.outputs, result)
        return filled(graph.result)

    def _match_free(self, graph):
        """Keep the tensors of other calls that a call uses, as far as these are done: some are made below it."""
        for use in graph.free_variables:
            if (use.call, use.id) in self.values and (graph.call, use.value.id) not in self.values:
                self._match(graph.call, use.value, self.values[use.call, use.id])

    def _match(self, call, structure, given):
        """Keep the tensors in the place of Values, and their gradients; a cast to the same dtype returns its input."""
        for value, tensor in zip(tree_leaves(structure, object), tree_leaves(given, object), strict=True):
            if isinstance(value, Value):
                place = call, value.id
                self.values[place] = tensor
                if needs_gradient(tensor) and not isinstance(tensor, Parameter) and not is_known(tensor):
                    self.gradients[place] = np.zeros(())
                    tensor.register_hook(partial(self._came, place))

    def _came(self, place, gradient):
        """Keep the gradient of a tensor, None where none came."""
        if gradient is not None:
            self.gradients[place] = gradient.asnumpy()
