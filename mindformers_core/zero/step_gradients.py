"""`StepGradients`: the sums of a step's gradients over micro-steps, and their reduction."""

from mindformers_core.zero.collecting import GradientCollector
from mindformers_core.zero.stored import as_dtype

__all__ = ["StepGradients"]


class StepGradients:
    """The gradients of one step while its micro-steps go by.

    Args:
        storage: the `HsdpStorage`.
    """

    def __init__(self, storage):
        self.storage = storage
        self._sums = {}

    def add(self, gradients):
        """Whole gradients of a micro-step, in the order of the trained parameters, are summed up."""
        self.storage.meter.watch_all("gradients", gradients)
        for number, gradient in zip(self.storage.trained, gradients, strict=True):
            plan = self.storage.parameters[number].plan
            gradient = as_dtype(gradient, self.storage.settings.precision.reduce_dtype(plan.dtype))
            if number in self._sums:
                gradient = self._sums[number] + gradient
            self._sums[number] = self.storage.meter.watch("gradients", gradient)

    def collector(self, at_once=False):
        """What reduces the gradients of the last micro-step together with those before; see `GradientCollector`."""
        return GradientCollector(self.storage, self._sums, at_once)

    def reduce(self, gradients):
        """The reduced gradients, a tuple; takes all whole ones of the last micro-step out of the list `gradients`."""
        storage, collector = self.storage, self.collector()
        storage.meter.watch_all("gradients", gradients)
        numbered = dict(zip(storage.trained, gradients, strict=True))
        gradients.clear()
        for bucket in storage.reduces:
            for number in bucket.members:
                collector.came(number, numbered.pop(number))
        return collector.finish()
