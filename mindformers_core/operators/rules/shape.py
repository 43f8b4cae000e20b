"""Rules of operators that only move elements: reshapes, transposes, dims of size 1, repetitions. All are linear."""

import math

from mindformers_core.operators import views
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import as_transpose, sizes_together
from mindformers_core.operators.rules.dims import along, as_dim, as_dims, dim_names, dim_sizes, integers, unary
from mindformers_core.operators.saved import NOTHING
from mindformers_core.operators.signature import LocalCall, Signature, TensorMeta, tensors_in

_MOVES = {"linear": ({0},), "moves_only": True}


def common_factors(source, target):
    """Factors of two shapes of as many elements: `(source dims, target dims, sizes, whole)`, as in a `Signature`.

    Read from the major end, a common divisor of the two dims that meet is a factor of both. Where they have none, the
    dims up to the next place where the shapes agree again are whole.
    """
    dims, sizes, whole = ([[] for _ in source], [[] for _ in target]), {}, set()

    def enter(name, size, *places):
        sizes[name] = size
        for side, place in places:
            dims[side][place].append(name)

    rest = [[[place, size] for place, size in enumerate(shape) if size > 1] for shape in (source, target)]
    while rest[0]:
        first, second = rest[0][0], rest[1][0]
        common, reached = math.gcd(first[1], second[1]), [1, 1]
        if common > 1:
            enter(f"f{len(sizes)}", common, (0, first[0]), (1, second[0]))
            first[1], second[1] = first[1] // common, second[1] // common
        while common == 1 and (reached[0] != reached[1] or reached[0] == 1):
            side = int(reached[0] > reached[1])
            place, size = rest[side].pop(0)
            whole.add(f"{'xy'[side]}{place}")
            enter(f"{'xy'[side]}{place}", size, (side, place))
            reached[side] *= size
        rest = [[entry for entry in left if entry[1] > 1] for left in rest]
    return *(tuple(map(tuple, side)) for side in dims), sizes, frozenset(whole)


def _reshaped(x, target, localize):
    """The `Signature` of `x` reshaped to `target`, which may hold one -1."""
    count = math.prod(x.shape)
    known = math.prod(size for size in target if size != -1)
    if target.count(-1) == 1 and known and count % known == 0:
        target = tuple(count // known if size == -1 else size for size in target)
    if math.prod(target) != count or any(size < 0 for size in target):
        raise ValueError(f"shape {x.shape} of {count} elements can't become {target}")
    if count == 0:
        sizes = {f"y{dim}": size for dim, size in enumerate(target)}
        output = [(factor,) for factor in sizes]
        return unary(x, output, sizes=sizes, whole=range(x.ndim), **_MOVES, local=LocalCall(localize=localize))
    source, reshaped, sizes, whole = common_factors(x.shape, target)
    return Signature((source,), (reshaped,), sizes, whole=whole, **_MOVES, local=LocalCall(localize=localize))


def _to_output_shape(args, shapes):
    return args[0], tuple(shapes[0])


@register_operator("Reshape", "View", saves=NOTHING, view=views.reshaped, rewrite=sizes_together("Reshape"))
def reshape(x, *shape, **named):
    """`x.reshape(2, -1)`, `reshape(x, (2, -1))`, `x.view(shape=…)`."""
    return _reshaped(x, integers(shape or tuple(named.values()), "a shape"), _to_output_shape)


@register_operator("ViewAs", saves=NOTHING, view=views.reshaped)
def view_as(x, other):
    """`x` in the shape of `other`, which is looked at no further."""
    if math.prod(x.shape) != math.prod(other.shape):
        raise ValueError(f"shape {x.shape} can't become {other.shape}")
    source, target, sizes, whole = common_factors(x.shape, other.shape)
    return Signature((source, target), (target,), sizes, whole=whole, **_MOVES)


@register_operator("Flatten", saves=NOTHING)
def flatten(x):
    """All dims but the first become one."""
    return _reshaped(x, (x.shape[0], math.prod(x.shape[1:])) if x.ndim else (1,), None)


@register_operator("FlattenExt", saves=NOTHING, view=views.reshaped)
def flatten_range(x, start_dim=0, end_dim=-1):
    """Dims `start_dim` to `end_dim`, that one included, become one."""
    if x.ndim == 0:
        return _reshaped(x, (1,), None)
    start, end = as_dim(start_dim, x.ndim), as_dim(end_dim, x.ndim)
    if start > end:
        raise ValueError(f"flatten from dim {start} to dim {end}: the first comes behind the last")
    return _reshaped(x, (*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]), None)


def _permuted(x, order):
    names = dim_names(x)
    return unary(x, [names[dim] for dim in order], **_MOVES)


@register_operator(
    "Transpose", "TransposeView", "DeprecatedTranspose", saves=NOTHING, view=views.transposed, rewrite=as_transpose
)
def transpose(x, *order, **named):
    """The dims of `x` in another order; without one, reversed."""
    order = order or tuple(named.values())
    order = tuple(range(x.ndim))[::-1] if order in ((), ((),), (None,)) else integers(order, "an order of dims")
    if len(order) != x.ndim:
        raise ValueError(f"{order} orders {len(order)} dims, but the tensor {x.shape} has {x.ndim}")
    return _permuted(x, as_dims(order, x.ndim) if order else ())


@register_operator("TransposeExtView", saves=NOTHING, view=views.swapped)
def swap_dims(x, dim0, dim1):
    """Two dims change places."""
    order = list(range(x.ndim))
    first, second = as_dim(dim0, x.ndim), as_dim(dim1, x.ndim)
    order[first], order[second] = second, first
    return _permuted(x, order)


