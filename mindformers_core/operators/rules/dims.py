"""Reading dim arguments, and naming the factors of a tensor after its dims. Pure Python."""

from mindformers_core.operators.signature import Signature, TensorMeta

_SPELLINGS = {"axis": "dim", "axes": "dims", "keepdims": "keepdim", "keep_dims": "keepdim"}


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


def plain_names(named):
    """`named` with MindSpore's several spellings of one argument (`axis`, `keep_dims`, …) brought to one."""
    return {_SPELLINGS.get(name, name): value for name, value in named.items()}


def dim_names(x, prefix="d"):
    """One factor for every dim of `x`, as in `Signature.inputs`."""
    return tuple((f"{prefix}{dim}",) for dim in range(x.ndim))


def dim_sizes(x, prefix="d"):
    """The sizes of the factors that `dim_names` gives."""
    return {f"{prefix}{dim}": size for dim, size in enumerate(x.shape)}


def unary(x, output=None, outputs=1, sizes=(), whole=(), **more):
    """The `Signature` of an operator of the one tensor `x`, with a factor for each dim.

    Args:
        x: the tensor.
        output: factors of the dims of every output; default: those of `x`.
        outputs: number of outputs.
        sizes: factor -> its size, of factors that `x` lacks.
        whole: the dims of `x` along which the operator can't be sharded.
        more: further attributes of the `Signature`.
    """
    names = dim_names(x)
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
        A dict, and `again(values, changed)`: `values` are the arguments as `Signature.localize` gets them, `changed` a
        dict. It gives all arguments by position, or the same ones where nothing changes.

    Raises:
        TypeError: arguments that are none.
    """
    aliases, order = dict(aliases), list(parameters)
    named = {name if name in order else aliases.get(name, name): value for name, value in named.items()}
    if len(args) > len(order) or not set(named) <= set(order):
        raise TypeError(f"got {sorted(set(named) - set(order)) or args[len(order) :]} besides {', '.join(order)}")
    given = parameters | named | dict(zip(order, args))
    places = [*order[: len(args)], *(name for name in named if name not in order[: len(args)])]

    def again(values, changed):
        changed = {name: value for name, value in changed.items() if name in given and given[name] != value}
        if not changed and len(values) == len(args):
            return tuple(values)
        return tuple((given | dict(zip(places, values)) | changed).values())

    return given, again


def parameters(text, **defaults):
    """Parameter -> default (None if there is none), from "x weight stride=1", for `bound`."""
    pairs = (word.partition("=")[::2] for word in text.split())
    return {name: int(value) if value else None for name, value in pairs} | defaults


def per_dim(value, ndim):
    """`ndim` numbers: one number for all dims, or the last ones of several."""
    return (value,) * ndim if isinstance(value, int) else (tuple(value) * ndim)[-ndim:]
