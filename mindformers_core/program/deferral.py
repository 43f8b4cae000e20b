"""Matmuls of a plan whose weight gradient is deferred, and the gradients that flow around them. Pure Python.

An operator is *deferred* where its weight is a trained parameter of two dims, as stored or after redistributions. A
plan's *variables* are tensors in a layout, `(number of the Value, Layout)`.
"""

from dataclasses import dataclass

from mindformers_core.operators.registry import facts_of
from mindformers_core.program.environment import follow
from mindformers_core.program.plan import CallPlan, Redistribution, called_graphs, joined_path, parameter_path
from mindformers_core.program.structure import Value

PRODUCTS = "deferred_products"  # the name of a generated function's argument with one object for each deferred operator


@dataclass(frozen=True, eq=False)
class Deferral:
    """The deferred operators of one `CellPlan`.

    Attributes:
        places: every deferred `OperatorPlan`, and every `CallPlan` with such operators below -> its place, from 0.
        waiting: variables whose gradient is deferred by all consumers.
        needed: variables whose ordinary gradient some consumer computes.
    """

    places: dict
    waiting: frozenset
    needed: frozenset


NOTHING_DEFERRED = Deferral({}, frozenset(), frozenset())


@dataclass(frozen=True)
class DeferredWeight:
    """The weight of one deferred operator.

    Attributes:
        path: of the parameter, from the Cell of the program.
        steps: the `Step`s from the stored layout to the layout in which the operator takes the weight.
        transposed: whether the operator computes `x @ weight.T`.
    """

    path: str
    steps: tuple
    transposed: bool


def deferrals(plans):
    """`CellPlan` -> its `Deferral`, for all of them; callees come before their callers."""
    found = {}
    for plan in plans:
        found[plan] = _deferral(plan, found)
    return found


def _deferral(plan, below):
    trained = {use.value.id for use in plan.graph.parameters if use.trainable}
    chosen, waiting = [], set()
    needed = _variables(plan.returned)
    for entry in reversed(plan.instructions):  # consumers come before producers
        if isinstance(entry, Redistribution):
            target = entry.value.id, entry.target
            if target in needed or target in waiting:
                (needed if target in needed else waiting).add((entry.value.id, entry.source))
            continue
        taken = [*entry.consumed]
        if isinstance(entry, CallPlan):
            callee = below.get(entry.plan, NOTHING_DEFERRED)
            for (inner, layout), own in zip(entry.plan.lifted if entry.plan else (), entry.lifted, strict=True):
                for mine, theirs in (needed, callee.needed), (waiting, callee.waiting):
                    mine |= _variables([own]) if (inner.id, layout) in theirs else set()
            chosen += [entry] if callee.places else []
        elif entry.algorithm is None and _is_transposed(entry.node) is not None and taken[1][0].id in trained:
            waiting |= _variables([taken.pop(1)])
            chosen.append(entry)
        needed |= _variables(taken)
    places = {entry: place for place, entry in enumerate(reversed(chosen))}
    return Deferral(places, frozenset(waiting - needed), frozenset(needed))


def _variables(pairs):
    return {(value.id, layout) for value, layout in pairs}


def deferred_weights(program_path, plan, graph, below):
    """The deferred weights of a program, and its parameters with an ordinary gradient.

    Args:
        program_path: of the Cell of the program.
        plan, graph: the program's plan and graph.
        below: `CellPlan` -> its `Deferral`, for all plans of the program.

    Returns:
        (structure, paths): for every place a `DeferredWeight`, or a tuple of them for a call; and the paths of the
        trained parameters that have an ordinary gradient, alone or besides a deferred one.
    """
    ordinary = set()

    def visit(plan, graph, passed):
        """The weights of a call; what stands for a weight, in `passed` as well, is its path and the `Step`s so far."""
        deferral, ways = below[plan], {}
        for number, use in enumerate(plan.graph.parameters):
            stored, path = plan.layouts[use.value.id], joined_path(program_path, parameter_path(plan, graph, number))
            ways[use.value.id, stored] = path, ()
            if (use.value.id, stored) in deferral.needed:
                ordinary.add(path)
        graphs, found = dict(called_graphs(plan, graph)), []

        def instruction(_, entry, taken):
            if isinstance(entry, Redistribution):
                return [(way[0], (*way[1], *entry.steps)) for way in taken if way]
            if entry.plan is not None:
                inner = visit(entry.plan, graphs[entry], {tensor: way for tensor, way in taken.items() if way})
                found.extend([inner] if entry in deferral.places else [])
            elif isinstance(entry, CallPlan):
                uses = [use for inner in graphs[entry].calls() for use in inner.parameters]
                ordinary.update(joined_path(program_path, use.path) for use in uses)
            elif entry in deferral.places:
                found.append(DeferredWeight(*taken[1], _is_transposed(entry.node)))
            return ()

        follow(plan, ways | passed, instruction)
        return tuple(found)

    return visit(plan, graph, {}), ordinary


def _is_transposed(node):
    """Whether an operator computes `x @ weight.T`; None for an operator that doesn't compute `x @ weight` either."""
    arguments = (*node.args, *node.kwargs.values())
    product = facts_of(node.operator).product
    if not product or len(arguments) < 2:
        return None
    x, weight, *rest = arguments
    if not (isinstance(x, Value) and isinstance(weight, Value)) or len(weight.shape) != 2 or not x.shape:
        return None
    if len({x.dtype, weight.dtype, node.made[0].dtype}) != 1:
        return None
    if product == "x @ w.T":
        return True
    transpose_x, transpose_weight = (*rest, False, False)[:2]
    return None if transpose_x else bool(transpose_weight)
