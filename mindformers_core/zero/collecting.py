"""`GradientCollector`: takes the gradients of a step's last backward pass, and reduces them bucket by bucket."""

from mindspore import ops

__all__ = ["GradientCollector"]


class GradientCollector:
    """Reduces the gradients of one step.

    Buckets are reduced in one order on all ranks, whatever order gradients come in: a bucket that is complete waits for
    those before it. A parameter that a pass doesn't use has a gradient of zeros.

    Args:
        storage: the `HsdpStorage`.
        sums: number of a parameter -> the sum of its gradients in the micro-steps before; entries are taken out.
        at_once: whether all gradients are there when the first comes, as a compiled function gives them.

    Attributes:
        reduced: number of a parameter -> its reduced gradient.
    """

    def __init__(self, storage, sums, at_once=False):
        self.storage, self.sums, self.reduced = storage, sums, {}
        self._pending = {}
        self._next = 0
        self._unseen = [storage.parameters[number].plan.nbytes for number in storage.trained] if at_once else []
        self._placeholder = ops.zeros((1,))

    def came(self, number, gradient):
        """A whole gradient has come; returns what may take its place, so that its memory is free."""
        if self._unseen:
            self._count_unseen(gradient.nbytes)
        self._pending[number] = self.storage.meter.watch("gradients", gradient)
        self._reduce_complete()
        return self._placeholder

    def _count_unseen(self, came):
        """Tell the meter of gradients that are there, but have not been handed over; one of so many bytes has."""
        if len(self._unseen) == len(self.storage.trained):
            self.storage.meter.add("gradients", sum(self._unseen))
        self._unseen.remove(came)
        self.storage.meter.add("gradients", -came)

    def _reduce_complete(self):
        while self._next < len(self.storage.reduces):
            bucket = self.storage.reduces[self._next]
            if not all(number in self._pending for number in bucket.members):
                return
            self._next += 1
            self._reduce(bucket)

    def _reduce(self, bucket):
        storage = self.storage
        members = [storage.parameters[number] for number in bucket.members]
        gradients = [self._pending.pop(number) for number in bucket.members]
        for place, number in enumerate(bucket.members):
            if number in self.sums:
                gradients[place] = self._with_sum(number, gradients[place])
        reduce = storage.exchange.reduce_scatter if bucket.kind == "reducescatter" else storage.exchange.all_reduce
        self.reduced.update(zip(bucket.members, reduce(members, gradients)))

    def _with_sum(self, number, gradient):
        total = self.sums.pop(number)
        return self.storage.meter.watch("gradients", total + ops.cast(gradient, total.dtype))

    def finish(self):
        """The reduced gradients of all trained parameters, in their order, in the dtypes of the parts: a tuple.

        Whole weights are released before: gradients may take more memory in those dtypes.
        """
        assert self._next == len(self.storage.reduces), (self._next, sorted(self._pending))
        storage, gradients = self.storage, []
        storage.close()
        for number in storage.trained:
            gradient = ops.cast(self.reduced.pop(number), storage.parameters[number].part.dtype)
            gradients.append(storage.meter.watch("gradients", gradient))
        return tuple(gradients)
