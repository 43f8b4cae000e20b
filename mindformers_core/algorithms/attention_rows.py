"""Which rows of queries and keys a block of attention takes, as tables for gathers.

On CPU a gather of rows is twenty times as fast as a transpose, or as the copy of a slice.
"""

from functools import lru_cache
from itertools import groupby
from math import gcd, prod

import numpy as np
from mindspore import Tensor

from mindformers_core.algorithms.compiled import in_graph
from mindformers_core.mindspore_private import outside_of_meta

HIDDEN = -1e28  # of a score: 2**31 times as much, of a place far outside of a query's range, is finite, too
_PIECE = 64  # keys of which all are taken or none, where data tell
_FEW = 1 << 16  # pairs of a query and a key, of which a product takes less time than their tables


def block_rows(sizes, blocks, *ranges):
    """`rows_of_blocks`; in PyNative, where data are read once in each pass, without keys that they hide.

    Args:
        sizes: batch, heads, groups and length of keys.
        blocks: of `visible_blocks`.
        ranges: `first`, `last` and `places`, as of `attention`.
    """
    if in_graph() or is_known(blocks):
        return _kept_rows(*sizes, blocks)
    seen = seen_blocks(blocks, *[each.asnumpy() for each in ranges])
    return _kept_rows(*sizes, blocks) if seen is blocks else rows_of_blocks(*sizes, seen)


def seen_blocks(blocks, first, last, places):
    """`visible_blocks` without the keys that data hide from all queries of a block; as they are, if that is little.

    Args:
        blocks: whose masks are of data.
        first, last, places: int32 arrays (batch or 1, length), as of `attention`.
    """
    count, found = _pairs(blocks), []
    for start, stop, ranges in blocks if count >= _FEW else ():
        low, high = (np.expand_dims(each[:, start:stop], 2) for each in (first, last))
        taken = []
        for begin, end, mask in ranges:
            pieces, of_range = np.arange(0, end - begin, _PIECE), places[:, begin:end]
            least, most = (np.expand_dims(pick.reduceat(of_range, pieces, 1), 1) for pick in (np.minimum, np.maximum))
            seen = ((low <= most) & (high > least)).any((0, 1))
            edges = begin + _PIECE * np.flatnonzero(np.diff(seen, prepend=False, append=False)).reshape(-1, 2)
            taken += [(left, min(right, end), mask) for left, right in edges.tolist()]
        found.append((start, stop, tuple(taken) or ((0, 1, ()),)))
    return tuple(found) if 0 < _pairs(found) < 0.8 * count else blocks


def _pairs(blocks):
    return sum((stop - start) * (end - begin) for start, stop, ranges in blocks for begin, end, _ in ranges)


def rows_of_blocks(batch, heads, groups, key_length, blocks):
    """Blocks that take the same keys, together: (columns, sides, keys, back, ((start, stop, hidden, queries), …)), …

    `queries` and `keys` are numbers of rows of (batch * length * heads, size), in the order (batch, groups, heads of a
    group, length); `sides` are `keys` in one table, or in two where some are masked and others not; `columns` the keys
    by token; and `back` has for each row of all keys that of these, or their number for those that aren't taken.
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
        tables = map(_table, (keys, _inverse(keys, of_keys.size)))
        found.append((_table(columns), [_table(rows(each)) for each in sides], *tables, parts))
    return tuple(found)


_kept_rows = lru_cache(maxsize=32)(rows_of_blocks)


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
