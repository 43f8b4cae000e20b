"""`GradientReducer`: the gradients of one step, summed over micro-steps and reduced bucket by bucket."""

from mindspore import ops

from mindformers_core.communication.world import process_state
from mindformers_core.scopes import replaced
from mindformers_core.sharding.optimizers_before import optimizers_holding
from mindformers_core.sharding.parameter_storage import GradientSums, as_dtype


class GradientReducer(GradientSums):
    """Sums and reduces the gradients of one step.

    Where sums are sharded (`HsdpSettings.sums_shards`), every micro-step's gradients are reduce-scattered, and the last
    one reduces the sums over replicas; otherwise whole gradients are summed, and reduced in the last micro-step.
    Buckets are reduced in one order on all ranks, whatever the order of gradients: a complete bucket waits for those
    before it. An unused parameter has a gradient of zeros.

    Args:
        storage: the `HsdpStorage`.

    Attributes:
        sums: number of a parameter -> the sum of its gradients, in the dtype of reductions: whole, or (`sums_shards`)
            the shard.
    """

    def __init__(self, storage):
        super().__init__()
        self.storage = storage
        self._reduced = {}  # number of a parameter -> its reduced gradient
        self._placeholder = ops.zeros((0,))  # a shape that no parameter has

    def number(self, place):
        return self.storage.trained[place]

    def begin(self, is_last, scale, comes, at_once):
        self._is_last, self._scale, self._pending, self._next = is_last, scale, {}, 0
        self._came = set()
        settings = self.storage.settings
        comes = comes and settings.reduces_as_they_come and (is_last or settings.sums_shards)
        self._at_once, self.storage.reducer = comes and at_once, self if comes else None

    def came(self, number, gradient):
        """Take the whole gradient of parameter `number`; returns its replacement, so that its memory is freed."""
        storage = self.storage
        process_state().observer.weight_gradient(storage.parameters[number].unsharded, gradient)
        if self._at_once:
            if not self._came:
                storage.meter.add("gradients", sum(storage.parameters[other].plan.nbytes for other in storage.trained))
            storage.meter.add("gradients", -gradient.nbytes)
        self._came.add(number)
        self._pending[number] = storage.meter.watch("gradients", gradient)
        while self._next < len(storage.reduces):
            bucket = storage.reduces[self._next]
            if not all(member in self._pending for member in bucket.members):
                break
            self._next += 1
            self._add(bucket, [self._pending.pop(member) for member in bucket.members])
        return self._placeholder

    def take(self, gradients):
        """See `GradientSums`: take those that haven't come, also of a weight that nothing used."""
        self.storage.reducer = None
        numbered = dict(zip(self.storage.trained, gradients, strict=True))
        gradients.clear()
        for number in self._came:
            del numbered[number]
        self.storage.meter.watch_all("gradients", numbered.values())
        for bucket in self.storage.reduces:
            for number in bucket.members:
                if number in numbered:
                    self.came(number, numbered.pop(number))
        assert self._next == len(self.storage.reduces), (self._next, sorted(self._pending))

    def _add(self, bucket, gradients):
        """Add the whole gradients of a bucket to the sums; empties the list."""
        storage, settings = self.storage, self.storage.settings
        is_alone = self._is_last and bucket.members[0] not in self.sums
        if bucket.kind == "reducescatter" and settings.sums_shards and not is_alone:
            members = [storage.parameters[number] for number in bucket.members]
            gradients = storage.collectives.scatter(members, gradients)
        for number in bucket.members:
            dtype = storage.parameters[number].plan.dtype
            dtype = dtype if is_alone else settings.precision.reduce_dtype(dtype)
            self.add(number, as_dtype(gradients.pop(0), dtype))
        if self._is_last:
            self._reduce(bucket)

    def add(self, number, gradient):
        gradient = self.sums.pop(number) + gradient if number in self.sums else gradient  # no other reference is left
        self.sums[number] = self.storage.meter.watch("gradients", gradient)

    def _reduce(self, bucket):
        """Reduce the complete sums of a bucket: whole ones, or shards."""
        members = [self.storage.parameters[number] for number in bucket.members]
        sums = [self.sums.pop(number) for number in bucket.members]
        collectives = self.storage.collectives
        if bucket.kind == "allreduce":
            reduce = collectives.all_reduce
        else:
            reduce = collectives.reduce_scatter if sums[0].shape == members[0].plan.shape else collectives.finish
        with replaced(collectives, scale=self.storage.settings.scale if self._scale is None else self._scale):
            self._reduced.update(zip(bucket.members, reduce(members, sums)))

    def finish(self, scale):
        """See `GradientSums`: a tuple, in the dtypes of the shards; reduced now, unless the last ones were.

        Unsharded weights are freed before: gradients may take more memory in those dtypes.

        Raises:
            ValueError: at the first gradients of a function, an optimizer that can't work with shards.
        """
        storage, gradients, self._scale = self.storage, [], scale
        for bucket in [each for each in storage.reduces if each.members[0] in self.sums]:
            self._reduce(bucket)
        storage.close()
        for number in storage.trained:
            gradient = as_dtype(self._reduced.pop(number), storage.parameters[number].plan.shard_dtype)
            gradients.append(storage.meter.watch("gradients", gradient))
        if not storage.has_checked:
            check_optimizers(storage)
            storage.has_checked = True
        return tuple(gradients)


def check_optimizers(storage):
    """Raise `ValueError` for an optimizer that holds unsharded weights, whose memory is freed."""
    wholes = {id(stored.unsharded): stored.plan.path for stored in storage.parameters if stored.is_copied}
    for optimizer, held in optimizers_holding(wholes):
        raise ValueError(
            f"{type(optimizer).__name__} holds '{wholes[id(held[0])]}' of {storage.label} as it computes, whose "
            "memory comes and goes under hsdp(): build the optimizer of cell.trainable_params()"
        )
