"""Reading dim arguments, and naming the factors of tensors: after their dims, or by an equation. Pure Python."""

import re
from ast import literal_eval
from itertools import chain
from math import prod

from mindformers_core.operators.signature import Signature, TensorMeta, spelled


def as_dim(dim, ndim):
    """`dim` counted from the front.

    Raises:
        TypeError: not an int. ValueError: out of range for `ndim` dims.
    """
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"a dim is an int, not {dim!r}")
    if not -ndim <= dim < ndim:
        raise ValueError(f"dim {dim} is out of range for a tensor of {ndim} dims: it is one of {-ndim} to {ndim - 1}")
    return dim % ndim


def as_dims(dims, ndim):
    """`dims`, an int or several, counted from the front; `None` and `()` are all dims, as in MindSpore's reductions.

    Raises:
        TypeError, ValueError: as `as_dim`; a dim that is named twice.
    """
    if dims is None or dims == () or dims == []:
        return tuple(range(ndim))
    counted = tuple(as_dim(dim, ndim) for dim in (dims if isinstance(dims, (tuple, list)) else (dims,)))
    if len(set(counted)) != len(counted):
        raise ValueError(f"a dim is named twice in {dims} for a tensor of {ndim} dims")
    return counted


def integers(values, what):
    """The ints of `values`, given one by one or as one tuple or list: `(2, 4)` and `((2, 4),)` alike.

    Raises:
        TypeError: something that isn't an int, such as a tensor.
    """
    if len(values) == 1 and isinstance(values[0], (tuple, list)):
        values = values[0]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{what} is made of ints, not {value!r}")
    return tuple(values)


def dim_names(x, prefix="d"):
    """One factor for every dim of `x`, as in `Signature.inputs`."""
    return tuple((f"{prefix}{dim}",) for dim in range(x.ndim))


def dim_sizes(x, prefix="d"):
    """The sizes of the factors that `dim_names` gives."""
    return {f"{prefix}{dim}": size for dim, size in enumerate(x.shape)}


