"""Counts the memory that a step really takes: bytes by kind as they come and go, and how they were at the peak."""

import weakref
from collections import Counter

__all__ = ["KINDS", "MOMENTS", "MemoryMeter"]

KINDS = ("weights", "parts", "gradients", "buckets")
MOMENTS = ("pass", "update")  # from whole weights being asked for to their release; from then to the next step


class MemoryMeter:
    """Bytes of tensors that are there, by kind. MindSpore doesn't tell them on CPU, so tensors are watched until they
    are gone.

    Attributes:
        now: kind -> bytes.
        peaks: moment (one of `MOMENTS`) -> how `now` was when its sum was largest, the last time that it was so.
    """

    def __init__(self):
        self.now, self.peaks = Counter(), {}
        self._moment = None
        self._memory = {}  # address -> [kind, bytes, numbers of watched tensors that lie there]
        self._watched = {}  # number -> weak reference to a tensor
        self._number = 0

    def begin(self, moment):
        """A moment begins, and the one before ends; None is none of them."""
        self._moment = moment
        if moment is not None:
            self.peaks[moment] = self.now.copy()

    def add(self, kind, nbytes):
        """So many bytes have come, or, where negative, gone."""
        self.now[kind] += nbytes
        if self._moment is not None and self.now.total() > self.peaks[self._moment].total():
            self.peaks[self._moment] = self.now.copy()

    def watch(self, kind, tensor):
        """Count a tensor's memory until nobody has it any more; returns it.

        Tensors that share memory count once, as a bucket only where none of them is something else.
        """
        if tensor.is_meta:
            return tensor
        storage, number = tensor.untyped_storage(), self._number
        address, nbytes = storage.data_ptr(), storage.size()
        self._number += 1
        if address not in self._memory:
            self._memory[address] = [kind, nbytes, set()]
            self.add(kind, nbytes)
        memory = self._memory[address]
        if memory[0] == "buckets" != kind:
            self.add("buckets", -memory[1])
            self.add(kind, memory[1])
            memory[0] = kind
        memory[2].add(number)
        self._watched[number] = weakref.ref(tensor, lambda _: self._gone(number, address))
        return tensor

    def watch_all(self, kind, tensors):
        """`watch` each of several tensors."""
        for tensor in tensors:
            self.watch(kind, tensor)

    def _gone(self, number, address):
        del self._watched[number]
        kind, nbytes, users = self._memory[address]
        users.remove(number)
        if not users:
            del self._memory[address]
            self.add(kind, -nbytes)
