"""Which rank keeps which boxes of a job's state in memory: each on two machines, few bytes are sent. Pure Python."""

from dataclasses import replace

from mindformers_core.checkpoint.moves import Move
from mindformers_core.checkpoint.parts import PIECE_BYTES, boxes_of
from mindformers_core.checkpoint.regions import balanced, overlap
from mindformers_core.checkpoint.save import SavePlan, plan_save
from mindformers_core.grouping import grouped


def plan_memory(everywhere, machines, piece_bytes=PIECE_BYTES):
    """The boxes that all ranks keep in memory: one that ranks of two machines hold is kept there, and nothing is sent;
    of any other one a copy goes to the next machine, in the order of their first ranks.

    Args:
        everywhere, piece_bytes: as of `plan_save`, which says what errors there are.
        machines: a dict, rank -> its machine.

    Returns:
        The `SavePlan` of all machines, in which each box is twice (with one machine once), and a list of `Move`s, of
        those that their second rank doesn't hold.
    """
    whole, boxes, neighbours = plan_save(everywhere, piece_bytes=piece_bytes), boxes_of(everywhere), _next(machines)
    holders, offers = [], []
    for piece in whole.pieces:
        holders.append([rank for rank, box in boxes[piece.key] if overlap(box, piece.box) == piece.box])
        elsewhere = [rank for rank in holders[-1] if machines[rank] != machines[piece.rank]]
        offers.append(elsewhere or [neighbours[piece.rank]])
    seconds = balanced([piece.nbytes for piece in whole.pieces], offers)
    pieces, moves = [], []
    for piece, held, second in zip(whole.pieces, holders, seconds, strict=True):
        pieces += [replace(piece, rank=rank) for rank in dict.fromkeys((piece.rank, second))]
        if second not in held:
            moves.append(Move(piece.key, piece.box, piece.rank, second, piece.nbytes))
    return SavePlan(whole.files, tuple(pieces)), moves


def _next(machines):
    """For each rank one of the next machine, a dict."""
    ranks = list(grouped((machines[rank], rank) for rank in sorted(machines)).values())
    following = zip(ranks, [*ranks[1:], ranks[0]])
    return {rank: others[place % len(others)] for own, others in following for place, rank in enumerate(own)}
