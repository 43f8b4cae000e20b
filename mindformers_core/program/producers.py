"""The producers of every instruction's inputs, and the layers of a program. Pure Python."""

from dataclasses import dataclass
from itertools import repeat
from math import prod

from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.program.environment import follow

_LARGEST_PART = 3  # operators of a Cell that is called several times and is no layer: a projection


@dataclass(frozen=True, eq=False)
class Links:
    """The instructions of a program as a data-flow graph; calls are replaced by the instructions of the called Cell.

    Attributes:
        producers: key -> keys of the instructions that produce its inputs, each once, in order; arguments, parameters
            and constants have none. Keys are in the order of execution.
        nbytes: key -> bytes of all its results on one rank.
        groups: key -> its position, the same in all equal layers: a tuple of indices, in which equal layers have the
            same entry.
        layer_bounds: the number of instructions before every layer, and up to its end, ascending; with 0 and the
            number of all instructions.
        results: keys of the instructions that produce results of layers.
    """

    producers: dict
    nbytes: dict
    groups: dict
    layer_bounds: tuple
    results: frozenset


def links_of(plan):
    """The `Links` of a program.

    Layers are calls of one Cell, with more than 3 operators, that are equal and share their `CellPlan`; of nested ones
    the outermost.
    """
    producers, nbytes, groups, layer_bounds, layer_results = {}, {}, {}, {0}, set()

    def visit(plan, made, before, position, in_layer):
        """Keys of the instructions that produce the results of a call; `made`: of the tensors that it is passed."""
        equal = [] if in_layer else [call.plan for call in plan.calls]

        def instruction(index, entry, taken):
            key, inner = (*before, index), entry.plan
            if inner is None:
                producers[key] = tuple(dict.fromkeys(each for each in taken if each is not None))
                nbytes[key] = sum(
                    prod(at.local_shape(value.shape)) * ITEM_BYTES[value.dtype] for value, at in entry.produced
                )
                groups[key] = (*position, index)
                return repeat(key)
            is_layer = equal.count(inner) > 1 and _size(inner) > _LARGEST_PART
            start, here = len(producers), (*position, ("equal", id(inner)) if is_layer else index)
            results = visit(inner, taken, key, here, in_layer or is_layer)
            if is_layer:
                layer_bounds.update((start, len(producers)))
                layer_results.update(results)
            return results

        return follow(plan, made, instruction)

    visit(plan, {}, (), (), False)
    layer_bounds.add(len(producers))
    return Links(producers, nbytes, groups, tuple(sorted(layer_bounds)), frozenset(layer_results - {None}))


def _size(plan):
    """The number of instructions of a plan, with those of called Cells."""
    return sum(1 if entry.plan is None else _size(entry.plan) for entry in plan.instructions)