def broadcast_shape(shapes):
    """The shape that `shapes` broadcast to. Raises `ValueError` where they don't."""
    ndim = max(map(len, shapes), default=0)
    result = []
    for place in range(-ndim, 0):
        sizes = {shape[place] for shape in shapes if len(shape) >= -place} - {1}
        if len(sizes) > 1:
            shown = ", ".join(map(str, shapes))
            raise ValueError(f"shapes {shown} don't broadcast: sizes {sorted(sizes)} meet in dim {place}")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def equation(text, *tensors, sizes=(), whole=(), **more):
    """The `Signature` of an operator by an equation, such as "... m k, ... k n -> ... m n" of a matrix product.

    The notation is that of `einsum`, with names in the place of letters.

    Args:
        text: the factors of every input's dims, and of every output's. Those in capitals are whole; others are
            parallel, and summed where no output has them. `c*K` is a dim of two factors, `n'` another factor of the
            size of `n`, `1` a dim of size 1, and `...` are all other dims, d0, d1, …, which broadcast.
        tensors: a `TensorMeta` for every input.
        sizes: factor -> its size, where no input tells it.
        whole: further factors that are whole.
        more: further attributes of the `Signature`.

    Raises:
        ValueError: numbers of dims, or sizes of a factor, that disagree.
    """
    inputs, outputs = ([part.split() for part in side.split(",")] for side in text.split("->"))

    def misfit(why=""):
        return ValueError(f"shapes {', '.join(str(x.shape) for x in tensors)} don't fit {text.strip()}{why}")

    spare = [x.ndim - len(dims) + ("..." in dims) for dims, x in zip(inputs, tensors, strict=True)]
    if any(count < 0 or count and "..." not in dims for dims, count in zip(inputs, spare)):
        raise misfit()
    starts = [dims.index("...") if "..." in dims else x.ndim for dims, x in zip(inputs, tensors)]
    spans = [x.shape[start : start + count] for start, count, x in zip(starts, spare, tensors)]
    batch = broadcast_shape(spans)
    known = dict(sizes) | {f"d{dim}": size for dim, size in enumerate(batch)}
    assert "..." not in text or not re.search(r"\bd\d", text), f"{text}: '...' stands for d0, d1, …"

    def factors(dims, span):
        places = enumerate(span, len(batch) - len(span))
        own = [(f"d{place}",) if size == batch[place] else () for place, size in places]
        names = [own if dim == "..." else [() if dim == "1" else tuple(dim.split("*"))] for dim in dims]
        return tuple(chain(*names))

    inputs = tuple(map(factors, inputs, spans))
    outputs = tuple(factors(dims, batch) for dims in outputs)
    every = [
        ([name.rstrip("'") for name in names], f"dim {dim} of input {number} has size {size}", size)
        for number, (dims, x) in enumerate(zip(inputs, tensors)) for dim, (names, size) in enumerate(zip(dims, x.shape))
    ]  # fmt: skip
    for names, shown, size in sorted(every, key=lambda each: len(each[0])):  # of two factors at most one is new then
        new = [name for name in names if name not in known]
        known |= {name: size // prod(known.get(name, 1) for name in names) for name in new}
        found = prod(map(known.get, names))
        if found != size:
            raise misfit(f": {shown}, but '{'*'.join(names) or 1}' is {found}")
    taken, given = ({name: None for dims in side for names in dims for name in names} for side in (inputs, outputs))
    sizes = {name: known[name.rstrip("'")] for name in taken | given}
    whole = frozenset(whole).union(filter(str.isupper, sizes))
    reduced = {name: "sum" for name in taken if name not in given and not name.isupper()}
    return Signature(inputs, outputs, sizes, **{"reduced": reduced, "whole": whole} | more)


def unary(x, output=None, outputs=1, sizes=(), whole=(), **more):
    """The `Signature` of an operator of the one tensor `x`, with a factor for each dim.

    Args:
        output: factors of the dims of every output; or a dict, dim of `x` -> those of the dims in its place. Default:
            as `x`.
        outputs: number of outputs.
        sizes: factor -> its size, of factors that `x` lacks.
        whole: the dims of `x` along which the operator can't be sharded.
        more: further attributes of the `Signature`.
    """
    names = dim_names(x)
    if isinstance(output, dict):
        output = [factors for dim, name in enumerate(names) for factors in output.get(dim, [name])]
    output = names if output is None else tuple(output)
    whole = frozenset(names[dim][0] for dim in whole)
    return Signature((names,), (output,) * outputs, dim_sizes(x) | dict(sizes), whole=whole, **more)


def along(x, dim):
    """Dim `dim` of the tensor `x`, counted from the front.

    Raises:
        TypeError: `x` is no tensor, or `dim` no int. ValueError: out of range.
    """
    if not isinstance(x, TensorMeta):
        raise TypeError(f"a tensor is needed, not {x!r}")
    return as_dim(dim, x.ndim)


def bound(parameters, args, named, aliases=()):
    """The arguments of a call by name, and a function that writes the call again with some of them changed.

    Args:
        parameters: name -> default, in the order of the operator's arguments, attributes last.
        args, named: of the rule; an attribute that is given by position, too, is that.
        aliases: other name -> name in `parameters`.

    Returns:
        A dict, and `again(values, changed)`: `values` are the arguments as `LocalCall.localize` gets them, `changed` a
        dict. It gives all arguments by position, up to the last one that isn't its default, or the same ones where
        nothing changes.

    Raises:
        TypeError: arguments that are none.
    """
    aliases, order = dict(aliases), list(parameters)
    named = {name if name in order else aliases.get(name, name): value for name, value in named.items()}
    named = spelled(named, order)
    if len(args) > len(order) or not set(named) <= set(order):
        raise TypeError(f"got {sorted(set(named) - set(order)) or args[len(order) :]} besides {', '.join(order)}")
    given = parameters | named | dict(zip(order, args))
    places = [*order[: len(args)], *(name for name in named if name not in order[: len(args)])]

    def again(values, changed):
        changed = {name: value for name, value in changed.items() if name in given and given[name] != value}
        if not changed and len(values) == len(args):
            return tuple(values)
        last = max(map(order.index, (*places, *changed)))
        return tuple((given | dict(zip(places, values)) | changed).values())[: last + 1]

    return given, again


def parameters(text, **defaults):
    """Parameter -> default (None if there is none), from "x weight stride=1", for `bound`."""
    pairs = (word.partition("=")[::2] for word in text.split())
    return {name: literal_eval(value or "None") for name, value in pairs} | defaults


def per_dim(value, ndim):
    """`ndim` numbers: one number for all dims, or the last ones of several."""
    return (value,) * ndim if isinstance(value, int) else (tuple(value) * ndim)[-ndim:]
