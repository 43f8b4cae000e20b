"""From the layouts in which an operator's inputs arrive to those in which it computes: the cheapest. Pure Python.

On each mesh axis an operator has few options: to shard a factor that some input already shards, to pass a partial sum
through, or to replicate the computation. All combinations over the axes are priced with the redistributions that they
need, forward and backward; the cheapest is chosen, and among equals the one that shards most.
"""

import math
from dataclasses import dataclass
from itertools import product

from mindformers_core.grouping import grouped
from mindformers_core.layout import Layout
from mindformers_core.operators.signature import Signature, tensor_meta
from mindformers_core.placement import axes_in, entry_of, merged_entry, parts_of, split_entry
from mindformers_core.redistribution import plan_redistribution

_WITHOUT_POSITIONS = ("mean", "max", "min", "logsumexp", "softmax", "log_softmax", "softmax_cross_entropy")


@dataclass(frozen=True)
class Resolution:
    """The layouts that `resolve` chooses for one operator call.

    Attributes:
        inputs: the layout that every tensor input must have.
        outputs: the layout that every output then has.
        axes_of: for every factor the axes that shard it, major to minor, as an entry of `Layout.dims`.
        cost: seconds of redistribution by the device model, forward and backward.
        carried: axis -> (inputs, op): partial sums that pass through, and the inputs that bring them.
        marked: further axes on which the inputs are marked as varying. Default: none.
    """

    inputs: tuple
    outputs: tuple
    axes_of: dict
    cost: float
    carried: dict
    marked: frozenset = frozenset()


@dataclass(frozen=True, eq=False)
class OperatorCall:
    """An operator call whose layouts are to be chosen.

    Attributes:
        signature: the operator's `Signature`.
        metas: a `TensorMeta` with layout for every tensor input.
        mesh: the mesh that all the layouts are on.
        device_model: what redistributions cost.
        inputs: for every tensor input the required layout (its varying marks don't count), or None where the layout
            is to be chosen. Default: all are.
        outputs: for every output the layout that it is redistributed to, or None. Default: none is redistributed.
        free: indices of inputs whose redistribution costs nothing, as that of a parameter stored in any layout.
    """

    signature: Signature
    metas: tuple
    mesh: object
    device_model: object
    inputs: tuple | None = None
    outputs: tuple | None = None
    free: frozenset = frozenset()

    def __post_init__(self):
        """Give `metas` the required layouts; varying marks remain."""
        given = self.inputs or (None,) * len(self.metas)
        metas = (meta if layout is None else _given(meta, layout) for meta, layout in zip(self.metas, given))
        object.__setattr__(self, "metas", tuple(metas))


def resolve(signature, metas, mesh, device_model, inputs=None, outputs=None, free=()):
    """The cheapest `Resolution` of an operator call; the arguments are those of an `OperatorCall`.

    Raises:
        ValueError: the operator can't be computed with the given `inputs`.
    """
    assert len(metas) == len(signature.inputs), (len(metas), signature.inputs)
    call = OperatorCall(signature, metas, mesh, device_model, inputs, outputs, frozenset(free))
    best = None
    for axes_of, carried in _choices(call, _arriving(call)):
        limit = math.inf if best is None else best.cost * (1 - 1e-9)
        candidate = _candidate(call, axes_of, carried, limit)
        if candidate is not None:
            best = candidate
            if best.cost == 0:
                break
    if best is None:
        shown = "; ".join("derived" if given is None else str(given) for given in inputs)
        raise ValueError(
            f"it can't be computed with inputs of shapes {', '.join(str(meta.shape) for meta in metas)} in the "
            f"declared layouts {shown}: they cut a dim that has to be whole, or cut one dim of several tensors in "
            "several ways"
        )
    return best


def alternatives(call, suggested=()):
    """Every `Resolution` of an `OperatorCall` that shards as one of its inputs, or as one of the layouts suggested.

    Args:
        call: the `OperatorCall`.
        suggested: pairs (dims, layout): a layout to consider for an output or input; `dims` is its entry in the
            signature.
    """
    wanted = [_factor_axes(call.signature, dims, layout) for dims, layout in suggested]
    found = [_candidate(call, *choice, math.inf) for choice in _choices(call, wanted + _arriving(call))]
    return [candidate for candidate in found if candidate is not None]


