"""Copies of tensors on the host, and back, beside the computation of a device. PyNative.

On Ascend and GPU a stream of its own copies, so that the device computes meanwhile: it begins when the tensor is there,
and who uses what came back waits for it (Rhu et al., "vDNN", 2016, overlaps them so). On CPU, where both are one
memory, copies are made at once. None of this has run on Ascend or GPU yet: tests put streams that take notes there.
"""

from dataclasses import dataclass

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.graph.api import _no_grad

from mindformers_core.communication.world import process_state

__all__ = ["Arriving", "to_device", "to_host"]

_HOST = "CPU"
_STATE = process_state().memo(__name__)  # "stream": in which copies run; "leaving": (event, tensor) of those under way


def _moved_by_to(tensor, device):
    return tensor.to(device, non_blocking=True, copy=True)


def _moved_by_move_to(tensor, device):  # Tensor.to() knows no GPU
    return tensor.move_to(device, blocking=False)


_WAYS = {"Ascend": _moved_by_to, "GPU": _moved_by_move_to}


@dataclass(frozen=True, eq=False)
class Arriving:
    """A tensor that comes back to its device.

    Attributes:
        tensor: there already, its values perhaps not yet.
        event: with which they are; None where copies are made at once.
    """

    tensor: Tensor
    event: object = None

    def use(self):
        """The tensor: what is computed from now on waits until its values are there."""
        if self.event is not None:
            ms.runtime.current_stream().wait_event(self.event)
        return self.tensor


def to_host(tensor):
    """A copy of a tensor on the host, for `to_device`; the tensor's memory is kept until it has been read."""
    device = _kind(tensor.device)
    with _no_grad():
        if device == _HOST:
            return _copied(tensor)
        stream, tensor = _stream(), tensor.contiguous()
        stream.wait_stream(ms.runtime.current_stream())
        with ms.runtime.StreamCtx(stream):
            host = _WAYS[device](tensor, _HOST)
        _STATE["leaving"].append((stream.record_event(), tensor))
    return host


def to_device(host, device):
    """An `Arriving` copy of what `to_host` gave, on the device of that name, as `Tensor.device` has it."""
    device = _kind(device)
    with _no_grad():
        if device == _HOST:
            return Arriving(_copied(host))
        stream = _stream()
        with ms.runtime.StreamCtx(stream):
            return Arriving(_WAYS[device](host, device), stream.record_event())


def _stream():
    """The stream in which copies run, one after the other; lets go of what has left meanwhile."""
    if "stream" not in _STATE:
        _STATE.update(stream=ms.runtime.Stream(), leaving=[])
    _STATE["leaving"] = [(event, tensor) for event, tensor in _STATE["leaving"] if not event.query()]
    return _STATE["stream"]


def _kind(device):
    return device.partition(":")[0]  # of "Ascend:0"


def _copied(tensor):
    """A copy in the same memory.

    Never a view: MindSpore joins what a saved tensor is replaced by to its graph again, for gradients of gradients, but
    a view in the place of a tensor that is none it leaves out, and these gradients are wrong.
    """
    # Tensor.to() can't copy on CPU, and copy_() no parts of a stage's input
    return ops.cat((tensor,)) if tensor.ndim else ops.zeros_like(tensor).copy_(tensor)
