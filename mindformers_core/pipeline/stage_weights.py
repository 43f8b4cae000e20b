"""The gradients of a stage's weights: with those of its inputs, or, where programs are split, later."""

from mindspore import ParameterTuple

from mindformers_core.tensor_parallel.sharded_cells import EagerCell, ShardedCell
from mindformers_core.tensor_parallel.weight_split import split_weight_gradients

__all__ = ["StageWeights"]


class StageWeights:
    """What a backward pass differentiates by, and how the gradients of the parameters come of it.

    Args:
        cell: the stage's Cell.

    Attributes:
        parameters: tuple of its trainable Parameters.
    """

    def __init__(self, cell):
        self.cell = cell
        self.parameters = tuple(cell.trainable_params())
        self._deferred = None
        self._asked = ParameterTuple(self.parameters)

    def split(self):
        """From now on, the gradients of matmuls' weights take their time in `gradients`, not in the backward pass.

        That needs generated programs. Of other Cells (not sharded, or run eagerly) the backward pass computes all
        gradients, and `gradients` hands them out.
        """
        if self._deferred is None and isinstance(self.cell, ShardedCell) and not self._runs_eagerly():
            self._deferred = split_weight_gradients(self.cell)

    def _runs_eagerly(self):
        return any(isinstance(child, EagerCell) for _, child in self.cell.cells_and_names())

    def asked(self):
        """The `ParameterTuple` that a backward pass is to differentiate by; ask after the forward pass."""
        if self._deferred is not None:
            wanted = (*self._deferred.ordinary_parameters, *self._deferred.collectors)
            if len(wanted) != len(self._asked) or any(one is not other for one, other in zip(wanted, self._asked)):
                self._asked = ParameterTuple(wanted)
        return self._asked

    def keep(self, found):
        """What is to be kept of a backward pass for `gradients`; `found` are the gradients of `asked()`, in order."""
        if self._deferred is None:
            return self.parameters, found, None
        ordinary = self._deferred.ordinary_parameters
        return ordinary, found[: len(ordinary)], self._deferred.take(found[len(ordinary) :])

    def gradients(self, kept):
        """The gradients of `parameters`, a list in their order, of what `keep` gave."""
        ordinary, found, pending = kept
        if pending is None:
            return list(found)
        named = {id(parameter): gradient for parameter, gradient in zip(ordinary, found, strict=True)}
        for parameter, gradient in self._deferred.weight_gradients(pending):
            place = id(parameter)
            named[place] = named[place] + gradient if place in named else gradient
        return [named[id(parameter)] for parameter in self.parameters]

    def discard(self):
        """Forget what a pass that failed has left."""
        if self._deferred is not None:
            self._deferred.discard()
