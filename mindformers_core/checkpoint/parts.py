"""Parts of global tensors on ranks, and work that ranks do together. Pure Python."""

from collections.abc import Callable
from dataclasses import dataclass, field

from mindformers_core.checkpoint.regions import balanced, cells, split, volume
from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.grouping import grouped
from mindformers_core.scopes import errors_at

PIECE_BYTES = 2**24  # that a rank writes, with a checksum, at most
_ERRORS = {kind.__name__: kind for kind in (ValueError, BrokenPipeError, FileNotFoundError, PermissionError, OSError)}


@dataclass(frozen=True)
class Part:
    """The box of a tensor that a rank holds.

    Attributes:
        group: a key of `GROUPS`; a name is unique in it.
        name: of the tensor in the files.
        dtype: its name.
        shape: of the whole tensor.
        box: see `regions`.
        view: the `View` of it in the array of the Parameter that has it; None: it is all of that.
    """

    group: str
    name: str
    dtype: str
    shape: tuple
    box: tuple
    view: object = field(default=None, compare=False)

    @property
    def key(self):
        """Group and name."""
        return self.group, self.name

    @property
    def nbytes(self):
        """Bytes of the box."""
        return volume(self.box) * ITEM_BYTES[self.dtype]

    def of(self, array):
        """Its values in the array of its Parameter's part; written there, they are in the array."""
        return array if self.view is None else self.view.of(array)


@dataclass(frozen=True)
class Ranks:
    """The ranks that save or load together, seen from one of them.

    Attributes:
        rank: this one's number.
        gather: function of a value that JSON can hold, which every rank calls: returns a dict, rank -> its value.
            Default: a process alone.
        first: the rank that makes and completes files: the first one of those with this one's file system.
    """

    rank: int = 0
    gather: Callable = lambda value: {0: value}
    first: int = 0


def on_all_ranks(ranks, work):
    """Call `work()` on every rank, and wait for all: a dict, rank -> result, which JSON can hold.

    Raises:
        OSError, ValueError: the error of a rank, on all of them alike.
    """
    result, failure = None, None
    try:
        result = work()
    except (OSError, ValueError) as error:
        kind = next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
        failure = kind, str(error)
    found = ranks.gather((failure, result))
    for rank in sorted(found):
        failure, _ = found[rank]
        if failure is not None:
            kind, text = failure
            raise _ERRORS[kind](text if len(found) == 1 else f"rank {rank}: {text}")
    return {rank: result for rank, (_, result) in found.items()}


def parts_of_all(ranks, parts):
    """The `Part`s of all ranks, a dict, rank -> list, from those of this one; all ranks call this."""
    return {rank: decode_parts(own) for rank, own in ranks.gather(encode_parts(parts)).items()}


def encode_parts(parts):
    """`Part`s as lists, which JSON can hold."""
    return [[part.group, part.name, part.dtype, part.shape, part.box] for part in parts]


def decode_parts(encoded):
    """The `Part`s of `encode_parts`."""
    return [
        Part(group, name, dtype, tuple(shape), tuple(map(tuple, box))) for group, name, dtype, shape, box in encoded
    ]


def tensors_of(everywhere):
    """The tensors of all ranks: a dict, key -> (dtype, shape).

    Args:
        everywhere: a dict, rank -> list of `Part`s.

    Raises:
        ValueError: ranks disagree about a tensor.
    """
    found = {}
    for rank, parts in everywhere.items():
        for part in parts:
            dtype, shape, first = found.setdefault(part.key, (part.dtype, part.shape, rank))
            if (dtype, shape) != (part.dtype, part.shape):
                raise ValueError(
                    f"tensor '{part.name}' is {dtype} of shape {shape} on rank {first}, but {part.dtype} of shape "
                    f"{part.shape} on rank {rank}"
                )
    return {key: (dtype, shape) for key, (dtype, shape, _) in found.items()}


def boxes_of(everywhere):
    """The ranks that hold a part of each tensor: a dict, key -> list of (rank, box); argument as of `tensors_of`."""
    return grouped((part.key, (rank, part.box)) for rank, parts in everywhere.items() for part in parts)


def divide(everywhere, most=PIECE_BYTES):
    """All tensors in pieces, each with the rank among its holders that is responsible for it: balanced.

    Args:
        everywhere: a dict, rank -> list of `Part`s.
        most: bytes of a piece.

    Returns:
        A dict, key -> list of (box, rank): disjoint boxes that make up the tensor.

    Raises:
        ValueError: ranks disagree about a tensor, or no rank holds a part of it.
    """
    tensors, held, pieces = tensors_of(everywhere), boxes_of(everywhere), []
    for key in sorted(tensors):
        dtype, shape = tensors[key]
        with errors_at(f"tensor '{key[1]}': ", kinds=(ValueError,)):
            found = cells(held[key], shape)
        for cell, holders in found.items():
            pieces += [(key, box, holders) for box in split(cell, max(1, most // ITEM_BYTES[dtype]))]
    sizes = [volume(box) * ITEM_BYTES[tensors[key][0]] for key, box, _ in pieces]
    writers = balanced(sizes, [holders for *_, holders in pieces])
    return {key: [] for key in tensors} | grouped((key, (box, rank)) for (key, box, _), rank in zip(pieces, writers))