@register_operator("TExt", saves=NOTHING, view=views.reversed_dims, source=".t")
def matrix_transpose(x):
    """The transpose of a matrix, or of less."""
    if x.ndim > 2:
        raise ValueError(f"t() takes up to 2 dims, not {x.shape}: use swapaxes(-1, -2)")
    return _permuted(x, tuple(range(x.ndim))[::-1])


@register_operator("ExpandDims", "ExpandDimsView", saves=NOTHING, view=views.reshaped)
@register_operator("DeprecatedUnsqueeze", saves=NOTHING, view=views.reshaped, source=".unsqueeze")
def expand_dims(x, dim):
    """A new dim of size 1 at `dim` of the result."""
    place = as_dim(dim, x.ndim + 1)
    names = dim_names(x)
    return unary(x, (*names[:place], (), *names[place:]), **_MOVES)


@register_operator("Squeeze", saves=NOTHING, view=views.reshaped)
def squeeze(x, dim=None):
    """Drops the dims named, or all, that are of size 1.

    A dim that is sharded until its local size is 1 must stay. So what is named and larger than 1 is whole, and where
    nothing is named the local call gets the dims that the whole tensor drops.
    """
    everything = dim is None or dim in ((), [])
    named = as_dims(dim, x.ndim)
    dropped = tuple(place for place in named if x.shape[place] == 1)
    output = [name for place, name in enumerate(dim_names(x)) if place not in dropped]
    if everything and dropped:
        return unary(x, output, **_MOVES, local=LocalCall(localize=lambda args, shapes: (args[0], dropped)))
    return unary(x, output, whole=set(named) - set(dropped), **_MOVES)


def _broadcast(x, target):
    """Factors of `x` and of the `target` shape that it is broadcast to, and their sizes."""
    new = len(target) - x.ndim
    if new < 0:
        raise ValueError(f"shape {x.shape} can't be broadcast to {target}, which has fewer dims")
    target = tuple(x.shape[dim - new] if size == -1 and dim >= new else size for dim, size in enumerate(target))
    for size, wanted in zip(x.shape, target[new:]):
        if size not in (1, wanted):
            raise ValueError(f"shape {x.shape} can't be broadcast to {target}: size {size} meets {wanted}")
    output = tuple((f"d{dim}",) for dim in range(len(target)))
    source = tuple(() if size == 1 else output[dim + new] for dim, size in enumerate(x.shape))
    if any(size < 0 for size in target):
        raise ValueError(f"shape {x.shape} can't be broadcast to {target}: a new dim needs its size")
    return source, output, {f"d{dim}": size for dim, size in enumerate(target)}


@register_operator(
    "BroadcastTo", "BroadcastToView", saves=NOTHING, view=views.broadcast, rewrite=sizes_together("BroadcastTo")
)
def broadcast_to(x, *shape, **named):
    """`x` repeated along dims of size 1 and new leading dims; -1 keeps a dim."""
    source, output, sizes = _broadcast(x, integers(shape or tuple(named.values()), "a shape"))
    made = frozenset(sizes) - {factor for factors in source for factor in factors}
    return Signature((source,), (output,), sizes, **_MOVES, local=LocalCall(localize=_to_output_shape), made=made)


@register_operator("ExpandAs", saves=NOTHING, view=views.broadcast, source=".expand_as")
def expand_as(x, other):
    """`x` broadcast to the shape of `other`, which is looked at no further."""
    source, output, sizes = _broadcast(x, other.shape)
    return Signature((source, output), (output,), sizes, **_MOVES)


@register_operator("Tile", "Repeat", saves=NOTHING, rewrite=sizes_together("Tile"))
def tile(x, *counts, **named):
    """The tensor repeated along each dim. A repeated dim is minor to its repetitions, so that it can't be sharded."""
    counts = integers(counts or tuple(named.values()), "a number of repetitions")
    counts = (1,) * (x.ndim - len(counts)) + counts
    names, output, sizes = dim_names(x), [], {}
    for place, (name, count) in enumerate(zip(((),) * (len(counts) - x.ndim) + names, counts)):
        if count < 1:
            raise ValueError(f"{counts} repeats dim {place} {count} times: at least once")
        sizes[f"r{place}"] = count
        output.append((f"r{place}", *name) if count > 1 else name)
    return unary(x, output, sizes=sizes, **_MOVES)


@register_operator("RepeatInterleaveInt", "DeprecatedRepeatInterleave", saves=NOTHING, source=".repeat_interleave")
def repeat_interleave(x, repeats, dim=None, output_size=None):
    """Every element repeated, along `dim` or in the flattened tensor. `dim` is major, so that it can be sharded."""
    if isinstance(repeats, (TensorMeta, tuple, list)):
        raise ValueError(f"repeats={repeats!r}: only one number of repetitions for all elements is available")
    (count,) = integers((repeats,), "a number of repetitions")
    output = [(*dim_sizes(x), "r")] if dim is None else {along(x, dim): [(*dim_names(x)[dim], "r")]}
    return unary(x, output, sizes={"r": count}, **_MOVES)


@register_operator("LinSpace")
def linear_space(start, stop, num):
    """So many numbers from one to another: every rank has all."""
    return Signature(((),) * len(tensors_in((start, stop))), ((("n",),),), {"n": num})


@register_operator("ReverseV2", saves=NOTHING)
def flip(x, dims):
    """Elements in reverse order along `dims`."""
    return unary(x, whole=as_dims(dims, x.ndim), **_MOVES)


@register_operator("Roll")
def roll(x, shifts, dims=None):
    """Elements shifted along `dims`, around the end; without dims, in the flattened tensor."""
    return unary(x, whole=as_dims(dims, x.ndim), **_MOVES)
