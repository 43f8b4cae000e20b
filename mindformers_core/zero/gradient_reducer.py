"""`GradientReducer`: the gradients of one step, summed over micro-steps and reduced bucket by bucket."""

from mindspore import ops

from mindformers_core.sharding.parameter_storage import as_dtype

__all__ = ["GradientReducer", "reduced", "summed"]


class GradientReducer:
    """Sums and reduces the gradients of one step.

    Where sums are sharded (`HsdpSettings.sums_shards`), every micro-step's gradients are reduce-scattered, and what is
    left for the last one is the reduction over replicas; otherwise whole gradients are summed, and reduced in the last
    micro-step. Buckets are reduced in one order on all ranks, whatever order gradients come in: a bucket that is
    complete waits for those before it. A parameter that a pass doesn't use has a gradient of zeros.

    Args:
        storage: the `HsdpStorage`.
        sums: number of a parameter -> the sum of its gradients before, in the dtype in which they are reduced: of a
            whole one, or (`sums_shards`) of the part. Entries are taken out. Default: none.

    Attributes:
        sums: as given, with the micro-steps since.
    """

    def __init__(self, storage, sums=()):
        self.storage, self.sums = storage, dict(sums)
        self._reduced = {}  # number of a parameter -> its reduced gradient
        self._placeholder = ops.zeros((1,))
        self.begin(is_last=True)

    def begin(self, is_last, at_once=False):
        """Before the backward pass of a micro-step.

        Args:
            is_last: whether it is the last one of the step.
            at_once: whether all gradients are there when the first comes, as a compiled function gives them.
        """
        storage = self.storage
        self._is_last, self._pending, self._next = is_last, {}, 0
        self._unseen = [storage.parameters[number].plan.nbytes for number in storage.trained] if at_once else []

    def end(self):
        """After the backward pass of a micro-step, which has given all gradients."""
        assert self._next == len(self.storage.reduces), (self._next, sorted(self._pending))

    def came(self, number, gradient):
        """A whole gradient has come; returns what may take its place, so that its memory is free."""
        if self._unseen:
            self._count_unseen(gradient.nbytes)
        self._pending[number] = self.storage.meter.watch("gradients", gradient)
        self._take_complete()
        return self._placeholder

    def take(self, gradients):
        """Whole gradients of all trained parameters, in their order: all are taken out of the list."""
        self.storage.meter.watch_all("gradients", gradients)
        numbered = dict(zip(self.storage.trained, gradients, strict=True))
        gradients.clear()
        for bucket in self.storage.reduces:
            for number in bucket.members:
                self.came(number, numbered.pop(number))

    def _count_unseen(self, came):
        """Tell the meter of gradients that are there, but have not been handed over; one of so many bytes has."""
        if len(self._unseen) == len(self.storage.trained):
            self.storage.meter.add("gradients", sum(self._unseen))
        self._unseen.remove(came)
        self.storage.meter.add("gradients", -came)

    def _take_complete(self):
        while self._next < len(self.storage.reduces):
            bucket = self.storage.reduces[self._next]
            if not all(number in self._pending for number in bucket.members):
                return
            self._next += 1
            gradients = [self._pending.pop(number) for number in bucket.members]
            is_alone = self._is_last and bucket.members[0] not in self.sums
            in_parts = bucket.kind == "reducescatter" and self.storage.settings.sums_shards and not is_alone
            add = self._add_parts if in_parts else self._add
            add(bucket, gradients)
            if self._is_last:
                self.reduce(bucket, in_parts)

    def _add_parts(self, bucket, gradients):
        """Reduce-scatter the whole gradients of a bucket, which are taken out of the list, and add the parts."""
        members = [self.storage.parameters[number] for number in bucket.members]
        for number, part in zip(bucket.members, self.storage.collectives.scatter(members, gradients), strict=True):
            if number in self.sums:
                part = self.storage.meter.watch("gradients", self.sums.pop(number) + part)
            self.sums[number] = part

    def _add(self, bucket, gradients):
        """Add the whole gradients of a bucket; what nothing is added to stays as it came where it is reduced next."""
        for place, number in enumerate(bucket.members):
            plan, gradient = self.storage.parameters[number].plan, gradients[place]
            if number in self.sums or not self._is_last:
                gradient = as_dtype(gradient, self.storage.settings.precision.reduce_dtype(plan.dtype))
            if number in self.sums:
                gradient = self.sums.pop(number) + gradient
            self.sums[number] = self.storage.meter.watch("gradients", gradient)
            gradients[place] = None

    def reduce(self, bucket, in_parts):
        """Reduce the sums of a bucket, which has no more to come; `in_parts`: whether they were scattered."""
        storage = self.storage
        members, sums = [], []
        for number in bucket.members:
            members.append(storage.parameters[number])
            sums.append(self.sums.pop(number))
        if bucket.kind == "allreduce":
            reduce = storage.collectives.all_reduce
        else:
            reduce = storage.collectives.finish if in_parts else storage.collectives.reduce_scatter
        self._reduced.update(zip(bucket.members, reduce(members, sums)))

    def finish(self):
        """The reduced gradients of all trained parameters, in their order, in the dtypes of the parts: a tuple.

        Whole weights are released before: gradients may take more memory in those dtypes.
        """
        assert not self.sums, sorted(self.sums)
        storage, gradients = self.storage, []
        storage.close()
        for number in storage.trained:
            gradient = as_dtype(self._reduced.pop(number), storage.parameters[number].plan.shard_dtype)
            gradients.append(storage.meter.watch("gradients", gradient))
        return tuple(gradients)


def summed(storage, gradients):
    """What is summed up for the whole gradients of a micro-batch, all of which are taken out of the list."""
    collector = GradientReducer(storage)
    collector.begin(is_last=False)
    collector.take(gradients)
    collector.end()
    return [collector.sums[number] for number in storage.trained]


def reduced(storage, sums):
    """The reduced gradients, a tuple, of the sums of what `summed` gave, all of which are taken out of the list."""
    collector = GradientReducer(storage, zip(storage.trained, sums, strict=True))
    sums.clear()
    for bucket in storage.reduces:
        collector.reduce(bucket, storage.settings.sums_shards and bucket.kind == "reducescatter")
    return collector.finish()
