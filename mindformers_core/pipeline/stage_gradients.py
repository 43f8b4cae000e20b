"""The sums of a stage's gradients, over micro-batches and over runs, and how long its weights stay whole for them."""

__all__ = ["StageGradients"]


class StageGradients:
    """Adds up a stage's gradients, and has them reduced once they are asked for.

    The weights are put in place before the first pass. After a training pass they stay there, since further runs may
    follow; they go when the gradients are taken, and after a pass that failed or that leaves no gradients.

    Args:
        storage: the `ParameterStorage` of the stage's Cell.

    Attributes:
        of_run: the sums over the micro-batches so far of the run that is going on, a list of what
            `ParameterStorage.summed` gives; or None.
    """

    def __init__(self, storage):
        self._storage = storage
        self.of_run = None
        self._waiting, self._reduced = None, None  # sums over runs, and what became of earlier ones
        self._training, self._has_finished, self._has_opened = False, True, False

    def begin(self, training):
        """Before a pass."""
        self.of_run = None
        self._training, self._has_finished = training, False
        self._has_opened = self._has_opened or not self._storage.is_open
        self._storage.open(training)

    def add(self, gradients):
        """Whole gradients of a micro-batch."""
        self.of_run = _added(self.of_run, self._storage.summed(gradients))

    def finish(self):
        """After the last step of a pass."""
        if self._training:
            self._waiting = _added(self._waiting, self.of_run)
        self.of_run, self._has_finished = None, True

    def end(self):
        """After a pass, also one that failed, whose gradients are dropped."""
        self.of_run = None
        if not self._has_finished or self._waiting is None:
            self.close()

    def close(self):
        """The weights needn't be in place any longer."""
        if self._has_opened:
            self._has_opened = False
            self._storage.close()

    def taken(self):
        """The sums over all runs, reduced: a tuple; None if there was no gradient."""
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            try:
                self._reduced = _added(self._reduced, self._storage.reduced(waiting))
            finally:
                self.close()
        return None if self._reduced is None else tuple(self._reduced)

    def forget(self):
        """Begin at zero."""
        self._waiting = self._reduced = None
        self.close()


def _added(sums, more):
    """The sums with more added; both lists in the same order, or None."""
    if sums is None or more is None:
        return list(more) if sums is None and more is not None else sums
    return [one + other for one, other in zip(sums, more, strict=True)]
