"""Blocks of queries, and the ranges of keys that each sees, where places are known before a call. Pure Python."""

from functools import lru_cache


def place_runs(chunks, length):
    """Runs of tokens whose places follow each other, each (index of its first token, the token's place, count).

    Args:
        chunks: numbers of the chunks in order of appearance, of all or of a part of a sequence.
        length: of a chunk, in tokens.
    """
    runs = []
    for index, chunk in enumerate(chunks):
        if runs and sum(runs[-1][1:]) == chunk * length:
            runs[-1] = (*runs[-1][:2], runs[-1][2] + length)
        else:
            runs.append((index * length, chunk * length, length))
    return tuple(runs)


@lru_cache(maxsize=256)
def visible_blocks(queries, keys, reach, is_exact, rows):
    """Each block of queries with the ranges of keys that it may see: ((start, stop, ranges), …).

    All are indices. Blocks cover all queries in order, and have at least one range ((start, stop, mask), …) of keys:
    those that all queries of the block see, whose mask is None, then those of which each query may see some. Of these
    the mask is () where only data tell, else (low, high): query i of the block sees key j of the range where
    `low <= j - i <= high`. The number, the sizes and the masks of blocks and ranges decide a computation's structure,
    and where they start its constants.

    Args:
        queries, keys: of `place_runs`.
        reach: (before, after), see `attention`.
        is_exact: whether each query sees all keys within its reach.
        rows: the greatest number of queries of a block.
    """
    end = max(place + count for _, place, count in (*queries, *keys))
    before, after = (end if each is None else each for each in reach)
    blocks = []
    for index, place, count in queries:
        for start in range(0, count, rows):
            stop = min(count, start + rows)
            low, high = place + start, place + stop - 1
            some = low - before, high + after + 1
            whole = (high - before, low + after + 1) if is_exact and high - before < low + after + 1 else some[1:] * 2
            ranges = [(*keys_of, None) for _, *keys_of in _ranges(*whole, keys)]
            for first, *keys_of in _ranges(some[0], whole[0], keys) + _ranges(whole[1], some[1], keys):
                limits = max(some[0] - first, start - stop), min(low + after - first, keys_of[1] - keys_of[0])
                ranges.append((*keys_of, limits if is_exact else ()))
            blocks.append((index + start, index + stop, tuple(ranges or [(0, 1, (1, 0))])))
    return tuple(blocks)


def visible_band(length, gap, reach, is_exact):
    """Of a chunk of queries and one of keys (before, after): how many keys each query sees around its own index.

    None: any. The result is None where it isn't a band by which each query sees some key.

    Args:
        length: of both, in tokens.
        gap: number of chunks by which queries lie behind keys.
        reach, is_exact: as of `attention`.

    >>> visible_band(8, 0, (None, 0), True), visible_band(8, 1, (None, 0), True), visible_band(8, 1, (11, 0), True)
    ((None, 0), (None, None), (3, None))
    """
    sides = ((None if each is None else each + sign * gap * length) for each, sign in zip(reach, (-1, 1)))
    before, after = (None if each is None or each >= length - 1 else each for each in sides)
    return None if not is_exact or min(before or 0, after or 0) < 0 else (before, after)


def is_band(blocks):
    """Whether it is a `visible_band`, in the place of blocks, or of the arguments of `visible_blocks`."""
    return not isinstance(blocks[0], tuple)


def known_blocks(known):
    """The blocks of arguments of `visible_blocks`; or a `visible_band`, as it is."""
    return known if is_band(known) else visible_blocks(*known)


def visible_part(length, reach):
    """The part of the scores of a sequence that lies within the `reach` of its queries."""
    found = length
    for most in (length - 1 if each is None else min(each, length - 1) for each in reach):
        found += most * (most + 1) // 2 + most * (length - 1 - most)
    return found / length**2


def _ranges(low, high, keys):
    """(first place, start, stop) of ranges of the keys that lie at the places low … high - 1."""
    parts = ((max(low, place), min(high, place + count), index - place) for index, place, count in keys)
    return [(start, start + shift, stop + shift) for start, stop, shift in parts if start < stop]
