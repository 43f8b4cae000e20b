"""The range of half precision: distributed algorithms in float16, on large numbers, against one card in float64.

A verification computes in float64, which hides what overflows, or loses digits, in the dtypes of a model.
"""

import numpy as np
from mindspore import Tensor

from mindformers_core.capture.algorithm_graph import called_node, run_algorithm, shard_context
from mindformers_core.operators.registry import facts_of
from mindformers_core.program.plan import OperatorPlan
from mindformers_core.program.structure import Value, tree_fill, tree_leaves
from mindformers_core.verification.comparison import close, expected_part, largest
from mindformers_core.verification.operators import OperatorCalls

PEAK = 300.0  # of float16 numbers, whose squares have no float16
_LIMITS = 2**-6, 0.0  # tolerance and rounding


def range_cases(truth, plans):
    """What one card's float16 computes right of large numbers: `(stage, mesh, OperatorPlan, inputs, results)`, arrays.

    Args:
        truth: the `OneCard`, whose values are taken as they are but for a factor.
        plans: (number of a stage, mesh of its Cell) -> `(CellGraph, CellPlan)`.
    """
    calls, cases = [OperatorCalls(name) for name in ("float16", "float64")], {}
    for (stage, mesh), (_, frame) in plans.items():
        values = next(table for (number, _), table in truth.values.items() if number == stage)
        for _, inner in frame.walk():
            for entry in filter(_has_range, inner.instructions):
                key = stage, mesh, entry.node.operator, entry.algorithm, entry.inputs, tuple(entry.local_shapes)
                inputs = [values.get((inner.graph.call, value.id)) for value, _ in _taken(entry)]
                if key not in cases and all(each is not None and largest([each]) < np.inf for each in inputs):
                    cases[key] = _case(entry, [_large(each) for each in inputs], calls)
    return [(stage, mesh, *case) for (stage, mesh, *_), case in cases.items() if case is not None]


def _has_range(entry):
    return (
        isinstance(entry, OperatorPlan) and entry.algorithm and not facts_of(entry.node.operator).draws
        and not any(layout.partial for layout in entry.inputs)
    )  # fmt: skip


def _taken(entry):
    """Pairs (Value, Layout) of an operator's inputs, in order, also those that it takes twice."""
    return zip(tree_leaves((entry.node.args, entry.node.kwargs)), entry.inputs, strict=True)


def _large(array):
    """Floats scaled to `PEAK`, and rounded to float16."""
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        return (array * (PEAK / (np.abs(array).max(initial=0.0) or 1.0))).astype(np.float16)


def _case(entry, inputs, calls):
    found = []
    for each in calls:
        given = (Tensor(array.astype(each.dtype) if array.dtype.kind == "f" else array) for array in inputs)
        args, kwargs = tree_fill((entry.node.args, entry.node.kwargs), given, Value)
        try:
            found.append([tensor.asnumpy() for tensor in tree_leaves(each(entry.node, args, kwargs), Tensor)])
        except (RuntimeError, TypeError):  # no kernel of that dtype
            return None
    is_right = all(
        np.isfinite(wide).all() and close(half.astype(wide.dtype), wide, *_LIMITS) for half, wide in zip(*found)
    )
    return (entry, inputs, found[1]) if is_right else None


def compare_ranges(check, rank, meshes, cases):
    """Compare what a rank's algorithms make of the `cases`; `meshes`: number of a stage of this rank -> its mesh."""
    half = OperatorCalls("float16")

    def operator(args, kwargs):
        node = called_node(entry.node, args)
        return half(node, args, kwargs)

    for number, (stage, mesh, entry, inputs, expected) in enumerate(cases):
        if meshes.get(stage) == mesh:
            local = [Tensor(expected_part(array, layout, rank)) for array, (_, layout) in zip(inputs, _taken(entry))]
            results = run_algorithm(entry, local, operator, shard_context(entry, mesh, rank))
            at = None, None, None, f"{entry.node.operator}, {entry.node.source}", None
            for place, (tensor, layout) in enumerate(zip(tree_leaves(results, Tensor), entry.outputs, strict=True)):
                wide = Tensor(tensor.asnumpy().astype(expected[place].dtype))
                given = (4, number), rank, "value in float16, of large numbers,", at, layout, wide, expected[place]
                check.hold(*given, key=(number, place), limits=_LIMITS)
