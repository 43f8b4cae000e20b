"""Point-to-point messages on CPU: a connection to every other rank, without MindSpore.

Unix-domain sockets join ranks of one host, TCP others. A send passes the bytes to the kernel, which buffers bytes
that the receiver hasn't read; a thread writes the rest when the kernel has room, so that a send never blocks. On one
host the tensors of a large message go through shared memory. A receiver reads into the new tensors without a thread:
the kernel wakes it up.

One message of 4 KB, 1 MB, 8 MB from one pinned process to another, in µs (two cores of an AMD EPYC, Linux 6.18; an
idle sender / one that has just computed): bare TCP 13, 189, 1549 / 27, 253, 1884; Unix-domain socket 14, 83, 639 /
23, 93, 715; shared memory with such a socket to wake up 13, 60, 553 / 23, 74, 603. With tensors, in one run of
`benchmarks/transfers.py`, idle: MindSpore 2.10's MCCL 116, 1485 and 12130, the channel 68, 127 and 1071.
"""

import json
from functools import partial

from mindformers_core.communication.connecting import all_gather_texts, connect_ranks
from mindformers_core.communication.shared_memory import SegmentWriter, read_segment, share_memory
from mindformers_core.communication.tensor_bytes import DTYPES, HEAD_LENGTH, as_bytes, empty_tensor, encode_head
from mindformers_core.communication.world import world

_SHARED_FROM = 1 << 18  # bytes from which on shared memory is faster than the socket
_RESERVED = 1 << 34  # bytes of address space for a rank's messages in shared memory


def make_transport(timeout):
    """Connect this rank to all others. A collective call: every rank makes it."""
    here = world()
    share = partial(all_gather_texts, index=here.rank, size=here.size, group_name=here.group)
    return Transport(here.rank, connect_ranks(here.rank, here.size, share, timeout))


class Transport:
    """Messages to and from all other ranks, as frames of a stream: a head in JSON, then the bytes of the tensors.

    Where the head names a segment of the sender's memory, the bytes are there instead. A collective call.

    Args:
        connections: `{rank: Connection}` to all other ranks.
    """

    buffered = True

    def __init__(self, rank, connections):
        self.connections = connections
        on_host = {other: connection for other, connection in connections.items() if connection.on_one_host}
        self.memories = share_memory(rank, on_host, _RESERVED)
        self.segments = SegmentWriter(self.memories[rank])

    def send(self, rank, head, tensors):
        """Send a message; returns at once."""
        connection = self.connections[rank]
        connection.check_open()
        pieces = [as_bytes(tensor) for tensor in tensors]
        if connection.on_one_host and sum(piece.size for piece in pieces) >= _SHARED_FROM:
            head, pieces = {**head, "segment": self.segments.write(pieces)}, []
        connection.write([encode_head(head, tensors), *pieces])

    def receive(self, rank):
        """The next message from a rank: its head, and its tensors. After a timeout the caller can try again."""
        connection = self.connections[rank]
        length = int.from_bytes(connection.read(HEAD_LENGTH), "little")
        try:
            head = json.loads(connection.read(length))
            made = [empty_tensor(DTYPES[name], shape) for name, shape in head["tensors"]]
            memories = [memory for _, memory in made]
            if "segment" in head:
                read_segment(self.memories[rank], head["segment"], memories)
            else:
                for memory in memories:
                    connection.read_into(memory)
        except BaseException:  # the next read would take the rest of this message for a new one
            connection.close()
            raise
        return head, tuple(tensor for tensor, _ in made)

    def close(self):
        """Close all connections; those without a backlog first, so that their other ends know at once."""
        for connection in sorted(self.connections.values(), key=lambda connection: connection.has_backlog()):
            connection.close()
        self.memories, self.segments = None, None