def repeated(call, resolution):
    """The choice of `resolution` for another `OperatorCall` of the same operator; None where it is impossible there."""
    return _candidate(call, resolution.axes_of, resolution.carried, math.inf, resolution.marked)


def _arriving(call):
    """Factor -> axes that shard it, for every input and for every output with a required layout."""
    places = [(dims, meta.layout) for dims, meta in zip(call.signature.inputs, call.metas)]
    places += [(dims, layout) for dims, layout in zip(call.signature.outputs, call.outputs or ()) if layout is not None]
    return [_factor_axes(call.signature, dims, layout) for dims, layout in places]


def _choices(call, arriving):
    """`(axes_of, carried)` of all options that the operator admits, in the order of preference."""
    names = call.mesh.axis_names
    for choice in product(*[_options(call.signature, call.metas, arriving, axis) for axis in names]):
        chosen = dict(zip(names, choice))
        axes_of = _ordered_cuts(arriving, call.mesh, chosen)
        if _cuts_fit(call.signature, call.mesh, axes_of):
            yield axes_of, {axis: (group, op) for axis, (kind, group, op) in chosen.items() if kind == "partial"}


def _given(meta, layout):
    """The meta of an input in its required layout; varying marks remain."""
    used = {axis for axes in layout.axes for axis in axes} | set(dict(layout.partial))
    whole = [axis for axis in meta.layout.varying if axis not in used]
    return tensor_meta(meta.shape, meta.dtype, layout.replace(varying=whole), not meta.differentiable)


def _factor_axes(signature, dims, layout):
    """Factor -> its entry in an input of this layout (see `Layout.dims`); without axes that span several factors."""
    cut = {}
    for factors, entry in zip(dims, layout.dims):
        entries, _ = split_entry(layout.mesh, entry, [signature.sizes[factor] for factor in factors])
        for factor, own in zip(factors, entries):
            if own:
                cut[factor] = own if _may_stride(signature, factor) else axes_in(own)
    return cut


def _may_stride(signature, factor):
    """Whether an operator computes the same on a strided factor: nothing in it depends on positions along the dim."""
    return signature.run is None and signature.distributed.get(factor) in (None, *_WITHOUT_POSITIONS)


