"""A parameter under `hsdp()`: the unsharded Parameter that Cells compute with, and this rank's shard.

On CPU MindSpore's `untyped_storage().resize_(0)` leaks the memory. So a tensor keeps its addresses there, the system
frees the pages (Linux, `madvise`), and the next write allocates them, as zeros.
"""

import ctypes
import mmap
from contextlib import nullcontext

from mindspore import DeviceCtx, Parameter, dtype as mstype, mint, ops

from mindformers_core.sharding.parameter_storage import as_dtype, computing_dtype

_DONT_NEED = getattr(mmap, "MADV_DONTNEED", None)  # other systems have none
_SYSTEM = None if _DONT_NEED is None else ctypes.CDLL(None)


def _keeps_addresses(tensor):
    return _DONT_NEED is not None and tensor.device == "CPU"


def free_storage(tensor):
    """Free a tensor's memory, except the incomplete pages at both ends; the values are lost."""
    memory = tensor.untyped_storage()
    if not _keeps_addresses(tensor):
        memory.resize_(0)
        return
    first = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (memory.data_ptr() + memory.size() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if length > 0 and _SYSTEM.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), _DONT_NEED):
        raise MemoryError(f"the system doesn't take {length} bytes back")


def allocate_storage(tensor, nbytes):
    """Allocate a tensor's memory again, uninitialized."""
    if not _keeps_addresses(tensor):
        tensor.untyped_storage().resize_(nbytes)


def parameter_like(parameter, shape, dtype, values):
    """A Parameter with the name and the attributes of another, and without values where that is on the meta device.

    Args:
        parameter: the other Parameter.
        shape, dtype: of the new one; `dtype` is a name.
        values: a tensor of the shape, or a Parameter; unused on the meta device.
    """
    dtype = getattr(mstype, computing_dtype(dtype))
    with DeviceCtx("meta") if parameter.is_meta else nullcontext():
        values = mint.zeros(shape, dtype=dtype) if parameter.is_meta else ops.cast(values, dtype)
        made = Parameter(values, name=parameter.name, requires_grad=parameter.requires_grad)
    vars(made).update({name: value for name, value in vars(parameter).items() if name not in vars(made)})
    return made


def bytes_of(tensor):
    """Bytes of a tensor's memory, as MindSpore has allocated it."""
    return 0 if tensor.is_meta else tensor.untyped_storage().size()


