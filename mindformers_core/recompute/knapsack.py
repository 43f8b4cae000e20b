"""Between two corners of the curve: what to compute again so that a budget is used up. Pure Python."""

__all__ = ["improved", "mixed", "pieces_of"]


def mixed(keys, layer_bounds, above, below, fits):
    """A set that fits, made of one that needs more than the budget and one that needs less.

    The first layers drop what `below` drops, the others what `above` does: where layers are alike, bytes and operations
    lie on the line between the two, and there is no better set (it is the convex hull). What early layers keep is kept
    longest, so these come first. Then the border goes on within a layer.

    Args:
        keys: all instructions, in order.
        layer_bounds: where layers begin and end in `keys`, ascending, with 0 and the number of all.
        above, below: frozensets of keys; `below` fits.
        fits: frozenset of keys -> bool.

    Returns:
        `(set, first, end)`: instructions `first` to `end` were the last to be decided on.
    """

    def upto(place):
        return below.intersection(keys[:place]) | above.intersection(keys[place:])

    def least(places):
        """The first of ascending places that fits, by halving, and the last that doesn't; the last place fits."""
        low, high = 0, len(places) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(upto(places[middle])) else (middle, high)
        return places[low], places[high]

    outside, inside = least(layer_bounds)
    _, place = least(range(outside, inside + 1)) if inside - outside > 1 else (0, inside)
    return upto(place), outside, inside


def improved(dropped, near, pieces, measured, limit, questions):
    """A set that fits `limit`, too, and costs no more: some of what is dropped is kept, or exchanged.

    Local search: a piece or a single instruction is kept as long as that fits; else another one is dropped for it. The
    first change that gains is made.

    Args:
        dropped: a frozenset of keys.
        near: the keys that may be changed one by one, in order.
        pieces: sets of keys that may be changed together.
        measured: a `Measured`.
        limit: bytes.
        questions: how often `measured` may be asked, about.
    """
    end = measured.asked + questions
    gained = True
    while gained and measured.asked < end:
        again = measured.again(dropped)
        dropped = again if measured.nbytes(again) <= limit else dropped
        gained = False
        for changed in _changes(dropped, near, pieces, measured):
            if measured.asked >= end:
                break
            if measured.nbytes(changed) <= limit and measured.flops(changed) < measured.flops(dropped):
                dropped, gained = changed, True
                break
    return dropped


def _changes(dropped, near, pieces, measured):
    """Sets that differ in little, the most promising first."""

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
    """Sets of those instructions that hang together: one makes what another takes. `keys`: in order."""
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
