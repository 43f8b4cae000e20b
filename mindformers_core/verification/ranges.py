"""The range of half precision: distributed algorithms in float16, on large numbers, against one card in float64.

A verification computes in float64, which hides what overflows, or loses digits, in the dtypes of a model.
"""

from functools import partial

import numpy as np
from mindspore import Tensor

from mindformers_core.algorithms.distributed_operators import run_locally
from mindformers_core.algorithms.shard_context import shard_context
from mindformers_core.capture.algorithm_graph import called_node
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.structure import Value, tree_fill, tree_leaves
from mindformers_core.verification.comparison import close, expected_part, largest
from mindformers_core.verification.rounding import PEAK
from mindformers_core.verification.truth import OperatorCalls

_LIMITS = 2**-6, 0.0  # tolerance and rounding


def range_cases(truth, plans):
    """What one card's float16 computes right of large numbers: `(stage, mesh, OperatorPlan, inputs, results)`, arrays.

    Args:
        truth: the `OneCard`, whose values are taken as they are but for a factor.
        plans: (number of a stage, mesh of its Cell) -> `(CellGraph, CellPlan)`.
    """
    calls, cases, label = [OperatorCalls(name) for name in ("float16", "float64")], {}, next(iter(truth.outputs))
    for (stage, mesh), (_, plan) in plans.items():
        for call, entry in ((inner.graph.call, each) for _, inner in plan.walk() for each in inner.instructions):
            is_cut = getattr(entry, "algorithm", None) and not any(layout.partial for layout in entry.inputs)
            if is_cut and not facts_of(entry.node.operator).draws:
                key = stage, mesh, entry.node.operator, entry.algorithm, entry.inputs, tuple(entry.local_shapes)
                inputs = [truth.values[stage, label].get((call, value.id)) for value in _taken(entry.node)]
                if key not in cases and all(each is not None and largest([each]) < np.inf for each in inputs):
                    cases[key] = _case(entry.node, [_large(each) for each in inputs], calls), entry
    return [(stage, mesh, entry, *case) for (stage, mesh, *_), (case, entry) in cases.items() if case is not None]


def _taken(node):
    """The Values that an operator takes, in order, also those that it takes twice."""
    return tree_leaves((node.args, node.kwargs))


def _large(array):
    """Floats scaled to a peak, in float16; integers as they are."""
    scale = PEAK / (np.abs(array).max(initial=0.0) or 1.0)
    return (array * scale).astype(np.float16) if array.dtype.kind == "f" else array


def _case(node, inputs, calls):
    """Inputs, and one card's results in float64; None where float16 has other ones, or no kernel."""
    found = []
    for each in calls:
        given = (Tensor(array.astype(each.dtype) if array.dtype.kind == "f" else array) for array in inputs)
        try:
            results = each(node, *tree_fill((node.args, node.kwargs), given, Value))
        except (RuntimeError, TypeError):
            return None
        found.append([tensor.asnumpy() for tensor in tree_leaves(results, Tensor)])
    pairs = [(half.astype(wide.dtype), wide) for half, wide in zip(*found, strict=True)]
    is_right = all(np.isfinite(wide).all() and close(half, wide, *_LIMITS) for half, wide in pairs)
    return (inputs, found[1]) if is_right else None


def compare_ranges(check, rank, meshes, cases):
    """Compare what a rank's algorithms make of the `cases`; `meshes`: number of a stage of this rank -> its mesh."""
    half = OperatorCalls("float16")

    def operator(node, args, kwargs):
        return half.function(called_node(node, args), args, kwargs)(*tree_leaves((args, kwargs), Tensor))

    for number, (stage, mesh, entry, inputs, expected) in enumerate(cases):
        if meshes.get(stage) != mesh:
            continue
        local = [Tensor(expected_part(array, layout, rank)) for array, layout in zip(inputs, entry.inputs, strict=True)]
        try:
            results = run_locally(entry, local, partial(operator, entry.node), shard_context(entry, rank))
        except TypeError as error:  # on all ranks: a part of the algorithm has no such kernel
            note = f"not verified: {entry.node.operator} in float16: {str(error).partition(chr(10))[0]}"
            check.notes += (note,) * (note not in check.notes)
            continue
        at = None, None, None, f"{entry.node.operator}, {entry.node.source}", None
        for place, (tensor, layout) in enumerate(zip(tree_leaves(results, Tensor), entry.outputs, strict=True)):
            wide = Tensor(tensor.asnumpy().astype(expected[place].dtype))
            given = (4, number), rank, "value in float16, of large numbers,", at, layout, wide, expected[place]
            check.hold(*given, key=(number, place), limits=_LIMITS)
