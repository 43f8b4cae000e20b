"""From the layouts that arrive at an operator to those that it computes with: the cheapest choice. Pure Python.

For every mesh axis an operator has few ways to go: cut along a factor that some input already has cut, carry a partial
sum through, or compute the whole on every rank. All combinations over the axes are priced with the redistributions
that they need, forward and backward, and the cheapest wins; among equals the one that cuts most.
"""

import math
from dataclasses import dataclass
from itertools import product

from mindformers_core.layout import Layout
from mindformers_core.redistribution import plan_redistribution

__all__ = ["Resolution", "resolve"]

_REPLICATE = ("replicate", None, None)


@dataclass(frozen=True)
class Resolution:
    """What `resolve` decides for one operator call.

    Attributes:
        inputs: the layout that every tensor input must have.
        outputs: the layout that every output then has.
        axes_of: for every factor the axes that cut it, major to minor.
        cost: seconds of redistribution by the cost model, forward and backward.
    """

    inputs: tuple
    outputs: tuple
    axes_of: dict
    cost: float


def resolve(signature, metas, mesh, cost_model):
    """The cheapest `Resolution` of an operator call.

    Args:
        signature: the operator's `Signature`.
        metas: a `TensorMeta` with layout for every tensor input.
        mesh: the mesh that all the layouts are on.
        cost_model: what redistributions cost.
    """
    assert len(metas) == len(signature.inputs), (len(metas), signature.inputs)
    arriving = [_factor_axes(signature, dims, meta.layout) for dims, meta in zip(signature.inputs, metas)]
    options = [_options(signature, metas, arriving, axis) for axis in mesh.axis_names]
    best = None
    for choice in product(*options):
        limit = math.inf if best is None else best.cost * (1 - 1e-9)
        candidate = _candidate(signature, metas, arriving, mesh, dict(zip(mesh.axis_names, choice)), cost_model, limit)
        if candidate is not None:
            best = candidate
            if best.cost == 0:
                break
    assert best is not None, "computing the whole on every rank is always possible"
    return best


def _factor_axes(signature, dims, layout):
    """Which axes cut which factor in an input of this layout. Axes that straddle factors are left out."""
    cut = {}
    for factors, axes in zip(dims, layout.dims):
        rest = list(axes)
        for factor in factors:
            taken = 1
            while rest and signature.sizes[factor] % (taken * layout.mesh.axis_size(rest[0])) == 0:
                taken *= layout.mesh.axis_size(rest[0])
                cut.setdefault(factor, []).append(rest.pop(0))
            if taken != signature.sizes[factor]:
                break
    return cut


def _options(signature, metas, arriving, axis):
    """The ways that this call can go on `axis`: cuts first, then partials, then the whole."""
    cuts = [("cut", factor, None) for cut in arriving for factor, axes in cut.items() if axis in axes]
    options = [option for option in dict.fromkeys(cuts) if option[1] not in signature.whole]
    ops = {index: dict(meta.layout.partial).get(axis) for index, meta in enumerate(metas)}
    for group in signature.linear:
        for op in ("sum", "avg"):
            if any(ops[index] == op for index in group) and all(ops[index] in (op, None) for index in group):
                options.append(("partial", group, op))
    return [*options, _REPLICATE]


def _candidate(signature, metas, arriving, mesh, choices, cost_model, limit):
    """The `Resolution` of one choice for every axis; None where the cut doesn't divide, or it costs `limit` or more."""
    axes_of = _ordered_cuts(arriving, mesh, choices)
    if not _cuts_fit(signature, mesh, axes_of):
        return None
    partial = {axis: (group, op) for axis, (kind, group, op) in choices.items() if kind == "partial"}
    reduced = {axis: op for factor, op in signature.reduced.items() for axis in axes_of.get(factor, ())}
    active = {axis for axis, choice in choices.items() if choice is not _REPLICATE}
    active |= {axis for meta in metas if meta.differentiable for axis in meta.layout.varying}
    inputs, cost = [], 0.0
    for index, (dims, meta) in enumerate(zip(signature.inputs, metas)):
        terms = {axis: op for axis, (group, op) in partial.items() if index in group}
        terms |= reduced if index in signature.added else {}
        needed = _place(mesh, dims, axes_of, terms, active if meta.differentiable else ())
        source, unmarked = meta.layout.replace(varying=()), needed.replace(varying=())
        if source != unmarked:
            cost += plan_redistribution(source, unmarked, meta.shape, meta.dtype, cost_model).cost
        if cost >= limit:
            return None
        inputs.append(needed)
    terms = {axis: op for axis, (_, op) in partial.items()} | reduced
    gone = {axis for factor in _vanishing(signature) for axis in axes_of.get(factor, ())}
    outputs = tuple(_place(mesh, dims, axes_of, terms, active - gone) for dims in signature.outputs)
    return Resolution(tuple(inputs), outputs, axes_of, cost)


def _ordered_cuts(arriving, mesh, choices):
    """Factor -> axes that cut it, in the order in which an input already has them, else in mesh order."""
    axes_of = {}
    for axis in mesh.axis_names:
        kind, factor, _ = choices[axis]
        if kind == "cut":
            axes_of.setdefault(factor, []).append(axis)
    for factor, axes in axes_of.items():
        given = next((cut[factor] for cut in arriving if set(axes) <= set(cut.get(factor, ()))), axes)
        axes_of[factor] = tuple(axis for axis in given if axis in axes)
    return axes_of


def _cuts_fit(signature, mesh, axes_of):
    """Whether every factor divides by its axes, and minor ones are cut only where all major ones are cut to size 1."""
    counts = {factor: mesh.axis_size(*axes) for factor, axes in axes_of.items()}
    if any(signature.sizes[factor] % count for factor, count in counts.items()):
        return False
    for dims in (*signature.inputs, *signature.outputs):
        for factors in dims:
            for place, factor in enumerate(factors):
                major = factors[:place]
                if factor in counts and math.prod(signature.sizes[f] for f in major) != math.prod(
                    counts.get(f, 1) for f in major
                ):
                    return False
    return True


def _place(mesh, dims, axes_of, terms, active):
    """The layout of a tensor whose dims hold these factors: cut, partial in `terms`, varying on what else is active."""
    places = [tuple(axis for factor in factors for axis in axes_of.get(factor, ())) for factors in dims]
    used = {axis for axes in places for axis in axes} | set(terms)
    return Layout.on(mesh, places, terms, [axis for axis in mesh.axis_names if axis in active and axis not in used])


def _vanishing(signature):
    """Factors whose distributed algorithm leaves the whole result on every rank."""
    kept = {factor for dims in signature.outputs for factors in dims for factor in factors} | set(signature.reduced)
    return [factor for factor in signature.distributed if factor not in kept]
