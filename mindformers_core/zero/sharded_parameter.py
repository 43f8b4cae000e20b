"""One parameter as it is stored: the whole that computes, and the part that this rank keeps and updates."""

from mindspore import DeviceCtx, Parameter, mint, ops
from mindspore import dtype as mstype

from mindformers_core.sharding.parameter_storage import as_dtype
from mindformers_core.zero.free_storage import allocate_storage, free_storage

__all__ = ["ShardedParameter", "bytes_of"]


def bytes_of(tensor):
    """Bytes that a tensor's memory takes, as MindSpore has allocated it."""
    return 0 if tensor.is_meta else tensor.untyped_storage().size()


class ShardedParameter:
    """A Parameter that Cells compute with, and the one that the optimizer updates.

    The memory of the whole is given back and filled again behind a Parameter that stays the same: MindSpore's tapes and
    compiled graphs find the values that are there when they run.

    Args:
        plan: the `ParameterPlan`.
        whole: the Parameter that Cells compute with, with its values.
        source: the Parameter that there was, with the values in full precision; it may be `whole`.
        layout: of the part, on a mesh that has the shard axis.
        index: this rank's place along the shard axis.
        count: number of parts.
        meter: the `MemoryMeter` that hears of all memory taken and given back here.

    Attributes:
        plan, whole: as given.
        part: the Parameter of this rank's part, with `layout` and `global_shape`; `whole` where that is updated.
        lent: whether the memory of the part is given back while the whole holds its values.
        is_filled: whether the whole was given values and not released yet.
        is_shared: whether another `ShardedParameter` has the same part, which is never lent then.
    """

    def __init__(self, plan, whole, source, layout, index, count, meter):
        self.plan, self.unsharded, self.index, self.count, self._meter = plan, whole, index, count, meter
        self.shard = self._new_part(source, layout)
        self.lent = self.is_filled = self.is_shared = False
        self._place = self._address()
        self._held = {"weights": bytes_of(whole), "parts": bytes_of(self.shard) if self.is_copied else 0}
        for kind, nbytes in self._held.items():
            meter.add(kind, nbytes)
        if self.is_copied and whole is source and not whole.is_meta:
            whole.set_data(mint.zeros(plan.shape, dtype=whole.dtype))  # whoever has the values elsewhere keeps them

    @property
    def is_sharded(self):
        """Whether ranks keep different parts."""
        return self.plan.dim is not None

    @property
    def is_copied(self):
        """Whether whole and part are two things."""
        return self.shard is not self.unsharded

    @property
    def shard_shape(self):
        """The shape of the part."""
        return self.plan.shard_shape(self.count)

    def _new_part(self, source, layout):
        if not self.is_sharded and self.plan.shard_dtype == self.plan.dtype:
            return self.unsharded
        dtype = getattr(mstype, self.plan.shard_dtype)
        if self.unsharded.is_meta:
            with DeviceCtx("meta"):
                values = mint.zeros(self.shard_shape, dtype=dtype)
                part = Parameter(values, name=self.unsharded.name, requires_grad=self.unsharded.requires_grad)
        else:
            values = ops.cast(self._slice(source), dtype)
            part = Parameter(values, name=self.unsharded.name, requires_grad=self.unsharded.requires_grad)
        vars(part).update({name: value for name, value in vars(self.unsharded).items() if name not in vars(part)})
        part.layout = layout
        return part

    def _slice(self, whole):
        """This rank's part of a tensor of the whole's shape: a tensor of its own."""
        if not self.is_sharded:
            return whole.value().copy()
        length = self.plan.shape[self.plan.dim] // self.count
        return ops.cat((mint.narrow(whole.value(), self.plan.dim, self.index * length, length),), 0)

    def sent(self):
        """This rank's part, flat, in the dtype that computes: what a gather sends."""
        part = self._slice(self.unsharded) if self.lent else self.shard.value()
        return as_dtype(part, self.plan.dtype).reshape(-1)

    def rows(self, whole):
        """A tensor of the whole's shape as `count` rows, one for each part, flat."""
        dim, shape = self.plan.dim, self.plan.shape
        cut = whole.reshape(*shape[:dim], self.count, shape[dim] // self.count, *shape[dim + 1 :])
        return ops.moveaxis(cut, dim, 0).reshape(self.count, -1) if dim else cut.reshape(self.count, -1)

    def joined(self, rows):
        """The whole of `rows`, which may be a view: the other way round."""
        if not self.plan.dim and rows.is_contiguous():
            return rows.reshape(self.plan.shape)
        parts = mint.unbind(rows, 0)
        if self.plan.dim:
            return ops.cat([part.reshape(self.shard_shape) for part in parts], self.plan.dim)
        return ops.cat(parts, 0).reshape(self.plan.shape)

    def fill(self, values):
        """Give the whole memory, and `values`."""
        self._refill("weights", self.unsharded, values)
        self.is_filled = True

    def lend(self):
        """Give the part's memory back while the whole holds its values in the same dtype."""
        if self.is_sharded and self.plan.shard_dtype == self.plan.dtype and not (self.lent or self.is_shared):
            if self._address() != self._place:  # after set_data: memory that somebody else may have, too
                self.shard.set_data(ops.cat((self.shard.value(),), 0))
                self._place = self._address()
            self._give_back("parts", self.shard)
            self.lent = True

    def take_back(self):
        """Let a part that was lent have its values again, while the whole keeps them, too."""
        if self.lent:
            self._refill("parts", self.shard, self._slice(self.unsharded))
            self._place, self.lent = self._address(), False

    def release(self):
        """Give the whole's memory back; a part that was lent is there again."""
        self.take_back()
        self.is_filled = False
        if self.is_copied:
            self._give_back("weights", self.unsharded)

    def share(self, other):
        """Have the part of another `ShardedParameter`, planned alike, instead of one's own; neither whole is needed."""
        self._meter.add("parts", -self._held["parts"])
        self._held["parts"] = 0
        self.shard = other.shard
        self.is_shared = other.is_shared = True
        self._give_back("weights", self.unsharded)

    def _address(self):
        """Where the part is in memory."""
        return None if self.shard.is_meta else self.shard.data_ptr()

    def _refill(self, kind, parameter, values):
        """Give a Parameter memory again, with `values`."""
        self._meter.watch("buckets", values)
        self._meter.add(kind, values.nbytes - self._held[kind])
        self._held[kind] = values.nbytes
        allocate_storage(parameter, values.nbytes)
        ops.assign(parameter, values)  # the storage's own copy_() gave wrong values

    def _give_back(self, kind, parameter):
        if self._held[kind]:
            self._meter.add(kind, -self._held[kind])
            self._held[kind] = 0
            free_storage(parameter)
