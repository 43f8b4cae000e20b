"""Cells of a sharded tree that are compiled each by itself, where a pass can't be one compiled function.

So it is where weights come and go unit by unit, and where Cells are recomputed: of a compiled function PyNative keeps
all that its gradient needs, whatever is marked in it. What is around these Cells runs in PyNative.
"""

from contextlib import contextmanager
from functools import partial

from mindspore.graph.api import _pynative_executor

from mindformers_core.pipeline.flat_calls import giver, put_together, skeleton, taker, tensors_in
from mindformers_core.tensor_parallel.compiling import jit
from mindformers_core.tensor_parallel.generation.deferral import PRODUCTS
from mindformers_core.tensor_parallel.generation.passed_weights import WEIGHTS
from mindformers_core.tensor_parallel.sharded_cells import CONTAINERS, computing_parameters

__all__ = ["CompiledCells", "cells_apart", "forbid_reuse"]

_CONSTANTS = ("program", PRODUCTS)


def forbid_reuse(cell):
    """Before a Cell is compiled that PyNative differentiates: else all calls of one with a `bprop` get the last one's
    tensors."""
    for _, child in cell.cells_and_names():
        if child.has_bprop:
            child.add_flags(__function_forbid_reuse__=True)


def cells_apart(cell, units, recomputed):
    """Which Cells are compiled each by itself: a dict, path -> whether it is recomputed.

    Args:
        cell: the root, which itself is none of them.
        units: paths of Cells whose weights come and go with their calls; what is beside them isn't compiled.
        recomputed: paths of Cells that are recomputed, none within another one. One that holds units stands for
            these, which can't be in place together.
    """
    found = {}

    def visit(path, child, again, in_unit):
        for name, inner in child.name_cells().items():
            place = f"{path}.{name}" if path else name
            inner_again, inner_in_unit = again or place in recomputed, in_unit or place in units
            holds_units = not inner_in_unit and _any_below(units, place)
            if holds_units or isinstance(inner, CONTAINERS) or not again and _any_below(recomputed, place):
                visit(place, inner, inner_again, inner_in_unit)
            elif inner_in_unit or not units:
                found[place] = inner_again

    visit("", cell, "" in recomputed, False)
    return found


def _any_below(paths, place):
    return any(path.startswith(f"{place}.") for path in paths)


class CompiledCells:
    """The Cells of one tree that are compiled each by itself.

    Args:
        tree: the `ShardedTree`.
    """

    def __init__(self, tree):
        self._tree, self._graphs, self._known = tree, {}, {}
        self._known_calls = {}  # (running program, path, function) -> what `_called` gives

    @property
    def recomputes(self):
        """Whether any Cells are recomputed."""
        return bool(self._tree.activations.recomputed_cells)

    def programs(self):
        """A context manager; while it is open, programs are asked for in which these Cells can be called apart."""
        return self._tree.for_compiled(tuple(path for path, again in self._apart().items() if again))

    @contextmanager
    def calling(self):
        """While open, calls of these Cells from within the root's are those of their compiled functions."""
        tree = self._tree
        calls = {path: partial(self._call, path, again) for path, again in self._apart().items()}
        before, tree.compiled_cells = tree.compiled_cells, calls
        try:
            yield
        finally:
            tree.compiled_cells = before

    def _apart(self):
        known = tuple(self._tree.storage.units), tuple(self._tree.activations.recomputed_cells)
        if known not in self._known:
            self._known = {known: cells_apart(self._tree.cells[""], *known) if any(known) else {}}
        return self._known[known]

    def _call(self, path, again, *args, **kwargs):
        constants = {name: kwargs.pop(name) for name in _CONSTANTS if name in kwargs}
        result, weights = self._called(path, again, constants["program"])
        if again:
            kwargs[WEIGHTS] = weights
        graph = self._compiled(path, again, constants, (args, kwargs), result)
        tensors = tensors_in((args, kwargs))
        if again and _pynative_executor.grad_flag():
            collectors = _collectors(constants.get(PRODUCTS, ()))
            given = self._tree.activations.call_again(graph, collectors, tensors)
        else:
            given = graph(*tensors)
        return put_together(result, given)

    def _called(self, path, again, function):
        """The result of a Cell's function in the running program, as a structure, and the weights to pass."""
        key = self._tree.running, path, function
        if key not in self._known_calls:
            program, frame, graph = self._tree.running_call(path, function)
            weights = self._tree.weights_of_call(program, frame, graph) if again else ()
            names = {each.name for each in self._tree.programs.values()}
            self._known_calls = {known: call for known, call in self._known_calls.items() if known[0] in names}
            self._known_calls[key] = frame.graph.result, tuple(weights)
        return self._known_calls[key]

    def _compiled(self, path, again, constants, arguments, result):
        """The compiled function of a Cell for one program; made anew where values were put into other memory.

        Args:
            path: of the Cell.
            again: whether it is recomputed: then it takes its weights, and all that have this function share it.
            constants: arguments that are compiled in: the program, and the objects of split weight gradients.
            arguments: `(args, kwargs)` as it is called.
            result: what it gives, with `Value`s for tensors.
        """
        cell, parts = self._tree.cells[path], self._tree.storage.parts
        key = constants["program"], "" if again else path, skeleton(arguments), *map(_identity, constants.values())
        held = [] if again else [each for each in computing_parameters(cell) if id(each) not in parts]
        places = [each.data_ptr() for each in held]
        known, graph, _ = self._graphs.get(key, (None, None, None))
        if known != places:
            forbid_reuse(cell)
            take, give = taker(arguments), giver(result)

            def run(*tensors):
                args, kwargs = take(tensors)
                return give(cell(*args, **constants, **kwargs))

            graph = jit(run)
            alive = {name for each in self._tree.programs.values() for name in each.source.functions.values()}
            self._graphs = {other: entry for other, entry in self._graphs.items() if other[0] in alive}
            self._graphs[key] = places, graph, constants  # which have to live as long as their ids are known
        return graph


def _identity(constant):
    return constant if isinstance(constant, str) else id(constant)


def _collectors(products):
    """The collectors of all objects in a structure of split weight gradients."""
    if isinstance(products, tuple):
        return [each for inner in products for each in _collectors(inner)]
    return list(products.collectors)
