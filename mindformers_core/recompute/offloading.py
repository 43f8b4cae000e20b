"""Saved results of single operators on the host in PyNative, copied back ahead of their use.

Generated programs call each selected operator through `OnHost`. A result that autograd saves is copied to the host, and
freed on the device. The backward pass reads saved tensors in reverse order: each read starts the copies of the next
ones (Rhu et al., "vDNN", 2016; `backward_prefetch` in MindSpore Transformers).
"""

from functools import partial
from weakref import ref

from mindformers_core.recompute.host_copies import to_device, to_host
from mindformers_core.recompute.keeping import kept, session


class OnHost:
    """Wraps a function of tensors; its results stay on the host until the backward pass.

    Args:
        prefetch: number of saved tensors between the copy back and the use of a tensor, at least 1.
    """

    def __init__(self, prefetch):
        self.prefetch = prefetch

    def __call__(self, function, *inputs):
        return kept(function, inputs, partial(Offloading, prefetch=self.prefetch))


class Offloading:
    """A call whose results are copied to the host when autograd saves them.

    Args:
        function, inputs: function and arguments of the call; not stored.
        prefetch: as in `OnHost`.

    Attributes:
        unsettled: tensors that autograd saved while the call was open.
    """

    def __init__(self, function, inputs, prefetch):
        self.unsettled, self._prefetch, self._entries = [], prefetch, {}
        self._offloaded = session().offloaded

    def settle(self, tensors):
        """End of the call."""
        self._entries = {index: _Entry(tensor) for index, tensor in enumerate(tensors)}

    def expect(self, index):
        """Register one future reader of a result, and copy the result to the host."""
        entry = self._entries[index]
        entry.expected += 1
        if entry.host is None:
            entry.host = to_host(entry.tensor())
            entry.place = len(self._offloaded)
            self._offloaded.append(ref(entry))

    def value(self, index):
        """Return one result, release one reader, and start copying back the next results."""
        entry = self._entries[index]
        result = entry.fetch().use()
        self.release(index)
        for before in range(entry.place - 1, max(entry.place - self._prefetch, 0) - 1, -1):
            ahead = self._offloaded[before]()
            if ahead is not None and ahead.expected > 0:
                ahead.fetch()
        return result

    def release(self, index):
        """Release one reader."""
        entry = self._entries[index]
        entry.expected -= 1
        if entry.expected <= 0:
            entry.device = None


class _Entry:
    """One result: its copy on the host, and for some time an `Arriving` copy on the device."""

    def __init__(self, tensor):
        self.tensor, self._device_name = ref(tensor), tensor.device
        self.host = self.device = self.place = None
        self.expected = 0

    def fetch(self):
        if self.device is None:
            self.device = to_device(self.host, self._device_name)
        return self.device
