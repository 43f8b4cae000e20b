"""From the layouts in which an operator's inputs arrive to those in which it computes: the cheapest. Pure Python.

On each mesh axis an operator has few options: to shard a factor, or several jointly, that some input already shards or
that the operator offers, to pass a partial sum through, or to replicate the computation. All combinations over the axes
are priced: the redistributions that they need, forward and backward, the computation on one rank, and the steps of a
distributed algorithm. The cheapest is chosen, and among equals the one that shards most. Declared cuts come before
prices: see `OperatorCall.kept`.
"""

from dataclasses import replace
from itertools import product

from mindformers_core.grouping import grouped
from mindformers_core.layout import Layout
from mindformers_core.operators.choice import Choice, Resolution
from mindformers_core.operators.computation import computation_seconds
from mindformers_core.operators.registry import FLOWS, algorithm_named, facts_of
from mindformers_core.placement import axes_in, entry_of, merged_entry, parts_of, split_entry
from mindformers_core.redistribution import FREE, Price, redistribution_price

BACKWARD_WORK = 2  # operations of a gradient for one forward: a product has two, for its two inputs


def resolve(call):
    """The cheapest `Resolution` of an `OperatorCall`.

    Raises:
        ValueError: the operator can't be computed with the given `inputs`.
    """
    assert len(call.metas) == len(call.signature.inputs), (len(call.metas), call.signature.inputs)
    best = None
    for choice in _choices(call, _arriving(call)):
        by_algorithm = best is not None and best.algorithm[0] is not None
        candidate = resolved(call, choice, None if best is None or by_algorithm else best.price)
        if candidate is not None and (not by_algorithm or _is_preferred(candidate, best)):
            best = candidate
    if best is None:
        for axis, text in _exchanged(call.signature, _arriving(call)).items():
            raise ValueError(f"axis '{axis}' of size {call.mesh.axis_size(axis)}: {text}")
        shown = "; ".join("derived" if given is None else str(given) for given in call.inputs)
        raise ValueError(
            f"it can't be computed with inputs of shapes {', '.join(str(meta.shape) for meta in call.metas)} in the "
            f"declared layouts {shown}: they cut a dim that has to be whole, or cut one dim of several tensors in "
            "several ways"
        )
    return best


def _is_preferred(candidate, other):
    """Whether a `Resolution` costs less than another one by an algorithm, or sends as much by the operator itself."""
    price, known = candidate.price, other.price
    sends_no_more = price.given_up == known.given_up and price.communication <= known.communication * (1 + 1e-9)
    return (candidate.algorithm[0] is None and sends_no_more) or price.improves_on(known)


def alternatives(call, suggested=()):
    """Every `Resolution` of an `OperatorCall` that shards as one of its inputs, or as one of the layouts suggested.

    Args:
        suggested: pairs (dims, layout): a layout to consider for an output or input; `dims` is its entry in the
            signature.
    """
    wanted = [_factor_axes(call.signature, dims, layout) for dims, layout in suggested]
    found = [resolved(call, choice) for choice in _choices(call, wanted + _arriving(call))]
    return [candidate for candidate in found if candidate is not None]


def _arriving(call):
    """Factor -> axes that shard it, for every input and for every output with a required layout."""
    places = [(dims, meta.layout) for dims, meta in zip(call.signature.inputs, call.metas)]
    places += [(dims, layout) for dims, layout in zip(call.signature.outputs, call.outputs or ()) if layout is not None]
    return [_factor_axes(call.signature, dims, layout) for dims, layout in places]


def _choices(call, arriving):
    """The `Choice` of each combination of options that the operator admits, in the order of preference."""
    names = [axis for axis in call.mesh.axis_names if call.mesh.axis_size(axis) > 1]
    for choice in product(*[_options(call.signature, call.metas, arriving, axis) for axis in names]):
        chosen = dict(zip(names, choice))
        axes_of = _ordered_cuts(arriving, chosen)
        if _cuts_fit(call.signature, call.mesh, axes_of) and len(_algorithms(call.signature, axes_of)) <= 1:
            partial = [(axis, group, op) for axis, (kind, group, op) in chosen.items() if kind == "partial"]
            yield Choice(tuple(axes_of.items()), tuple((axis, tuple(sorted(group)), op) for axis, group, op in partial))


