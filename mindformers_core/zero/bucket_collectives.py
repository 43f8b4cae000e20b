"""The collectives of buckets: gather weights, reduce gradients. Each is one collective of a flat buffer (two, where
parts are replicated).

Tensors are copied by `ops.cat` alone, also single ones: on CPU it takes a tenth of the time of `Tensor.copy()`, or of a
reshape of what isn't contiguous.
"""

from math import prod

from mindspore import mint, ops

from mindformers_core.communication import communicator
from mindformers_core.sharding.parameter_storage import as_dtype

__all__ = ["BucketCollectives"]


class BucketCollectives:
    """Gathers and reduces over the data-parallel axes of a mesh; all their ranks call alike.

    Args:
        mesh: with the axes.
        shard_axes: over which parts lie.
        replicate_axes: over which the same parts lie.
        scale: what reduced gradients are multiplied by.
        precision: the `MixedPrecision`.
        meter: the `MemoryMeter` that buffers are counted by.
    """

    def __init__(self, mesh, shard_axes, replicate_axes, scale, precision, meter):
        def plain(kind, axes, **options):
            return communicator(mesh).make(kind, axes, **options).collective.forward if axes else _same

        self.scale, self.precision, self.meter = scale, precision, meter
        self._gather = plain("all_gather", shard_axes, dim=0)
        self._scatter = plain("reduce_scatter", shard_axes, dim=0, op="sum")
        self._over_replicas = plain("all_reduce", replicate_axes, op="sum")
        self._over_all = plain("all_reduce", (*replicate_axes, *shard_axes), op="sum")

    def gather(self, members):
        """Fill the wholes of some `ShardedParameter`s, which are cut, from all ranks' parts."""
        sent = self._joined([self._buffer(stored.sent()) for stored in members])
        table = self._buffer(self._gather(sent)).reshape(members[0].count, -1)
        self._buffer(table)
        del sent
        begin = 0
        for stored in members:
            length = stored.plan.size // stored.count
            rows = table if len(members) == 1 else mint.narrow(table, 1, begin, length)
            stored.fill(stored.joined(rows))
            begin += length

    def reduce_scatter(self, members, gradients):
        """The reduced parts of whole gradients of parameters that are cut; takes the tensors out of the list."""
        return self._finished(members, self._scattered(members, gradients))

    def scatter(self, members, gradients):
        """As `reduce_scatter`, without what `finish` does: the sums over the shard axis, in the dtype they are summed
        in."""
        return self._parts(members, self._scattered(members, gradients), is_sum=True)

    def finish(self, members, sums):
        """The reduced parts, of the sums of what `scatter` gave; takes the tensors out of the list."""
        flat = [self._buffer(part.reshape(-1)) for part in sums]
        sums.clear()
        return self._finished(members, self._joined(flat))

    def _scattered(self, members, gradients):
        dtype = self.precision.reduce_dtype(members[0].plan.dtype)
        rows = [self._buffer(stored.rows(as_dtype(one, dtype))) for stored, one in zip(members, gradients, strict=True)]
        gradients.clear()
        flat = self._joined(rows, 1)
        return self._buffer(self._scatter(flat.reshape(-1)))

    def _finished(self, members, scattered):
        return self._parts(members, self._over_replicas(scattered))

    def all_reduce(self, members, gradients):
        """The reduced gradients of parameters that are whole; takes the tensors out of the list."""
        dtype = self.precision.reduce_dtype(members[0].plan.dtype)
        flat = [self._buffer(as_dtype(gradient, dtype).reshape(-1)) for gradient in gradients]
        gradients.clear()
        flat = self._joined(flat)
        reduced = self._over_all(flat)
        del flat
        return self._parts(members, reduced)

    def _parts(self, members, reduced, is_sum=False):
        """A flat buffer of gradients as a list of tensors with memory of their own; scaled, but where sums go on."""
        self._buffer(reduced)
        parts, begin = [], 0
        for stored in members:
            length = prod(stored.shard_shape)
            part = reduced if len(members) == 1 else mint.narrow(reduced, 0, begin, length)
            if self.scale != 1 and not is_sum:
                part = part * self.scale
            elif len(members) > 1:
                part = ops.cat((part,), 0)
            if not is_sum:
                part = as_dtype(part, self.precision.gradient_dtype(stored.plan.dtype))
            part = part.reshape(stored.shard_shape)
            parts.append(self.meter.watch("gradients", part))
            begin += length
        return parts

    def _joined(self, tensors, dim=0):
        """One buffer of several tensors, which are taken out of the list."""
        joined = self._buffer(tensors[0] if len(tensors) == 1 else ops.cat(tensors, dim))
        tensors.clear()
        return joined

    def _buffer(self, tensor):
        """The tensor, counted while it is there; one that is counted as something else already stays that."""
        return self.meter.watch("buckets", tensor)


def _same(tensor):
    return tensor