def undivided(signature, dims, source, target):
    """The reason why a sharded dim of an input is gathered, where the reason is its size; else an empty string.

    Args:
        signature: the operator's `Signature`.
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
    """The options of a call on `axis`: to shard a factor, to pass partials, to replicate, in this order."""
    cuts = [("cut", factor, None) for cut in arriving for factor, axes in cut.items() if axis in axes]
    options = [option for option in dict.fromkeys(cuts) if option[1] not in signature.whole]
    ops = {index: dict(meta.layout.partial).get(axis) for index, meta in enumerate(metas)}
    for group in signature.linear:
        for op in ("sum", "avg"):
            if any(ops[index] == op for index in group) and all(ops[index] in (op, None) for index in group):
                options.append(("partial", group, op))
    return [*options, ("replicate", None, None)]


def _candidate(call, axes_of, carried, limit, marked=frozenset()):
    """The `Resolution` of one choice; None where it contradicts the required layouts, or costs `limit` or more."""
    signature, cost = call.signature, 0.0
    inputs, outputs = _placed(signature, call.metas, call.mesh, axes_of, carried, marked)
    for index, (needed, meta) in enumerate(zip(inputs, call.metas)):
        if index not in call.free:
            cost += _price(meta.layout, needed, meta.shape, meta.dtype, call.device_model)
        given = call.inputs[index] if call.inputs is not None else None
        if cost >= limit or (given is not None and needed.replace(varying=()) != given.replace(varying=())):
            return None
    for shape, made, wanted in zip(signature.output_shapes, outputs, call.outputs or ()):
        if wanted is not None:
            cost += _price(made, wanted, shape, call.metas[0].dtype if call.metas else "float32", call.device_model)
    return None if cost >= limit else Resolution(inputs, outputs, axes_of, cost, carried, marked)


def _placed(signature, metas, mesh, axes_of, carried, marked=frozenset()):
    """The layouts that a choice requires of the inputs, and the resulting layouts of the outputs."""
    reduced = {axis: op for factor, op in signature.reduced.items() for axis in axes_in(axes_of.get(factor, ()))}
    active = {axis for entry in axes_of.values() for axis in entry} | set(carried) | marked
    active |= {axis for meta in metas if meta.differentiable for axis in meta.layout.varying}
    inputs = []
    for index, (dims, meta) in enumerate(zip(signature.inputs, metas)):
        terms = {axis: op for axis, (group, op) in carried.items() if index in group}
        terms |= reduced if index in signature.added else {}
        inputs.append(_place(mesh, signature, dims, axes_of, terms, active if meta.differentiable else ()))
    terms = {axis: op for axis, (_, op) in carried.items()} | reduced
    kept = {factor for dims in signature.outputs for factors in dims for factor in factors} | set(signature.reduced)
    # a distributed algorithm gives every rank the whole result
    gone = {axis for factor in set(signature.distributed) - kept for axis in axes_of.get(factor, ())}
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
    named = [axis for entry in axes_of.values() for axis in axes_in(entry)]
    whole = sorted(signature.whole & {factor for factor, entry in axes_of.items() if entry})
    if whole or len(set(named)) < len(named) or not _cuts_fit(signature, mesh, axes_of):
        raise ValueError(f"it can't be cut as {axes_of}" + (f": '{whole[0]}' has to be whole" if whole else ""))
    carried = {}
    for axis in mesh.axis_names:
        ops = {index: dict(meta.layout.partial).get(axis) for index, meta in enumerate(metas)}
        group = {index for index, op in ops.items() if op is not None}
        if {ops[index] for index in group} in ({"sum"}, {"avg"}) and axis not in named and group in signature.linear:
            carried[axis] = group, ops[min(group)]
    inputs, outputs = _placed(signature, metas, mesh, axes_of, carried)
    for index, (meta, needed) in enumerate(zip(metas, inputs)):
        if meta.layout != needed:
            raise ValueError(f"input {index} has layout {meta.layout}, where {needed} is needed")
    return outputs


def _price(source, target, shape, dtype, device_model):
    """Seconds to redistribute a tensor, forward and backward; varying marks are free."""
    source, target = source.replace(varying=()), target.replace(varying=())
    return 0.0 if source == target else plan_redistribution(source, target, shape, dtype, device_model).cost


def _ordered_cuts(arriving, mesh, choices):
    """Factor -> axes that shard it, in the order of an input that is sharded alike, else in mesh order."""
    chosen = ((axis, *choices[axis]) for axis in mesh.axis_names)
    axes_of = grouped((factor, axis) for axis, kind, factor, _ in chosen if kind == "cut")
    for factor, axes in axes_of.items():
        given = [cut[factor] for cut in arriving if set(axes) <= set(cut.get(factor, ()))]
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
    if signature.linear == ({0},) and all(_may_stride(signature, factor) for factor in counts):
        return True
    counts = {factor: mesh.axis_size(*axes_in(entry)) for factor, entry in axes_of.items()}
    merged = [factors for dims in (*signature.inputs, *signature.outputs) for factors in dims]
    majors = [factors[:place] for factors in merged for place, factor in enumerate(factors) if factor in counts]
    return all(signature.sizes[factor] == counts.get(factor, 1) for factors in majors for factor in factors)


def _place(mesh, signature, dims, axes_of, terms, active):
    """The layout of a tensor with these factors: sharded, partial in `terms`, varying on the other active axes."""
    places = [
        merged_entry(mesh, [axes_of.get(factor, ()) for factor in factors], [signature.sizes[each] for each in factors])
        for factors in dims
    ]
    used = {axis for axes in places for axis in axes} | set(terms)
    return Layout.on(mesh, places, terms, [axis for axis in mesh.axis_names if axis in active and axis not in used])