def _factor_axes(signature, dims, layout):
    """Factor -> its entry in an input of this layout (see `Layout.dims`); without axes that span several factors."""
    cut = {}
    for factors, entry in zip(dims, layout.dims):
        entries, _ = split_entry(layout.mesh, entry, [signature.sizes[factor] for factor in factors])
        for factor, own in zip(factors, entries):
            if own:
                cut[factor] = own if _may_stride(signature, factor) else axes_in(own)
    return cut


def jointly_kept(signature, metas, kept):
    """`OperatorCall.kept`, and the axes that cut all factors of a `joint` group as the inputs arrive."""
    cut = {}
    for dims, meta in zip(signature.inputs if signature.joint else (), metas):
        for factor, entry in _factor_axes(signature, dims, meta.layout).items():
            cut[factor] = (*cut.get(factor, ()), *axes_in(entry))
    joint = {axis for axes in signature.joint_axes(cut).values() for axis in axes}
    return tuple(axes | (joint & meta.layout.cut_axes) for axes, meta in zip(kept, metas)) if joint else kept


def _may_stride(signature, factor):
    """Whether an operator computes the same on a strided factor: nothing in it depends on positions along the dim."""
    if signature.run is not None or any(factor in group for group in signature.joint):
        return False
    name = signature.distributed.get(factor)
    return name is None or not algorithm_named(name).by_position


def undivided_reason(signature, dims, source, target):
    """The reason why a sharded dim of an input is gathered, where the reason is its size; else an empty string.

    Args:
        dims: the input's entry in it.
        source, target: the layouts of the input before and after its redistribution.
    """
    for dim, (factors, axes, kept) in enumerate(zip(dims, source.axes, target.axes)):
        lost = [axis for axis in axes if axis not in kept]
        sizes = [signature.sizes[factor] for factor in factors]
        if lost and len(sizes) > 1 and sizes[0] % source.mesh.axis_size(*axes):
            product_of = " x ".join(map(str, sizes))
            return (
                f"dim {dim}, {product_of}, can't stay sharded over {' and '.join(axes)}: {sizes[0]} doesn't divide by "
                f"{source.mesh.axis_size(*axes)}"
            )
    return ""


def _options(signature, metas, arriving, axis):
    """The options of a call on `axis`: to shard factors, to pass partials, to replicate, in this order."""
    given = list(dict.fromkeys(factor for cut in arriving for factor, axes in cut.items() if axis in axes))
    groups = [(factor,) for factor in given if factor not in signature.whole]
    groups += [group for group in signature.joint if not set(group).isdisjoint(given)]
    options = [("cut", group, None) for group in dict.fromkeys((*groups, *signature.offers))]
    if axis in _exchanged(signature, arriving):
        return options
    ops = {index: dict(meta.layout.partial).get(axis) for index, meta in enumerate(metas)}
    for group in signature.linear:
        for op in ("sum", "avg"):
            if any(ops[index] == op for index in group) and all(ops[index] in (op, None) for index in group):
                options.append(("partial", group, op))
    return [*options, ("replicate", None, None)]


def _exchanged(signature, arriving):
    """Axis that has to cut what is offered -> the error where it can't: see `Signature.undivided`."""
    cuts = [(factor, axis) for cut in arriving for factor, axes in cut.items() for axis in axes_in(axes)]
    return {axis: signature.undivided[factor] for factor, axis in cuts if factor in signature.undivided}


def resolved(call, choice, limit=None):
    """The `Resolution` of a `Choice`; None where it contradicts the required layouts, or doesn't improve on `limit`."""
    signature = call.signature
    inputs, outputs = _placed(signature, call.metas, call.mesh, choice)
    price = FREE
    for index, (needed, meta) in enumerate(zip(inputs, call.metas)):
        given = call.inputs[index] if call.inputs is not None else None
        if given is not None and needed.replace(varying=()) != given.replace(varying=()):
            return None
        if index not in call.free:
            price += _moved(call, meta.layout, needed, meta.shape, meta.dtype, index in call.trained)
    for shape, dtype, made, wanted in zip(signature.output_shapes, call.dtypes, outputs, call.outputs or ()):
        if wanted is not None:
            price += _moved(call, made, wanted, shape, dtype, _flows(call))
    if limit is not None and not price.improves_on(limit):
        return None
    found = Resolution(choice, inputs, outputs, chosen_algorithm(call.name, signature, choice.axes_of), price, price)
    name, axes = found.algorithm
    ended = axes if name is not None and algorithm_named(name).gathers else ()
    firm = [layout for index, layout in enumerate(inputs) if index not in signature.yielding]
    given_up = 0
    for index, (kept, layout) in enumerate(zip(call.kept, inputs)):
        yields = kept and index in signature.yielding
        given_up += _given_up(kept.difference(*(each.cut_axes for each in firm)) if yields else kept, layout, ended)
    own = Price(given_up, 0.0, seconds_of(call, choice.axes_of))
    if name is not None and call.algorithm_price is not None:
        own += call.algorithm_price(call, found)
    price += own
    if limit is not None and not price.improves_on(limit):
        return None
    return replace(found, own=own, price=price)


