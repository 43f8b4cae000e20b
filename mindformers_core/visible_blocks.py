"""Blocks of queries, and the ranges of keys that each sees, where places are known before a call. Pure Python."""


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


def visible_blocks(queries, keys, reach, is_exact, rows):
    """Each block of queries with the ranges of keys that it may see: ((start, stop, ((start, stop, is_masked), …)), …).

    All are indices, and cover all queries in order. Keys in a range that isn't masked are seen by all queries of the
    block. The number and the sizes of blocks decide a computation's structure, and where they start its constants.

    Args:
        queries, keys: of `place_runs`.
        reach: (before, after), see `attention`.
        is_exact: whether each query sees all keys within its reach.
        rows: the greatest number of queries of a block.
    """
    end = max((place + count for _, place, count in (*queries, *keys)), default=0)
    before, after = (end if each is None else each for each in reach)
    blocks = []
    for index, place, count in queries:
        for start in range(0, count, rows):
            stop = min(count, start + rows)
            low, high = place + start, place + stop - 1  # of the block's places
            seen = [low - before, high - before, low + after + 1, high + after + 1]
            if not is_exact or seen[1] >= seen[2]:
                seen[1:3] = seen[3], seen[3]  # nothing is seen by all
            parts = zip(seen, seen[1:], (True, False, True))
            blocks.append((index + start, index + stop, tuple(_ranges(list(parts), keys))))
    return tuple(blocks)


def _ranges(parts, keys):
    """Of ranges of places, those of the keys that lie there."""
    for index, place, count in keys:
        for start, stop, is_masked in parts:
            start, stop = max(start, place), min(stop, place + count)
            if start < stop:
                yield start - place + index, stop - place + index, is_masked


def visible_share(blocks, key_length):
    """The part of all pairs of a query and a key that the blocks hold."""
    pairs = sum((stop - start) * sum(b - a for a, b, _ in ranges) for start, stop, ranges in blocks)
    return pairs / max(1, key_length * sum(stop - start for start, stop, _ in blocks))
