"""Point-to-point messages by MindSpore's operators on Ascend (HCCL) and GPU (NCCL): PyNative, and not buffered.

A message is a block of bytes of a fixed size with its head (JSON), a second one where that is longer, and the tensors.
The host reads the head before it receives the tensors, since the head holds their dtypes and shapes. Later work of the
device waits for a send, so that the sent tensor can be overwritten.
"""

import json

import numpy as np
from mindspore import Tensor, dtype as mstype, ops
from mindspore.ops.auto_generate.gen_ops_prim import dist_comm_irecv_op, dist_comm_isend_op

from mindformers_core.communication.tensor_bytes import DTYPES, HEAD_LENGTH, NOT_OF_NUMPY, encode_head

_BLOCK = 1024  # bytes
_CARRIED = {mstype.bool_: mstype.uint8, mstype.int16: mstype.int32, mstype.uint16: mstype.int32}
UNKNOWN = (mstype.complex64, mstype.complex128, *NOT_OF_NUMPY)  # to the libraries of devices


class Transport:
    """Messages in MindSpore's group of all ranks. The libraries have their own timeout (`HCCL_EXEC_TIMEOUT`)."""

    buffered = False

    def __init__(self, group):
        self.group = group

    def send(self, rank, head, tensors):
        """Send a message; later work of the device waits until it is received."""
        for tensor in tensors:
            if tensor.dtype in UNKNOWN:
                raise TypeError(f"message {head['tag']} to rank {rank}: devices can't send {tensor.dtype} tensors")
        encoded = encode_head(head, tensors).ljust(_BLOCK, b"\0")
        blocks = [Tensor(np.frombuffer(block, np.int8)) for block in (encoded[:_BLOCK], encoded[_BLOCK:]) if block]
        for tensor in (*blocks, *tensors):
            send_tensor(tensor, rank, self.group)

    def receive(self, rank):
        """The next message from a rank: its head, and its tensors."""
        encoded = receive_tensor((_BLOCK,), mstype.int8, rank, self.group).asnumpy().tobytes()
        end = HEAD_LENGTH + int.from_bytes(encoded[:HEAD_LENGTH], "little")
        if end > _BLOCK:
            encoded += receive_tensor((end - _BLOCK,), mstype.int8, rank, self.group).asnumpy().tobytes()
        head = json.loads(encoded[HEAD_LENGTH:end])
        given = ((tuple(shape), DTYPES[name]) for name, shape in head["tensors"])
        return head, tuple(receive_tensor(*each, rank, self.group) for each in given)

    def close(self):
        """Nothing to do: the group is MindSpore's."""


def send_tensor(x, rank, group):
    """Send a tensor to a rank of MindSpore's `group`; later work of the device waits until it is received."""
    dist_comm_isend_op(ops.cast(x, _CARRIED.get(x.dtype, x.dtype)), rank, group, 0)[1].wait()


def receive_tensor(shape, dtype, rank, group):
    """The next tensor from a rank of MindSpore's `group`, whose shape and dtype are known."""
    received, handle = dist_comm_irecv_op(ops.zeros(shape, _CARRIED.get(dtype, dtype)), 0, rank, group)
    handle.wait()
    return ops.cast(received, dtype)
