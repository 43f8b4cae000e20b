"""The forms of one tensor: the layouts that it is needed in, and the moves that lead to them. Pure Python.

The moves are a tree: its root is the layout in which the tensor is first available. What a call needs of a tensor from
outside is such a tree, too; the caller decides which of its moves it makes itself.
"""

__all__ = ["RequiredLayouts"]


class RequiredLayouts:
    """One tensor's forms, as far as one call and those below it are concerned.

    Attributes:
        first: the layout in which it is first available.
        moves: target -> (source, reason), in an order in which every source is available when it is needed.
        wanted: the layouts (the keys) that some operator, or the caller, takes it in; not those on the way.
    """

    __slots__ = ("first", "moves", "wanted")

    def __init__(self, first):
        self.first = first
        self.moves = {}
        self.wanted = {}

    def move(self, source, target, reason):
        """See to it that the layout `target` is available, from `source` if need be."""
        if target != self.first and target not in self.moves:
            assert source == self.first or source in self.moves, (source, self.first, self.moves)
            self.moves[target] = source, reason

    def want(self, layout):
        """Say that the tensor is taken in this layout, which is available."""
        self.wanted[layout] = None

    def merge(self, other):
        """Take over what another call needs, whose `first` is available here."""
        for target, (source, reason) in other.moves.items():
            self.move(source, target, reason)
        self.wanted.update(other.wanted)

    def way(self, layout):
        """The layouts from `first` to `layout`, both included."""
        way = [layout]
        while way[-1] != self.first:
            way.append(self.moves[way[-1]][0])
        return way[::-1]

    def needed(self):
        """The layouts that it is moved to for someone's sake."""
        return {layout for wanted in self.wanted for layout in self.way(wanted)[1:]}

    def route(self, price):
        """Take to every needed layout the cheapest way, by way of another one that is needed if that costs less.

        Args:
            price: `(source, target) -> Cost`.
        """
        needed = [layout for layout in self.moves if layout in self.needed()]
        if len(needed) < 2:
            return
        for target in needed:
            source, reason = self.moves[target]
            for other in (self.first, *needed):
                later = other == target or target in self.way(other)
                if not later and price(other, target).improves_on(price(source, target)):
                    source = other
            self.moves[target] = source, reason
        self.moves = dict(sorted(self.moves.items(), key=lambda move: len(self.way(move[0]))))

    def entry(self):
        """The last layout that the ways to all wanted ones have in common; `first` where nothing is wanted."""
        common = None
        for layout in self.wanted:
            way = self.way(layout)
            common = way if common is None else [a for a, b in zip(common, way) if a == b]
        return common[-1] if common else self.first

    def entries(self, available):
        """The layouts, in order, that have to come from outside, where those in `available` (`first` among them) can:
        for every wanted one the last such on the way to it.
        """
        found = {}
        for layout in self.wanted:
            found[next(step for step in reversed(self.way(layout)) if step in available)] = None
        return list(found)