def seconds_of(call, axes_of):
    """Seconds of an `OperatorCall` on a rank, and of its gradient where one flows: see `computation_seconds`."""
    dtypes = (*(meta.dtype for meta in call.metas), *call.dtypes)
    seconds = computation_seconds(call.name, call.signature, call.mesh, axes_of, dtypes, call.device_model)
    return seconds * (1 + BACKWARD_WORK * _flows(call))


def _flows(call):
    """Whether a gradient flows back through an operator to what is trained."""
    return bool(call.trained) and facts_of(call.name).gradient == FLOWS


def _given_up(kept, layout, ended):
    """The number of axes in `kept` that don't cut a tensor in this layout, or whose cut ends in an algorithm."""
    return len(kept.difference(*layout.axes) | kept.intersection(ended)) if kept else 0


def _moved(call, source, target, shape, dtype, gradient):
    """The `Price` of a redistribution; varying marks are free."""
    source, target = source.replace(varying=()), target.replace(varying=())
    return redistribution_price(source, target, shape, dtype, gradient, call.device_model)


def chosen_algorithm(name, signature, axes_of):
    """The name of the distributed algorithm that replaces an operator, or None, and the mesh axes that it spans."""
    needed = _algorithms(signature, axes_of)
    if len(needed) > 1:
        raise ValueError(f"operator '{name}' asks for the algorithms {sorted(needed)}; there is one at a time")
    return next(iter(needed.items()), (None, ()))


def _algorithms(signature, axes_of):
    """Name of each distributed algorithm that these cuts ask for -> the mesh axes that it spans."""
    joint = signature.joint_axes(axes_of)
    needed = grouped((signature.joint[group], axis) for group, axes in joint.items() for axis in axes)
    jointly = {axis for axes in joint.values() for axis in axes}
    for factor, name in signature.distributed.items():
        axes = [axis for axis in axes_in(axes_of.get(factor, ())) if axis not in jointly]
        if axes:
            needed.setdefault(name, []).extend(axes)
    if signature.run is not None:
        needed.setdefault(signature.run, [])
    return {name: tuple(axes) for name, axes in needed.items()}


def _placed(signature, metas, mesh, choice):
    """The layouts that a choice requires of the inputs, and the resulting layouts of the outputs."""
    axes_of, carried = choice.axes_of, {axis: (group, op) for axis, group, op in choice.carried}
    joint = {axis for axes in signature.joint_axes(axes_of).values() for axis in axes}
    reduced = {axis: op for factor, op in signature.reduced.items() for axis in axes_in(axes_of.get(factor, ()))}
    reduced = {axis: op for axis, op in reduced.items() if axis not in joint}
    active = {axis for entry in axes_of.values() for axis in entry} | set(carried) | choice.marked
    active |= {axis for meta in metas if meta.differentiable for axis in meta.layout.varying}
    inputs = []
    for index, (dims, meta) in enumerate(zip(signature.inputs, metas)):
        terms = {axis: op for axis, (group, op) in carried.items() if index in group}
        own = {axis for factors in dims for factor in factors for axis in axes_in(axes_of.get(factor, ()))}
        terms |= {axis: op for axis, op in reduced.items() if axis not in own} if index in signature.added else {}
        inputs.append(_place(mesh, signature, dims, axes_of, terms, active if meta.differentiable else ()))
    terms = {axis: op for axis, (_, op) in carried.items()} | reduced
    kept = {factor for dims in signature.outputs for factors in dims for factor in factors} | set(signature.reduced)
    # a distributed algorithm gives every rank the whole result
    gone = {axis for factor in set(signature.distributed) - kept for axis in axes_of.get(factor, ())} - joint
    outputs = tuple(_place(mesh, signature, dims, axes_of, terms, active - gone) for dims in signature.outputs)
    return tuple(inputs), outputs


