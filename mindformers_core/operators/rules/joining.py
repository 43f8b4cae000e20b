"""Rules of operators that join tensors along a dim, or take one apart. All are linear.

Where the tensors are of one size, the dim in question can be cut: a rank then joins, or splits, its part of each of
them, which gives a strided part of the whole. Otherwise the dim is whole.
"""

from mindformers_core.operators import views
from mindformers_core.operators.registry import register_operator
from mindformers_core.operators.rewrites import split_by_method
from mindformers_core.operators.rules.dims import along, as_dim, dim_sizes, equation, unary
from mindformers_core.operators.saved import INPUTS_AS_THEY_ARE, NOTHING
from mindformers_core.operators.signature import LocalCall


def _names_of_first(tensors):
    """The factors of the dims of the first one of several tensors."""
    if not isinstance(tensors, (tuple, list)) or not tensors:
        raise TypeError(f"a tuple or list of tensors is needed, not {tensors!r}")
    return list(dim_sizes(tensors[0]))


def _with(names, place, factor):
    """The dims of a tensor in an equation, with another factor in one place."""
    return " ".join([*names[:place], factor, *names[place + 1 :]])


@register_operator("Concat", saves=NOTHING)
def concat(tensors, dim=0):
    """Tensors concatenated along `dim`."""
    names = _names_of_first(tensors)
    place = as_dim(dim, len(names))
    lengths, linear = [sum(tensor.shape[place : place + 1]) for tensor in tensors], (set(range(len(tensors))),)
    if len(set(lengths)) == 1:
        text = f"{', '.join([' '.join(names)] * len(tensors))} -> {_with(names, place, f'number*{names[place]}')}"
        return equation(text, *tensors, sizes={"number": len(tensors)}, linear=linear, moves_only=True)
    text = f"{', '.join(_with(names, place, f'P{number}') for number in range(len(tensors)))} -> {' '.join(names)}"
    return equation(text, *tensors, sizes={names[place]: sum(lengths)}, linear=linear)


@register_operator("Stack", saves=NOTHING, attributes=("axis",), source="(x)")
@register_operator("StackExt", attributes=("dim",), source="(tensors, dim=0)")
def stack(tensors, dim=0):
    """Tensors side by side along a new dim."""
    names, linear = _names_of_first(tensors), (set(range(len(tensors))),)
    place = as_dim(dim, len(names) + 1)
    text = f"{', '.join([' '.join(names)] * len(tensors))} -> {' '.join([*names[:place], 'number', *names[place:]])}"
    return equation(text, *tensors, sizes={"number": len(tensors)}, linear=linear)


def _split(x, dim, lengths, localize=None):
    """`x` split into pieces of these lengths along `dim`; `localize` as in a `Signature`."""
    place, names = along(x, dim), list(dim_sizes(x))
    if sum(lengths) != x.shape[place] or any(length < 0 for length in lengths):
        raise ValueError(f"pieces of {list(lengths)} don't make up dim {place} of {x.shape}")
    more = {"linear": ({0},), "reduced": {}}
    if len(set(lengths)) == 1:
        more |= {"whole": frozenset({"number"}), "moves_only": True, "local": LocalCall(localize=localize)}
        text = f"{_with(names, place, f'number*{names[place]}')} -> {', '.join([' '.join(names)] * len(lengths))}"
        return equation(text, x, sizes={"number": len(lengths)}, **more)
    sizes = {f"part{number}": length for number, length in enumerate(lengths)}
    text = f"{' '.join(names)} -> {', '.join(_with(names, place, part) for part in sizes)}"
    return equation(text, x, sizes=sizes, **more | {"whole": frozenset({names[place]})})


def _pieces(x, dim, length):
    """Lengths of pieces of `length`, the last one perhaps shorter."""
    size = x.shape[as_dim(dim, x.ndim)]
    if length < 1:
        raise ValueError(f"pieces of length {length}: at least 1")
    return [min(length, size - start) for start in range(0, size, length)] or [0]


@register_operator("Split", saves=NOTHING, view=views.parts)
def split_evenly(x, dim=0, output_num=1):
    """`output_num` equal pieces."""
    size = x.shape[as_dim(dim, x.ndim)]
    if output_num < 1 or size % output_num:
        raise ValueError(f"dim {dim} of {x.shape} has size {size}, which {output_num} equal pieces don't make up")
    return _split(x, dim, [size // output_num] * output_num)


@register_operator("SplitTensor", saves=INPUTS_AS_THEY_ARE, view=views.parts, source=".split")
@register_operator("DeprecatedSplit", saves=NOTHING, view=views.parts, source=".split")
@register_operator(
    "SplitTensorView", "SplitWithSize", "SplitWithSizeView", saves=NOTHING, view=views.parts, rewrite=split_by_method
)
def split(x, split_size, dim=0):
    """Pieces of the length, or of the lengths, given."""
    lengths = split_size if isinstance(split_size, (tuple, list)) else _pieces(x, dim, split_size)
    place = as_dim(dim, x.ndim)

    def localize(args, shapes):
        length = shapes[0][place]
        return args[0], [length] * len(shapes) if isinstance(split_size, (tuple, list)) else length, *args[2:]

    return _split(x, dim, lengths, localize)


@register_operator("Chunk", "DeprecatedChunk", saves=INPUTS_AS_THEY_ARE, view=views.parts, source=".chunk")
@register_operator("ChunkView", saves=NOTHING, view=views.parts)
def chunk(x, chunks, dim=0):
    """At most `chunks` pieces, equal save for the last."""
    if chunks < 1:
        raise ValueError(f"{chunks} chunks: at least 1")
    return _split(x, dim, _pieces(x, dim, max(1, -(-x.shape[as_dim(dim, x.ndim)] // chunks))))


@register_operator("Unstack", saves=NOTHING, view=views.unstacked, attributes=("axis",))
@register_operator("UnstackExtView", saves=NOTHING, view=views.unstacked, rewrite="Unstack")
def unstack(x, dim=0, num=None):
    """One output for every index of a dim, without that dim."""
    place = along(x, dim)
    return unary(x, {place: []}, x.shape[place], whole=(place,), linear=({0},))
