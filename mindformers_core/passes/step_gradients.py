"""The gradients of a step: the parameters to differentiate, and the sums over micro-batches and runs."""

import logging

from mindspore import ParameterTuple

from mindformers_core.passes.label_counts import scale_of_labels
from mindformers_core.passes.weight_split import split_weight_gradients
from mindformers_core.sharding.sharded_cells import EagerCell, ShardedCell, computing_parameters

_LOG = logging.getLogger("mindformers_core")


class StepGradients:
    """Computes the gradients of a Cell's weights, with those of its inputs or later, and sums and reduces them.

    The last backward pass of a run adds to the sums of the runs before. That of the last run, `accumulate_grad_step` of
    `hsdp()`, also reduces them, each whole gradient as it comes, where the storage can and the scale is known.

    The weights are gathered before the first pass. After a training pass they stay gathered, since further runs may
    follow; they are freed by `reduced`, and after a pass that failed or has no gradients.

    Args:
        storage: the `ParameterStorage` of the Cell.

    Attributes:
        parameters: tuple of the trained Parameters of the Cell's computation, in the order of
            `cell.trainable_params()`, which may be their shards (see `ParameterStorage`).
        runs: number of the runs since `forget`.
        labels: number of the labels of these runs, which their owner counts; None where the loss is a mean.
        of_run: the `GradientSums` of the current run, until its last backward pass.
    """

    def __init__(self, cell, storage):
        self._cell, self._storage = cell, storage
        self.parameters = tuple(p for p in computing_parameters(cell) if p.requires_grad)
        self._weights = ParameterTuple(self.parameters)
        self._deferred, self._has_warned, self._has_opened = None, False, False
        self.forget()

    def split(self, is_split):
        """If `is_split`, have programs defer the gradients of matmuls' weights to `add`, until `unsplit()`.

        Only generated programs can. The backward pass of other Cells (not sharded, or run eagerly) computes all
        gradients: they are correct, but the split saves no time; one warning reports that.
        """
        self._deferred = None
        if not is_split:
            return
        eager = any(isinstance(child, EagerCell) for _, child in self._cell.cells_and_names())
        if isinstance(self._cell, ShardedCell) and not eager:
            self._deferred = split_weight_gradients(self._cell)
            self._deferred.discard()
        elif self.parameters and not self._has_warned:
            self._has_warned = True
            _LOG.warning(
                "%s is not sharded, or runs eagerly: its weights' gradients can't be split off, and BWD_INPUT computes "
                "them, too. shard(cell, mesh) first; a mesh of one rank will do", type(self._cell).__name__,
            )  # fmt: skip

    def unsplit(self):
        """Have backward passes of the Cell compute all gradients again, also for other callers."""
        if self._deferred is not None:
            self._deferred.pause()

    def begin(self, training, is_split=False, micro_batch_num=1, waits=False):
        """Begin a pass.

        Args:
            training: whether backward passes follow, as many as `micro_batch_num`.
            is_split: see `split`.
            waits: whether sums wait for other stages until `end`: for their terms, or the number of labels.

        Raises:
            ValueError: the gradients of earlier runs are lost.
        """
        if training and (self._is_reduced or self._is_lost):  # more runs than `accumulate_grad_step`
            self.reduced()
        self.split(is_split)
        self.of_run = self._storage.gradient_sums()
        self._left, self._waits = micro_batch_num if training else None, waits
        self._has_opened = self._has_opened or not self._storage.is_open
        self._storage.open(training)

    def begin_adding(self, labels=None, comes=True, at_once=False):
        """Before the gradients of a micro-batch are added.

        Args:
            labels: number of the labels of this run's micro-batches so far, an integer tensor; None for a mean.
            comes: whether the backward pass follows, whose gradients may be added as they come.
            at_once: whether all of these exist when the first is given, as those of a compiled function.
        """
        self._left -= 1
        self._adding, settings = self.of_run, self._storage.settings
        if self._adds_to_runs:
            self._adding = self._waiting = self.of_run.added_to(self._waiting)
            self._is_reduced = settings is not None and self.runs == settings.accumulate_grad_step - 1
        if self._is_reduced and labels is not None:
            self._scale = scale_of_labels((labels + (self.labels or 0)).item(), settings)
        self._adding.begin(self._is_reduced, self._scale, comes, at_once)

    @property
    def _adds_to_runs(self):
        """Whether the last backward pass of a run, which adds to the sums of those before, has begun."""
        return self._left == 0 and not self._waits

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
        ordinary, pending = self.parameters, ()
        if self._deferred is not None:
            ordinary = self._deferred.ordinary_parameters
            pending = self._deferred.take(found[len(ordinary) :])
        self._kept[micro_index] = ordinary, found[: len(ordinary)], pending

    def add(self, micro_index):
        """Compute the deferred gradients of a micro-batch, and add all its gradients to the sums."""
        ordinary, found, pending = self._kept.pop(micro_index)
        named = {id(parameter): gradient for parameter, gradient in zip(ordinary, found, strict=True)}
        del found  # `take` frees each whole gradient when it is reduced: nothing else may hold them
        for parameter, gradient in self._deferred.weight_gradients(pending) if pending else ():
            place = id(parameter)
            named[place] = named[place] + gradient if place in named else gradient
            del gradient
        self._adding.take([named.pop(id(parameter)) for parameter in self.parameters])

    def end(self, is_complete):
        """End a pass; gradients of an incomplete one are dropped, after its last backward pass all of the step."""
        self.unsplit()
        if self._left == 0 and is_complete:
            self._waiting = self._waiting if self._adds_to_runs else self.of_run.added_to(self._waiting)
            self.runs += 1
        elif self._adds_to_runs:
            self._is_lost = self._waiting is not self.of_run  # else there were none before
            self._waiting, self._is_reduced = None, False
        self._drop_run()
        if not is_complete or self._waiting is None:
            self.close()

    def close(self):
        """Free the gathered weights."""
        if self._has_opened:
            self._has_opened = False
            self._storage.close()

    def reduced(self):
        """The reduced sums over all runs: a tuple; None if there are no gradients.

        Raises:
            ValueError: those of earlier runs are lost.
        """
        if self._is_lost:
            name = type(self._cell).__name__
            raise ValueError(f"a run of {name} failed in its last backward pass: call zero_gradients(), and begin anew")
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            try:
                if not self._is_reduced:
                    self._scale = None if self.labels is None else scale_of_labels(self.labels, self._storage.settings)
                found = waiting.finish(self._scale)
                if self._reduced is not None:
                    factor = 1 if self._scale is None else self._scale / self._scale_before
                    found = [one * factor + other for one, other in zip(self._reduced, found, strict=True)]
                self._reduced, self._scale_before = tuple(found), self._scale
            finally:
                self._is_reduced = False
                self.close()
        return self._reduced

    def _drop_run(self):
        self.of_run = self._adding = self._left = None
        self._kept = {}  # micro-batch -> (Parameters, their gradients, result of `DeferredGradients.take`)

    def forget(self):
        """Drop all sums."""
        self._drop_run()
        # sums over runs, and the reduced sums of earlier ones, with their factor
        self._waiting = self._reduced = self._scale = self._scale_before = self.labels = None
        self._is_reduced = self._is_lost = self._waits = False
        self.runs = 0
        self.close()
