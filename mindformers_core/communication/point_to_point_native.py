"""Point-to-point messages by MindSpore's operators on Ascend (HCCL) and GPU (NCCL): PyNative, and not buffered.

A message is a block of bytes of a fixed size with its head (JSON), a second one where that is longer, and the tensors.
The head is read on the host before the tensors are received, since it says what they are. What a device computes after
a send waits for it, so that the sent tensor can be overwritten.
"""

import json

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindformers_core.communication.tensor_bytes import described, dtype_named
from mindformers_core.communication.world import world

__all__ = ["make_carrier"]

_BLOCK = 1024  # bytes
_LENGTH = 4  # of these, for the length of the head
_CARRIED = {mstype.bool_: mstype.uint8, mstype.int16: mstype.int32, mstype.uint16: mstype.int32}
UNKNOWN = {mstype.complex64, mstype.complex128, mstype.qint4x2}
UNKNOWN |= {mstype.float8_e4m3fn, mstype.float8_e5m2, mstype.hifloat8}


def make_carrier(limit):
    """The carrier of this rank. `limit` has no effect: the libraries have their own (`HCCL_EXEC_TIMEOUT`)."""
    return Carrier(world().group)


class Carrier:
    """Messages in MindSpore's group of all ranks."""

    buffered = False

    def __init__(self, group):
        self.group = group

    def send(self, rank, head, tensors):
        """Send a message; what follows on the device waits until the receiver takes it."""
        for tensor in tensors:
            if tensor.dtype in UNKNOWN:
                raise TypeError(f"message {head['tag']} to rank {rank}: devices can't send {tensor.dtype} tensors")
        encoded = json.dumps({**head, "tensors": [described(tensor) for tensor in tensors]}).encode()
        block = len(encoded).to_bytes(_LENGTH, "little") + encoded
        self._put(_bytes(block[:_BLOCK].ljust(_BLOCK, b"\0")), rank)
        if len(block) > _BLOCK:
            self._put(_bytes(block[_BLOCK:]), rank)
        for tensor in tensors:
            self._put(ops.cast(tensor, _CARRIED.get(tensor.dtype, tensor.dtype)), rank)

    def receive(self, rank):
        """The next message from a rank: its head, and its tensors."""
        block = self._take((_BLOCK,), mstype.int8, rank).asnumpy().tobytes()
        length = int.from_bytes(block[:_LENGTH], "little")
        missing = _LENGTH + length - _BLOCK
        if missing > 0:
            block += self._take((missing,), mstype.int8, rank).asnumpy().tobytes()
        head = json.loads(block[_LENGTH : _LENGTH + length])
        tensors = []
        for name, shape in head["tensors"]:
            dtype = dtype_named(name)
            tensors.append(ops.cast(self._take(tuple(shape), _CARRIED.get(dtype, dtype), rank), dtype))
        return head, tuple(tensors)

    def close(self):
        """The group is MindSpore's, and ends with it."""

    def _put(self, x, rank):
        dist_comm_isend_op(x, rank, self.group, 0)[1].wait()

    def _take(self, shape, dtype, rank):
        received, handle = dist_comm_irecv_op(ops.zeros(shape, dtype), 0, rank, self.group)
        handle.wait()
        return received


def _bytes(data):
    return Tensor(np.frombuffer(data, np.int8))
