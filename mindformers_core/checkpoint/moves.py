"""The fewest bytes that bring tensors from one set of layouts into another, in memory. Pure Python."""

from dataclasses import dataclass

from mindformers_core.checkpoint.parts import PIECE_BYTES, boxes_of, tensors_of
from mindformers_core.checkpoint.regions import balanced, cells, overlap, split, volume
from mindformers_core.dtypes import ITEM_BYTES
from mindformers_core.hints import nearest


@dataclass(frozen=True)
class Move:
    """A box of a tensor that one rank sends to another.

    Attributes:
        key: group and name of the tensor.
        box: see `regions`.
        sender, receiver: ranks, of which the receiver holds no element of the box.
        nbytes: of the box.
    """

    key: tuple
    box: tuple
    sender: int
    receiver: int
    nbytes: int


def plan_moves(sources, targets, most=PIECE_BYTES):
    """The `Move`s of all ranks, in an order in which every rank can send and receive without buffers.

    A rank receives exactly the elements that it lacks, each once, which is the lower bound for messages between two
    ranks; those that several ranks hold are sent by the one with the least to send.

    Args:
        sources, targets: dicts, rank -> list of `Part`s: what it holds, and what it shall hold.
        most: bytes of a move.

    Raises:
        ValueError: a tensor that no source has, or with another shape or dtype.
    """
    have, want = tensors_of(sources), tensors_of(targets)
    for (group, name), (dtype, shape) in sorted(want.items()):
        if (group, name) not in have:
            hint = nearest(name, [other for kind, other in have if kind == group])
            raise ValueError(f"relayout(): the source has no {group} tensor '{name}'{hint}")
        if have[group, name] != (dtype, shape):
            other, shape_there = have[group, name]
            raise ValueError(
                f"relayout(): '{name}' is {other} of shape {shape_there} in the source, but {dtype} of shape {shape} "
                "in the target"
            )
    held, wanted, lacking = boxes_of(sources), boxes_of(targets), []
    for key, (dtype, shape) in sorted(want.items()):
        cut = cells(held[key], shape)
        for receiver, box in sorted(wanted[key]):
            for cell, holders in cut.items():
                common = None if receiver in holders else overlap(cell, box)
                if common is not None:
                    pieces = split(common, max(1, most // ITEM_BYTES[dtype]))
                    lacking += [(key, piece, holders, receiver, volume(piece) * ITEM_BYTES[dtype]) for piece in pieces]
    senders = balanced([nbytes for *_, nbytes in lacking], [holders for _, _, holders, _, _ in lacking])
    return [Move(key, box, sender, receiver, nbytes) for (key, box, _, receiver, nbytes), sender in
            zip(lacking, senders)]  # fmt: skip