def checked_outputs(signature, metas, mesh, axes_of):
    """The layouts of an operator's outputs where its inputs stay in their layouts: a check, no search.

    Args:
        signature, mesh: as of an `OperatorCall`.
        metas: a `TensorMeta` for every tensor input, with the layout that it has.
        axes_of: factor -> the axes that shard it.

    Raises:
        ValueError: the operator doesn't admit these layouts; names the input, its layout and the required one.
    """
    joint = signature.joint_axes(axes_of)
    jointly = [axis for group, axes in joint.items() for axis in axes * (len(group) - 1)]
    named = [axis for entry in axes_of.values() for axis in axes_in(entry)]
    alone = {factor: [axis for axis in axes_in(entry) if axis not in jointly] for factor, entry in axes_of.items()}
    whole = sorted(factor for factor in signature.whole if alone.get(factor))
    if whole or len(set(named)) < len(named) - len(jointly) or not _cuts_fit(signature, mesh, axes_of):
        raise ValueError(f"it can't be cut as {axes_of}" + (f": '{whole[0]}' has to be whole" if whole else ""))
    carried = []
    for axis in mesh.axis_names:
        ops = {index: dict(meta.layout.partial).get(axis) for index, meta in enumerate(metas)}
        group = {index for index, op in ops.items() if op is not None}
        if {ops[index] for index in group} in ({"sum"}, {"avg"}) and axis not in named and group in signature.linear:
            carried.append((axis, tuple(sorted(group)), ops[min(group)]))
    inputs, outputs = _placed(signature, metas, mesh, Choice(tuple(axes_of.items()), tuple(carried)))
    for index, (meta, needed) in enumerate(zip(metas, inputs)):
        if meta.layout != needed:
            raise ValueError(f"input {index} has layout {meta.layout}, where {needed} is needed")
    return outputs


def _ordered_cuts(arriving, choices):
    """Factor -> axes that shard it, in the order of an input that is sharded alike, else in mesh order."""
    cuts = [(factor, axis, group) for axis, (kind, group, _) in choices.items() if kind == "cut" for factor in group]
    axes_of = grouped((factor, axis) for factor, axis, _ in cuts)
    groups = {factor: group for factor, _, group in cuts}
    for factor, axes in axes_of.items():  # factors that are cut jointly have their axes in one order
        given = [cut[each] for each in groups[factor] for cut in arriving if set(axes) <= set(cut.get(each, ()))]
        given = sorted(given, key=lambda entry: axes_in(entry) != entry)  # strided where all tensors are
        axes_of[factor] = entry_of(given[0] if given else axes, axes)
    return axes_of


def _cuts_fit(signature, mesh, axes_of):
    """Whether its axes divide every factor, and minor factors are sharded only below major ones of local size 1.

    Operators that only move elements may shard others, too: a dim that merges them is strided.
    """
    counts = {factor: parts_of(mesh, entry) for factor, entry in axes_of.items()}
    if any(signature.sizes[factor] % count for factor, count in counts.items()):
        return False
    if signature.moves_only and all(_may_stride(signature, factor) for factor in counts):
        return True
    counts = {factor: mesh.axis_size(*axes_in(entry)) for factor, entry in axes_of.items()}
    merged = [factors for dims in (*signature.inputs, *signature.outputs) for factors in dims]
    majors = [factors[:place] for factors in merged for place, factor in enumerate(factors) if factor in counts]
    return all(signature.sizes[factor] == counts.get(factor, 1) for factors in majors for factor in factors)


def _place(mesh, signature, dims, axes_of, terms, active):
    """The layout of a tensor with these factors: sharded, partial in `terms`, varying on the other active axes."""
    for group, axes in signature.joint_axes(axes_of).items():
        held = [factor for factor in group if any(factor in factors for factors in dims)]
        rest = {factor: set(axes_in(axes_of[factor])).difference(axes) for factor in held[1:]}
        axes_of = axes_of | {factor: entry_of(axes_of[factor], kept) for factor, kept in rest.items()}
    places = [
        merged_entry(mesh, [axes_of.get(factor, ()) for factor in factors], [signature.sizes[each] for each in factors])
        for factors in dims
    ]
    used = {axis for axes in places for axis in axes} | set(terms)
    return Layout.on(mesh, places, terms, [axis for axis in mesh.axis_names if axis in active and axis not in used])
