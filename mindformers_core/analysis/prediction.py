"""Predicted activations that PyNative keeps from the forward to the backward pass of a plan. Pure Python.

Tensors that gradients read (`operators.saved`) are kept, each piece of memory once: a saved view keeps the whole memory
of its base, and most operators save a copy of an input that is a view. The result of a dropped instruction is not kept;
the inputs of its recomputation are, back to available tensors (Chen et al., "Training Deep Nets with Sublinear Memory
Cost", arXiv 1604.06174, with a choice for each result).
"""

from functools import cache, partial

from mindformers_core.analysis.saved_tensors import traced
from mindformers_core.hints import nearest
from mindformers_core.program.plan import called_cells, operators_in_order


class Prediction:
    """Kept and recomputed activations of a program, for several sets of dropped instructions.

    An instruction in a set `dropped`, a frozenset of keys, isn't kept but recomputed. One without input tensors (a
    random number generator) never runs again. Memory that an operator saves besides its inputs and results (the powers
    in a variance, the copy of an input view) is kept nevertheless.

    Args:
        plan: the root's `CellPlan`.
        algorithm: function from the plan of an operator with a distributed algorithm to the algorithm's graph, as
            `algorithm_of`, which captures it.
        arguments_need: whether gradients flow back to the root's arguments, of any dtype. They do if the differentiated
            function (`mindspore.value_and_grad`) has them as arguments, even for gradients of weights alone; they don't
            if it captures them from its scope.

    Raises:
        ValueError: the methods, where no instruction has a key in `dropped`; or where an operator has a distributed
            algorithm, and `algorithm` is None.
    """

    def __init__(self, plan, algorithm=None, arguments_need=True):
        self._plan, self._places = plan, {place.key: place for place in operators_in_order(plan)}
        self.algorithm = algorithm and cache(algorithm)  # a budget follows a program a thousand times
        self.trace = partial(traced, plan, {}, algorithm=self.algorithm, arguments_need=arguments_need)
        self._live_set, self._plain_trace = cache(self._live_set_of), cache(self.trace)

    def saved(self, dropped=frozenset()):
        """Memory that PyNative keeps for the backward pass, in the order of its consumers: a list of distinct `Memory`.

        Parameters, constants and arguments of the root are owned by the caller and not listed; copies of views of them
        are. The list is grouped by the calls of equal layers.
        """
        return list(self._live_set(dropped).kept)

    def saved_bytes(self, dropped=frozenset()):
        """Sum of `saved` in bytes on one rank."""
        return sum(memory.nbytes for memory in self._live_set(dropped).kept)

    def recomputed(self, dropped):
        """The keys in `dropped` whose instructions run again, as a set.

        An instruction runs again if a gradient, or another instruction that runs again, reads one of its results.
        """
        return set(self._live_set(dropped).recomputed)

    def cell_keys(self, key):
        """Keys of the instructions in one call of a Cell that are dropped if a pattern selects the Cell.

        These are all instructions except the producers of its results and of the bases of results that are views.

        Args:
            key: key of the call (see `called_cells`); `()` is the root.

        Raises:
            ValueError: no call has this key.
        """
        results = self._plain_trace().results_of(key)
        if results is None:
            calls = [str(other) for other, _ in called_cells(self._plan)]
            raise ValueError(f"no call of a Cell at {key}{nearest(str(key), calls)}")
        running = (inner for inner, place in self._places.items() if getattr(place.entry, "steps", True))
        made = {inner for inner in running if inner[: len(key)] == key}
        for tensor in results:
            while tensor is not None:
                made.discard(tensor.key)
                tensor = tensor.base
        return frozenset(made)

    def _live_set_of(self, dropped):
        unknown = dropped.difference(self._places)
        if unknown:
            raise ValueError(
                f"no instruction at {min(unknown)}, which is to be dropped: take keys from operators_in_order(plan)"
            )
        return self.trace(dropped).live_set()
