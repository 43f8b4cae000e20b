"""Which matmuls of a plan leave the gradient of their weight for later, and what flows around them. Pure Python.

An operator is *deferred* where its weight is a trained parameter of two dims, as it is stored or after moves. A plan's
*variables* are tensors in a layout, `(number of the Value, Layout)`.
"""

from dataclasses import dataclass

from mindformers_core.operators.registry import facts_of
from mindformers_core.program.plan import CallPlan, Move, called_graphs, joined_path, parameter_path
from mindformers_core.program.structure import Value, tree_leaves

__all__ = [
    "NOTHING_DEFERRED", "PRODUCTS", "Deferral", "DeferredWeight", "deferrals", "deferred_weights",
]  # fmt: skip

PRODUCTS = "deferred_products"  # what a generated function calls the objects that stand for its deferred operators


@dataclass(frozen=True, eq=False)
class Deferral:
    """What one `CellPlan` defers.

    Attributes:
        places: every `OperatorPlan` that is deferred, and every `CallPlan` with such ones below -> its place, from 0.
        waiting: variables whose gradient is deferred wherever they go.
        needed: variables of which something takes the ordinary gradient.
    """

    places: dict
    waiting: frozenset
    needed: frozenset


NOTHING_DEFERRED = Deferral({}, frozenset(), frozenset())


@dataclass(frozen=True)
class DeferredWeight:
    """The weight of one deferred operator.

    Attributes:
        path: the parameter, from the Cell that the program belongs to.
        steps: the `Step`s from how it is stored to how the operator takes it.
        transposed: whether the operator computes `x @ weight.T`.
    """

    path: str
    steps: tuple
    transposed: bool


def deferrals(frames):
    """`CellPlan` -> its `Deferral`, for all of them; callees come before their callers."""
    found = {}
    for frame in frames:
        found[frame] = _deferral(frame, found)
    return found


def _deferral(frame, below):
    trained = {use.value.id for use in frame.graph.parameters if use.trainable}
    chosen, waiting = [], set()
    needed = {(value.id, layout) for value, layout in zip(tree_leaves(frame.graph.result), frame.results, strict=True)}
    for entry in reversed(frame.instructions):  # who takes a tensor comes before it
        if isinstance(entry, Move):
            target = entry.value.id, entry.target
            if target in needed or target in waiting:
                (needed if target in needed else waiting).add((entry.value.id, entry.source))
            continue
        values = tree_leaves((entry.node.args, entry.node.kwargs))
        taken = [(value.id, layout) for value, layout in zip(values, entry.inputs, strict=True)]
        if isinstance(entry, CallPlan):
            _pass_down(entry, below.get(entry.frame), needed, waiting)
            if entry.frame is not None and below[entry.frame].places:
                chosen.append(entry)
        elif entry.algorithm is None and _is_transposed(entry.node) is not None and taken[1][0] in trained:
            waiting.add(taken.pop(1))
            chosen.append(entry)
        needed.update(taken)
    places = {entry: place for place, entry in enumerate(reversed(chosen))}
    return Deferral(places, frozenset(waiting - needed), frozenset(needed))


def _pass_down(call, callee, needed, waiting):
    """Sort what a call passes besides its arguments, as the callee takes it."""
    inner = call.frame.lifted if call.frame is not None else ()
    for (value, layout), (own, own_layout) in zip(inner, call.lifted, strict=True):
        variable = value.id, layout
        if variable in callee.needed:
            needed.add((own.id, own_layout))
        elif variable in callee.waiting:
            waiting.add((own.id, own_layout))


def deferred_weights(program_path, frame, graph, below):
    """What a program defers, and what it doesn't.

    Args:
        program_path: the Cell that is called.
        frame, graph: the program's.
        below: the `Deferral` of every plan in it.

    Returns:
        (structure, paths): for every place a `DeferredWeight`, or a tuple of them for a call; and the paths of the
        trained parameters that have an ordinary gradient as well, or only one.
    """
    ordinary = set()

    def visit(frame, graph, passed):
        deferral, ways = below[frame], {}
        for number, use in enumerate(frame.graph.parameters):
            stored, path = frame.layouts[use.value.id], joined_path(program_path, parameter_path(frame, graph, number))
            ways[use.value.id, stored] = path, ()
            if (use.value.id, stored) in deferral.needed:
                ordinary.add(path)
        ways |= {(value.id, layout): way for (value, layout), way in zip(frame.lifted, passed, strict=True) if way}
        graphs = dict(called_graphs(frame, graph))
        found = []
        for entry in frame.instructions:
            if isinstance(entry, Move):
                if (entry.value.id, entry.source) in ways:
                    path, steps = ways[entry.value.id, entry.source]
                    ways[entry.value.id, entry.target] = path, (*steps, *entry.steps)
            elif isinstance(entry, CallPlan):
                if entry.frame is None:
                    uses = [use for inner in graphs[entry].calls() for use in inner.parameters]
                    ordinary.update(joined_path(program_path, use.path) for use in uses)
                else:
                    inner = visit(entry.frame, graphs[entry], [ways.get((v.id, layout)) for v, layout in entry.lifted])
                    found += [inner] if entry in deferral.places else []
            elif entry in deferral.places:
                weight = tree_leaves((entry.node.args, entry.node.kwargs))[1]
                path, steps = ways[weight.id, entry.inputs[1]]
                found.append(DeferredWeight(path, steps, _is_transposed(entry.node)))
        return tuple(found)

    return visit(frame, graph, []), ordinary


def _is_transposed(node):
    """Whether an operator computes `x @ weight.T`; None where it doesn't compute `x @ weight` either."""
    arguments = (*node.args, *node.kwargs.values())
    product = facts_of(node.operator).product
    if not product or len(arguments) < 2:
        return None
    x, weight, *rest = arguments
    outputs = tree_leaves(node.outputs)
    if not (isinstance(x, Value) and isinstance(weight, Value)) or len(weight.shape) != 2 or not x.shape:
        return None
    if len({x.dtype, weight.dtype, outputs[0].dtype}) != 1:
        return None
    if product == "x @ w.T":
        return True
    transpose_x, transpose_weight = (*rest, False, False)[:2]
    return None if transpose_x else bool(transpose_weight)
