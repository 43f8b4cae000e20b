"""Layouts for what is declared of an operator; strategies become mesh axes through the operator's factors. Pure Python.

A strategy is MindSpore's older notation: the number of shards of every dim of a tensor, without naming mesh axes
(`MatMul().shard(((2, 1), (1, 4)))`). Dims with the same factor are one dim to the operator and are sharded over the
same axes: above, `m` and `n` are sharded, on a mesh (dp=2, tp=4) over dp and over tp.
"""

import itertools
import math

from mindformers_core.layout import Layout, bind_layout
from mindformers_core.mesh import DeviceMesh


def declared_layouts(declaration, signature, metas, mesh, where):
    """The layouts that an `OperatorDeclaration` requires of the tensors of one call.

    Every factor that an input's strategy shards gets the first mesh axes, in mesh order, that no other factor has and
    whose sizes multiply to the number. An output's strategy may require another sharding than the operator produces:
    the axes of its own factors come first, then those of reduced factors (a reduce-scatter), then unused axes.

    Args:
        signature: the `Signature` of the call.
        metas: a `TensorMeta` for every tensor input.
        mesh: the mesh of the layouts.
        where: the operator's label in errors, as `"Cell 'dense1' (Dense), operator 'matmul' (MatMul)"`.

    Returns:
        `(inputs, outputs)`: tuples with a `Layout`, or None where nothing is declared, for every tensor.

    Raises:
        ValueError: a wrong number of entries or dims, strategies and layouts mixed, a number that is no product of
            axis sizes, a dim that the number doesn't divide or that can't be sharded, one factor with two numbers.
    """
    shapes = [meta.shape for meta in metas], signature.output_shapes
    inputs = _tensors(declaration.inputs, signature.inputs, shapes[0], f"{where}: input")
    outputs = _tensors(declaration.outputs, signature.outputs, shapes[1], f"{where}: output")
    given = [entry for _, _, _, entry in inputs + outputs if entry is not None]
    if not given or not any(isinstance(entry, tuple) for entry in given):
        arriving = [meta.layout for meta in metas]
        return _bound(inputs, mesh, arriving), _bound(outputs, mesh, [None] * len(outputs))
    if not all(isinstance(entry, tuple) for entry in given):
        raise ValueError(f"{where}: strategies and layouts are mixed: write layout(…) for all of its tensors, or none")
    counts = _factor_counts(inputs, signature)
    axes_of = _assign(counts, dict.fromkeys(counts, mesh.axis_names), mesh)
    cut = tuple(_layout(entry, mesh, axes_of) for entry in inputs)
    return cut, tuple(_output_layout(entry, signature, mesh, axes_of) for entry in outputs)


def mesh_of(parts, size):
    """The `DeviceMesh` that strategies and layouts of several tensors are about; arguments as of `layouts_of`.

    That of the layouts; of strategies one of `size` ranks, with an axis for every prime factor of the numbers of the
    first strategies, in order, and of what is left; with one axis, where they cut into 1 or `size` parts only.

    Raises:
        ValueError: layouts on no mesh, or on several.
    """
    given = {f"{name}[{place}]": each for name, entries in parts.items() for place, each in enumerate(entries)}
    given = {name: entry for name, entry in given.items() if entry is not None}
    layouts = [bind_layout(entry, None, name=name) for name, entry in given.items() if not is_strategy(entry)]
    if layouts:
        return layouts[0].mesh
    numbers = [number for entry in given.values() for number in entry]
    if {*numbers} <= {1, size}:
        return DeviceMesh((size,), ("d0",))
    sizes, left = [], size
    for number in [*numbers, size]:
        while (common := math.gcd(number, left)) > 1:
            prime = next(each for each in range(2, common + 1) if common % each == 0)
            sizes, number, left = [*sizes, prime], number // prime, left // prime
    return DeviceMesh(sizes, [f"d{place}" for place in range(len(sizes))])


