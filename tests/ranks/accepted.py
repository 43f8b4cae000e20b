"""Which placements of its inputs a rule accepts, enumerated; and any other layouts, drawn at random."""

from itertools import permutations, product

from mindformers_core.layout import Layout
from mindformers_core.operators.resolve import _cuts_fit, _place

AXES = ("dp", "tp")


def accepted(signature, floats, mesh):
    """All layouts that inputs may arrive in and stay: each axis cuts a factor, carries terms through, or does nothing.

    Args:
        signature: the operator's `Signature`.
        floats: whether each input is of a floating dtype: others carry no terms of a sum.
        mesh: a mesh of one or two axes.

    Yields:
        A tuple of layouts, one for each input. A factor that two axes cut is cut in both orders.
    """
    arriving = {factor for dims in signature.inputs for factors in dims for factor in factors}
    groups = [group for group in signature.linear if group and all(floats[place] for place in group)]
    factors = [factor for factor in signature.sizes if factor in arriving and factor not in signature.whole]
    axes = mesh.axis_names
    for picks in product([None, *factors, *groups], repeat=mesh.ndim):
        for order in permutations(axes) if picks[0] == picks[-1] and isinstance(picks[0], str) else (axes,):
            chosen = dict(zip(axes, picks))
            axes_of = {}
            for axis in order:
                if isinstance(chosen[axis], str):
                    axes_of[chosen[axis]] = (*axes_of.get(chosen[axis], ()), axis)
            if _cuts_fit(signature, mesh, axes_of):
                yield tuple(
                    _place(mesh, signature, dims, axes_of, _terms(signature, chosen, axes_of, place), ())
                    for place, dims in enumerate(signature.inputs)
                )


def _terms(signature, chosen, axes_of, place):
    """The partial sums that input `place` carries; an added input is one where a reduced factor is cut."""
    terms = {axis: "sum" for axis, pick in chosen.items() if isinstance(pick, (set, frozenset)) and place in pick}
    if place in signature.added:
        terms |= {axis: op for factor, op in signature.reduced.items() for axis in axes_of.get(factor, ())}
    return terms


def at_random(shapes, floats, mesh, random, count):
    """`count` tuples of layouts that an operator need not accept: partial sums and averages, varying tensors too."""
    every = [layouts_of(shape, is_float, mesh) for shape, is_float in zip(shapes, floats)]
    return [tuple(layouts[random.integers(len(layouts))] for layouts in every) for _ in range(count)]


def layouts_of(shape, is_float, mesh):
    choices, axes = [None, *range(len(shape)), *(["sum", "avg", "varying"] if is_float else [])], mesh.axis_names
    found = {}
    for picks in product(choices, repeat=mesh.ndim):
        partial = {axis: pick for axis, pick in zip(axes, picks) if pick in ("sum", "avg")}
        varying = [axis for axis, pick in zip(axes, picks) if pick == "varying"]
        for order in permutations(axes):
            dims = [[axis for axis in order if picks[axes.index(axis)] == dim] for dim in range(len(shape))]
            if all(size % mesh.axis_size(*axes) == 0 for size, axes in zip(shape, dims)):
                found[Layout.on(mesh, dims, partial, varying)] = None
    return list(found)
