"""Copies of tensors between a device and the host, overlapped with computation. PyNative.

On Ascend and GPU a separate stream copies while the device computes: a copy starts when the tensor is computed, and
consumers of a tensor wait for its copy (overlap as in Rhu et al., "vDNN", 2016). On CPU, with one memory for both,
copies are synchronous. This module hasn't run on Ascend or GPU yet: tests replace the streams by recording ones.
"""

from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, ops

from mindformers_core.communication.world import process_state
from mindformers_core.mindspore_private import no_grad

_HOST = "CPU"


_WAYS = {
    "Ascend": lambda tensor, device: tensor.to(device, non_blocking=True, copy=True),
    "GPU": lambda tensor, device: tensor.move_to(device, blocking=False),  # Tensor.to() knows no GPU
}


@dataclass(frozen=True, eq=False)
class Arriving:
    """A tensor that is being copied back to its device.

    Attributes:
        tensor: the tensor; its values may be incomplete until `event`.
        event: end of the copy; None for a synchronous one.
    """

    tensor: Tensor
    event: object = None

    def use(self):
        """Return the tensor; later computation waits for the end of the copy."""
        if self.event is not None:
            ms.runtime.current_stream().wait_event(self.event)
        return self.tensor


def to_host(tensor):
    """A copy of a tensor on the host, for `to_device`; the tensor's memory is not freed before the copy ends."""
    device = _kind(tensor.device)
    with no_grad():
        if device == _HOST:
            return _copied(tensor)
        stream, tensor = _stream(), tensor.contiguous()
        stream.wait_stream(ms.runtime.current_stream())
        with ms.runtime.StreamCtx(stream):
            host = _WAYS[device](tensor, _HOST)
        process_state().memo(__name__)["leaving"].append((stream.record_event(), tensor))
    return host


def to_device(host, device):
    """An `Arriving` copy of a result of `to_host` on a device, named as in `Tensor.device`."""
    device = _kind(device)
    with no_grad():
        if device == _HOST:
            return Arriving(_copied(host))
        stream = _stream()
        with ms.runtime.StreamCtx(stream):
            return Arriving(_WAYS[device](host, device), stream.record_event())


def _stream():
    """The stream that runs copies in order; releases tensors whose copies have ended."""
    state = process_state().memo(__name__)  # "leaving": (event, tensor) of copies under way
    if "stream" not in state:
        state.update(stream=ms.runtime.Stream(), leaving=[])
    state["leaving"] = [(event, tensor) for event, tensor in state["leaving"] if not event.query()]
    return state["stream"]


def _kind(device):
    return device.partition(":")[0]  # the kind of "Ascend:0"


def _copied(tensor):
    """A copy in the same memory.

    Never a view: for gradients of gradients MindSpore connects the replacement of a saved tensor to its graph, except
    for a view in place of a tensor that is no view, and such gradients are wrong.
    """
    # Tensor.to() can't copy on CPU, and copy_() no parts of a stage's input
    return ops.cat((tensor,)) if tensor.ndim else ops.zeros_like(tensor).copy_(tensor)
