"""Ranks simulated in NumPy, for the redistribution tests to run plans on: a tensor is a dict from rank to array.

Written from the definitions of the placements, and from the design's table of forward and backward collectives.
"""

import numpy as np

from mindformers_core.redistribution.arrays import exchange, reduce_arrays
from mindformers_core.redistribution.steps import ring


def assert_close(found, expected, rtol=1e-9, atol=1e-9):
    """NumPy's assertion, which takes long, of what is not just equal."""
    if not np.array_equal(found, expected):
        np.testing.assert_allclose(found, expected, rtol, atol)


def distribute(value, layout, rng):
    """Local tensors of `layout` whose global tensor is `value`: random terms where it is partial."""
    mesh, ops = layout.mesh, [op for _, op in layout.partial]
    axes = tuple(axis for axis, _ in layout.partial)
    averaged = mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])
    local, terms = {}, {}
    for rank in mesh.rank_list:
        part = value[layout.local_slices(value.shape, rank)].copy()
        if axes:
            known = terms.setdefault(_place(layout, rank), [])
            known.extend([] if known else _terms(part, mesh.axis_size(*axes), ops, averaged, rng))
            part = known[mesh.group_index(rank, axes)]
        local[rank] = part
    return local


def _place(layout, rank):
    """Where `rank` stands along the axes that shard: ranks of one place hold the same slice."""
    return layout.mesh.coordinate(rank, tuple(axis for axes in layout.axes for axis in axes))


def _terms(value, number, ops, averaged, rng):
    """`number` terms that reduce to `value`; extremes with ties now and then."""
    if "max" in ops or "min" in ops:
        sign = 1 if "max" in ops else -1
        terms = [value - sign * rng.integers(0, 3, value.shape) for _ in range(number)]
        holder = rng.integers(0, number, value.shape)
        return [np.where(holder == index, value, term) for index, term in enumerate(terms)]
    terms = [rng.standard_normal(value.shape) for _ in range(number - 1)]
    return [value * averaged - sum(terms, np.zeros(value.shape)), *terms]


def collect(local, layout, shape):
    """The global tensor of `local`, having checked that all ranks that should hold the same do."""
    mesh, partial = layout.mesh, dict(layout.partial)
    reduced = dict(local)
    for axis, op in partial.items():
        reduced = {rank: reduce_arrays([reduced[each] for each in mesh.group(rank, (axis,))], op) for rank in reduced}
    value = np.empty(shape, next(iter(reduced.values())).dtype)
    slices = {rank: layout.local_slices(shape, rank) for rank in mesh.rank_list}
    for rank in mesh.rank_list:
        value[slices[rank]] = reduced[rank]
    for rank in mesh.rank_list:
        assert_close(reduced[rank], value[slices[rank]])
    for axis in mesh.axis_names:
        if axis not in partial and not any(axis in cut for cut in layout.dims):
            for group in mesh.groups((axis,)):
                for rank in group[1:]:
                    assert_close(local[rank], local[group[0]], 0, 0)
    return value


def run_forward(step, local):
    """What every rank holds after `step`."""
    if step.kind == "view":
        return {rank: part.reshape(step.output_shape) for rank, part in local.items()}
    result = {}
    for ranks in step.source.mesh.groups(step.axes):
        result.update(zip(ranks, forward(step, ranks, [local[rank] for rank in ranks]), strict=True))
    return result


def run_backward(step, grads, inputs):
    """Gradients of the step's inputs, from those of its outputs; `inputs` is what went in forward."""
    if step.kind == "view":
        return {rank: part.reshape(step.local_shape) for rank, part in grads.items()}
    result = {}
    for ranks in step.source.mesh.groups(step.axes):
        members = [[tensors[rank] for rank in ranks] for tensors in (grads, inputs)]
        result.update(zip(ranks, backward(step, ranks, *members), strict=True))
    return result


def forward(step, ranks, x):
    """What the ranks of a group hold after a step, a list, from what they hold before."""
    n, dim = len(x), step.dim
    kind = step.kind
    if kind in ("slice", "slice_varying"):
        return [np.split(x[index], n, dim)[index] for index in range(n)]
    sent = {
        "all_gather": (dim,),
        "all_to_all": (dim, step.to_dim),
        "all_reduce": (step.op,),
        "reduce_scatter": (dim, step.op),
    }
    if kind in ("permute", "shift"):
        return exchange("permute", x, *_places(step, ranks))
    if kind.removesuffix("_varying") in sent:
        return exchange(kind.removesuffix("_varying"), x, *sent[kind.removesuffix("_varying")])
    if kind in ("mark_varying", "unmark_varying"):
        return x
    if kind == "to_partial" and step.op != "sum":
        return x
    if kind in ("to_partial", "to_partial_varying"):
        return [x[0], *[np.zeros_like(tensor) for tensor in x[1:]]]
    assert kind == "pad", kind
    return _pad(x, dim)


