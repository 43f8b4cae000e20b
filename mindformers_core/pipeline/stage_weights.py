"""The gradients of a stage's weights: with those of its inputs, or, where programs are split, later."""

import logging

from mindspore import ParameterTuple

from mindformers_core.passes.weight_split import split_weight_gradients
from mindformers_core.sharding.sharded_cells import EagerCell, ShardedCell, computing_parameters

__all__ = ["StageWeights"]

_LOG = logging.getLogger("mindformers_core")


class StageWeights:
    """What a backward pass differentiates by, and how the gradients of the parameters come of it.

    Args:
        cell: the stage's Cell.

    Attributes:
        parameters: tuple of the Parameters that it computes with and that are trained, in the order of
            `cell.trainable_params()`, which may be others (see `ParameterStorage`).
    """

    def __init__(self, cell):
        self.cell = cell
        self.parameters = tuple(p for p in computing_parameters(cell) if p.requires_grad)
        self._deferred = None
        self._asked = ParameterTuple(self.parameters)
        self._has_warned = False

    def begin(self, is_split):
        """Before a pass; `is_split`: the gradients of matmuls' weights are to be computed in `gradients`.

        That needs generated programs. Of other Cells (not sharded, or run eagerly) the backward pass computes all
        gradients, and `gradients` hands them out: right, but with no time saved, which a warning says once.
        """
        self._deferred = None
        if is_split and isinstance(self.cell, ShardedCell) and not self._runs_eagerly():
            self._deferred = split_weight_gradients(self.cell)
            self._deferred.discard()
        elif is_split and self.parameters and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s is not sharded, or runs eagerly: its weights' gradients can't be split off, and BWD_INPUT computes "
                "them, too. shard(cell, mesh) first; a mesh of one rank will do", type(self.cell).__name__,
            )  # fmt: skip

    def end(self):
        """After a pass, also one that failed: whoever calls the Cell otherwise gets whole gradients."""
        if self._deferred is not None:
            self._deferred.pause()

    def _runs_eagerly(self):
        return any(isinstance(child, EagerCell) for _, child in self.cell.cells_and_names())

    def asked(self):
        """The `ParameterTuple` that a backward pass is to differentiate by; ask after the forward pass."""
        wanted = self.parameters
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
