"""Which rows of queries and keys a block of attention takes, as tables for gathers.

On CPU a gather of rows is twenty times as fast as a transpose, or as the copy of a slice.
"""

from functools import lru_cache

import numpy as np
from mindspore import Tensor

from mindformers_core.mindspore_private import outside_of_meta


@lru_cache(maxsize=32)
def block_rows(batch, heads, groups, key_length, blocks):
    """For every block (start, stop, is_masked, queries, columns, keys, back).

    `queries` and `keys` are numbers of rows of (batch * length * heads, size), in the order (batch, groups, heads of a
    group, length); `columns` the keys of the block, by token; and `back` has for each row of all keys that of the
    block's, or their number for those that it doesn't take.
    """
    length = blocks[-1][1]
    of_queries = np.arange(batch * length * heads).reshape(batch, length, groups, heads // groups)
    of_keys = np.arange(batch * key_length * groups).reshape(batch, key_length, groups)
    found = []
    for start, stop, ranges in blocks:
        columns = np.concatenate([np.arange(low, high) for low, high, _ in ranges])
        keys = of_keys[:, columns].transpose(0, 2, 1).reshape(-1)
        queries = of_queries[:, start:stop].transpose(0, 2, 3, 1)
        tables = map(_table, (queries, columns, keys, _inverse(keys, of_keys.size)))
        found.append((start, stop, any(is_masked for *_, is_masked in ranges), *tables))
    return tuple(found)


@lru_cache(maxsize=32)
def token_rows(batch, heads, blocks):
    """Of rows as `block_rows` orders them, block by block, those of (batch, length, heads)."""
    length = blocks[-1][1]
    rows = np.arange(batch * length * heads).reshape(batch, length, heads)
    order = [rows[:, start:stop].transpose(0, 2, 1).reshape(-1) for start, stop, _ in blocks]
    return _table(_inverse(np.concatenate(order), rows.size))


def _inverse(rows, count):
    found = np.full(count, len(rows))
    found[rows] = np.arange(len(rows))
    return found


def _table(rows):
    with outside_of_meta():  # a capture may be the first to ask
        return Tensor(rows.reshape(-1).astype(np.int32))
