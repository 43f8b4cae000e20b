"""Documents packed into sequences, block by block: a pure function of lengths. Pure Python."""

from bisect import bisect_right, insort
from typing import NamedTuple

ROWS = 16  # sequences of a block
_FULL = 0.99  # part of a block's positions that tokens take: what is left makes most cuts of documents unnecessary


class Piece(NamedTuple):
    """Consecutive tokens of one document: `length` of them from token `first` of the source on.

    `goes_on`: whether the document's next token follows it, which the last token predicts.
    """

    first: int
    length: int
    goes_on: bool


def block_tokens(seq_length):
    """Tokens of a whole block of `ROWS` sequences."""
    return max(ROWS, int(ROWS * seq_length * _FULL))


def packed_rows(tokens, seq_length):
    """Number of sequences that so many tokens are packed into."""
    blocks, rest = divmod(tokens, block_tokens(seq_length))
    return blocks * ROWS + -(-rest // seq_length)


def packed_row(row, tokens, starts, seq_length):
    """The pieces of a sequence: every token of a source lies in one piece of one of its `packed_rows` sequences.

    Args:
        row: number of the sequence.
        tokens: number of the source's tokens.
        starts: a sequence of the places of all documents' first tokens, increasing, the first of them 0.
        seq_length: positions of a sequence.

    Returns:
        A list of `Piece`s, whose lengths add up to `seq_length` at most.
    """
    size = block_tokens(seq_length)
    block, number = divmod(row, ROWS)
    first, end = block * size, min(tokens, (block + 1) * size)
    count = -(-(end - first) // seq_length)
    return pack(_pieces(first, end, tokens, starts, seq_length), count, seq_length)[number]


def pack(pieces, count, room):
    """Pieces in `count` bins of `room` tokens, the longest first, each where the least room is left.

    This is best-fit decreasing (Johnson et al., "Worst-case performance bounds for simple one-dimensional packing
    algorithms", 1974). A piece that fits nowhere fills the emptiest bin, and the rest of it goes on elsewhere; so all
    pieces find room, if they have no more tokens than the bins.
    """
    bins = [[] for _ in range(count)]
    free = [(room, -number) for number in range(count)]  # increasing; of equal ones the last number comes first
    waiting = sorted(pieces, key=lambda piece: (-piece.length, piece.first))[::-1]
    while waiting:
        piece = waiting.pop()
        place = bisect_right(free, (piece.length, -count))
        if place == len(free):
            place -= 1
            part = free[place][0]
            waiting.append(Piece(piece.first + part, piece.length - part, piece.goes_on))
            piece = Piece(piece.first, part, True)
        left, number = free.pop(place)
        bins[-number].append(piece)
        if left > piece.length:
            insort(free, (left - piece.length, number))
    return bins


def _pieces(first, end, tokens, starts, seq_length):
    """The documents of a range of tokens as pieces: those that are longer than a sequence, or leave the range, cut."""
    place = bisect_right(starts, first)  # of the next document
    while first < end:
        last = starts[place] if place < len(starts) else tokens
        part = min(end, last, first + seq_length)
        if part > first:
            yield Piece(first, part - first, part < last)
        first, place = part, place + (part == last)
