"""Which chunks of keys a rank of a cut sequence needs of each other one: known before a call. Pure Python."""

import math
from dataclasses import dataclass
from itertools import product

from mindformers_core.operators.visible_blocks import known_blocks, visible_band


@dataclass(frozen=True)
class Product:
    """Products of chunks of queries and chunks of keys that are alike, as many on every rank.

    Attributes:
        known: a `visible_band`, or arguments of `visible_blocks`, of one chunk each; shorter than the blocks, of which
            there may be many.
        slots: for every rank a tuple of (chunk of its queries, chunk of the giver's keys, whether it is one at all).
    """

    known: tuple
    slots: tuple


@dataclass(frozen=True)
class Exchange:
    """What ranks need of those whose parts are so far before theirs, in a ring.

    Attributes:
        distance: number of ranks; 0: their own parts.
        givers: for every chunk of a part the ranks that give theirs.
    """

    distance: int
    givers: tuple
    products: tuple


def chunk_order(order, ranks):
    """The chunks of `order` cut into equal ones, so that every rank has as many; None: a chunk each."""
    order = tuple(range(ranks)) if order is None else order
    times = math.lcm(len(order), ranks) // len(order)
    return tuple(chunk * times + number for chunk in order for number in range(times))


def chunk_blocks(length, order, reach, is_exact, rows, has_kernel=False, key_length=None):
    """Function from the number of chunks by which queries lie behind keys to a `known`; None: they see none.

    Args:
        length: of a chunk, in tokens.
        order, reach, is_exact: as of `attention`; without an order nothing is known.
        rows: as of `visible_blocks`.
        has_kernel: whether a band is computed as one: `visible_band` is what is known then.
        key_length: of a chunk of keys, which without an order may be another one. Default: `length`.
    """
    if order is None:
        return lambda gap: (((0, 0, length),), ((0, 0, key_length or length),), (None, None), False, rows)
    before, after = reach

    def known_of(gap):
        nearest = abs(gap) * length - (length - 1) * (gap != 0)
        limit = before if gap > 0 else after
        if gap and limit is not None and limit < nearest:
            return None
        start, band = abs(gap) * length, visible_band(length, gap, reach, is_exact) if has_kernel else None
        return band or (((0, start + gap * length, length),), ((0, start, length),), reach, is_exact, rows)

    return known_of


def exchanges(order, ranks, known_of):
    """The `Exchange`s of every distance at which a rank needs anything, the own parts first.

    Args:
        order: of `chunk_order`.
        ranks: number of ranks.
        known_of: of `chunk_blocks`.

    >>> zigzag = exchanges((0, 3, 1, 2), 2, chunk_blocks(8, (0, 3, 1, 2), (None, 0), True, 8))
    >>> zigzag[1].givers  # the second chunk goes to the rank before alone
    ((0, 1), (1,))
    """
    each, found = len(order) // ranks, []
    for distance in range(ranks):
        pairs, needed = {}, [set() for _ in range(each)]  # blocks -> their `known`, every rank's slots; chunk -> givers
        for rank, query, key in product(range(ranks), range(each), range(each)):
            giver = (rank - distance) % ranks
            known = known_of(order[rank * each + query] - order[giver * each + key])
            if known is not None:
                _, slots = pairs.setdefault(known_blocks(known), (known, [[] for _ in range(ranks)]))
                slots[rank].append((query, key, True))
                needed[key].add(giver)
        products = []
        for known, slots in pairs.values():
            most = max(slots, key=len)
            idle = (0, most[0][1], False)  # with a chunk that somebody gives
            products.append(Product(known, tuple((*some, *[idle] * (len(most) - len(some))) for some in slots)))
        if products:
            found.append(Exchange(distance, tuple(tuple(sorted(givers)) for givers in needed), tuple(products)))
    return tuple(found)
