"""Who makes what an instruction takes, and which instructions of equal layers are alike. Pure Python."""

from dataclasses import dataclass
from math import prod

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.program.aliases import match_arguments
from mindformers_core.program.plan import CallPlan, Move
from mindformers_core.program.structure import tree_leaves

__all__ = ["Links", "links_of"]

_LARGEST_PART = 3  # operators of a Cell that is called several times without being a layer: a projection


@dataclass(frozen=True, eq=False)
class Links:
    """How the instructions of a program hang together; those of places, not calls that are gone into.

    Attributes:
        producers: key -> keys of the instructions that make its inputs, each once, in order; arguments, parameters and
            constants have none. In the order in which the instructions run.
        nbytes: key -> bytes of all its results, on one rank.
        groups: key -> its position, the same in all equal layers: a tuple of indices, where in the place of a layer's
            stands what its calls share.
        layer_bounds: for every layer how many instructions come before it and before what follows it, ascending; 0 and
            the number of all are there, too.
        results: keys of the instructions that make what layers return.
    """

    producers: dict
    nbytes: dict
    groups: dict
    layer_bounds: tuple
    results: frozenset


def links_of(frame):
    """The `Links` of a program.

    Layers are calls of one Cell, with more than 3 operators, that are equal and share their `CellPlan`; of nested ones
    the outermost.
    """
    producers, nbytes, groups, layer_bounds, results = {}, {}, {}, {0}, set()
    _follow((producers, nbytes, groups, layer_bounds, results), frame, {}, (), (), False)
    return Links(producers, nbytes, groups, tuple(sorted(layer_bounds | {len(producers)})), frozenset(results))


def _follow(found, frame, given, before, position, in_layer):
    """Enter a frame's instructions; returns `(number of Value, layout) -> key` of all that is available at its end.

    Args:
        found: what `Links` is made of.
        given: the same for what the caller passes.
        before, position: what keys and groups begin with.
        in_layer: whether the frame is that of a layer or below one.
    """
    producers, nbytes, groups, layer_bounds, layer_results = found
    made = dict(given)
    equal = [] if in_layer else [id(call.frame) for call in frame.calls if call.frame is not None]
    for index, entry in enumerate(frame.instructions):
        key = (*before, index)
        if not isinstance(entry, CallPlan) or entry.frame is None:
            producers[key] = _makers(entry, made)
            nbytes[key], groups[key] = 0, (*position, index)
            for value, layout in _results(entry):
                made[value.id, layout] = key
                nbytes[key] += prod(layout.local_shape(value.shape)) * ITEM_BYTES[value.dtype]
            continue
        is_layer = equal.count(id(entry.frame)) > 1 and _size(entry.frame) > _LARGEST_PART
        if is_layer:
            layer_bounds.add(len(producers))
        here = (*position, ("equal", id(entry.frame)) if is_layer else index)
        inside = _follow(found, entry.frame, _passed(entry, made), key, here, in_layer or is_layer)
        results = [
            (value.id, layout) for value, layout in zip(tree_leaves(entry.frame.graph.result), entry.frame.results)
        ]
        if is_layer:
            layer_bounds.add(len(producers))
            layer_results.update(inside[result] for result in results if result in inside)
        for value, layout, result in zip(tree_leaves(entry.node.outputs), entry.outputs, results):
            _take(made, (value.id, layout), inside.get(result))
    return made


def _makers(entry, made):
    if isinstance(entry, Move):
        taken = [(entry.value.id, entry.source)]
    else:
        values = tree_leaves((entry.node.args, entry.node.kwargs))
        taken = [(value.id, layout) for value, layout in zip(values, entry.inputs)]
    return tuple(dict.fromkeys(made[tensor] for tensor in taken if tensor in made))


def _results(entry):
    if isinstance(entry, Move):
        return [(entry.value, entry.target)]
    return zip(tree_leaves(entry.node.outputs), entry.outputs)


def _passed(call, made):
    """What the called frame is given: `(number of its Value, layout) -> key`."""
    layouts = dict(zip(tree_leaves((call.node.args, call.node.kwargs)), call.inputs))
    passed = {}
    for inner, outer in match_arguments(call.node).items():
        _take(passed, (inner.id, layouts[outer]), made.get((outer.id, layouts[outer])))
    for (inner, inner_layout), (outer, layout) in zip(call.frame.lifted, call.lifted):
        _take(passed, (inner.id, inner_layout), made.get((outer.id, layout)))
    return passed


def _take(made, tensor, key):
    if key is not None:
        made[tensor] = key


def _size(frame):
    """The number of a frame's instructions, those of called Cells included."""
    return sum(
        _size(entry.frame) if isinstance(entry, CallPlan) and entry.frame is not None else 1
        for entry in frame.instructions
    )
