"""Saved results of single operators on the host in PyNative, copied back ahead of their use.

Generated programs call each selected operator through `OnHost`. A result that autograd saves is copied to the host, and
freed on the device. The backward pass reads saved tensors in reverse order: each read starts the copies of the next
ones (Rhu et al., "vDNN", 2016; `backward_prefetch` in MindSpore Transformers).
"""

from weakref import ref

from mindformers_core.recompute.host_copies import to_device, to_host
from mindformers_core.recompute.keeping import Handle, kept, session


class OnHost:
    """Wraps a function of tensors; its results stay on the host until the backward pass.

    Args:
        prefetch: number of saved tensors between the copy back and the use of a tensor, at least 1.
    """

    def __init__(self, prefetch):
        self.prefetch = prefetch

    def __call__(self, function, *inputs):
        return kept(function, inputs, lambda *_: self)

    def handles(self, tensors):
        """An `Offloaded` for every result of a call."""
        return [Offloaded(tensor, self.prefetch) for tensor in tensors]


class Offloaded(Handle):
    """A result that is copied to the host when autograd saves it; for some time an `Arriving` copy is on the device.

    Args:
        tensor: the result; not stored.
        prefetch: as in `OnHost`.

    Attributes:
        expected: number of future readers; the last one frees the copy on the device.
    """

    def __init__(self, tensor, prefetch):
        self.tensor, self._device_name, self._prefetch = ref(tensor), tensor.device, prefetch
        self.host = self.device = self.place = None
        self.expected, self._offloaded = 0, session().offloaded

    def expect(self):
        """Register one future reader, and copy the result to the host."""
        self.expected += 1
        if self.host is None:
            self.host = to_host(self.tensor())
            self.place = len(self._offloaded)
            self._offloaded.append(ref(self))

    def read(self):
        """Return the value, release one reader, and start copying back the next ones."""
        result = self.fetch().use()
        self.release()
        for before in range(self.place - 1, max(self.place - self._prefetch, 0) - 1, -1):
            ahead = self._offloaded[before]()
            if ahead is not None and ahead.expected > 0:
                ahead.fetch()
        return result

    def release(self):
        """Release one reader without reading."""
        self.expected -= 1
        if self.expected <= 0:
            self.device = None

    def fetch(self):
        """Start copying back, unless that has begun: the `Arriving` copy."""
        if self.device is None:
            self.device = to_device(self.host, self._device_name)
        return self.device