def backward(step, ranks, g, x):
    """The gradients of what they hold before, `x`, from those of what they hold after."""
    n, dim, kind, op = len(g), step.dim, step.kind, step.op
    if kind == "slice":
        return [np.concatenate(g, dim)] * n
    if kind == "slice_varying":
        return _pad(g, dim)
    if kind in ("all_gather", "pad"):
        return [np.split(part, n, dim)[index] for index, part in enumerate(g)]
    if kind == "all_gather_varying":
        return np.split(sum(g), n, dim)
    if kind == "all_to_all":
        return exchange(kind, g, step.to_dim, dim)
    if kind in ("permute", "shift"):
        return [g[place] for place in _places(step, ranks)[0]]
    if kind in ("all_reduce", "reduce_scatter"):
        whole = g if kind == "all_reduce" else [np.concatenate(g, dim)] * n
        return _reduced_gradient(whole, x, op)
    if kind == "all_reduce_varying":
        return [sum(g) / (n if op == "avg" else 1)] * n
    if kind == "mark_varying":
        return [sum(g)] * n
    if kind == "unmark_varying":
        return [tensor / n for tensor in g]
    if kind == "to_partial":
        return g if op == "sum" else [sum(g)] * n
    assert kind == "to_partial_varying", kind
    return [g[0], *[np.zeros_like(tensor) for tensor in g[1:]]]


def _reduced_gradient(g, x, op):
    """Gradient of the terms `x` of a reduction: ties of an extreme share equally."""
    if op in ("sum", "avg"):
        return [tensor / (len(x) if op == "avg" else 1) for tensor in g]
    extreme = reduce_arrays(x, op)
    holders = sum((term == extreme).astype(float) for term in x)
    return [tensor * (term == extreme) / holders for tensor, term in zip(g, x)]


def _pad(x, dim):
    zeros = [np.zeros_like(tensor) for tensor in x]
    return [np.concatenate([*zeros[:index], x[index], *zeros[index + 1 :]], dim) for index in range(len(x))]


def _places(step, ranks):
    """For every member of the group the place in it that its tensor goes to, and the place that one comes from."""
    if step.kind == "shift":
        return ring(len(ranks), step.distance)
    held, wanted = ([layout.local_slices(step.shape, rank) for rank in ranks] for layout in (step.source, step.target))
    return [wanted.index(slices) for slices in held], [held.index(slices) for slices in wanted]


def distribute_gradient(weights, local, layout, rng):
    """The gradient, on every rank, of `sum(weights * global tensor)` in the local tensors, by definition."""
    mesh, ops = layout.mesh, [op for _, op in layout.partial]
    averaged = mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])
    result, terms = {}, {}
    for rank in mesh.rank_list:
        grad = weights[layout.local_slices(weights.shape, rank)] / averaged
        if layout.varying:
            known = terms.setdefault(_place(layout, rank), [])
            known.extend([] if known else _terms(grad, mesh.axis_size(*layout.varying), ["sum"], 1, rng))
            grad = known[mesh.group_index(rank, layout.varying)]
        if "max" in ops or "min" in ops:
            members = mesh.group(rank, tuple(axis for axis, _ in layout.partial))
            shares = _reduced_gradient([grad] * len(members), [local[member] for member in members], ops[0])
            grad = shares[members.index(rank)]
        result[rank] = grad
    return result


def check_gradient(grads, weights, local, layout):
    """Assert that `grads` is a gradient of `sum(weights * global tensor)`, as `layout` places gradients."""
    mesh, ops = layout.mesh, [op for _, op in layout.partial]
    summed = tuple(layout.varying)
    if "max" in ops or "min" in ops:
        axes = tuple(axis for axis, _ in layout.partial)
        summed += axes
        for ranks in mesh.groups(axes):
            extreme = reduce_arrays([local[rank] for rank in ranks], ops[0])
            for rank in ranks:
                assert not grads[rank][local[rank] != extreme].any(), "a gradient where the extreme isn't held"
    averaged = mesh.axis_size(*[axis for axis, op in layout.partial if op == "avg"])
    for rank in mesh.rank_list:
        total = sum(grads[other] for other in mesh.group(rank, summed))
        expected = weights[layout.local_slices(weights.shape, rank)] / averaged
        assert_close(total, expected)
