"""Point-to-point messages on CPU: a connection to every other rank, without MindSpore.

Unix-domain sockets join ranks of one host, TCP others. A send hands the bytes to the kernel, which keeps what the
receiver hasn't read; what it has no room for waits in memory for a thread, so that a send never blocks. The tensors of
a large message go through shared memory on one host, which always has room. A receiver reads into the new tensors
without a thread: the kernel wakes it up.

One message of 4 KB, 1 MB, 8 MB from one pinned process to another, in µs (two cores of an AMD EPYC, Linux 6.18; an
idle sender / one that has just computed): bare TCP 13, 189, 1549 / 27, 253, 1884; Unix-domain socket 14, 83, 639 /
23, 93, 715; shared memory with such a socket to wake up 13, 60, 553 / 23, 74, 603. With tensors, in one run of
`benchmarks/transfers.py`, idle: MindSpore 2.10's MCCL 116, 1485 and 12130, the channel 68, 127 and 1071.
"""

import json

import numpy as np
from mindspore import Tensor, ops

from mindformers_core.communication.connecting import connect_ranks
from mindformers_core.communication.shared_segments import SegmentReader, SegmentWriter
from mindformers_core.communication.streams import Stream
from mindformers_core.communication.tensor_bytes import as_bytes, described, empty_tensor
from mindformers_core.communication.world import world

__all__ = ["make_carrier", "share_cards"]

_CARD = 512  # bytes in which a rank says how it can be reached
_SHARED_FROM = 1 << 18  # bytes from which on shared memory is faster than the socket


def make_carrier(limit):
    """Connect this rank to all others; all ranks call it together."""
    here = world()
    lines = connect_ranks(here.rank, here.size, lambda card: share_cards(card, here.rank, here.size, here.group))
    return Carrier({rank: Peer(line, limit) for rank, line in lines.items()})


class Carrier:
    """Messages to and from all other ranks. `peers`: rank -> `Peer`."""

    buffered = True

    def __init__(self, peers):
        self.peers = peers

    def send(self, rank, head, tensors):
        """Send a message; returns at once."""
        self.peers[rank].send(head, tensors)

    def receive(self, rank):
        """The next message from a rank: its head, and its tensors."""
        return self.peers[rank].receive()

    def close(self):
        """Close all connections; those with nothing left to send first, so that their other ends know at once."""
        for peer in sorted(self.peers.values(), key=lambda peer: peer.stream.has_backlog()):
            peer.close()


class Peer:
    """Messages to and from one other rank, as frames of a stream: a head in JSON, then the bytes of the tensors.

    Where the head names a segment, the bytes are there instead.
    """

    def __init__(self, line, limit):
        self.stream = Stream(line.socket, limit)
        self.writer, self.reader = (None, None)
        if line.files is not None:
            self.writer, self.reader = SegmentWriter(line.files[0]), SegmentReader(line.files[1])

    def send(self, head, tensors):
        """Send a message."""
        self.stream.check_open()
        head = {**head, "tensors": [described(tensor) for tensor in tensors]}
        pieces = [as_bytes(tensor) for tensor in tensors]
        if self.writer is not None and sum(piece.size for piece in pieces) >= _SHARED_FROM:
            head["segment"] = self.writer.write(pieces)
            pieces = []
        encoded = json.dumps(head, separators=(",", ":")).encode()
        self.stream.write([len(encoded).to_bytes(4, "little") + encoded, *pieces])

    def receive(self):
        """The next message: its head, and its tensors. Where nothing came within the limit it can be tried again."""
        length = int.from_bytes(self.stream.read(4), "little")
        try:
            return self._receive_rest(length)
        except BaseException:  # the rest of the message would be taken for the next one
            self.close()
            raise

    def _receive_rest(self, length):
        head = json.loads(self.stream.read(length))
        made = [empty_tensor(*description) for description in head["tensors"]]
        memories = [memory for _, memory in made]
        if "segment" in head:
            self.reader.read_into(head["segment"], memories)
        else:
            for memory in memories:
                self.stream.read_into(memory)
        return head, tuple(tensor for tensor, _ in made)

    def close(self):
        """End the connection when all is on its way."""
        if self.stream.closed:
            return
        self.stream.close()
        if self.writer is not None:
            self.writer.close()
            self.reader.close()


def share_cards(card, index, size, group_name):
    """All ranks' cards (short texts) in the order of their indices, by MindSpore's all-reduce of a process group."""
    table = np.zeros((size, _CARD), np.float32)
    table[index, : len(card)] = np.frombuffer(card.encode(), np.uint8)
    whole = ops.AllReduce(group=group_name)(Tensor(table)).asnumpy().astype(np.uint8)
    return [row.tobytes().rstrip(b"\0").decode() for row in whole]