def layouts_of(parts, mesh):
    """The layouts of the tensors of a function, of which strategies or layouts are given.

    A dim that is cut into as many parts as one of a tensor before it has the same axes; others have the first, in mesh
    order, whose sizes multiply to the number.

    Args:
        parts: a dict, name of a part, for errors -> a sequence with a strategy, a layout or None for each tensor.

    Returns:
        For every part a tuple with a layout, or None where nothing is given.

    Raises:
        ValueError: a number that is no product of axis sizes, or a layout on another mesh.
    """
    known, found = {}, []
    for name, entries in parts.items():
        layouts = []
        for place, entry in enumerate(entries):
            if entry is not None and is_strategy(entry):
                what = f"{name}[{place}]: strategy {tuple(entry)}: dim"
                counts = {dim: (count, f"{what} {dim}") for dim, count in enumerate(entry) if count > 1}
                orders = {
                    dim: dict.fromkeys((*known.get(count, ()), *mesh.axis_names)) for dim, (count, _) in counts.items()
                }
                axes = _assign(counts, orders, mesh)
                known = {counts[dim][0]: axes[dim] for dim in reversed(axes)} | known
                entry = Layout.on(mesh, [axes.get(dim, ()) for dim in range(len(entry))])
            elif entry is not None:
                bind_layout(entry, mesh, name=f"{name}[{place}]")
            layouts.append(entry)
        found.append(tuple(layouts))
    return found


def is_strategy(entry):
    """Whether a declared entry is a strategy: a number of parts for each dim."""
    return isinstance(entry, (tuple, list)) and all(type(count) is int and count > 0 for count in entry)


def _tensors(entries, dims, shapes, what):
    """For every tensor its label in errors, the factors of its dims, its shape, and its entry."""
    if entries is None:
        entries = (None,) * len(dims)
    if len(entries) != len(dims):  # MindSpore writes () for a number that stands in a tensor's place, as in x * 2.0
        tensors = tuple(entry for entry in entries if entry != ())
        if len(tensors) != len(dims):
            raise ValueError(
                f"{what}s have {len(entries)} declared entries, but this call has {len(dims)} tensors there, of shapes "
                f"{', '.join(map(str, shapes)) or 'none'}: write one for each, None to derive it"
            )
        entries = tensors
    return [(f"{what} {place}", *entry) for place, entry in enumerate(zip(dims, shapes, entries))]


def _bound(tensors, mesh, arriving):
    layouts = []
    for (what, _, shape, entry), layout in zip(tensors, arriving):
        bound = None if entry is None else bind_layout(entry, mesh, len(shape), layout, what)
        if bound is not None:
            bound.local_shape(shape, what)
        layouts.append(bound)
    return tuple(layouts)


def _cuts(tensor, signature):
    """`(factor, number of shards, the dim's label in errors)` for every factor of a tensor with a strategy."""
    what, dims, shape, strategy = tensor
    if set(strategy) == {1}:  # cuts nothing, of however many dims: a library shares a primitive among tensors
        strategy = (1,) * len(shape)
    if len(strategy) != len(shape):
        raise ValueError(
            f"{what} of shape {shape} has {len(shape)} dims, but strategy {strategy} has {len(strategy)} numbers: "
            "write one for every dim, 1 for a dim that isn't cut"
        )
    for dim, (factors, size, count) in enumerate(zip(dims, shape, strategy)):
        place = f"{what} of shape {shape}, strategy {strategy}: dim {dim} of size {size}"
        if size % count:
            raise ValueError(f"{place} can't be cut into {count} parts: write a divisor of {size}")
        left, open_so_far = count, True
        for factor in factors:  # a minor factor is sharded only where shards of the major ones have size 1
            parts = math.gcd(left, signature.sizes[factor]) if open_so_far else 1
            if parts > 1 and factor in signature.whole:
                raise ValueError(f"{place} can't be cut in this operator: write 1")
            yield factor, parts, place
            left, open_so_far = left // parts, open_so_far and parts == signature.sizes[factor]
        if left > 1:
            sizes = " x ".join(str(signature.sizes[factor]) for factor in factors)
            raise ValueError(
                f"{place} is {sizes} to this operator, which {count} parts don't fit: cut a major one first"
            )


