"""Small sizes in the place of a model's own: the least that keep how its tensors are cut. Pure Python."""

from itertools import chain, combinations
from math import ceil, gcd, lcm, prod

_SMALL = 4  # sizes up to this one stay as they are
_LARGER = 4  # times the least size, up to which a product is kept
_NEAR = 16  # least candidates of a size that are all tried; further ones are a 16th of their size apart


def divisors_of(counts):
    """The products of all subsets of some pairs of numbers of ranks, many and few, without those of one rank."""
    chosen = (subset for length in range(1, len(counts) + 1) for subset in combinations(counts, length))
    return {tuple(map(prod, zip(*subset))) for subset in chosen} - {(1, 1)}


def parts_of_sizes(tensors, fewer):
    """Size of a dim -> the least common multiple of the numbers of parts that dims of this size are cut into, and that
    on fewer ranks.

    Args:
        tensors: pairs (global shape, Layout).
        fewer: name of a mesh axis -> its size on fewer ranks. Default of an axis: as it is.
    """
    found = {}
    for shape, layout in tensors:
        for size, axes in zip(shape, layout.axes):
            few = prod(fewer.get(axis, layout.mesh.axis_size(axis)) for axis in axes)
            found[size] = tuple(map(lcm, found.get(size, (1, 1)), (layout.mesh.axis_size(*axes), few)))
    return found


def parts_of_products(sizes, parts):
    """`parts` where those of a product of two sizes, such as heads and their size, are parts of these.

    The one that is cut less has what the other one leaves.
    """
    found = dict(parts)
    for pair in combinations(sorted(sizes), 2):
        cut, other = sorted(pair, key=lambda size: (-parts.get(size, (1, 1))[0], size))
        whole, own = parts.get(cut * other, (1, 1)), parts.get(cut, (1, 1))
        left = [count // gcd(count, done) for count, done in zip(whole, own)]
        if other % left[0] == 0:
            found[other] = tuple(map(lcm, found.get(other, (1, 1)), left))
    return found


def least_sizes(sizes, parts, divisors, share, fits):
    """The least size for each of the sizes of a model.

    A number of parts that divides a size divides the small one; a number of `divisors` that doesn't, doesn't, unless
    the parts want it. Parts with several elements keep at least two. Equal sizes stay equal, unequal ones unequal. A
    product of two sizes stays one where it can.

    Args:
        parts: size -> number of parts that it is cut into, which divides it, and that of the small size. Default of a
            size: 1.
        divisors: products of numbers of ranks, in pairs: for the sizes, and for the small ones.
        share: what at least remains of each size, from 0 to 1.
        fits: function of a dict, size -> small size: whether the model can be made.

    Returns:
        A dict, size -> small size.
    """
    small = {size: size for size in sizes}
    for size in sorted(size for size in small if size > _SMALL):
        done = {other: small[other] for other in sorted(small) if other < size}
        products = [done[a] * done[b] for a in done for b in done if 1 < a <= b and a * b == size]
        many, count = parts.get(size, (1, 1))
        strange = [few for many, few in divisors if size % many and count % few]
        units = (lcm(count, gcd(size, part)) for part in (_SMALL, 2, 1))  # halves of an uncut dim have several elements
        unit = next(unit for unit in units if all(unit % divisor for divisor in strange))
        several = gcd(size, _SMALL)  # of those halves, too, where the unit is less
        lowest = max(unit, several, count * min(size // many, 2), ceil(size * share))
        products = [one for one in products if one <= _LARGER * lowest]  # others are products by chance
        for one in chain(products, _candidates(unit, lowest, size)):
            wrong = one % unit or one >= size or one in done.values() or any(one % divisor == 0 for divisor in strange)
            if not wrong and fits(small | {size: one}):
                small[size] = one
                break
    return small


def _candidates(unit, lowest, size):
    """Multiples of `unit` from `lowest` to `size`, ascending, with growing gaps."""
    count = -(-lowest // unit)
    while count * unit < size:
        yield count * unit
        count += max(1, count // _NEAR)
