"""Which rank keeps which boxes of a job's state in memory: each on two machines, with the fewest bytes sent. Pure
Python.
"""

from dataclasses import dataclass

from mindformers_core.checkpoint.moves import Move
from mindformers_core.checkpoint.parts import PIECE_BYTES, Part, boxes_of
from mindformers_core.checkpoint.regions import balanced, overlap
from mindformers_core.checkpoint.save import Piece, SavePlan, plan_save
from mindformers_core.grouping import grouped


@dataclass(frozen=True)
class MemoryPlan:
    """The boxes that all ranks keep in memory; no rank keeps one twice.

    Attributes:
        saved: the `SavePlan` of the whole state, of which each piece's rank is the first that keeps it.
        local: the `SavePlan` of what ranks keep of tensors that they hold: these pieces, and second copies.
        moves: the `Move`s of the other second copies, from the first rank to the second one.
        kept: rank -> what it keeps, a list of `Part`s: in the order of `local`, then of the moves to it.
    """

    saved: SavePlan
    local: SavePlan
    moves: tuple
    kept: dict

    def agreed(self, sums):
        """The checksums of the pieces of `saved`, a dict as of `commit`.

        Args:
            sums: rank -> those of its `kept` boxes.

        Raises:
            ValueError: the two copies of a box differ.
        """
        found = {}
        for rank, own in sums.items():
            for part, value in zip(self.kept[rank], own, strict=True):
                first, known = found.setdefault((part.key, part.box), (rank, value))
                if known != value:
                    where = ", ".join(f"{start}:{stop}" for start, stop in part.box)
                    at = f"ranks {first} and {rank}"
                    raise ValueError(f"checkpoint.replicas: '{part.name}'[{where}] differs on {at}, which both hold it")
        return grouped((piece.rank, found[piece.key, piece.box][1]) for piece in self.saved.pieces)


def plan_memory(everywhere, machines, piece_bytes=PIECE_BYTES):
    """The `MemoryPlan`: a box that ranks of two machines hold is kept there, and nothing is sent; of any other one a
    copy goes to the next machine, in the order of their first ranks.

    On one machine alone each box is kept once.

    Args:
        everywhere: a dict, rank -> list of `Part`s.
        machines: a dict, rank -> its machine.
        piece_bytes: bytes of a box at most.

    Raises:
        ValueError: as of `plan_save`.
    """
    saved, boxes, neighbours = plan_save(everywhere, piece_bytes=piece_bytes), boxes_of(everywhere), _next(machines)
    holders, offers = [], []
    for piece in saved.pieces:
        holders.append([rank for rank, box in boxes[piece.key] if overlap(box, piece.box) == piece.box])
        elsewhere = [rank for rank in holders[-1] if machines[rank] != machines[piece.rank]]
        offers.append(elsewhere or [neighbours[piece.rank]])
    seconds = balanced([piece.nbytes for piece in saved.pieces], offers)
    local, moves, kept = [], [], {rank: ([], []) for rank in sorted(machines)}
    for piece, held, second in zip(saved.pieces, holders, seconds, strict=True):
        part = Part(*piece.key, piece.placed.dtype, piece.placed.shape, piece.box)
        for rank in dict.fromkeys((piece.rank, second)):
            is_held = rank in held
            kept[rank][not is_held].append(part)
            if is_held:
                local.append(Piece(piece.key, piece.placed, piece.box, rank))
            else:
                moves.append(Move(piece.key, piece.box, piece.rank, rank, piece.nbytes))
    kept = {rank: [*own, *received] for rank, (own, received) in kept.items()}
    return MemoryPlan(saved, SavePlan(saved.files, tuple(local)), tuple(moves), kept)


def _next(machines):
    """For each rank one of the next machine, a dict; itself where there is one machine."""
    ranks = list(grouped((machines[rank], rank) for rank in sorted(machines)).values())
    if len(ranks) == 1:
        return {rank: rank for rank in machines}
    following = zip(ranks, [*ranks[1:], ranks[0]])
    return {rank: others[place % len(others)] for own, others in following for place, rank in enumerate(own)}
