"""Which rows of queries and keys a block of attention takes, as tables for gathers.

On CPU a gather of rows is twenty times as fast as a transpose, or as the copy of a slice.
"""

from functools import lru_cache
from itertools import groupby
from math import gcd, prod

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.algorithms.compiled import has_values
from mindformers_core.mindspore_private import outside_of_meta

HIDDEN = -1e28  # of a score: 2**31 times as much, of a place far outside of a query's range, is finite, too
_PIECE = 64  # keys of which all are taken or none, where data tell
_FEW = 1 << 18  # pairs of a query and a key, of which a product takes less time than their tables


def of_seen_keys(function, given, scale, drop, blocks):
    """`function(*given, scale, drop, blocks)`; in PyNative row by row, without keys that data hide from it.

    Args:
        function: takes `is_whole` in the end, see `block_rows`, and gives results (batch, …), a sequence.
        given: tensors (batch or 1, …) or None; those from 3 to 5 are `first`, `last` and `places`, as of `attention`.
        blocks: of `visible_blocks`.
    """
    seen = _seen_by_rows(blocks, *given[3:6])
    if seen:
        return _row_by_row(function, given, scale, drop, seen)
    return function(*given, scale, drop, blocks)


def _row_by_row(function, given, scale, drop, seen):
    found = []
    for row, blocks in enumerate(seen):
        own = [each if each is None or 1 in (len(each), len(seen)) else each[row : row + 1] for each in given]
        found.append(function(*own, scale, drop, blocks, False))
    return [ops.cat(each, 0) for each in zip(*found)] if found[1:] else found[0]


def _seen_by_rows(blocks, first, last, places):
    """Of each row of a batch, or of all that are alike, its `seen_blocks`; () where they are most of all blocks."""
    if not has_values(first):
        return ()
    count = _pairs(blocks)
    if count < _FEW or is_known(blocks):
        return ()
    ranges = [each.asnumpy() for each in (first, last, places)]
    rows = max(map(len, ranges))
    found = [seen_blocks(blocks, *[each[row % len(each)] for each in ranges]) for row in range(rows)]
    return found if sum(map(_pairs, found)) < 0.8 * rows * count else ()


def seen_blocks(blocks, first, last, places):
    """`visible_blocks` without the keys that data hide from all queries of a block.

    Args:
        blocks: whose masks are of data.
        first, last, places: int32 arrays (length,), as of `attention`.
    """
    found = []
    for start, stop, ranges in blocks:
        low, high, taken = first[start:stop, None], last[start:stop, None], []
        for begin, end, mask in ranges:
            pieces, of_range = np.arange(0, end - begin, _PIECE), places[begin:end]
            least, most = np.minimum.reduceat(of_range, pieces), np.maximum.reduceat(of_range, pieces)
            seen = ((low <= most) & (high > least)).any(0)
            edges = begin + _PIECE * np.flatnonzero(np.diff(seen, prepend=False, append=False)).reshape(-1, 2)
            taken += [(left, min(right, end), mask) for left, right in edges.tolist()]
        found.append((start, stop, tuple(taken) or ((0, 1, ()),)))
    return tuple(found)


def _pairs(blocks):
    return sum((stop - start) * sum(end - begin for begin, end, _ in ranges) for start, stop, ranges in blocks)


@lru_cache(maxsize=32)
def block_rows(batch, heads, groups, key_length, blocks, is_whole=True):
    """Blocks that take the same keys, together: (columns, sides, keys, back, ((start, stop, hidden, queries), …)), …

    `queries` and `keys` are numbers of rows of (batch * length * heads, size), in the order (batch, groups, heads of a
    group, length); `sides` are `keys` in one table, or in two where some are masked and others not; `columns` the keys
    by token; and `back` has for each row of all keys that of these, or their number for those that aren't taken, or it
    is None where blocks aren't `is_whole`, but take a small part of all keys.
    `hidden` is None where all queries see all of them; else it is float32 (queries, keys), of the last side: 0 where a
    query sees a key, else `HIDDEN`; or it is () where only data tell.
    """
    length = blocks[-1][1]
    of_queries = np.arange(batch * length * heads).reshape(batch, length, groups, heads // groups)
    of_keys = np.arange(batch * key_length * groups).reshape(batch, key_length, groups)
    found, known = [], is_known(blocks)

    def rows(columns):
        return of_keys[:, columns].transpose(0, 2, 1).reshape(-1)

    for ranges, alike in groupby(blocks, _taken_keys):
        whole, masked = (np.concatenate([np.arange(0), *(np.arange(*each) for each in side)]) for side in ranges)
        columns = np.concatenate((whole, masked))
        sides = [each for each in ((whole, masked) if known else (columns,)) if each.size]
        parts = []
        for start, stop, ranges in alike:
            masks = tuple((high - low, mask) for low, high, mask in ranges if mask is not None)
            hidden = None if not masks else _band(stop - start, masks) if known else ()
            parts.append((start, stop, hidden, _table(of_queries[:, start:stop].transpose(0, 2, 3, 1))))
        keys = rows(columns)
        table, back = _table(keys), _table(_inverse(keys, of_keys.size)) if is_whole else None
        sides = [_table(rows(each)) for each in sides] if sides[1:] else [table]
        found.append((_table(columns), sides, table, back, parts))
    return tuple(found)


@lru_cache(maxsize=256)
def is_known(blocks):
    """Whether no mask of `visible_blocks` is of data."""
    return all(mask != () for *_, ranges in blocks for *_, mask in ranges)


def _taken_keys(block):
    """The ranges (low, high) of keys that all queries of a block see, and of those that some may not see."""
    return [[(low, high) for low, high, mask in block[2] if (mask is None) == seen] for seen in (True, False)]


@lru_cache(maxsize=32)
def _band(count, masks):
    distances = [np.arange(length) - np.arange(count)[:, None] for length, _ in masks]
    sees = np.hstack([(low <= each) & (each <= high) for each, (_, (low, high)) in zip(distances, masks)])
    with outside_of_meta():
        return Tensor(np.where(sees, 0, HIDDEN).astype(np.float32))


@lru_cache(maxsize=32)
def token_rows(batch, heads, blocks):
    """Of rows as `block_rows` orders them, block by block, those of (batch, length, heads)."""
    length = blocks[-1][1]
    rows = np.arange(batch * length * heads).reshape(batch, length, heads)
    order = [rows[:, start:stop].transpose(0, 2, 1).reshape(-1) for start, stop, _ in blocks]
    return _table(_inverse(np.concatenate(order), rows.size))


@lru_cache(maxsize=32)
def side_rows(shape, size):
    """How rows (…, wide) are parted into their first `size` elements and the others: the length of equal pieces, and
    the numbers of the first ones' and the others' pieces."""
    step = gcd(size, shape[-1])
    pieces = np.arange(prod(shape) // step).reshape(-1, shape[-1] // step)
    return step, _table(pieces[:, : size // step]), _table(pieces[:, size // step :])


def _inverse(rows, count):
    found = np.full(count, len(rows))
    found[rows] = np.arange(len(rows))
    return found


def _table(rows):
    with outside_of_meta():  # a capture may be the first to ask
        return Tensor(rows.reshape(-1).astype(np.int32))
