"""The required layouts of one tensor, and the redistributions between them. Pure Python.

The redistributions form a tree, whose root is the layout in which the tensor is first available. A call has such a tree
for every tensor from outside; the caller chooses which of these redistributions it runs itself.
"""

from mindformers_core.redistribution import FREE


class RequiredLayouts:
    """The required layouts of one tensor, in one call and those below.

    Attributes:
        first: the layout in which the tensor is first available.
        moves: target -> (source, reason), in an order in which every source precedes its targets.
        wanted: the layouts (the keys) in which an operator, or the caller, consumes the tensor; no intermediate ones.
    """

    __slots__ = ("first", "moves", "wanted")

    def __init__(self, first):
        self.first = first
        self.moves = {}
        self.wanted = {}

    def move(self, source, target, reason):
        """Add a redistribution from `source`, unless the layout `target` is available."""
        if target != self.first and target not in self.moves:
            assert source == self.first or source in self.moves, (source, self.first, self.moves)
            self.moves[target] = source, reason

    def want(self, layout):
        """Record that the tensor is consumed in this layout, which is available."""
        self.wanted[layout] = None

    def merge(self, other):
        """Add the required layouts of another call, whose `first` is available here."""
        for target, (source, reason) in other.moves.items():
            self.move(source, target, reason)
        self.wanted.update(other.wanted)

    def way(self, layout):
        """The path of layouts from `first` to `layout`, both included."""
        way = [layout]
        while way[-1] != self.first:
            way.append(self.moves[way[-1]][0])
        return way[::-1]

    def needed(self):
        """The targets of all redistributions that some consumer requires."""
        return {layout for wanted in self.wanted for layout in self.way(wanted)[1:]}

    def route(self, price):
        """Choose the cheapest source of every needed layout: `first`, or another needed layout.

        Args:
            price: `(source, target) -> Price`.
        """
        needed = self.needed() if len(self.moves) > 1 else ()
        if len(needed) < 2:
            return
        needed = [layout for layout in self.moves if layout in needed]
        for target in needed:
            source, reason = self.moves[target]
            for other in (self.first, *needed):
                later = other == target or target in self.way(other)
                if not later and price(other, target).improves_on(price(source, target)):
                    source = other
            self.moves[target] = source, reason
        self.moves = dict(sorted(self.moves.items(), key=lambda move: len(self.way(move[0]))))

    def price(self, price):
        """The sum of the prices of all needed redistributions; `price` as of `route`."""
        return sum((price(self.moves[target][0], target) for target in self.needed()), FREE)

    def entry(self):
        """The last common layout of the paths to all wanted layouts; `first` where none is wanted."""
        common = [steps[0] for steps in zip(*map(self.way, self.wanted)) if len(set(steps)) == 1]
        return common[-1] if common else self.first

    def entries(self, available):
        """The layouts, in order, that the caller passes: the last one in `available` (which contains `first`) on the
        path to every wanted layout.
        """
        last = (next(step for step in reversed(self.way(layout)) if step in available) for layout in self.wanted)
        return list(dict.fromkeys(last))