def _factor_counts(inputs, signature):
    """Factor -> `(number of shards, the dim's label in errors)`, for the factors that strategies of inputs shard."""
    counts = {}
    for tensor in inputs:
        for factor, count, place in _cuts(tensor, signature) if tensor[3] is not None else ():
            before, other = counts.setdefault(factor, (count, place))
            if before != count:
                raise ValueError(
                    f"{place} is cut into {count} parts, but it is one dim with that of {other}, which is cut into "
                    f"{before}: cut both alike"
                )
    _check_merged_dims(counts, signature)
    return {factor: entry for factor, entry in counts.items() if entry[0] > 1}


def _check_merged_dims(counts, signature):
    """Raise `ValueError` for a sharded minor dim that the operator merges: its shards would not be contiguous."""
    for dims in (*signature.inputs, *signature.outputs):
        for factors in dims:
            for place, major in enumerate(factors[:-1]):
                cut = [factor for factor in factors[place + 1 :] if counts.get(factor, (1, ""))[0] > 1]
                size, count = signature.sizes[major], counts.get(major, (1, ""))[0]
                if cut and size != count:
                    raise ValueError(
                        f"{counts[cut[0]][1]} is merged by this operator with a major dim of size {size}, which is cut "
                        f"into {count}: write 1, or cut the major one into {size}"
                    )


def _assign(counts, candidates, mesh):
    """Factor -> axes: the first choice of candidate axes that multiply to each number, with no axis used twice.

    Args:
        counts: factor -> `(number of shards, the dim's label in errors)`.
        candidates: factor -> axes that may shard it, in order of preference.
    """
    choices = {factor: _subsets([a for a in axes if mesh.axis_size(a) > 1]) for factor, axes in candidates.items()}
    fitting = [[axes for axes in choices[f] if mesh.axis_size(*axes) == count] for f, (count, _) in counts.items()]
    for found in itertools.product(*fitting):
        axes = list(itertools.chain(*found))
        if len(axes) == len(set(axes)):
            return dict(zip(counts, found))
    used = []
    for (factor, (count, place)), axes in zip(counts.items(), fitting):
        left = [choice for choice in choices[factor] if not set(choice) & set(used)]
        first = next((choice for choice in axes if choice in left), None)
        if first is None:
            works = sorted({mesh.axis_size(*choice) for choice in left})
            others = ", ".join(f"{axis}={mesh.axis_size(axis)}" for axis in used)
            raise ValueError(
                f"{place} can't be cut into {count} parts by whole axes of {mesh}"
                + (f", of which {others} cut other dims" if others else "")
                + f": possible are {', '.join(map(str, works))}"
            )
        used += first
    raise AssertionError("the first choices of all factors are a solution")


def _subsets(axes):
    """All subsets of axes, in order, those with the first axes first."""
    return [tuple(itertools.compress(axes, kept)) for kept in itertools.product((True, False), repeat=len(axes))]


def _layout(tensor, mesh, axes_of):
    _, dims, _, strategy = tensor
    if strategy is None:
        return None
    return Layout.on(mesh, [tuple(axis for factor in factors for axis in axes_of.get(factor, ())) for factors in dims])


def _output_layout(tensor, signature, mesh, axes_of):
    """The layout of an output; new axes are assigned where the operator's own don't give the required numbers."""
    if tensor[3] is None:
        return None
    wanted = {factor: (count, place) for factor, count, place in _cuts(tensor, signature) if count > 1}
    own = {factor: axes_of.get(factor, ()) for factor in wanted}
    same = all(mesh.axis_size(*own[factor]) == count for factor, (count, _) in wanted.items())
    if not same:
        summed = [axis for factor in signature.reduced for axis in axes_of.get(factor, ())]
        used = {axis for axes in axes_of.values() for axis in axes}
        spare = [axis for axis in mesh.axis_names if axis in summed or axis not in used]
        spare.sort(key=lambda axis: axis not in summed)
        others = [axis for axis in mesh.axis_names if axis not in spare]
        own = {factor: tuple(dict.fromkeys((*axes, *spare, *others))) for factor, axes in own.items()}
        own = _assign(wanted, own, mesh)
    return _layout(tensor, mesh, own)
