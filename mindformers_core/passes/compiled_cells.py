"""Cells of a sharded tree that are compiled one by one, where the whole pass can't be one compiled function.

Two cases need that: weights that are gathered and freed unit by unit, and Cells that are recomputed (PyNative keeps all
that the gradient of a compiled function needs, whatever is annotated in it). The code around these Cells is compiled in
segments (`CellPlan.compiled`).
"""

from functools import partial

from mindspore import Parameter, Tensor, ops

from mindformers_core.mindspore_private import forbid_reuse, pynative_executor
from mindformers_core.passes.flat_calls import flatten_fn, treedef, unflatten_fn
from mindformers_core.passes.weight_split import DeferredProduct
from mindformers_core.program.deferral import PRODUCTS
from mindformers_core.program.passed_weights import WEIGHTS
from mindformers_core.program.structure import tree_fill, tree_leaves
from mindformers_core.sharding.compiling import jit


def forbid_reuse_below(cell):
    """`forbid_reuse` of all Cells with a `bprop`, before a Cell around them is compiled."""
    for _, child in cell.cells_and_names():
        if child.has_bprop:
            forbid_reuse(child)


class CompiledCells:
    """The functions of one tree's programs that are compiled each by itself.

    Args:
        tree: the `ShardedTree`.
    """

    def __init__(self, tree):
        self._tree = tree
        self._graphs = {}  # (function of a program, path or "", treedef, id of products) -> (compiled, products)
        self._calls = {}  # (running program, path, function) -> its replacement, or None where it isn't compiled

    def calling(self):
        """A context manager: programs that are made or run in it have such functions, and call the compiled ones."""
        apart = tuple(self._tree.activations.recomputed_cells), tuple(self._tree.storage.units)
        return self._tree.for_compiled(apart if any(apart) else (), self)

    def function_of(self, path, function):
        """The replacement for a function of the running program; None where the function isn't compiled by itself.

        Args:
            path: of the Cell whose method it is.
            function: its name.
        """
        key = self._tree.running, path, function
        if key not in self._calls:
            self._calls = {known: call for known, call in self._calls.items() if known[0] in self._tree.programs}
            plan, weights = self._tree.running_call(path, function)
            self._calls[key] = None if plan.compiled is None else partial(self._call, path, plan, tuple(weights))
        return self._calls[key]

    def _call(self, path, plan, weights, *args, program, **kwargs):
        products = kwargs.pop(PRODUCTS, None)
        arguments = args, {**kwargs, WEIGHTS: weights}
        graph, tensors = self._compiled(path, plan, program, products, arguments), tree_leaves(arguments, Tensor)
        if plan.compiled == "again" and pynative_executor.grad_flag():
            collectors = [each for product in tree_leaves(products, DeferredProduct) for each in product.collectors]
            outputs = self._tree.activations.checkpoint_call(graph, collectors, tensors)
        else:
            outputs = graph(*map(_no_parameter, tensors))
        return tree_fill(plan.graph.result, outputs)

    def _compiled(self, path, plan, program, products, arguments):
        """The compiled function for calls of a `CellPlan`'s function; Cells with the same function and plan share it.

        Args:
            path: of the Cell that is called.
            program: name of the function; a constant of the graph.
            products: the `DeferredProduct`s of split weight gradients, or None; constants of the graph.
            arguments: `(args, kwargs)` of the call.
        """
        key = program, path if _has_own_gradients(plan) else "", treedef(arguments), id(products)
        if key not in self._graphs:
            cell, constants = self._tree.cells[path], {"program": program}
            if products is not None:
                constants[PRODUCTS] = products
            forbid_reuse_below(cell)
            build, flatten = unflatten_fn(arguments), flatten_fn(plan.graph.result)

            def run(*tensors):
                args, kwargs = build(tensors)
                return flatten(cell(*args, **constants, **kwargs))

            alive = {name for each in self._tree.programs.values() for name in each.source.functions.values()}
            self._graphs = {other: entry for other, entry in self._graphs.items() if other[0] in alive}
            self._graphs[key] = jit(run), products  # products have to live as long as their id is a key
        return self._graphs[key][0]


def _has_own_gradients(plan):
    """Whether a plan calls Cells with a `bprop`: what that reads of a Cell is compiled in, and is in no plan."""
    return any(call.plan is None or _has_own_gradients(call.plan) for call in plan.calls)


def _no_parameter(tensor):
    """A Parameter as an ordinary tensor, with its gradient: a graph would take the Parameter for its own."""
    return ops.reshape(tensor, tensor.shape) if isinstance(tensor, Parameter) else tensor