class ShardedParameter:
    """The unsharded Parameter, which Cells compute with, and its shard, which the optimizer updates.

    The memory of the unsharded Parameter is freed and filled again while the Parameter stays the same object, so that
    MindSpore's tapes and compiled graphs read the current values.

    Args:
        plan: the `ParameterPlan`.
        unsharded: the Parameter that Cells compute with, with its values.
        source: the original Parameter, with the values in full precision; may be `unsharded`.
        layout: the layout of the shard.
        index: this rank's index along the shard axes.
        count: number of shards.
        meter: the `MemoryMeter` that counts the memory of both.

    Attributes:
        plan, unsharded, index, count: as given.
        shard: the Parameter of this rank's shard, with `layout` and `global_shape`; `unsharded` itself where that is
            replicated, and updated in the dtype of the passes.
        lent: whether the shard's memory is freed while `unsharded` has its values.
        is_filled: whether `unsharded` has values.
        is_shared: whether another `ShardedParameter` has the same shard, which is never lent then.
    """

    def __init__(self, plan, unsharded, source, layout, index, count, meter):
        self.plan, self.unsharded, self.index, self.count, self._meter = plan, unsharded, index, count, meter
        self.shard = unsharded
        if plan.is_copied:
            values = None if source.is_meta else self._slice(source)
            self.shard = parameter_like(unsharded, self.shard_shape, plan.shard_dtype, values)
        self.shard.layout = layout
        self.lent = self.is_filled = self.is_shared = False
        self._address = None if self.shard.is_meta else self.shard.data_ptr()
        self._held = {"weights": bytes_of(unsharded), "parts": bytes_of(self.shard) if self.is_copied else 0}
        for kind, nbytes in self._held.items():
            meter.add(kind, nbytes)
        if self.is_copied and unsharded is source and not source.is_meta:
            unsharded.set_data(mint.zeros(plan.shape, dtype=source.dtype))  # other holders of the values keep them

    @property
    def is_copied(self):
        """Whether the shard is another Parameter than the unsharded one."""
        return self.shard is not self.unsharded

    @property
    def shard_shape(self):
        """The shape of the shard."""
        return self.plan.shard_shape(self.count)

    def _slice(self, whole):
        """This rank's shard of a Parameter of the unsharded shape: a copy."""
        if self.plan.dim is None:
            return whole.value().copy()
        length = self.plan.shape[self.plan.dim] // self.count
        return ops.cat((mint.narrow(whole.value(), self.plan.dim, self.index * length, length),), 0)

    def sent(self):
        """The input of an all-gather: this rank's shard, flat, in the dtype of the passes."""
        shard = self._slice(self.unsharded) if self.lent else self.shard.value()
        return as_dtype(shard, self.plan.dtype).reshape(-1)

    def rows(self, whole):
        """A tensor of the unsharded shape as `count` rows, one for each shard, flat."""
        dim, shape = self.plan.dim, self.plan.shape
        cut = whole.reshape(*shape[:dim], self.count, shape[dim] // self.count, *shape[dim + 1 :])
        return ops.moveaxis(cut, dim, 0).reshape(self.count, -1) if dim else cut.reshape(self.count, -1)

    def joined(self, rows):
        """The tensor of the unsharded shape for `rows`, which may be a view: the inverse of `rows`."""
        if not self.plan.dim and rows.is_contiguous():
            return rows.reshape(self.plan.shape)
        shards = mint.unbind(rows, 0)
        if self.plan.dim:
            return ops.cat([shard.reshape(self.shard_shape) for shard in shards], self.plan.dim)
        return ops.cat(shards, 0).reshape(self.plan.shape)

    def fill(self, values):
        """Allocate the unsharded memory, and assign `values`."""
        self._allocate("weights", self.unsharded, values)
        self.is_filled = True

    def lend(self):
        """Free the shard's memory while the unsharded Parameter has its values in the same dtype."""
        of_one_dtype = self.plan.dim is not None and self.plan.shard_dtype == self.plan.dtype
        if of_one_dtype and not (self.lent or self.is_shared):
            if self.shard.data_ptr() != self._address:  # after set_data: the memory may have other holders
                self.shard.set_data(ops.cat((self.shard.value(),), 0))
                self._address = self.shard.data_ptr()
            self._free("parts", self.shard)
            self.lent = True

    def take_back(self):
        """Allocate the memory of a shard that was lent, and copy its values from the unsharded Parameter."""
        if self.lent:
            self._allocate("parts", self.shard, self._slice(self.unsharded))
            self._address, self.lent = self.shard.data_ptr(), False

    def release(self):
        """Free the unsharded memory, after `take_back`."""
        self.take_back()
        self.is_filled = False
        if self.is_copied:
            self._free("weights", self.unsharded)

    def share(self, other):
        """Replace the shard by that of another `ShardedParameter` with an equal plan; neither is filled."""
        self._meter.add("parts", -self._held["parts"])
        self._held["parts"] = 0
        self.shard = other.shard
        self.is_shared = other.is_shared = True
        self._free("weights", self.unsharded)

    def _allocate(self, kind, parameter, values):
        """Allocate a Parameter's memory again, and assign `values`."""
        self._meter.watch("buckets", values)
        self._meter.add(kind, values.nbytes - self._held[kind])
        self._held[kind] = values.nbytes
        allocate_storage(parameter, values.nbytes)
        ops.assign(parameter, values)  # the storage's own copy_() gave wrong values

    def _free(self, kind, parameter):
        if self._held[kind]:
            self._meter.add(kind, -self._held[kind])
            self._held[kind] = 0
            free_storage(parameter)
