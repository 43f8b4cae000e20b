"""Cells of a sharded tree that are compiled each by itself, where a pass can't be one compiled function.

So it is where weights come and go unit by unit, and where Cells are recomputed: of a compiled function PyNative keeps
all that its gradient needs, whatever is marked in it. What is around these Cells runs in PyNative.
"""

from contextlib import contextmanager
from functools import partial
from inspect import signature

from mindspore.graph.api import _pynative_executor

from mindformers_core.tensor_parallel.compiling import jit
from mindformers_core.tensor_parallel.generation.deferral import PRODUCTS
from mindformers_core.tensor_parallel.sharded_cells import CONTAINERS, computing_parameters
from mindformers_core.tensor_parallel.sharded_tree import MOST_PROGRAMS

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
        self._version, self._taken = None, {}  # of the tree's programs; what their functions take

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
        function = constants["program"]
        names, weights = self._takes(path, again, function)
        args, kwargs = _by_place(names, args, kwargs)
        if not again:
            return self._compiled(path, path, constants)(*args, **kwargs)
        graph = self._compiled(function, path, constants, own=len(args))
        args += weights
        if not _pynative_executor.grad_flag():
            return graph(*args, **kwargs)
        return self._tree.activations.call_again(graph, _collectors(constants.get(PRODUCTS, ())), args, kwargs)

    def _takes(self, path, again, function):
        """Names of the arguments of a Cell's function in the running program, and the weights to pass."""
        if self._version != self._tree.versions:
            self._version, self._taken = self._tree.versions, {}
        key = self._tree.running, path, function
        if key not in self._taken:
            names = list(signature(getattr(type(self._tree.cells[path]), function)).parameters)[1:]
            self._taken[key] = names, tuple(self._tree.weights_of_call(path, function)) if again else ()
        return self._taken[key]

    def _compiled(self, owner, path, constants, own=None):
        """The compiled function of a Cell for one program; made anew where values were put into other memory.

        Args:
            owner: whose it is: the path, or what all Cells have in common that share it and pass their weights.
            path: of the Cell that is compiled.
            constants: arguments that are compiled in: the program, and the objects of split weight gradients.
            own: how many arguments the Cell's weights come behind; None: they are its own.
        """
        cell = self._tree.cells[path]
        key = owner, *map(_identity, constants.values())
        parts = self._tree.storage.parts
        held = [each for each in computing_parameters(cell) if id(each) not in parts] if own is None else []
        places = [each.data_ptr() for each in held]
        known, graph, _ = self._graphs.get(key, (None, None, None))
        if known != places:
            forbid_reuse(cell)

            def run(*args, **kwargs):
                return cell(*args, **constants, **kwargs)

            def run_with_weights(*args, **kwargs):
                return cell(*args[:own], weights=args[own:], **constants, **kwargs)

            graph = jit(run if own is None else run_with_weights)
            self._graphs[key] = places, graph, constants  # which have to live as long as their ids are known
            alike = [other for other in self._graphs if other[0] == owner]
            if len(alike) > MOST_PROGRAMS:
                del self._graphs[alike[0]]
        return graph


def _by_place(names, args, kwargs):
    """Arguments by place, as far as can be: of tensors in a tuple that is given by name a graph has no gradient."""
    names, kwargs = names[len(args) :], dict(kwargs)
    while names and names[0] in kwargs:
        args += (kwargs.pop(names.pop(0)),)
    return args, kwargs


def _identity(constant):
    return constant if isinstance(constant, str) else id(constant)


def _collectors(products):
    """The collectors of all objects in a structure of split weight gradients."""
    if isinstance(products, tuple):
        return [each for inner in products for each in _collectors(inner)]
    return list(products.collectors)
