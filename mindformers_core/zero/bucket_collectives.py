"""The collectives of buckets: gathers of weights and reductions of gradients. A bucket is one collective of a flat
buffer, or two where shards are replicated.

Tensors are copied by `ops.cat` alone, also single ones: on CPU it takes a tenth of the time of `Tensor.copy()`, or of a
reshape of a tensor that isn't contiguous.
"""

from math import prod

from mindspore import mint, ops

from mindformers_core.communication import communicator, process_state
from mindformers_core.sharding.parameter_storage import as_dtype


class BucketCollectives:
    """Gathers and reduces over the data-parallel axes of a mesh; all their ranks call the same methods.

    Args:
        settings: the `HsdpSettings`: `mesh`, `shard_axes`, `replicate_axes`, `scale` and `precision`.
        meter: the `MemoryMeter` that counts the buffers.
        cuts: the `ParameterPlan.cut`s of all parameters; those of a bucket have one.
    """

    def __init__(self, settings, meter, cuts=((),)):
        def plain(kind, axes, **options):
            return communicator(settings.mesh).make(kind, axes, **options).collective.forward if axes else _same

        if process_state().watch is not None:
            process_state().watch.recorder.sources[__file__] = _described
        self.scale, self.precision, self.meter = settings.scale, settings.precision, meter
        self._gather, self._scatter, self._over_replicas, self._over_all = {}, {}, {}, {}
        for cut in cuts:
            own = settings.without(cut)
            self._gather[cut] = plain("all_gather", own.shard_axes, dim=0)
            self._scatter[cut] = plain("reduce_scatter", own.shard_axes, dim=0, op="sum")
            self._over_replicas[cut] = plain("all_reduce", own.replicate_axes, op="sum")
            self._over_all[cut] = plain("all_reduce", (*own.replicate_axes, *own.shard_axes), op="sum")

    def gather(self, members):
        """Fill sharded `ShardedParameter`s from the shards of all ranks."""
        sent = self._joined([stored.sent() for stored in members], [])
        table = self._buffer(self._gather[members[0].plan.cut](sent)).reshape(members[0].count, -1)
        self._buffer(table)
        del sent
        begin = 0
        for stored in members:
            length = stored.plan.size // stored.count
            rows = table if len(members) == 1 else mint.narrow(table, 1, begin, length)
            stored.fill(stored.joined(rows))
            begin += length

    def reduce_scatter(self, members, gradients):
        """The reduced shards of whole gradients of sharded parameters; empties the list."""
        return self._split(members, self._over_replicas[members[0].plan.cut](self._scattered(members, gradients)))

    def scatter(self, members, gradients):
        """As `reduce_scatter` before `finish`: sums over the shard axes only, unscaled, in the dtype of the sums."""
        return self._split(members, self._scattered(members, gradients), is_sum=True)

    def finish(self, members, sums):
        """The reduced shards, of sums of results of `scatter`; empties the list."""
        flat = self._joined([shard.reshape(-1) for shard in sums], sums)
        return self._split(members, self._over_replicas[members[0].plan.cut](flat))

    def all_reduce(self, members, gradients):
        """The reduced gradients of replicated parameters; empties the list."""
        dtype = self.precision.reduce_dtype(members[0].plan.dtype)
        flat = self._joined([as_dtype(gradient, dtype).reshape(-1) for gradient in gradients], gradients)
        reduced = self._over_all[members[0].plan.cut](flat)
        del flat
        return self._split(members, reduced)

    def _scattered(self, members, gradients):
        dtype = self.precision.reduce_dtype(members[0].plan.dtype)
        rows = [stored.rows(as_dtype(one, dtype)) for stored, one in zip(members, gradients, strict=True)]
        flat = self._joined(rows, gradients, 1)
        return self._buffer(self._scatter[members[0].plan.cut](flat.reshape(-1)))

    def _split(self, members, reduced, is_sum=False):
        """A flat buffer of gradients as a list of tensors with memory of their own; sums are not scaled."""
        self._buffer(reduced)
        shards, begin = [], 0
        for stored in members:
            length = prod(stored.shard_shape)
            shard = reduced if len(members) == 1 else mint.narrow(reduced, 0, begin, length)
            if self.scale != 1 and not is_sum:
                shard = shard * self.scale
            elif len(members) > 1:
                shard = ops.cat((shard,), 0)
            if not is_sum:
                shard = as_dtype(shard, self.precision.gradient_dtype(stored.plan.dtype))
            shards.append(self.meter.watch("gradients", shard.reshape(stored.shard_shape)))
            begin += length
        return shards

    def _joined(self, tensors, sources, dim=0):
        """One buffer of several tensors; empties the list of them, and that of their sources."""
        self.meter.watch_all("buckets", tensors)
        sources.clear()
        joined = self._buffer(tensors[0] if len(tensors) == 1 else ops.cat(tensors, dim))
        tensors.clear()
        return joined

    def _buffer(self, tensor):
        """Count the memory of a tensor as a buffer, unless it is counted as another kind; returns the tensor."""
        return self.meter.watch("buckets", tensor)


def _described(line, variables):
    """A bucket in the report of a hang: its first parameter, and how many."""
    paths = [stored.plan.path for stored in variables.get("members", ())]
    return f"bucket of {paths[0]}{f' and {len(paths) - 1} more' * (len(paths) > 1)}" if paths else "a bucket", ""


def _same(tensor):
    return tensor
