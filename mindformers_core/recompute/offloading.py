"""What PyNative keeps of an operator on the host while the forward pass goes on, and brings back ahead of its use.

Generated programs call the operators that were chosen through `OnHost`. A result that autograd saves is copied to the
host, and freed on the device. The backward pass asks for saved tensors in the reverse order: when it asks for one,
those that come next are copied back already (Rhu et al., "vDNN", 2016; MindSpore Transformers' `backward_prefetch`).
"""

from functools import partial
from weakref import ref

from mindformers_core.recompute.host_copies import to_device, to_host
from mindformers_core.recompute.keeping import kept, session

__all__ = ["Offloading", "OnHost"]


class OnHost:
    """Calls a function of tensors whose results wait on the host for the backward pass.

    Args:
        prefetch: how many saved tensors ahead of its use one is copied back, at least 1.
    """

    def __init__(self, prefetch):
        self.prefetch = prefetch

    def __call__(self, function, *inputs):
        return kept(function, inputs, partial(Offloading, prefetch=self.prefetch))


class Offloading:
    """A call whose results are copied to the host when autograd saves them.

    Args:
        function, inputs: of the call; not kept.
        prefetch: as in `OnHost`.

    Attributes:
        unsettled: what autograd has saved while the call was going on.
    """

    def __init__(self, function, inputs, prefetch):
        self.unsettled, self._prefetch, self._entries = [], prefetch, {}
        self._offloaded = session().offloaded

    def settle(self, tensors):
        """The results are there."""
        self._entries = {index: _Entry(tensor) for index, tensor in enumerate(tensors)}

    def expect(self, index):
        """Somebody is going to ask for a result: it goes to the host."""
        entry = self._entries[index]
        entry.expected += 1
        if entry.host is None:
            entry.offload()
            entry.place = len(self._offloaded)
            self._offloaded.append(ref(entry))

    def value(self, index):
        """One of the results, as somebody who was expected asks for it; the next ones are copied back, too."""
        entry = self._entries[index]
        result = entry.fetch().use()
        self.forgone(index)
        for before in range(entry.place - 1, max(entry.place - self._prefetch, 0) - 1, -1):
            ahead = self._offloaded[before]()
            if ahead is not None and ahead.expected > 0:
                ahead.fetch()
        return result

    def forgone(self, index):
        """Somebody who was expected has asked, or doesn't."""
        entry = self._entries[index]
        entry.expected -= 1
        if entry.expected <= 0:
            entry.device = None


class _Entry:
    """One result: on the host, and for a while, `Arriving`, on the device."""

    def __init__(self, tensor):
        self._tensor, self._device_name = ref(tensor), tensor.device
        self.host = self.device = self.place = None
        self.expected = 0

    def offload(self):
        self.host = to_host(self._tensor())

    def fetch(self):
        if self.device is None:
            self.device = to_device(self.host, self._device_name)
        return self.device
