"""Cells of a sharded tree that are compiled each by itself, where a pass can't be one compiled function.

So it is where weights come and go unit by unit, and where Cells are recomputed: of a compiled function PyNative keeps
all that its gradient needs, whatever is marked in it. What is around these Cells is compiled in parts (see `cut`).
"""

from functools import partial

from mindspore import Parameter, ops
from mindspore.graph.api import _pynative_executor

from mindformers_core.passes.flat_calls import giver, skeleton, taker, tensors_in, unflatten
from mindformers_core.program.deferral import PRODUCTS
from mindformers_core.program.passed_weights import WEIGHTS
from mindformers_core.sharding.compiling import jit

__all__ = ["CompiledCells", "forbid_reuse"]

_CONSTANTS = ("program", PRODUCTS)


def forbid_reuse(cell):
    """Before a Cell is compiled that PyNative differentiates: else all calls of one with a `bprop` get the last one's
    tensors."""
    for _, child in cell.cells_and_names():
        if child.has_bprop:
            child.add_flags(__function_forbid_reuse__=True)


class CompiledCells:
    """The functions of one tree's programs that are compiled each by itself.

    Args:
        tree: the `ShardedTree`.
    """

    def __init__(self, tree):
        self._tree, self._graphs = tree, {}
        self._calls = {}  # (running program, path, function) -> what calls it, or None where it isn't compiled

    @property
    def recomputes(self):
        """Whether any Cells are recomputed."""
        return bool(self._tree.activations.recomputed_cells)

    def calling(self):
        """A context manager; while it is open, programs are asked for that have such functions, and run with them."""
        apart = tuple(self._tree.activations.recomputed_cells), tuple(self._tree.storage.units)
        return self._tree.for_compiled(apart if any(apart) else (), self)

    def function_of(self, path, function):
        """What to call in the place of a function of the running program; None where that isn't compiled by itself.

        Args:
            path: of the Cell whose method it is.
            function: its name.
        """
        key = self._tree.running, path, function
        if key not in self._calls:
            names = {each.name for each in self._tree.programs.values()}
            self._calls = {known: call for known, call in self._calls.items() if known[0] in names}
            self._calls[key] = self._called(path, function)
        return self._calls[key]

    def _called(self, path, function):
        frame, weights = self._tree.running_call(path, function)
        if frame.compiled is None:
            return None
        shared_by = path if _has_own_gradients(frame) else ""
        return partial(self._call, self._tree.cells[path], frame, tuple(weights), shared_by)

    def _call(self, cell, frame, weights, shared_by, *args, **kwargs):
        constants = {name: kwargs.pop(name) for name in _CONSTANTS if name in kwargs}
        kwargs[WEIGHTS] = weights
        graph = self._compiled(cell, frame, shared_by, constants, (args, kwargs))
        tensors = tensors_in((args, kwargs))
        if frame.compiled == "again" and _pynative_executor.grad_flag():
            collectors = _collectors(constants.get(PRODUCTS, ()))
            given = self._tree.activations.checkpoint_call(graph, collectors, tensors)
        else:
            given = graph(*map(_no_parameter, tensors))
        return unflatten(frame.graph.result, given)

    def _compiled(self, cell, frame, shared_by, constants, arguments):
        """The compiled function for calls of a `CellPlan`'s function.

        Args:
            cell: that is called.
            frame: the plan.
            shared_by: Cells for which it is the same share a compiled function.
            constants: arguments that are compiled in: the program, and the objects of split weight gradients.
            arguments: `(args, kwargs)` as it is called.
        """
        key = constants["program"], shared_by, skeleton(arguments), *map(_identity, constants.values())
        if key not in self._graphs:
            forbid_reuse(cell)
            take, give = taker(arguments), giver(frame.graph.result)

            def run(*tensors):
                args, kwargs = take(tensors)
                return give(cell(*args, **constants, **kwargs))

            alive = {name for each in self._tree.programs.values() for name in each.source.functions.values()}
            self._graphs = {other: entry for other, entry in self._graphs.items() if other[0] in alive}
            self._graphs[key] = jit(run), constants  # which have to live as long as their ids are known
        return self._graphs[key][0]


def _has_own_gradients(frame):
    """Whether a plan calls Cells with a `bprop`: what that reads of a Cell is compiled in, and no plan tells of it."""
    return any(call.frame is None or _has_own_gradients(call.frame) for call in frame.calls)


def _no_parameter(tensor):
    """A Parameter as any other tensor, with its gradient: a graph would take it for its own."""
    return ops.reshape(tensor, tensor.shape) if isinstance(tensor, Parameter) else tensor


def _identity(constant):
    return constant if isinstance(constant, str) else id(constant)


def _collectors(products):
    """The collectors of all objects in a structure of split weight gradients."""
    if isinstance(products, tuple):
        return [each for inner in products for each in _collectors(inner)]
    return list(products.collectors)
