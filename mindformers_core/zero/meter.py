"""The measured memory of a step: bytes of live tensors by kind, and at the peak."""

import weakref
from collections import Counter

MOMENTS = ("pass", "update")  # from the gathers of weights to their release; from then to the next step


class MemoryMeter:
    """Counts the bytes of live tensors. MindSpore doesn't report them on CPU, so weak references watch tensors.

    Attributes:
        now: kind ("weights", "parts", "gradients" or "buckets") -> bytes.
        peaks: moment (one of `MOMENTS`) -> `now` when its sum was largest, in the last such moment.
    """

    def __init__(self):
        self.now, self.peaks = Counter(), {}
        self._moment = None
        self._memory = {}  # address -> [kind, bytes, number of watched tensors there]

    def begin(self, moment):
        """Begin a moment, and end the one before; None is none of `MOMENTS`."""
        self._moment = moment
        if moment is not None:
            self.peaks[moment] = self.now.copy()

    def add(self, kind, nbytes):
        """Count allocated bytes, or, where negative, freed ones."""
        self.now[kind] += nbytes
        if self._moment is not None and self.now.total() > self.peaks[self._moment].total():
            self.peaks[self._moment] = self.now.copy()

    def watch(self, kind, tensor):
        """Count a tensor's memory until all watched tensors there are garbage; returns the tensor.

        Tensors that share memory count once, as "buckets" only where none of them is of another kind.
        """
        if tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        address, nbytes = storage.data_ptr(), storage.size()
        if address not in self._memory:
            self._memory[address] = [kind, nbytes, 0]
            self.add(kind, nbytes)
        memory = self._memory[address]
        if memory[0] == "buckets" != kind:
            self.add("buckets", -memory[1])
            self.add(kind, memory[1])
            memory[0] = kind
        memory[2] += 1
        weakref.finalize(tensor, self._gone, address).atexit = False
        return tensor

    def watch_all(self, kind, tensors):
        """`watch` each of several tensors."""
        for tensor in tensors:
            self.watch(kind, tensor)

    def _gone(self, address):
        memory = self._memory[address]
        memory[2] -= 1
        if not memory[2]:
            del self._memory[address]
            self.add(memory[0], -memory[1])
