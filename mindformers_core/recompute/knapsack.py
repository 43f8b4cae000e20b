"""Sets to recompute between two corners of the Pareto curve that use up a budget. Pure Python."""


def mixed(keys, layer_bounds, above, below, fits):
    """A set that fits, combined from a set above the budget and a set below it.

    The first layers drop the keys of `below`, the other layers those of `above`: for equal layers, bytes and time
    lie on the line between both sets, the convex hull, so no other set is better. Tensors of early layers stay saved
    longest, so early layers follow `below`. A second bisection places the border within a layer.

    Args:
        keys: all instructions, in order.
        layer_bounds: first and end positions of layers in `keys`, ascending, with 0 and `len(keys)`.
        above, below: frozensets of keys; `below` fits.
        fits: frozenset of keys -> bool.

    Returns:
        `(set, first, end)`: positions of the layer that holds the border.
    """

    def upto(place):
        return below.intersection(keys[:place]) | above.intersection(keys[place:])

    def least(places):
        """The first of ascending places that fits, and the last that doesn't, by bisection; the last place fits."""
        low, high = 0, len(places) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(upto(places[middle])) else (middle, high)
        return places[low], places[high]

    outside, inside = least(layer_bounds)
    _, place = least(range(outside, inside + 1)) if inside - outside > 1 else (0, inside)
    return upto(place), outside, inside


def improved(dropped, near, pieces, measured, limit, questions):
    """A set within `limit` that costs no more than `dropped`, by local search (first improvement).

    A change saves a piece or a single instruction if the result fits; otherwise another one is dropped in exchange.

    Args:
        dropped: a frozenset of keys.
        near: keys that may change one by one, in order.
        pieces: sets of keys that may change together.
        limit: bytes.
        questions: approximate limit on evaluations by `measured`.
    """
    end = measured.asked + questions
    gained = True
    while gained and measured.asked < end:
        rerun = measured.recomputed(dropped)
        dropped = rerun if measured.nbytes(rerun) <= limit else dropped
        gained = False
        for changed in _changes(dropped, near, pieces, measured):
            if measured.asked >= end:
                break
            if measured.nbytes(changed) <= limit and measured.ticks(changed) < measured.ticks(dropped):
                dropped, gained = changed, True
                break
    return dropped


def _changes(dropped, near, pieces, measured):
    """Sets that differ in one piece or one exchange, the most promising first."""

    def cost(some):
        return sum(map(measured.price, some))

    smaller = sorted((piece & dropped for piece in pieces if piece & dropped), key=cost, reverse=True)
    singles = sorted((frozenset((key,)) for key in near if key in dropped), key=cost, reverse=True)
    for removed in (*smaller, *singles):
        yield dropped - removed
    for removed in smaller:
        for added in (piece - dropped for piece in pieces if not piece <= dropped):
            if cost(added) < cost(removed):
                yield (dropped - removed) | added
    for key in near:
        if key not in dropped:
            for removed in (*smaller, *singles):
                yield (dropped - removed) | {key}


def pieces_of(keys, producers):
    """Connected components of instructions, by producer and consumer. `keys`: in order."""
    piece_of = {}
    for key in keys:
        joined = {key}
        for maker in producers[key]:
            if maker in piece_of:
                joined |= piece_of[maker]
        for member in joined:
            piece_of[member] = joined
    found = {id(piece): piece for piece in piece_of.values()}
    return [frozenset(piece) for piece in found.values()]
