"""The gradients of a stage's weights: the parameters to differentiate, and the sums over micro-batches and runs."""

import logging

from mindspore import ParameterTuple

from mindformers_core.passes.label_counts import scale_of_labels
from mindformers_core.passes.weight_split import split_weight_gradients
from mindformers_core.sharding.sharded_cells import EagerCell, ShardedCell, computing_parameters

_LOG = logging.getLogger("mindformers_core")


class StageGradients:
    """Computes a stage's weight gradients, with the input gradients or later, sums them, and reduces the sums.

    The weights are gathered before the first pass. After a training pass they stay gathered, since further runs may
    follow; they are freed by `reduced`, and after a pass that failed or has no gradients.

    Args:
        cell: the stage's Cell.
        storage: the `ParameterStorage` of the Cell.

    Attributes:
        parameters: tuple of the trained Parameters of the Cell's computation, in the order of
            `cell.trainable_params()`, which may be their shards (see `ParameterStorage`).
        runs: number of the runs since `forget`.
        labels: number of the labels of these runs; None where the loss is a mean.
        of_run: the sums over the micro-batches so far of the current run, a list of results of
            `ParameterStorage.summed`; or None.
    """

    def __init__(self, cell, storage):
        self._cell, self._storage = cell, storage
        self.parameters = tuple(p for p in computing_parameters(cell) if p.requires_grad)
        self._weights = ParameterTuple(self.parameters)
        self._deferred, self._has_warned = None, False
        self._kept = {}  # micro-batch -> (Parameters, their gradients, result of `DeferredGradients.take` or None)
        self.of_run, self.runs, self.labels = None, 0, None
        # sums over runs, and the reduced sums of earlier ones, with their factor
        self._waiting, self._reduced, self._scale = None, None, None
        self._has_opened = False

    def split(self, is_split):
        """If `is_split`, have programs defer the gradients of matmuls' weights to `add`, until `unsplit()`.

        Only generated programs can. The backward pass of other Cells (not sharded, or run eagerly) computes all
        gradients: they are correct, but the split saves no time; one warning reports that.
        """
        self._deferred = None
        eager = any(isinstance(child, EagerCell) for _, child in self._cell.cells_and_names())
        if is_split and isinstance(self._cell, ShardedCell) and not eager:
            self._deferred = split_weight_gradients(self._cell)
            self._deferred.discard()
        elif is_split and self.parameters and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s is not sharded, or runs eagerly: its weights' gradients can't be split off, and BWD_INPUT computes "
                "them, too. shard(cell, mesh) first; a mesh of one rank will do", type(self._cell).__name__,
            )  # fmt: skip

    def unsplit(self):
        """Have backward passes of the Cell compute all gradients again, also for other callers."""
        if self._deferred is not None:
            self._deferred.pause()

    def begin(self, training, is_split):
        """Begin a pass."""
        self.split(is_split)
        self._kept, self.of_run = {}, None
        self._has_opened = self._has_opened or not self._storage.is_open
        self._storage.open(training)

    @property
    def is_split(self):
        """Whether backward passes leave gradients of matmuls' weights to `add`."""
        return self._deferred is not None

    def differentiated(self):
        """The `ParameterTuple` whose gradients a backward pass has to compute; known after the forward pass."""
        wanted = self.parameters
        if self._deferred is not None:
            wanted = (*self._deferred.ordinary_parameters, *self._deferred.collectors)
        if len(wanted) != len(self._weights) or any(one is not other for one, other in zip(wanted, self._weights)):
            self._weights = ParameterTuple(wanted)
        return self._weights

    def keep(self, micro_index, found):
        """Keep the results of a micro-batch's backward pass for `add`; `found` are those of the weights, in order."""
        if self._deferred is None:
            self._kept[micro_index] = self.parameters, found, None
        else:
            ordinary = self._deferred.ordinary_parameters
            pending = self._deferred.take(found[len(ordinary) :])
            self._kept[micro_index] = ordinary, found[: len(ordinary)], pending

    def add(self, micro_index):
        """Compute the deferred gradients of a micro-batch, and add all its gradients to the sums."""
        ordinary, found, pending = self._kept.pop(micro_index)
        named = {id(parameter): gradient for parameter, gradient in zip(ordinary, found, strict=True)}
        del found  # `summed` frees each whole gradient when it is reduced: nothing else may hold them
        for parameter, gradient in () if pending is None else self._deferred.weight_gradients(pending):
            place = id(parameter)
            named[place] = named[place] + gradient if place in named else gradient
            del gradient
        gradients = [named.pop(id(parameter)) for parameter in self.parameters]
        self.of_run = _added(self.of_run, self._storage.summed(gradients))

    def end(self, is_complete):
        """End a pass; the gradients of an incomplete one are dropped."""
        self.unsplit()
        if is_complete:
            self._waiting = _added(self._waiting, self.of_run)
            self.runs += self.of_run is not None
        self.of_run = None
        if not is_complete or self._waiting is None:
            self.close()

    def close(self):
        """Free the gathered weights."""
        if self._has_opened:
            self._has_opened = False
            self._storage.close()

    def reduced(self):
        """The reduced sums over all runs: a tuple; None if there are no gradients."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            try:
                scale = None if self.labels is None else scale_of_labels(self.labels, self._storage.settings)
                if scale is not None and self._reduced is not None:
                    self._reduced = [gradient * (scale / self._scale) for gradient in self._reduced]
                self._reduced, self._scale = _added(self._reduced, self._storage.reduced(waiting, scale)), scale
            finally:
                self.close()
        return None if self._reduced is None else tuple(self._reduced)

    def forget(self):
        """Drop all sums."""
        self._waiting = self._reduced = self.labels = None
        self.runs = 0
        self.close()


def _added(sums, more):
    """The elementwise sums of two lists, either of which may be None."""
    if sums is None or more is None:
        return list(more) if sums is None and more is not None else sums
    return [one + other for one, other in zip(sums, more, strict=True)]
