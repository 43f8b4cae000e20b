"""Splits a batch into micro-batches. Pure Python: a tensor is any object with a shape and slicing."""


def split_micro_batches(args, kwargs, micro_batch_num, args_batch_dim=None, kwargs_batch_dim=None):
    """The arguments of every micro-batch, in order.

    Args:
        args: positional arguments of a whole batch.
        kwargs: keyword arguments of a whole batch, by name.
        micro_batch_num: number of micro-batches, of equal size.
        args_batch_dim: for every positional argument the dim to split, which may be negative; None for an argument that
            every micro-batch gets whole. Default: dim 0 of every argument that has dims.
        kwargs_batch_dim: the same for keyword arguments, by name; missing names have the default.

    Returns:
        A list of `(args, kwargs)`, `micro_batch_num` of them.

    Raises:
        ValueError: the number of dims isn't that of the positional arguments; an argument doesn't have its dim, or the
            dim isn't divisible.
    """
    if args and args_batch_dim is not None and len(args_batch_dim) != len(args):
        raise ValueError(
            f"args_batch_dim {tuple(args_batch_dim)} has {len(args_batch_dim)} entries, but there are {len(args)} "
            "positional arguments: give one dim for each, None for one that isn't split"
        )
    dims = dict(enumerate(args_batch_dim or ())) | (kwargs_batch_dim or {})
    pieces = {}  # place or name of an argument -> its parts
    for name, value in [*enumerate(args), *kwargs.items()]:
        dim = dims.get(name, 0 if getattr(value, "shape", ()) else None)
        pieces[name] = _pieces(value, dim, micro_batch_num, f"argument {name!r}")
    batches = [{name: each[index] for name, each in pieces.items()} for index in range(micro_batch_num)]
    return [(tuple(batch.pop(place) for place in range(len(args))), batch) for batch in batches]


def _pieces(value, dim, count, what):
    """One argument of every micro-batch: a list."""
    if dim is None or count == 1:
        return [value] * count
    shape = tuple(getattr(value, "shape", ()))
    if not -len(shape) <= dim < len(shape):
        found = f"has the shape {shape}" if hasattr(value, "shape") else f"is {type(value).__name__} {value!r}"
        raise ValueError(f"{what} {found}: it has no dim {dim} to split; None as its batch dim keeps it whole")
    dim %= len(shape)
    if shape[dim] % count:
        raise ValueError(
            f"{what} of shape {shape} can't be split into {count} micro-batches: dim {dim} has the size {shape[dim]}, "
            f"which isn't divisible; run_microbatches() takes micro-batches of different sizes"
        )
    size = shape[dim] // count
    return [value[(slice(None),) * dim + (slice(index * size, (index + 1) * size),)] for index in range(count)]
